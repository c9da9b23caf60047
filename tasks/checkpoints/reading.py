"""Checkpoints, read without running code; imports no Lightning, so that `export` starts fast."""

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
from tasks.checkpoints.contents import KEY, check_entry, check_model, check_version
from tasks.errors import RunError, UsageError

Checkpoint = dict[str, Any]
Config = TypeVar("Config")
CODE = "GLOBAL|allowlisted|reduce"  # in torch's messages about objects; others are about bytes


def read_checkpoint(path: str | os.PathLike, task: str | None = None) -> Checkpoint:
    """Loads a checkpoint's tensors and primitives; a pickle with code in it is refused, never run.

    Args:
        path: File written by `fit`.
        task: Task that it must belong to, such as "vit"; None for any.

    Raises:
        UsageError: There is no such file, it is of another program, version or task, or it holds
            code.
        RunError: It is truncated or corrupt, an entry is missing or wrong, or a weight is not
            finite.
        OSError: It is no regular file.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        names = sorted(found.name for found in file.parent.glob("*.ckpt"))
        hint = "`fit` writes RUN_DIR/checkpoints/best.ckpt and last.ckpt"
        if names:
            hint = f"there is {', '.join(names)}"
        raise UsageError(f"no checkpoint '{path}': {hint}")
    checkpoint = check_checkpoint(load_tensors(file, f"checkpoint '{path}'"), file, task)
    check_finite(checkpoint["state_dict"], f"checkpoint '{path}'")
    return checkpoint


def check_checkpoint(checkpoint: Checkpoint, path: Path, task: str | None) -> Checkpoint:
    """Returns a checkpoint that was read from `path`, if it can be used.

    Raises:
        UsageError: It is of another program, version or task (None: any task will do).
        RunError: An entry is missing, unknown or wrong; by name.
    """
    if not isinstance(checkpoint, dict) or KEY not in checkpoint or "state_dict" not in checkpoint:
        raise UsageError(
            f"'{path}' is not a Tessera checkpoint: give a file that `fit` wrote; weights of other "
            "libraries load through --model.pretrained"
        )
    try:
        check_version(checkpoint[KEY])
    except ValueError as error:
        raise UsageError(f"checkpoint '{path}' cannot be read: {error}") from error
    with checkpoint_errors(path):
        found = check_entry(checkpoint[KEY])
    if task is not None and found != task:
        raise UsageError(
            f"checkpoint '{path}' is of task '{found}', not '{task}': use python -m tasks.{found}"
        )
    with checkpoint_errors(path):
        check_model(checkpoint)
    return checkpoint


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Turns a `ValueError` about an entry of the checkpoint at `path` into a `RunError`."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"checkpoint '{path}' cannot be used: {str(error).rstrip('.')}") from error


def check_finite(state: Mapping[str, torch.Tensor], what: str) -> None:
    """Refuses weights that hold NaN or infinity.

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
                "file"
            )


def load_tensors(file: Path, what: str) -> Any:
    """Returns what `torch.save` wrote, if it is tensors and primitives.

    Args:
        file: The file.
        what: What to call it in a message.

    Raises:
        UsageError: It holds other objects.
        RunError: It is truncated, corrupt or of another format.
        OSError: It is no regular file, or cannot be read.
    """
    open_regular(file).close()  # a pipe would wait
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        damaged = damaged_part(file) if zipfile.is_zipfile(file) else None  # not of old torch
    except Exception as error:  # whatever bytes make of the unpickler
        pickled = re.search(CODE, str(error)) or file.open("rb").read(1) == b"\x80"
        if isinstance(error, pickle.UnpicklingError) and pickled:
            raise UsageError(
                f"{what} holds objects other than tensors and primitives; loading them could run "
                "code, so it is refused"
            ) from error
        raise RunError(f"{what} is truncated or not a checkpoint") from error
    if damaged:
        raise RunError(f"{what} is damaged: its part {damaged} is not what was written")
    return content


def damaged_part(file: Path | IO[bytes]) -> str | None:
    """Returns the first part of what `torch.save` wrote whose checksum is wrong; torch checks none.

    Raises:
        BadZipFile: The file is not whole.
    """
    with zipfile.ZipFile(file) as archive:
        return archive.testzip()


def net_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Returns the weights of the network, averaged ones if the run averaged them."""
    return {
        name.removeprefix("net."): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("net.")
    }


def load_config(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """Returns the config of a checkpoint's network.

    Raises:
        ValueError: An entry is unknown, missing or of another type; by name.
    """
    return from_dict(kind, options, f"{KEY}.net.")
