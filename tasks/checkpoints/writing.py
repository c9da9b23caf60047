"""Checkpoint files of a run: atomic writing, the latest two, the newest whole one."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from datamodules.utils.files import replacing
from tasks.checkpoints.contents import check_training
from tasks.checkpoints.reading import (
    META,
    Checkpoint,
    checkpoint_errors,
    is_sharded,
    old_path,
    read_checkpoint,
    recover,
)
from tasks.errors import RunError

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, syncs and renames, so that a kill leaves the previous file whole.

    The `last.ckpt` before stays as `previous.ckpt`. Lightning's own class writes through the
    system's temporary folder, unsynced, with a second copy in memory.

    Args:
        damaged: A file that is not worth keeping.
    """

    def __init__(self, damaged: Path | None = None) -> None:
        self.damaged = damaged

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """Saves `checkpoint` at `path`.

        Raises:
            RunError: It cannot be written; what was there before stays.
        """
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            clear(target)
            with replacing(target) as partial:
                with open(partial, "wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())
                self.keep_previous(target)
            self.finish(target)
        except (OSError, RuntimeError) as error:
            full = "inline_container" in str(error)  # torch says no more
            hint = " (is the disk full?)" if full else ""
            raise RunError(f"checkpoint {target} could not be written: {error}{hint}") from error

    def rename_sharded(self, partial: Path, target: Path) -> None:
        """Renames a sharded checkpoint, which all processes have written.

        Raises:
            OSError: That cannot be done; what was there before stays.
        """
        with open(partial / META, "rb") as file:
            os.fsync(file.fileno())
        sync_folder(partial)
        self.keep_previous(target, is_folder=True)
        partial.replace(target)
        self.finish(target)

    def keep_previous(self, target: Path, is_folder: bool = False) -> None:
        """Gives the present checkpoint the name of the previous one.

        A file keeps its own as well until a new file replaces it; a folder cannot be replaced.
        """
        kept = old_path(target)
        if target.name == LAST and target != self.damaged:
            kept = target.with_name(PREVIOUS)
        if target.is_dir() or (is_folder and target.exists()):
            discard(kept)
            target.replace(kept)
        elif kept.name == PREVIOUS:
            link(target, kept)

    def finish(self, target: Path) -> None:
        """Cleans up once there is a new checkpoint."""
        discard(old_path(target))
        sync_folder(target.parent)
        if target == self.damaged:
            self.damaged = None

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> Checkpoint:
        """Loads a checkpoint, a sharded one as a whole."""
        if is_sharded(Path(path)):
            from tasks.checkpoints.sharded import gathered

            return gathered(Path(path))
        return read_checkpoint(path)


def clear(target: Path) -> None:
    """Removes what a killed process had begun to write beside `target`."""
    for name in (target.name, PREVIOUS):
        for begun in target.parent.glob(f".{name}.*.tmp"):
            discard(begun)


def discard(path: Path) -> None:
    """Removes a file, a folder or a link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link(file: Path, name: Path) -> None:
    """Gives a file a second name, or another name on file systems without hard links."""
    if not file.is_file():
        return
    if name.is_dir():
        discard(name)
    with replacing(name) as partial:
        try:
            partial.unlink(missing_ok=True)
            os.link(file, partial)
        except OSError:
            file.replace(partial)


def sync_folder(folder: Path) -> None:
    """Flushes a folder to the disk, if the system can."""
    with suppress(OSError):
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
        say: Told of a damaged one, and of what is used instead.

    Returns:
        Path and content, without the weights of a sharded one; None and None if there is none yet.

    Raises:
        UsageError: One holds code, or is of another task.
        RunError: All are damaged; names them.
    """
    damaged: list[str] = []
    found: list[tuple[Path, Checkpoint]] = []
    for path in (folder / LAST, folder / PREVIOUS, folder / BEST):
        recover(path)
        if not path.exists():
            continue
        try:
            found.append((path, read_for_resume(path, task)))
        except RunError as error:
            damaged.append(str(error))
        if path.name == LAST and found:
            return found[0]
    if not found and damaged:
        raise RunError(f"no checkpoint can be read: {'; '.join(damaged)}")
    if not found:
        return None, None
    path, checkpoint = max(found, key=lambda one: one[1]["global_step"])
    reason = damaged[0] if damaged else f"there is no {folder / LAST}"
    say(f"{reason}: resuming from {path.name}, step {checkpoint['global_step']}")
    return path, checkpoint


def read_for_resume(path: Path, task: str) -> Checkpoint:
    """Returns a checkpoint of this task; Lightning's strategy reads the parts of a sharded one.

    Raises:
        UsageError: It holds code, or is of another task.
        RunError: It is damaged.
    """
    if path.is_dir():
        from tasks.checkpoints.sharded import read_parts

        checkpoint = read_parts(path, task)
    else:
        checkpoint = read_checkpoint(path, task)
    with checkpoint_errors(path):
        check_training(checkpoint, path.is_dir())
    return checkpoint
