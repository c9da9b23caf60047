"""What a checkpoint holds, checked before anything is built from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modules.config import require
from modules.schema import checked

KEY = "tessera"  # of our entry in a checkpoint
VERSION = 2  # of the layout of our entry; 1 had no number
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRAINING_STATE = ("epoch", "global_step", "loops", "callbacks", "lr_schedulers", "optimizer_states")


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


def check_training(checkpoint: Mapping[str, Any]) -> None:
    """Checks that training can continue from a checkpoint that only names files of its own folder.

    A `ModelCheckpoint` deletes its files once others are better; a forged one could delete any.

    Raises:
        ValueError: Says what is missing, or which path is outside of the callback's folder.
    """
    for name in TRAINING_STATE:
        require(name in checkpoint, f"{name} is missing.")
    for name, state in checked(dict[str, Any], checkpoint["callbacks"], "callbacks").items():
        if not name.startswith(("ModelCheckpoint", "RunCheckpoint")):
            continue
        folder = state["dirpath"] or ""
        own = (state["best_model_path"], state["kth_best_model_path"], state["last_model_path"])
        for path in map(Path, filter(None, (*own, *state["best_k_models"]))):
            inside = path.is_relative_to(folder) and ".." not in path.parts
            require(inside, f"callbacks name {path}, which is not in their folder {folder}.")


def check_tensor(value: Tensor, like: Tensor, name: str) -> None:
    """Raises `ValueError` unless `value` has the shape of `like` and a type that fits it."""
    shape = [*value.shape]
    wanted = [*like.shape]
    require(shape == wanted, f"{name} has shape {shape}, but must have {wanted}.")
    fits = value.dtype in FLOATS if like.dtype in FLOATS else value.dtype == like.dtype
    require(fits, f"{name} has dtype {value.dtype}, but must have {like.dtype}.")


def read_count(state: Any, name: str, entry: str) -> int:
    """Returns a count in a callback's state, `name` being that of the state.

    Raises:
        ValueError: There is none, or it is below 0; by name.
    """
    require(entry in checked(dict[str, Any], state, name), f"{name}.{entry} is missing.")
    count = checked(int, state[entry], f"{name}.{entry}")
    require(count >= 0, f"{name}.{entry} is below 0.")
    return int(count)
