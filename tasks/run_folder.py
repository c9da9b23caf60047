"""The run folder: where a run keeps its configuration, metrics, checkpoints, pictures and summary."""

import csv
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning_fabric.loggers.csv_logs import _ExperimentWriter
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.plugins.io import TorchCheckpointIO
from pytorch_lightning.utilities import rank_zero_only

from datamodules.files import replacing, write_text
from tasks import __version__
from tasks.checkpoints import Checkpoint
from tasks.errors import RunError, UsageError

PACKAGES = ("torch", "pytorch-lightning", "torchvision", "torchmetrics", "numpy")


def run_folder(task: str, chosen: str | None) -> Path:
    """The folder of this run: as chosen, else `runs/TASK/<time>`; the same one in every process of the run.

    Lightning's processes inherit it from the one that launched them; those of torchrun get it from their first.

    Raises:
        UsageError: the chosen folder is a file, or holds a run already.
    """
    inherited = os.environ.get("TESSERA_RUN_DIR")
    if inherited and os.environ.get("LOCAL_RANK", "0") != "0":
        return Path(inherited)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return new_folder(task, chosen)
    store, rank = torchrun_store()
    key = f"run_folder {os.environ['TORCHELASTIC_RESTART_COUNT']}"  # the store may outlive processes that failed
    if rank == 0:
        store.set(key, str(new_folder(task, chosen)))
    return Path(store.get(key).decode())


@cache
def torchrun_store() -> tuple["torch.distributed.Store", int]:
    """What torchrun's processes share, and the rank of this one; kept open, since the first may have to serve it."""
    store, rank, _ = next(torch.distributed.rendezvous("env://"))
    return store, rank


def new_folder(task: str, chosen: str | None) -> Path:
    """The folder of a run of one process, absolute.

    Raises:
        UsageError: the chosen folder is a file, or holds a run already.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[:-3]  # milliseconds: runs may start together
    folder = Path(chosen or Path("runs", task, now)).resolve()
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--run_dir {folder} is a file: give a folder, it is made where it does not exist")
    if (folder / "config.yaml").exists():
        raise UsageError(
            f"--run_dir {folder} holds a run already: choose another folder, or continue that run "
            f"with --resume {folder}"
        )
    return folder


def make_run_folder(folder: Path, task: str) -> None:
    """Create the folder, and point `latest` beside it to it where it lies in `runs/TASK`."""
    folder.mkdir(parents=True, exist_ok=True)
    link, partial = folder.parent / "latest", folder.parent / f".latest.{os.getpid()}"
    if folder.parts[-3:-1] == ("runs", task) and (link.is_symlink() or not link.exists()):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder.name)
        partial.replace(link)


@contextmanager
def kept_if_started(folder: Path) -> Iterator[None]:
    """Remove a folder that was made inside, unless the run got as far as its `config.yaml`."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if made and not (folder / "config.yaml").exists():
            if "wandb" in sys.modules:  # which else writes into the folder later
                import wandb

                wandb.finish(exit_code=1)
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made[1:]:
                with suppress(OSError):  # another run is in it by now
                    parent.rmdir()
        raise


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.yaml`, which `fit --config` takes back."""
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=120))


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, with the versions and the commit that made it."""
    origin = {"tessera": __version__, "python": platform.python_version()} | {p: version(p) for p in PACKAGES}
    write_text(
        folder / "summary.json", json.dumps(summary | {"versions": origin, "git_commit": git_commit()}, indent=2)
    )


def code_version() -> dict[str, str | None]:
    """What ran: version and commit."""
    return {"tessera": __version__, "git_commit": git_commit()}


def git_commit() -> str | None:
    """The commit of the source tree, with "-dirty" where it has changes; None outside of a git checkout."""
    where = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ("git", "-C", str(where), *arguments), capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # our own repository, not one around the installed files
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, sync, rename: a kill or a full disk leaves the previous checkpoint whole.

    Lightning's own goes through the system's temporary folder, unsynced, with a second copy in memory.
    """

    def save_checkpoint(self, checkpoint: Checkpoint, path: str | os.PathLike, storage_options: Any = None) -> None:
        """Save `checkpoint` at `path`.

        Raises:
            RunError: it cannot be written; names the path. What was there before stays.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for stale in target.parent.glob(f".{target.name}.*.tmp"):  # of a killed process
                stale.unlink(missing_ok=True)
            with replacing(target) as partial, open(partial, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:
            raise RunError(f"checkpoint {target} could not be written: {error}") from error


class MetricsCSV(CSVLogger):
    """`metrics.csv` in the run folder; a continued run keeps the rows from before its checkpoint.

    Args:
        folder: run folder.
        step: first optimizer step of this process; rows from it on are dropped and logged anew.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        super().__init__(save_dir=folder, name="", version="", flush_logs_every_n_steps=50)
        self._step = step

    @property
    def log_dir(self) -> str:
        """The run folder itself."""
        return self.save_dir

    @property
    @rank_zero_experiment
    def experiment(self) -> _ExperimentWriter:
        """The writer of the file, once there is something to write: a refused run must not touch an old one's rows."""
        if self._experiment is None:
            raise AttributeError("metrics.csv is opened with its first row")
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Add a row; the first one opens the file."""
        if self._experiment is None:
            path, rows = Path(self.save_dir, "metrics.csv"), list[dict[str, Any]]()
            if path.exists():
                with open(path, newline="") as file:
                    rows = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
            self._experiment = _ExperimentWriter(log_dir=self.save_dir)
            self._experiment.metrics += [row for row in rows if int(row["step"]) < self._step]
            self._experiment.save()
        super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        """Write the rows that wait."""
        if self._experiment is not None:
            super().save()

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing: `config.yaml` holds them."""
