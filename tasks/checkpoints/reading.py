"""Checkpoints, read without running code; imports Lightning only to warn: `export` starts fast."""

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from datamodules.utils.files import did_you_mean, open_regular
from modules.config import require
from modules.schema import check_value, format_value, from_dict
from tasks.cli.app import program
from tasks.errors import RunError, UsageError, with_trust

KEY = "tessera"  # of our entry in a checkpoint
VERSION = 4  # of the layout of our entry; 3 did not scale the embeddings of lm, bert and mlm
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHECKPOINT_PATHS = ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path")
TRAINING_STATE = ("epoch", "global_step", "loops", "callbacks", "lr_schedulers", "optimizer_states")

Checkpoint = dict[str, Any]
Config = TypeVar("Config")
Net = TypeVar("Net", bound=nn.Module)
OTHER_FILES = (  # ends messages about a file or folder that is no checkpoint
    "In Python, tessera.load reads exports (hf, timm, safetensors) and weights of other libraries; "
    "`fit --model.pretrained` starts from the latter, too"
)
REFUSED_OBJECT = "GLOBAL|allowlisted|reduce"  # in torch's messages about objects, not bytes


@dataclass(frozen=True)
class RunOptions:
    """Options of the run, as the command line has them."""

    model: dict[str, Any]
    data: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """Our entry of a checkpoint.

    Args:
        task: Name of the task.
        version: `VERSION` of the program that wrote it.
        metadata: Of the data: class names, normalisation, tokenizer.
        net: Config of the network, with the sizes found in the data.
        config: Options of the run.
    """

    task: str
    version: int
    metadata: dict[str, Any]
    net: dict[str, Any]
    config: RunOptions


def best_checkpoint(path: str | os.PathLike) -> str:
    """Returns the best checkpoint of a run folder, or else its last, with a warning.

    Any other path is returned as it is.

    Raises `UsageError` for an ONNX file.
    """
    if Path(path).suffix == ".onnx":
        raise UsageError(onnx_message(path))
    best, last = (Path(path, "checkpoints", name) for name in ("best.ckpt", "last.ckpt"))
    if best.is_file():
        return str(best)
    if last.is_file():
        _warn_of_last(Path(path).absolute())
        return str(last)
    return str(path)


@cache
def _warn_of_last(folder: Path) -> None:
    """Warns once that a run folder has no best checkpoint."""
    from pytorch_lightning.utilities import rank_zero_warn

    rank_zero_warn(f"{folder} has no best.ckpt, as no validation has ended: last.ckpt is used")


def run_of_checkpoint(path: str) -> Path | None:
    """Returns the run folder of a checkpoint, or the run folder itself; None if there is none."""
    file = Path(best_checkpoint(path))
    run = file.resolve().parent.parent
    return run if file.suffix == ".ckpt" and (run / "config.yaml").is_file() else None


def onnx_message(path: str | os.PathLike) -> str:
    """Returns what to do with an ONNX file, or a folder with one, that no command here reads."""
    return (
        f"'{path}' is an ONNX graph, which onnxruntime runs: give the checkpoint or run folder "
        f"that it was exported from. {OTHER_FILES}"
    )


def read_checkpoint(path: str | os.PathLike, task: str | None = None) -> Checkpoint:
    """Reads a checkpoint of tensors and primitives; one with pickled code is refused, never run.

    Args:
        path: File that `fit` wrote, or its run folder.
        task: Task that it must belong to, such as "vit"; None for any.

    Raises:
        UsageError: There is no such file, it is of another program, version or task, or it holds
            code.
        RunError: It is damaged, an entry is missing or wrong, or a weight is not finite.
        OSError: It is not a regular file.
    """
    path = best_checkpoint(path)
    file = Path(path)
    what = f"checkpoint '{path}'"
    if file.is_dir() or not file.exists():
        names = sorted(found.name for found in file.parent.glob("*.ckpt"))
        near = "" if file.exists() else did_you_mean(file)
        hint = "give a run folder of `fit`, or RUN_DIR/checkpoints/best.ckpt or last.ckpt"
        if (file / "config.json").exists():
            hint = f"this command takes a run folder or a checkpoint of `fit`. {OTHER_FILES}"
        elif names:
            hint = f"there is {', '.join(names)}"
        raise UsageError(f"no {what}{near}: {hint}")
    is_weights = file.suffix == ".safetensors"
    checkpoint = None if is_weights else load_tensors(file, what)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint or "state_dict" not in checkpoint:
        raise UsageError(
            f"'{path}' is not a Tessera checkpoint: give a run folder or a checkpoint of `fit`. "
            f"{OTHER_FILES}"
        )
    entry = checkpoint[KEY]
    version = entry.get("version") if isinstance(entry, Mapping) else VERSION
    check_version(version, VERSION, what)
    with checkpoint_errors(what):
        found = from_dict(Entry, checkpoint[KEY], f"{KEY}.").task
        weights = check_value(dict[str, Tensor], checkpoint["state_dict"], "state_dict")
    if task is not None and found != task:
        raise UsageError(f"{what} is of task '{found}', not '{task}': use {program(found)}")
    check_finite(weights, what)
    return checkpoint


