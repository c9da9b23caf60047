"""Resuming a run: its options and its latest checkpoint."""

import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_only

from tasks.checkpoints.reading import Checkpoint, read_checkpoint
from tasks.checkpoints.writing import LAST, newest_checkpoint
from tasks.cli.app import App, program
from tasks.cli.config_files import read_config
from tasks.cli.signals import MESSAGES
from tasks.distributed.environment import with_launcher
from tasks.errors import UsageError
from tasks.lightning_patches import RunCheckpoint
from tasks.options import Options

print_once = rank_zero_only(print)


@dataclass(frozen=True)
class SavedRun:
    """A run to resume: options of its config.yaml, and a checkpoint with its path, if there is one.

    `damaged` is the path of last.ckpt if that is damaged or missing, else None: the next save keeps
    a good last.ckpt as previous.ckpt, but not a damaged one.
    """

    options: Options
    path: Path | None
    checkpoint: Checkpoint | None
    damaged: Path | None


def run_folder(path: str) -> str:
    """The run folder that `--resume` names, also by its last checkpoint.

    Raises `UsageError` for another checkpoint of a run.
    """
    folder = Path(path).parent.parent
    if Path(path).suffix != ".ckpt" or not (folder / "config.yaml").is_file():
        return path
    if Path(path).name != LAST:
        raise UsageError(
            f"--resume {path}: a run resumes from its {LAST}; give --resume {folder}, or "
            f"--model.pretrained {path} for a new run from these weights"
        )
    return str(folder)


def read_run(folder: Path, app: App) -> SavedRun:
    """Reads a run to resume; refuses a folder without one, or an ended run without checkpoint."""
    if not (folder / "config.yaml").is_file():
        raise UsageError(
            f"--resume {folder}: there is no config.yaml; give a run folder, such as "
            f"runs/{app.name}/latest"
        )
    options = read_config(str(folder / "config.yaml"))
    dirpath = options.get("checkpoint", {}).get("dirpath")
    checkpoints = folder / "checkpoints"
    if dirpath and isinstance(dirpath, str):
        checkpoints = Path(dirpath).expanduser()
    path, checkpoint = newest_checkpoint(checkpoints, app.name, print_once)
    earlier = folder / "checkpoints" / LAST
    if checkpoint is None and earlier.exists():  # written before `dirpath` was set
        raise UsageError(
            f"--resume {folder}: there is no checkpoint in {checkpoints}, where the run keeps "
            f"them; to resume from {earlier}, copy it there"
        )
    if checkpoint is None:
        best = folder / "checkpoints" / "best.ckpt"
        has_ended = (folder / "summary.json").exists()
        is_relative = dirpath and not checkpoints.is_absolute()  # to where the run was started
        if has_ended or (is_relative and best.exists()):
            read_checkpoint(checkpoints / LAST)  # raises an error: it is missing
        print_once(f"no checkpoint in {checkpoints} yet: starting from the beginning")
    damaged = None if path == checkpoints / LAST else checkpoints / LAST
    return SavedRun(options, path, checkpoint, damaged)


def stop_message(number: int, trainer: Trainer, folder: Path, app: App) -> str:
    """The message of a run that a signal stopped, with the command to resume it, or to test it."""
    if not trainer.is_global_zero:
        return ""
    if not (folder / "config.yaml").exists():
        return MESSAGES[number]
    name = signal.Signals(number).name
    run = shlex.quote(str(folder))
    has_trained = trainer.state.fn == TrainerFn.TESTING or trainer.state.finished
    if has_trained and trainer.limit_test_batches != 0:
        command = f"{program(app.name)} test --ckpt_path {run} --output {run}"
        return f"stopped by {name} after training, before the results; to test: {command}"
    how = "at once, without saving"
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, RunCheckpoint) and callback.last_saved(trainer):
            how = f"after step {trainer.global_step}"
    command = with_launcher(f"{program(app.name)} fit --resume {run}")
    return f"stopped by {name} {how}; to resume: {command}"
