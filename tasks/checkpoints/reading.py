"""Checkpoints, read without running code; without Lightning, so that `export` starts fast."""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from datamodules.utils.files import open_regular
from modules.schema import from_dict
from tasks.checkpoints.contents import KEY, check_entry, check_model
from tasks.errors import RunError, UsageError

Checkpoint = dict[str, Any]
Config = TypeVar("Config")
CODE = "GLOBAL|allowlisted|reduce"  # in torch's messages about objects; others are about bytes


def read_checkpoint(path: str | os.PathLike, task: str | None = None) -> Checkpoint:
    """Load a checkpoint's tensors and primitives; a pickle with code in it is refused, never run.

    Args:
        path: file written by `fit`.
        task: task it must belong to, such as "vit"; None for any.

    Raises:
        UsageError: no such file, not a checkpoint of this project or of another task, or it holds
            code.
        RunError: truncated or corrupt, an entry is missing or wrong, or a weight is not finite.
        OSError: no regular file.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        names = sorted(found.name for found in file.parent.glob("*.ckpt"))
        there = (
            f"there is {', '.join(names)}"
            if names
            else "`fit` writes RUN_DIR/checkpoints/best.ckpt and last.ckpt"
        )
        raise UsageError(f"no checkpoint '{path}': {there}")
    checkpoint = belonging(load_tensors(file, f"checkpoint '{path}'"), file, task)
    check_finite(checkpoint["state_dict"], f"checkpoint '{path}'")
    return checkpoint


def belonging(checkpoint: Checkpoint, path: Path, task: str | None) -> Checkpoint:
    """The same checkpoint, read from `path`.

    Raises:
        UsageError: it is not of this project, or of another task (None: any is right).
        RunError: an entry is missing, unknown or wrong, by name.
    """
    if not isinstance(checkpoint, dict) or KEY not in checkpoint or "state_dict" not in checkpoint:
        raise UsageError(
            f"'{path}' is not a Tessera checkpoint: give a file that `fit` wrote; "
            "weights of other libraries load through --model.pretrained"
        )
    with entries(path):
        found = check_entry(checkpoint[KEY])
    if task is not None and found != task:
        raise UsageError(
            f"checkpoint '{path}' is of task '{found}', not '{task}': use python -m tasks.{found}"
        )
    with entries(path):
        check_model(checkpoint)
    return checkpoint


@contextmanager
def entries(path: Path) -> Iterator[None]:
    """What is found wrong inside is about the entries of the checkpoint at `path`.

    Raises:
        RunError: names both.
    """
    try:
        yield
    except ValueError as error:
        raise RunError(f"checkpoint '{path}' cannot be used: {str(error).rstrip('.')}") from error


def check_finite(state: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuse weights that hold NaN or infinity.

    Args:
        state: Tensors by name.
        what: What to call them in a message.

    Raises:
        RunError: Names the first of them.
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise RunError(
                f"{what} cannot be used: {name} holds NaN or infinity; take an earlier or another "
                f"file"
            )


def load_tensors(file: Path, what: str) -> Any:
    """What `torch.save` wrote, if it is tensors and primitives.

    Args:
        file: the file.
        what: what to call it in a message.

    Raises:
        UsageError: it holds other objects.
        RunError: truncated, corrupt or of another format.
        OSError: it is no regular file, or cannot be read.
    """
    open_regular(file).close()  # nothing waits for a pipe
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        damaged = altered(file) if zipfile.is_zipfile(file) else None  # not of an older torch
    except Exception as error:  # whatever bytes make of the unpickler
        pickled = re.search(CODE, str(error)) or file.open("rb").read(1) == b"\x80"
        if isinstance(error, pickle.UnpicklingError) and pickled:
            raise UsageError(
                f"{what} holds objects other than tensors and primitives; loading them could run "
                f"code, so it is refused"
            ) from error
        raise RunError(f"{what} is truncated or not a checkpoint") from error
    if damaged:
        raise RunError(f"{what} is damaged: its part {damaged} is not what was written")
    return content


def altered(file: Path | IO[bytes]) -> str | None:
    """The first part of what `torch.save` wrote that changed on the disk, which torch reads without
    a word.

    Raises:
        BadZipFile: it is not whole.
    """
    with zipfile.ZipFile(file) as archive:
        return archive.testzip()


def net_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The network's own weights, names as in the plain module (averaged ones where the run averaged
    them).
    """
    return {
        name[4:]: value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("net.")
    }


def load_config(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """The configuration of a checkpoint's network.

    Raises:
        ValueError: an entry is unknown, missing or of another type, by name.
    """
    return from_dict(kind, options, f"{KEY}.net.")
