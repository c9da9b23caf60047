"""Where a model computes that does not train, and how exact its weights are."""

from typing import Any, Literal, TypeVar

import torch

from modules.quantized import quantize as to_int8
from tasks.errors import UsageError, refusals

DeviceName = Literal["auto", "cpu", "cuda"]
Quantization = Literal["int8"]
Model = TypeVar("Model", bound=Any)


def on_device(model: Model, name: DeviceName, quantization: Quantization | None = None) -> Model:
    """A model, a named tuple with a `net`, where it is to compute, with weights as exact as they are to be.

    Raises:
        UsageError: there is no such device, or it knows no such weights.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no GPU that torch can use; leave it out")
    on_gpu = name != "cpu" and torch.cuda.is_available()
    net = model.net.to("cuda" if on_gpu else "cpu")
    if quantization:
        with refusals(f"--quantize {quantization}"):
            to_int8(net)
    return model._replace(net=net)
