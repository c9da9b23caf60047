"""`metrics.csv` in the run folder, which a resumed run continues."""

import csv
from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor

from datamodules.utils.files import open_regular, read_bytes, replacing
from tasks.checkpoints.reading import Checkpoint
from tasks.errors import RunError

ROWS_BEFORE_WRITE = 50


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a `metrics.csv`, without empty cells and without an unfinished last row."""
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        return []
    try:
        lines = content[: content.rfind(b"\n") + 1].decode().splitlines()
        rows = [
            {name: value for name, value in row.items() if value}
            for row in csv.DictReader(lines, strict=True)
        ]
        for row in rows:
            int(row["step"])
            for value in row.values():
                float(value)  # raises ValueError
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: move it away, and its rows are lost") from error
    return rows


def last_validation(folder: Path) -> dict[str, str]:
    """The last row of a run with metrics of a validation; empty if there is none."""
    rows = read_rows(folder / "metrics.csv")
    return next((row for row in reversed(rows) if any(name[:4] == "val/" for name in row)), {})


def is_test(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("test/") for name in row)


class LoggedRows:
    """Which rows a run that resumes from a checkpoint keeps: those that it does not log again."""

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.last_step = checkpoint["global_step"] if checkpoint else 0
        loops = checkpoint["loops"]["fit_loop"] if checkpoint else {}
        self.validation_due = loops.get("epoch_loop.state_dict", {}).get("validates", False)
        epochs = loops.get("epoch_progress", {}).get("current", {"completed": 0, "ready": 0})
        self.epoch_end_due = epochs["completed"] < epochs["ready"]

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row stays; the last step may still validate or end its epoch."""
        step = int(row["step"])
        if is_test(row):
            return False
        if step != self.last_step or "train/grad_norm" in row:
            return step <= self.last_step
        if any(name.startswith("val/") for name in row):
            return not self.validation_due
        return not self.epoch_end_due


class MetricsCSV(Logger):
    """Writes `metrics.csv`: one row per step, one column per metric; new metrics add columns.

    Numbers have the digits that float32 needs, as in 0.0006 instead of 0.0006000000284984708.
    Steps and epochs are counted from 1, as on the console; Lightning counts from 0 in training.
    Lightning's CSVLogger deletes the file of an earlier process. `earlier` says which rows of one
    are kept.
    """

    def __init__(self, folder: Path, earlier: LoggedRows) -> None:
        super().__init__()
        self.folder = folder
        self.path = folder / "metrics.csv"
        self.earlier = earlier
        self.columns: list[str] = []
        self.waiting: list[dict[str, Any]] = []
        self.opened = False

    # Lightning would put folders with a name and a version into the run folder.
    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def log_dir(self) -> str:
        return str(self.folder)

    @property
    def save_dir(self) -> str:
        """Where profilers write."""
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Do nothing: they are in `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row; the first one removes earlier rows that a resumed run logs again."""
        if not self.opened and self.path.exists():
            rows = [row for row in read_rows(self.path) if self.earlier.keeps(row)]
            self.columns = sorted({"step"}.union(*rows))
            self.rewrite(rows)
        self.opened = True
        row: dict[str, Any] = {"step": step}
        for name, value in metrics.items():
            number = value.item() if isinstance(value, Tensor) else value
            row[name] = np.float32(number) if isinstance(number, float) else number
        if step is not None and not is_test(row):
            row |= {name: row[name] + 1 for name in ("step", "epoch") if name in row}
        self.waiting.append(row)
        if len(self.waiting) >= ROWS_BEFORE_WRITE:
            self.save()

    @rank_zero_only
    def save(self) -> None:
        """Write the waiting rows; new columns need a new header."""
        if not self.waiting:
            return
        new = set().union(*self.waiting) - set(self.columns)
        self.columns = sorted({*self.columns, *new})
        if new or not self.path.exists():
            self.rewrite(read_rows(self.path))
        with TextIOWrapper(open_regular(self.path, follow=False, append=True), newline="") as file:
            csv.DictWriter(file, self.columns).writerows(self.waiting)
        self.waiting = []

    def rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replace the file, whole or not at all."""
        with replacing(self.path) as partial, open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the waiting rows; if the run failed, a full disk must not hide why."""
        with suppress(OSError) if status == "failed" else nullcontext():
            self.save()