def check_version(version: Any, wanted: int | str, what: str) -> None:
    """Raises `UsageError` unless a file, called `what`, has this version of the layout."""
    if version != wanted:
        raise UsageError(
            f"{what} has version {format_value(version)} of the layout, and this program reads "
            f"only {VERSION}: train again, or use the version of the program that wrote it"
        )


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """Turns a `ValueError` about an entry of a checkpoint, called `what`, into a `RunError`."""
    try:
        yield
    except ValueError as error:
        reason = with_trust(str(error).rstrip("."))
        raise RunError(f"{what} cannot be used: {reason}") from error


def check_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raises `RunError` if a weight holds NaN or infinity; `what` is the file in its message."""
    for name, value in state.items():
        if not value.isfinite().all():
            raise RunError(
                f"{what} cannot be used: {name} holds NaN or infinity; take another file"
            )


def load_tensors(file: Path, what: str) -> Any:
    """Returns what `torch.save` wrote, if it is tensors and primitives; `what` is for messages.

    Raises:
        UsageError: It holds other objects.
        RunError: It is truncated, corrupt or of another format.
        OSError: It is not a regular file, or cannot be read.
    """
    open_regular(file).close()  # a pipe would wait
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        damaged = None
        if zipfile.is_zipfile(file):  # files of torch before 1.6 are none
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()  # torch compares no checksums
    except Exception as error:  # corrupt bytes raise any exception in the unpickler
        pickled = re.search(REFUSED_OBJECT, str(error)) or file.open("rb").read(1) == b"\x80"
        if isinstance(error, pickle.UnpicklingError) and pickled:
            raise UsageError(
                f"{what} is refused: loading objects other than tensors and primitives could run "
                "code"
            ) from error
        raise RunError(
            f"{what} is truncated or not a checkpoint: copy it again, or take another"
        ) from error
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


def load_config(
    kind: type[Config], options: Mapping[str, Any], what: str = "the checkpoint"
) -> Config:
    """Returns the config of a checkpoint's network; raises `RunError` if an entry is wrong.

    `what` is the checkpoint in its message.
    """
    with checkpoint_errors(what):
        return from_dict(kind, options, f"{KEY}.net.")


def load_network(checkpoint: Checkpoint, kind: type[Config], build: Callable[[Config], Net]) -> Net:
    """Returns the network of a checkpoint with its weights, in evaluation mode.

    Args:
        checkpoint: See `read_checkpoint`.
        kind: Class of the network's config.
        build: Builds the network from its config.
    """
    net = build(load_config(kind, checkpoint[KEY]["net"]))
    net.load_state_dict(net_weights(checkpoint))
    return net.eval()


def check_training(checkpoint: Mapping[str, Any]) -> None:
    """Checks that a checkpoint holds the training state, and names files in its own folder only.

    A `ModelCheckpoint` deletes its files once others are better; a forged one could delete any.

    Raises:
        ValueError: Says what is missing, or which path is outside of the callback's folder.
    """
    for name in TRAINING_STATE:
        require(name in checkpoint, f"{name} is missing.")
    for name, state in check_value(dict[str, Any], checkpoint["callbacks"], "callbacks").items():
        if not name.startswith(("ModelCheckpoint", "RunCheckpoint")):
            continue
        state = check_value(dict[str, Any], state, f"callbacks.{name}")
        for key in CHECKPOINT_PATHS:
            require(key in state, f"callbacks.{name}.{key} is missing.")
        folder, *paths = (state[key] for key in CHECKPOINT_PATHS)
        for path in filter(None, (*paths, *state.get("best_k_models", ()), folder)):
            # Compared as strings, in which `RunCheckpoint` replaces the folder. A URL is no path.
            inside = isinstance(path, str) and f"{path}/".startswith(f"{folder}/")
            inside = inside and ":/" not in path and ".." not in Path(path).parts
            require(inside, f"callbacks name {path}, which is not in their folder {folder}.")


def check_tensor(value: Tensor, like: Tensor, name: str) -> None:
    """Raises `ValueError` unless `value` has the shape of `like` and a type that fits it."""
    shape = [*value.shape]
    wanted = [*like.shape]
    require(shape == wanted, f"{name} has shape {shape}, but must have {wanted}.")
    fits = value.dtype in FLOATS if like.dtype in FLOATS else value.dtype == like.dtype
    require(fits, f"{name} has dtype {value.dtype}, but must have {like.dtype}.")
