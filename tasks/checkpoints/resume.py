"""Going on with a run that ended early: what it was asked for, how far it came, and how to say so."""

import shlex
import signal
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_only

from tasks.checkpoints.reading import Checkpoint, read_checkpoint
from tasks.checkpoints.writing import LAST, newest_checkpoint
from tasks.cli.app import App, program
from tasks.cli.config_files import Options, read_config
from tasks.cli.signals import Stopped
from tasks.distributed.launch import as_started
from tasks.errors import UsageError
from tasks.training.trainer_options import FolderCheckpoint

say = rank_zero_only(print)  # once, whatever the number of processes


def read_run(folder: Path, app: App) -> tuple[Options, Path | None, Path | None, Checkpoint | None]:
    """A run to go on with.

    Args:
        folder: its run folder.
        app: its task.

    Returns:
        Its options; its last checkpoint, if that is not the one to use; file and content of the one to use, None and
        None where it ended before the first.

    Raises:
        UsageError: no run there, or a complete one without checkpoints, or a checkpoint that is refused.
        RunError: its checkpoints are damaged.
    """
    if not (folder / "config.yaml").is_file():
        raise UsageError(
            f"--resume {folder}: no run there (no config.yaml); give the folder a `fit` wrote, such as "
            f"runs/{app.name}/latest"
        )
    options = read_config(str(folder / "config.yaml"))
    chosen = options.get("checkpoint", {}).get("dirpath")
    place = Path(chosen) if chosen and isinstance(chosen, str) else folder / "checkpoints"
    path, checkpoint = newest_checkpoint(place, app.name, say)
    if checkpoint is None:
        if (folder / "summary.json").exists():
            read_checkpoint(place / LAST)  # says that it is missing
        say(f"no checkpoint in {place} yet: starting from the beginning")
    return options, place / LAST if path != place / LAST else None, path, checkpoint


def farewell(stop: Stopped, trainer: Trainer, folder: Path, app: App) -> Stopped:
    """The same stop with a message that says, once, how to go on with the run in `folder`."""
    trainer.fit_loop.teardown()  # ends workers; Lightning forgets those of training where a validation is stopped
    launcher: Any = trainer.strategy.launcher
    children = getattr(launcher, "procs", [])
    for (
        process
    ) in children:  # those that wait for this one, in C++; where all agreed there are none
        process.kill()
    children.clear()
    if not trainer.is_global_zero:
        return Stopped(stop.number, "")
    if not (folder / "config.yaml").exists():
        return stop
    name = signal.Signals(stop.number).name
    saved = any(
        one.last_saved(trainer)
        for one in trainer.checkpoint_callbacks
        if isinstance(one, FolderCheckpoint)
    )
    how = f"after step {trainer.global_step}" if saved else "at once, without saving"
    to_go_on = as_started(f"{program(app)} fit --resume {shlex.quote(str(folder))}")
    return Stopped(stop.number, f"stopped by {name} {how}; to go on: {to_go_on}")
