"""Checkpoint files of a run: written whole or not at all, and the newest good one found."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from datamodules.utils.files import replacing
from tasks.checkpoints.reading import Checkpoint, check_training, checkpoint_errors, read_checkpoint
from tasks.errors import RunError

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
BEST = "best.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs, renames: a kill or a full disk leaves the old file whole.

    The `last.ckpt` before the present one stays as `previous.ckpt`. Lightning's own class writes
    through the system's temporary folder, unsynced, with a second copy in memory.

    Args:
        damaged: A `last.ckpt` that is not to be kept as `previous.ckpt`.
        loaded: Checkpoints that have been read, by path, so that each is read once.
    """

    def __init__(
        self,
        damaged: Path | None = None,
        loaded: dict[Path | None, Checkpoint | None] | None = None,
    ) -> None:
        self.damaged = damaged
        self.loaded = loaded or {}

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """Saves a checkpoint; if that fails, raises `RunError` and keeps the old file."""
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_partial(target)
            with replacing(target) as partial:
                with open(partial, "wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
                if target.name == LAST and target != self.damaged:
                    keep(target, target.with_name(PREVIOUS))
            sync_folder(target.parent)
            if target == self.damaged:
                self.damaged = None
        except (OSError, RuntimeError) as error:
            # While torch handles an error of the system, its own writer may fail, without a reason.
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            raise RunError(f"checkpoint {target} could not be written: {reason}") from error

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> Checkpoint:
        return self.loaded.pop(Path(path), None) or read_checkpoint(path)


def remove_partial(target: Path) -> None:
    """Remove temporary files beside `target` of a process that was killed."""
    for name in (target.name, PREVIOUS):
        for partial in target.parent.glob(f".{name}.*.tmp"):
            partial.unlink(missing_ok=True)


def keep(file: Path, name: Path) -> None:
    """Give a file a second name, or rename it if the file system has no hard links."""
    if not file.is_file():
        return
    with replacing(name) as partial:
        try:
            partial.unlink(missing_ok=True)
            os.link(file, partial)
        except OSError:
            file.replace(partial)


def sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def newest_checkpoint(
    folder: Path, task: str, say: Callable[[str], object]
) -> tuple[Path | None, Checkpoint | None]:
    """Returns the checkpoint to resume from: `last.ckpt`, or another if that is damaged.

    Args:
        folder: Folder of checkpoints.
        task: Task that they must belong to.
        say: Called with a sentence if an older one is used.

    Returns:
        Path and content; (None, None) if there is no checkpoint yet.

    Raises:
        UsageError: One holds code, or is of another task.
        RunError: All are damaged.
    """
    damaged: list[str] = []
    found: list[tuple[Path, Checkpoint]] = []
    for path in (folder / LAST, folder / PREVIOUS, folder / BEST):
        if not path.exists():
            continue
        try:
            checkpoint = read_checkpoint(path, task)
            with checkpoint_errors(f"checkpoint '{path}'"):
                check_training(checkpoint)
            found.append((path, checkpoint))
        except RunError as error:
            damaged.append(str(error))
        if path.name == LAST and found:
            return found[0]
    if not found and damaged:
        raise RunError(f"no checkpoint can be read: {'; '.join(damaged)}")
    if not found:
        return None, None
    path, checkpoint = max(found, key=lambda pair: pair[1]["global_step"])
    reason = damaged[0] if damaged else f"there is no {folder / LAST}"
    say(f"{reason}: resuming from {path.name}, step {checkpoint['global_step']}")
    return path, checkpoint
