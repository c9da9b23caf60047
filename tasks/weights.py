"""Weights: files that others wrote, read without running code, and those of checkpoints, which must all fit."""

import pickle
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.errors import DataError, UsageError
from tasks.parsing import flat

State = dict[str, Tensor]


def read_weights(source: str) -> State:
    """Tensors of a .safetensors file, or of a .pth file that holds nothing else.

    Raises:
        UsageError: no such file, or it holds objects other than tensors.
        DataError: it is truncated or of another format.
    """
    path = Path(source)
    if not path.is_file():
        raise UsageError(f"--model.pretrained {source}: no such file; give one, or timm/<model name>")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"--model.pretrained {source} holds objects other than tensors, which could run code: refused"
        ) from error
    except Exception as error:  # safetensors and zip files each have their own kinds
        raise DataError(f"--model.pretrained {source} is truncated or not a file of weights") from error
    return state.get("state_dict", state.get("model", state))


def load_weights(net: Any, weights: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Load `weights` saved with the configuration `saved`, all of them.

    Raises:
        UsageError: the network was asked for otherwise than it was saved; names the options that differ.
    """
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        asked, had = flat(asdict(net.config)), flat(dict(saved))
        differ = [f"--model.net.{k} {v} (checkpoint: {had.get(k)})" for k, v in asked.items() if had.get(k) != v]
        reason = "; ".join(differ) or str(error).splitlines()[0]
        raise UsageError(f"these options do not fit the checkpoint's weights: {reason}") from error
