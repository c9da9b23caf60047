"""Tiny Shakespeare by characters: nanoGPT's recipe, run as it comes, and ours, in seconds.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.nanogpt_peer --nanogpt FOLDER [--size gpu]

nanoGPT's recipe for CPUs is that of its README: 4 layers, 4 heads, 128 wide, 64 characters, batch
12, 2,000 steps; for GPUs its `config/train_shakespeare_char.py`. Ours:
`configs/lm/shakespeare_char_cpu.yaml` and `shakespeare_char.yaml`. Both are commands that start,
train, evaluate as they please and save; the seconds are those of the whole command. The loss is
that of the last tenth of the text, in consecutive windows of each model's context, in nats a
character.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.benchmarks import _compare
from tests.benchmarks._decoders import LIBRARIES, installed, nanogpt_model

WINDOWS = 64  # evaluated at once
CHARACTERS = "config/train_shakespeare_char.py"
THEIRS = {
    "cpu": "--device=cpu --compile=False --eval_iters=20 --log_interval=100 --block_size=64"
    " --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000"
    " --dropout=0.0",
    "gpu": "",
}
OURS = {"cpu": "configs/lm/shakespeare_char_cpu.yaml", "gpu": "configs/lm/shakespeare_char.yaml"}


@dataclass
class Trained:
    """A trained model.

    Args:
        net: The model.
        context: Tokens T that it sees at most.
        encode: Text to tokens (N,).
        seconds: What training took.
    """

    net: Any
    context: int
    encode: Callable[[str], Tensor]
    seconds: float


def run(command: list[str], folder: Path, threads: int) -> float:
    """Runs Python with these arguments and shows what it prints; seconds."""
    print("$ python", *command, flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)
    return time.perf_counter() - start


def nanogpt(options: Namespace, text: Path, folder: Path) -> Trained:
    """Trains nanoGPT in a copy of its checkout."""
    copy = folder / "nanogpt"
    shutil.copytree(options.nanogpt, copy, ignore=shutil.ignore_patterns(".git", "out-*"))
    data = copy / "data" / "shakespeare_char"
    shutil.copy(text, data / "input.txt")
    subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True)
    line = ["train.py", CHARACTERS, *THEIRS[options.size].split()]
    if options.steps:
        line += [f"--max_iters={options.steps}", f"--lr_decay_iters={options.steps}"]
    seconds = run(line, copy, options.threads)
    saved = torch.load(copy / "out-shakespeare-char" / "ckpt.pt", map_location="cpu")
    net = nanogpt_model(str(copy), **saved["model_args"])
    weights = {name.removeprefix("_orig_mod."): value for name, value in saved["model"].items()}
    net.load_state_dict(weights)
    ids = pickle.loads((data / "meta.pkl").read_bytes())["stoi"]
    encode = lambda part: torch.tensor([ids[letter] for letter in part])  # noqa: E731
    return Trained(net, net.config.block_size, encode, seconds)


def tessera(options: Namespace, text: Path, folder: Path) -> Trained:
    """Trains ours."""
    line = ["-m", "tasks.lm", "fit", "--config", OURS[options.size], "--data.path", str(text)]
    if options.steps:
        line += ["--trainer.max_steps", str(options.steps)]
    seconds = run([*line, "--run_dir", str(folder)], _compare.ROOT, options.threads)
    from tasks.lm.architectures import load_model

    model = load_model(str(folder / "checkpoints" / "last.ckpt"))
    encode = lambda part: torch.tensor(model.tokenizer.encode_batch([part])[0])  # noqa: E731
    return Trained(model.net, model.net.max_length, encode, seconds)


@torch.inference_mode()
def mean_loss(name: str, trained: Trained, tokens: Tensor) -> float:
    """Of all tokens but the first, in consecutive windows; the last one may be shorter."""
    trained.net.eval()
    context = trained.context
    inputs = tokens[:-1]
    targets = tokens[1:]
    whole = len(inputs) // context * context
    batches = list(
        zip(
            inputs[:whole].view(-1, context).split(WINDOWS),
            targets[:whole].view(-1, context).split(WINDOWS),
            strict=True,
        )
    )
    if whole < len(inputs):
        batches.append((inputs[None, whole:], targets[None, whole:]))
    total = 0.0
    for one, other in batches:  # (B, T) each
        logits = LIBRARIES[name].logits(trained.net, one)  # (B, T, V)
        total += float(F.cross_entropy(logits.flatten(0, 1), other.flatten(), reduction="sum"))
    return total / len(inputs)


def main() -> None:
    """Trains both and prints a line for each."""
    parser = _compare.arguments(__doc__)
    parser.add_argument("--nanogpt", default="", metavar="FOLDER", help="a checkout of nanoGPT")
    parser.add_argument("--size", choices=THEIRS, default="cpu", help="of model and recipe")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of training; default: those of the recipes")
    options = parser.parse_args()
    text = (_compare.data_folder("tinyshakespeare") / "input.txt").resolve()
    print(_compare.machine(), flush=True)
    letters = text.read_text(encoding="utf-8")
    tail = letters[int(0.9 * len(letters)) :]
    trainers = {"nanogpt": nanogpt, "tessera": tessera}
    lines = [f"{'':<10}{'loss':>10}{'seconds':>10}{'parameters':>14}{'context':>10}"]
    for name in [*installed(["nanogpt"], options.nanogpt), "tessera"]:
        with tempfile.TemporaryDirectory() as folder:
            trained = trainers[name](options, text, Path(folder, "run"))
            tokens = trained.encode(tail)
            assert len(tokens) == len(tail), "a token is not a character"
            found = mean_loss(name, trained, tokens)
        size = sum(parameter.numel() for parameter in trained.net.parameters())
        numbers = f"{found:>10.4f}{trained.seconds:>10.1f}{size:>14,}{trained.context:>10}"
        lines.append(f"{name:<10}{numbers}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
