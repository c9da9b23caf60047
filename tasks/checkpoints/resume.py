"""Continuing a run that ended early: its options, its latest checkpoint, and how to say so."""

import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_only

from tasks.checkpoints.reading import Checkpoint, read_checkpoint
from tasks.checkpoints.writing import LAST, newest_checkpoint
from tasks.cli.app import App, program
from tasks.cli.config_files import Options, read_config
from tasks.cli.signals import Stopped
from tasks.distributed.environment import with_launcher
from tasks.errors import UsageError
from tasks.lightning_patches import RunCheckpoint

print_once = rank_zero_only(print)  # whatever the number of processes


@dataclass(frozen=True)
class SavedRun:
    """A run to continue.

    Args:
        options: of its `config.yaml`.
        path: checkpoint to continue from; None where the run ended before the first.
        checkpoint: its content.
        damaged: the last checkpoint, where `path` is an earlier one.
    """

    options: Options
    path: Path | None
    checkpoint: Checkpoint | None
    damaged: Path | None


def read_run(folder: Path, app: App) -> SavedRun:
    """The run of a run folder.

    Raises:
        UsageError: no run there, or a complete one without checkpoints, or a checkpoint that is
            refused.
        RunError: its checkpoints are damaged.
    """
    if not (folder / "config.yaml").is_file():
        raise UsageError(
            f"--resume {folder}: no run there (no config.yaml); give the folder a `fit` wrote, "
            f"such as runs/{app.name}/latest"
        )
    options = read_config(str(folder / "config.yaml"))
    dirpath = options.get("checkpoint", {}).get("dirpath")
    place = folder / "checkpoints"
    if dirpath and isinstance(dirpath, str):
        place = Path(dirpath)
    path, checkpoint = newest_checkpoint(place, app.name, print_once)
    if checkpoint is None:
        if (folder / "summary.json").exists():
            read_checkpoint(place / LAST)  # says that it is missing
        print_once(f"no checkpoint in {place} yet: starting from the beginning")
    damaged = None if path == place / LAST else place / LAST
    return SavedRun(options, path, checkpoint, damaged)


def stop_message(stop: Stopped, trainer: Trainer, folder: Path, app: App) -> str:
    """How to continue the run in `folder` that a signal stopped; empty in all processes but the
    first.
    """
    if not trainer.is_global_zero:
        return ""
    if not (folder / "config.yaml").exists():
        return str(stop)
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, RunCheckpoint)]
    how = "at once, without saving"
    if any(callback.last_saved(trainer) for callback in callbacks):
        how = f"after step {trainer.global_step}"
    command = with_launcher(f"{program(app)} fit --resume {shlex.quote(str(folder))}")
    return f"stopped by {signal.Signals(stop.number).name} {how}; to go on: {command}"
