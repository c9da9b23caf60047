"""Running the command line, in this process or another; reading what it prints and leaves."""

import csv
import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tasks.cli.main import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]
SHORT = (
    "--trainer.limit_train_batches 4 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1 "
    "--trainer.max_epochs 2 --trainer.log_every_n_steps 1 --model.net.stack.depth 1"
)
FEW_STEPS = (
    "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 "
    "--trainer.limit_test_batches 1 --trainer.log_every_n_steps 1"
)
NO_UPDATES = "--model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"
CLOCK = ("train/samples_per_s", "train/tokens_per_s", "train/mfu")
SMALL_LM = (
    "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2 "
    "--model.samples.every null "
    "--model.samples.generation.max_new_tokens 8 --data.batch_size 4 --data.max_length 32 "
    "--data.tokenizer.min_frequency 1 --trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)
SMALL_S2S = " ".join(
    f"--model.net.{side}.width 32 --model.net.{side}.depth 2 --model.net.{side}.heads 2 "
    f"--model.net.{side}.mlp_width 64 --model.net.{side}.dropout 0"
    for side in ("encoder", "decoder")
)
SMALL_S2S += (
    " --data.batch_size 16 --data.max_length 24 --data.tokenizer.vocabulary 60 "
    "--data.tokenizer.min_frequency 1 "
    "--data.tokenizer.kind whitespace --trainer.max_epochs 1 --trainer.log_every_n_steps 1 "
    "--model.optimizer.lr 5e-3"
)
PAIRS = "--data.source files --data.path pairs --data.languages en-up"
NET = "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2"
TINY = {  # a small model of each task, on the data of `write_data`
    "vit": f"{NET} --model.net.stack.depth 1 --data.batch_size 16",
    "bert": f"{NET} --data.tokenizer.vocabulary 300 --data.batch_size 8",
    "mlm": f"--preset tiny {NET} --data.source hub --data.path hub --data.max_length 48 "
    "--data.batch_size 8 --data.tokenizer.vocabulary 70",
    "lm": f"{SMALL_LM} --data.source files --data.path texts --data.tokenizer.vocabulary 400",
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}


def run(line: str, task: str = "vit") -> int:
    """The exit code of `python -m tasks.TASK LINE`, run here; progress is not printed."""
    os.environ.pop("TESSERA_RUN_DIR", None)
    try:
        return main(import_module(f"tasks.{task}.__main__").APP, shlex.split(line))
    except SystemExit as stop:
        return int(stop.code or 0)


def environment(**more: str) -> dict[str, str]:
    """Variables for other processes, by default with one thread for each."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = {**os.environ, **own, **more}
    found.pop("TESSERA_RUN_DIR", None)
    found.pop("WANDB_SERVICE", None)  # our W&B process would keep a killed run open
    return found


def process(
    line: str, before: str = "", task: str = "vit", **options: Any
) -> subprocess.CompletedProcess[str]:
    """`python -m tasks.TASK LINE` in a process of its own, after the Python code `before`; prints
    what it imported.
    """
    code = (
        f"import sys\n{before}\n"
        f"from tasks.cli.main import main\nfrom tasks.{task}.__main__ import APP\n"
        f"code = main(APP, {shlex.split(line)!r})\n"
        "print('imported', *{name.partition('.')[0] for name in sys.modules})\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code]
    own = environment(OMP_NUM_THREADS=str(torch.get_num_threads()))
    return subprocess.run(command, capture_output=True, text=True, env=own, **options)


def python(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python -m LINE` in a folder."""
    command = [sys.executable, "-m", *shlex.split(line)]
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300
    )


