"""What tests ask of a task's command line and of the run folders it leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.command import metrics, run

FEW_STEPS = (
    "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 "
    "--trainer.limit_test_batches 1 --trainer.log_every_n_steps 1"
)
NO_UPDATES = "--model.optimizer.lr 1e-12 --model.optimizer.weight_decay 0"


def summary(folder: str | Path) -> dict[str, Any]:
    """The content of a run's `summary.json`."""
    return json.loads(Path(folder, "summary.json").read_text())


def losses(folder: str | Path) -> list[float]:
    """The logged training losses of a run, then its test loss."""
    train = [float(row["train/loss"]) for row in metrics(folder) if "train/loss" in row]
    return [*train, summary(folder)["test/loss"]]


def printed(line: str, task: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Standard output and standard error of a command that succeeds."""
    capsys.readouterr()
    code = run(line, task)
    out, err = capsys.readouterr()
    assert code == 0, err
    return out, err


def printed_objects(
    line: str, task: str, capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """The objects that a command prints with `--json`."""
    return [json.loads(text) for text in printed(f"{line} --json", task, capsys)[0].splitlines()]


def refused(line: str, task: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which a command refuses wrong input."""
    capsys.readouterr()
    assert run(line, task) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err
