"""Tiny Shakespeare by characters: nanoGPT's recipe, run as it comes, and ours, in seconds of wall clock.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.nanogpt_peer --nanogpt FOLDER [--size gpu]

nanoGPT's recipe for CPUs is that of its README: 4 layers, 4 heads, 128 wide, 64 characters, batch 12, 2,000 steps; for
GPUs its `config/train_shakespeare_char.py`. Ours: `configs/lm/shakespeare_char_cpu.yaml` and `shakespeare_char.yaml`.
Both are commands that start, train, evaluate as they please and save; the seconds are those of the whole command. The
loss is that of the whole last tenth of the text, in consecutive windows of each model's context, in nats a character.
"""

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks._compare import ROOT
from tests.benchmarks._decoders import all_logits, nanogpt_model

THEIRS = {
    "cpu": "--device=cpu --compile=False --eval_iters=20 --log_interval=100 --block_size=64 --batch_size=12 "
    "--n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0",
    "gpu": "",
}
OURS = {"cpu": "configs/lm/shakespeare_char_cpu.yaml", "gpu": "configs/lm/shakespeare_char.yaml"}
Trained = tuple[
    Any, int, Callable[[str], Tensor], float
]  # network, context, characters to tokens, seconds


def seconds(command: list[str], folder: Path, threads: int) -> float:
    """Runs a command and shows what it prints."""
    print("$", *command, flush=True)
    start = time.perf_counter()
    subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, check=True
    )
    return time.perf_counter() - start


def theirs(options: argparse.Namespace, text: Path, folder: Path) -> Trained:
    """Trains nanoGPT in a copy of its checkout."""
    copy = folder / "nanogpt"
    shutil.copytree(options.nanogpt, copy, ignore=shutil.ignore_patterns(".git", "out-*"))
    data = copy / "data" / "shakespeare_char"
    shutil.copy(text, data / "input.txt")
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True)
    command = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        *THEIRS[options.size].split(),
    ]
    spent = seconds(command, copy, options.threads)
    saved = torch.load(copy / "out-shakespeare-char" / "ckpt.pt", map_location="cpu")
    net = nanogpt_model(str(copy), **saved["model_args"])
    net.load_state_dict(
        {name.removeprefix("_orig_mod."): value for name, value in saved["model"].items()}
    )
    numbers = pickle.loads((data / "meta.pkl").read_bytes())["stoi"]
    return (
        net,
        net.config.block_size,
        lambda part: torch.tensor([numbers[letter] for letter in part]),
        spent,
    )


def ours(options: argparse.Namespace, text: Path, folder: Path) -> Trained:
    """Trains ours."""
    run = folder / "tessera"
    command = [sys.executable, "-m", "tasks.lm", "fit", "--config", OURS[options.size]]
    spent = seconds(
        [*command, "--data.path", str(text), "--run_dir", str(run)], ROOT, options.threads
    )
    from tasks.lm.architectures import load_model

    model = load_model(str(run / "checkpoints" / "last.ckpt"))
    return (
        model.net,
        model.net.max_length,
        lambda part: torch.tensor(model.tokenizer.encode_batch([part])[0]),
        spent,
    )


@torch.inference_mode()
def loss(net: Any, tokens: Tensor, length: int) -> float:
    """Mean loss of all tokens but the first, in consecutive windows; the last one may be shorter."""
    net.eval()
    total, rows = 0.0, 4096 // length
    inputs, targets = tokens[:-1], tokens[1:]
    whole = len(inputs) // length * length
    parts = list(
        zip(
            inputs[:whole].view(-1, length).split(rows),
            targets[:whole].view(-1, length).split(rows),
            strict=True,
        )
    )
    parts += [(inputs[None, whole:], targets[None, whole:])] if whole < len(inputs) else []
    for one, two in parts:
        total += float(
            F.cross_entropy(all_logits(net, one).flatten(0, 1), two.flatten(), reduction="sum")
        )
    return total / len(inputs)


def main() -> None:
    """Trains both and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--nanogpt", default="", metavar="FOLDER", help="checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--size", choices=THEIRS, default="cpu", help="of model and recipe")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if not os.environ.get("TESSERA_DATA"):
        raise SystemExit(
            "TESSERA_DATA is not set: it names the folder that holds tinyshakespeare/."
        )
    text = Path(os.environ["TESSERA_DATA"], "tinyshakespeare", "input.txt").resolve()
    letters = text.read_text(encoding="utf-8")
    tail, lines = letters[int(0.9 * len(letters)) :], []
    if not options.nanogpt:
        print(
            "nanogpt is left out: clone github.com/karpathy/nanoGPT and give the folder with --nanogpt."
        )
    for name, train in (
        {"nanogpt": theirs, "tessera": ours}.items()
        if options.nanogpt
        else {"tessera": ours}.items()
    ):
        with tempfile.TemporaryDirectory() as folder:
            net, length, numbers, spent = train(options, text, Path(folder))
            tokens = numbers(tail)
            assert len(tokens) == len(tail), "a token is not a character"
            count = sum(parameter.numel() for parameter in net.parameters())
            lines.append(
                f"{name:<10}{loss(net, tokens, length):>10.4f}{spent:>10.1f}{count:>14,}{length:>10}"
            )
    print(f"{'':<10}{'loss':>10}{'seconds':>10}{'parameters':>14}{'context':>10}", *lines, sep="\n")


if __name__ == "__main__":
    main()
