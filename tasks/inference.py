"""Options of commands that use a trained model."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from modules.generation import quantized
from modules.generation.quantized import QuantizationName, prepare
from tasks.errors import UsageError, usage_errors

DeviceName = Literal["auto", "cpu", "cuda"]
Model = TypeVar("Model", bound=Any)
Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """A model to use.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout;
            its generation_config.json, if it has one, has the defaults of generation.
        quantize: int8: weights in a quarter of the memory, on a CPU, slightly less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one, but int8 on the CPU.
    """

    ckpt_path: str
    quantize: QuantizationName | None = None
    device: DeviceName = "auto"


def prepare_model(
    model: Model, name: DeviceName, quantization: QuantizationName | None = None
) -> Model:
    """A model, a named tuple with a `net`, on a device and with layers for inference."""
    return model._replace(net=prepare_net(model.net, name, quantization))


def prepare_net(net: Net, name: DeviceName, quantization: QuantizationName | None = None) -> Net:
    """The same network on a device, with layers for inference."""
    on_device(net, name, quantization)
    if quantization == "int8" and not quantized.HAS_FBGEMM:
        text = "this CPU has no kernels for products of int8 weights: they save memory, but no time"
        warnings.warn(text, stacklevel=2)
    with usage_errors(f"--quantize {quantization}"):
        prepare(net, quantization)
    return net


def on_device(
    net: Net, name: str, quantization: QuantizationName | None = None, option: str = "--device"
) -> Net:
    """The same network on a device: one of `DeviceName`, or one of torch, such as "cuda:1".

    Raises `UsageError` if there is none; it says which `option` named it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() and quantization is None else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device has its own
        known = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise UsageError(
            f"{option} is {name!r}, but torch has no such device here: give {' or '.join(known)}"
        ) from error
    return net.to(name)
