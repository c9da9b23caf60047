"""The run folder, with a run's configuration, metrics, checkpoints, pictures and summary."""

import os
import platform
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from datamodules.utils.files import NOT_ALLOWED, open_regular, try_lock
from tasks import __version__
from tasks.checkpoints.exporting import check_writable, made_parents
from tasks.distributed.environment import by_slurm, by_torchrun, torchrun_store
from tasks.errors import RunError, UsageError

FILE_FORMATS = (".csv", ".json", ".jsonl", ".parquet")
PACKAGES = ("torch", "pytorch-lightning", "torchvision", "torchmetrics", "numpy")


def choose_run_folder(task: str, chosen: str | None) -> Path:
    """The folder of this run, absolute: as chosen, or else `runs/TASK/<time>`.

    All processes of a run get the same folder: those that Lightning launches inherit it, those of
    torchrun get it from their first, also after a restart, and those of SLURM derive it from the
    job number and their command line, since a job may have several runs.
    """
    inherited = os.environ.get("TESSERA_RUN_DIR")
    if by_torchrun():
        store, rank = torchrun_store()
        if rank == 0 and not store.check(["run_folder"]):
            store.set("run_folder", str(new_run_folder(task, chosen)))
        return Path(store.get("run_folder").decode())
    if by_slurm():
        job = "_".join(os.environ.get(f"SLURM_{name}_ID", "0") for name in ("JOB", "STEP"))
        checksum = zlib.crc32("\0".join(sys.argv[1:]).encode())
        is_restart = int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0
        return new_run_folder(task, chosen or f"runs/{task}/slurm_{job}_{checksum:08x}", is_restart)
    if inherited and os.environ.get("LOCAL_RANK", "0") != "0":
        return Path(inherited)
    return new_run_folder(task, chosen)


def new_run_folder(task: str, chosen: str | None, is_restart: bool = False) -> Path:
    """The folder of a new run; only a restart may use one that holds a run already."""
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S.%f")[:-3]  # runs may start together
    folder = Path(chosen or Path("runs", task, now)).resolve()
    check_writable(folder)
    if (folder / "config.yaml").exists() and not is_restart:
        raise UsageError(
            f"--run_dir {folder} holds a run: give another folder, or --resume {folder}"
        )
    return folder


def check_results_folder(folder: Path) -> None:
    """Raise `UsageError` if the results of an evaluation cannot be written into a folder."""
    if folder.suffix in FILE_FORMATS and not folder.is_dir():
        raise UsageError(
            f"--output {folder} has the name of a file: give a folder, in which predictions.csv, "
            "metrics and figures are written"
        )
    check_writable(folder, "--output")


def make_folder(folder: Path, option: str = "--run_dir") -> None:
    """Create the folder of an option and those above it; raise `UsageError` if that fails."""
    try:
        with made_parents(folder):  # removed again after an error
            folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder} ({error.strerror}): give another folder") from error


def create_run_folder(folder: Path, task: str) -> None:
    """Create the folder; if it is in `runs/TASK`, let the link `latest` beside it point to it."""
    make_folder(folder)
    link = folder.parent / "latest"
    partial = folder.parent / f".latest.{os.getpid()}"
    in_runs = folder.parts[-3:-1] == ("runs", task)
    in_runs |= folder.parent == Path("runs", task).resolve()  # runs is a link
    if in_runs and (link.is_symlink() or not link.exists()):
        partial.unlink(missing_ok=True)
        partial.symlink_to(folder.name)
        partial.replace(link)


def lock(folder: Path) -> BinaryIO:
    """Reserve the folder for this process, until it closes the returned file or ends.

    The file stays in the folder: a process that removed it could remove the lock of the next one.
    """
    path = folder / ".lock"
    try:
        file = open_regular(path, follow=False, append=True)
    except OSError as error:
        if error.errno in NOT_ALLOWED:
            advice = "give another --run_dir, or --output of a lab"
            raise UsageError(f"you may not write to {folder}: {advice}") from error
        raise RunError(f"{path} cannot be opened ({error.strerror}): remove it") from error
    if not try_lock(file):
        raise UsageError(f"another process is training in {folder}: stop it first")
    return file


@contextmanager
def remove_unless_started(folder: Path) -> Iterator[None]:
    """After an exception, remove a folder that was created here and has no `config.yaml` yet."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if made and not os.path.exists(folder / "config.yaml"):
            if "wandb" in sys.modules:  # would write into the folder later
                import wandb

                wandb.finish(exit_code=1)
            shutil.rmtree(folder, ignore_errors=True)
            for parent in made[1:]:
                with suppress(OSError):  # another run is in it by now
                    parent.rmdir()
        raise


def versions() -> dict[str, str]:
    own = {"tessera": __version__, "python": platform.python_version()}
    return own | {name: version(name) for name in PACKAGES}


def git_commit() -> str | None:
    """The commit of the source tree, with "-dirty" if it has changes; None if unknown."""
    file = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ("git", "-C", str(file.parent), *arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # fails in site-packages
        commit = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changes else commit
