"""Reading what a run leaves."""

import csv
import json
from pathlib import Path
from typing import Any

import torch

CLOCK = ("train/samples_per_s", "train/tokens_per_s", "train/mfu")


def summary(run_folder: str | Path) -> dict[str, Any]:
    """The content of a run's `summary.json`."""
    return json.loads(Path(run_folder, "summary.json").read_text())


def checkpoint(run_folder: str | Path, name: str = "last") -> dict[str, Any]:
    """A checkpoint of a run."""
    return torch.load(Path(run_folder, "checkpoints", f"{name}.ckpt"), weights_only=True)


def table(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, newline="") as file:
        return [*csv.DictReader(file)]


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
