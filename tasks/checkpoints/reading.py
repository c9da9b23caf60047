"""Checkpoints, read without running code; imports no Lightning, so that `export` starts fast."""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from datamodules.utils.files import open_regular
from modules.schema import checked, from_dict, shown
from tasks.checkpoints.contents import KEY, VERSION, Entry
from tasks.errors import RunError, UsageError

Checkpoint = dict[str, Any]
Config = TypeVar("Config")
CODE = "GLOBAL|allowlisted|reduce"  # in torch's messages about objects; others are about bytes


def read_checkpoint(path: str | os.PathLike, task: str | None = None) -> Checkpoint:
    """Reads a checkpoint of tensors and primitives; one with pickled code is refused, never run.

    Args:
        path: File that `fit` wrote.
        task: Task that it must belong to, such as "vit"; None for any.

    Raises:
        UsageError: There is no such file, it is of another program, version or task, or it holds
            code.
        RunError: It is damaged, an entry is missing or wrong, or a weight is not finite.
        OSError: It is no regular file.
    """
    file = Path(path)
    what = f"checkpoint '{path}'"
    if file.is_dir() or not file.exists():
        names = sorted(found.name for found in file.parent.glob("*.ckpt"))
        hint = "`fit` writes RUN_DIR/checkpoints/best.ckpt and last.ckpt"
        if names:
            hint = f"there is {', '.join(names)}"
        raise UsageError(f"no {what}: {hint}")
    checkpoint = load_tensors(file, what)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint or "state_dict" not in checkpoint:
        raise UsageError(
            f"'{path}' is not a Tessera checkpoint: give a file that `fit` wrote; weights of other "
            "libraries load through --model.pretrained"
        )
    check_version(checkpoint[KEY], what)
    with checkpoint_errors(file):
        found = from_dict(Entry, checkpoint[KEY], f"{KEY}.").task
        weights = checked(dict[str, Tensor], checkpoint["state_dict"], "state_dict")
    if task is not None and found != task:
        raise UsageError(f"{what} is of task '{found}', not '{task}': use python -m tasks.{found}")
    check_finite(weights, what)
    return checkpoint


def check_version(entry: Any, what: str) -> None:
    """Raises `UsageError` if a checkpoint, called `what`, has another version of the layout."""
    version = entry.get("version") if isinstance(entry, Mapping) else VERSION
    if version != VERSION:
        raise UsageError(
            f"{what} cannot be read: it has version {shown(version)} of the layout, and this "
            f"program reads version {VERSION} only: train again, or use the version of this "
            "program that wrote it"
        )


@contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Turns a `ValueError` about an entry of the checkpoint at `path` into a `RunError`."""
    try:
        yield
    except ValueError as error:
        raise RunError(f"checkpoint '{path}' cannot be used: {str(error).rstrip('.')}") from error


def check_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raises `RunError` if a weight holds NaN or infinity; `what` is the file in its message."""
    for name, value in state.items():
        if not value.isfinite().all():
            raise RunError(
                f"{what} cannot be used: {name} holds NaN or infinity; take an earlier or another "
                "file"
            )


def load_tensors(file: Path, what: str) -> Any:
    """Returns what `torch.save` wrote, if it is tensors and primitives; `what` is its name in
    messages.

    Raises:
        UsageError: It holds other objects.
        RunError: It is truncated, corrupt or of another format.
        OSError: It is no regular file, or cannot be read.
    """
    open_regular(file).close()  # a pipe would wait
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        damaged = None
        if zipfile.is_zipfile(file):  # torch before 1.6 wrote others
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()  # torch compares no checksums
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


def net_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns the weights of the network, averaged ones if the run averaged them."""
    return {
        name.removeprefix("net."): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("net.")
    }


def load_config(kind: type[Config], options: Mapping[str, Any]) -> Config:
    """Returns the config of a checkpoint's network; raises `RunError` if an entry is wrong."""
    try:
        return from_dict(kind, options, f"{KEY}.net.")
    except ValueError as error:
        raise RunError(f"the checkpoint cannot be used: {str(error).rstrip('.')}") from error
