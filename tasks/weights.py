"""Files of weights that others wrote, read without running code."""

import pickle
from pathlib import Path

import torch
from torch import Tensor

from tasks.errors import DataError, UsageError

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