class Console:
    """Runs commands here and reads what they print."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def printed(self, line: str, task: str = "vit") -> tuple[str, str]:
        """Standard output and standard error of a command that succeeds."""
        self.capture.readouterr()
        code = run(line, task)
        out, err = self.capture.readouterr()
        assert code == 0, err
        return out, err

    def objects(self, line: str, task: str) -> list[dict[str, Any]]:
        """The objects that a command prints with `--json`."""
        return [json.loads(text) for text in self.printed(f"{line} --json", task)[0].splitlines()]

    def refused(self, line: str, *names: str, task: str = "vit", code: int = 2) -> str:
        """The one sentence of a command that fails; it has these names and leaves no file."""
        before = sorted(Path().rglob("*"))
        self.capture.readouterr()
        found = run(line, task)
        error = self.capture.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        assert "--debug" not in error and found == code, error
        for name in names:
            assert name in error
        assert sorted(Path().rglob("*")) == before
        return error


def summary(run_folder: str | Path) -> dict[str, Any]:
    """The content of a run's `summary.json`."""
    return json.loads(Path(run_folder, "summary.json").read_text())


def checkpoint(run_folder: str | Path, name: str = "last") -> dict[str, Any]:
    """A checkpoint of a run."""
    return torch.load(Path(run_folder, "checkpoints", f"{name}.ckpt"), weights_only=True)


def same(a: Any, b: Any) -> bool:
    """Whether two trees of tensors and primitives agree in every bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def metrics(run_folder: str | Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv`, without empty cells and without what depends on the clock."""
    with open(Path(run_folder, "metrics.csv"), newline="") as file:
        rows = [
            {k: v for k, v in row.items() if v and k not in CLOCK} for row in csv.DictReader(file)
        ]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def logged(run_folder: str | Path, name: str = "train/loss") -> list[float]:
    """The values of a metric that a run logged."""
    return [float(row[name]) for row in metrics(run_folder) if name in row]


class Malicious:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("pwned").touch, ()


def picture(side: int, mode: str = "RGB") -> Image.Image:
    """A random picture."""
    pixels = torch.randint(0, 256, (side, side, 3), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).convert(mode)


def write_images(
    folder: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 4, side: int = 12
) -> Path:
    """`train/CLASS/*.png` below `folder`."""
    for name in classes:
        (folder / "train" / name).mkdir(parents=True)
        for number in range(count):
            picture(side).save(folder / "train" / name / f"{number}.png")
    return folder


def write_reviews(folder: Path, copies: int = 20, names: tuple[str, ...] = ("neg", "pos")) -> Path:
    """Reviews in the hub's schema, negative and positive in turn, with unlabelled ones; `names` of
    their classes.
    """
    from datasets import ClassLabel, Dataset, Features, Value

    folder.mkdir()
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(names))})
    for split, count in (("train", copies), ("test", 4), ("unsupervised", 4)):
        words = ("a bad", "a good")
        texts = [f"{word} film number {i}, seen twice" for i in range(count) for word in words]
        labels = [-1] * len(texts) if split == "unsupervised" else [0, 1] * count
        rows = Dataset.from_dict({"text": texts, "label": labels}, features=features)
        rows.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def write_corpus(folder: Path, count: int = 8) -> Path:
    """Texts of Python's reference, one in a file each."""
    from datamodules.embedded.reference import documents

    folder.mkdir()
    for number, text in enumerate(sorted(documents()["val"], key=len)[:count]):
        (folder / f"{number}.txt").write_text(text[:2000])
    return folder


def write_pairs(
    folder: Path, count: int = 160, test: str = "test", languages: tuple[str, str] = ("en", "up")
) -> Path:
    """Aligned files of three splits: up to six numbers in words, and the same in capitals."""
    from random import Random

    folder.mkdir()
    words = ["one's", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    draw = Random(0)
    for split, size in (("train", count), ("val", 16), (test, 12)):
        texts = [
            " ".join(draw.choices(words, k=1 + int(6 * draw.random()))) + "\n" for _ in range(size)
        ]
        for language, way in zip(languages, (str, str.upper), strict=True):
            (folder / f"{split}.{language}").write_text("".join(map(way, texts)))
    return folder


def write_data(folder: Path = Path(), texts: int = 8) -> Path:
    """The data that `TINY` names."""
    write_corpus(folder / "texts", texts)
    write_pairs(folder / "pairs")
    write_reviews(folder / "hub")
    return folder
