"""The run folder: where a run keeps its configuration, metrics, checkpoints, pictures and summary."""

import csv
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from lightning_fabric.loggers.csv_logs import _ExperimentWriter
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from datamodules.utils.files import open_regular, read_bytes, replacing, write_text
from tasks import __version__
from tasks.checkpoints.exporting import made_parents
from tasks.checkpoints.reading import Checkpoint
from tasks.distributed.launchers import by_slurm, by_torchrun, kept_store
from tasks.errors import RunError, UsageError

LOCK = ".lock"
PACKAGES = ("torch", "pytorch-lightning", "torchvision", "torchmetrics", "numpy")


def run_folder(task: str, chosen: str | None) -> Path:
    """The folder of this run: as chosen, else `runs/TASK/<time>`; the same one in every process of the run.

    Lightning's processes inherit it from the one that launched them; those of torchrun get it from their first, also
    when they are started again; those of SLURM know it by the number of their job and by their command line, since a
    job may have several.

    Raises:
        UsageError: the chosen folder is a file, cannot be made, or holds a run already.
    """
    inherited = os.environ.get("TESSERA_RUN_DIR")
    if by_torchrun():
        store, rank = kept_store()
        if rank == 0 and not store.check(["run_folder"]):
            store.set("run_folder", str(new_folder(task, chosen)))
        return Path(store.get("run_folder").decode())
    if by_slurm():
        job = "_".join(os.environ.get(f"SLURM_{name}_ID", "0") for name in ("JOB", "STEP"))
        again = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        line = zlib.crc32("\0".join(sys.argv[1:]).encode())
        return new_folder(task, chosen or str(Path("runs", task, f"slurm_{job}_{line:08x}")), again)
    if inherited and os.environ.get("LOCAL_RANK", "0") != "0":
        return Path(inherited)
    return new_folder(task, chosen)


def new_folder(task: str, chosen: str | None, again: bool = False) -> Path:
    """The folder of a run of one process, absolute; one that holds a run only where that is started again.

    Raises:
        UsageError: the chosen folder is a file, cannot be made, or holds a run already.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[
        :-3
    ]  # milliseconds: runs may start together
    folder = Path(chosen or Path("runs", task, now)).resolve()
    check_writable(folder)
    if (folder / "config.yaml").exists() and not again:
        raise UsageError(
            f"--run_dir {folder} holds a run already: choose another folder, or continue that run "
            f"with --resume {folder}"
        )
    return folder


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before anything is computed for it.

    Raises:
        UsageError: see above.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UsageError(
            f"--run_dir {folder} cannot be used ({error.strerror}): give another folder"
        ) from error
    if not there.is_dir():
        raise UsageError(
            f"--run_dir {folder}: {there} is a file; give a folder, it is made where it does not exist"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"--run_dir {folder} cannot be used: you may not write to {there}")


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        with made_parents(folder):
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--run_dir {folder} cannot be made ({error.strerror}): give another folder"
        ) from error


def make_run_folder(folder: Path, task: str) -> None:
    """Create the folder, and point `latest` beside it to it where it lies in `runs/TASK`.

    Raises:
        UsageError: it cannot be made.
    """
    make_folder(folder)
    link, partial = folder.parent / "latest", folder.parent / f".latest.{os.getpid()}"
    if folder.parts[-3:-1] == ("runs", task) and (link.is_symlink() or not link.exists()):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder.name)
        partial.replace(link)


def lock(folder: Path) -> BinaryIO:
    """A file in the folder that nobody else gets as long as this process has it open and lives.

    Raises:
        UsageError: another process has it.
        RunError: it is a link, or no regular file.
    """
    try:
        file = open_regular(folder / LOCK, follow=False, append=True)
    except OSError as error:
        raise RunError(
            f"{folder / LOCK} cannot be opened ({error.strerror}): remove it, or make it writable"
        ) from error
    with suppress(ImportError):  # not on Windows
        import fcntl

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # others are of disks without locks
                raise UsageError(
                    f"another process is training in {folder}: wait until it ends, or stop it"
                ) from error
    return file


def unlock(folder: Path, file: BinaryIO) -> None:
    """Let others have the folder."""
    (folder / LOCK).unlink(missing_ok=True)
    file.close()


@contextmanager
def kept_if_started(folder: Path) -> Iterator[None]:
    """Remove a folder that was made inside, unless the run got as far as its `config.yaml`."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if made and not os.path.exists(folder / "config.yaml"):
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
    write_text(
        folder / "config.yaml",
        yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=120),
    )


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write `summary.json`, with the versions and the commit that made it."""
    origin = {"tessera": __version__, "python": platform.python_version()} | {
        p: version(p) for p in PACKAGES
    }
    write_text(
        folder / "summary.json",
        json.dumps(summary | {"versions": origin, "git_commit": git_commit()}, indent=2),
    )


def code_version() -> dict[str, str | None]:
    """What ran: version and commit."""
    return {"tessera": __version__, "git_commit": git_commit()}


def git_commit() -> str | None:
    """The commit of the source tree, with "-dirty" where it has changes; None outside of a git checkout."""
    where = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ("git", "-C", str(where), *arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # our own repository, not one around the installed files
        return git("rev-parse", "HEAD") + (
            "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a `metrics.csv`, without empty cells; a last one that was not written to its end is left out.

    Raises:
        RunError: it is something else.
        OSError: it is no regular file, or cannot be read.
    """
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
        raise RunError(
            f"{path} is damaged: move it away, and the run goes on without its earlier rows"
        ) from error
    return rows


class Continued:
    """What the loggers of a continued run keep: all from before its checkpoint that the run does not log again.

    Args:
        checkpoint: what it goes on from; None where it begins again.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.latest = (checkpoint["global_step"] if checkpoint else 0) - 1  # step that was logged
        loops = checkpoint["loops"]["fit_loop"] if checkpoint else {}
        self.validates = loops.get("epoch_loop.state_dict", {}).get(
            "validates", False
        )  # after that step
        epochs = loops.get("epoch_progress", {}).get("current", {"completed": 0, "ready": 0})
        self.ends = (
            epochs["completed"] < epochs["ready"]
        )  # whether the end of the epoch is still to come

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of metrics stays."""
        step = int(row["step"])
        if step != self.latest or "train/grad_norm" in row:
            return step <= self.latest
        return not (self.validates if any(name.startswith("val/") for name in row) else self.ends)


class RowWriter(_ExperimentWriter):
    """Lightning's writer, but for this: what is in the file stays there, also if the process is killed meanwhile.

    It never writes through a link.
    """

    def _check_log_dir_exists(self) -> None:
        """Nothing: Lightning would delete the file."""

    def save(self) -> None:
        """Append the rows that wait, below a new header where they have new columns."""
        if not self.metrics:
            return
        path = Path(self.metrics_file_path)
        if self._record_new_keys() or not path.exists():
            self.write(read_rows(path), self.metrics_keys)
        with TextIOWrapper(open_regular(path, follow=False, append=True), newline="") as file:
            csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    def write(self, rows: list[dict[str, str]], columns: list[str]) -> None:
        """Replace the file."""
        with (
            replacing(Path(self.metrics_file_path)) as partial,
            open(partial, "w", newline="") as file,
        ):
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)


class MetricsCSV(CSVLogger):
    """`metrics.csv` in the run folder.

    Args:
        folder: run folder.
        continued: what a run that goes on keeps of an earlier file; None drops all.
    """

    def __init__(self, folder: Path, continued: Continued | None = None) -> None:
        super().__init__(save_dir=folder, name="", version="", flush_logs_every_n_steps=50)
        self._continued = continued or Continued(None)

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
            self._experiment = writer = RowWriter(log_dir=self.save_dir)
            path = Path(writer.metrics_file_path)
            if path.exists():
                rows = [row for row in read_rows(path) if self._continued.keeps(row)]
                writer.metrics_keys = sorted({"step"}.union(*rows))
                writer.write(rows, writer.metrics_keys)
        super().log_metrics(metrics, step)

    @rank_zero_only
    def save(self) -> None:
        """Write the rows that wait."""
        if self._experiment is not None:
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the rows that wait; where the run failed already, as far as that works."""
        with suppress(OSError) if status == "failed" else nullcontext():
            super().finalize(status)

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing: `config.yaml` holds them."""
