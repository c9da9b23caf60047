"""Device and quantization of a model that does not train."""

from typing import Any, Literal, TypeVar

import torch

from modules.generation.quantized import QuantizationName, prepare
from tasks.errors import UsageError, usage_errors

DeviceName = Literal["auto", "cpu", "cuda"]
Model = TypeVar("Model", bound=Any)


def prepared(model: Model, name: DeviceName, quantization: QuantizationName | None = None) -> Model:
    """A model, a named tuple with a `net`, on a device and with quantized weights.

    "auto" is the GPU if there is one, but the CPU for quantized weights.

    Raises:
        UsageError: there is no such device, or it cannot compute with such weights.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no GPU that torch can use; leave it out")
    wants_gpu = name == "cuda" or (name == "auto" and quantization is None)
    on_gpu = wants_gpu and torch.cuda.is_available()
    net = model.net.to("cuda" if on_gpu else "cpu")
    with usage_errors(f"--quantize {quantization}"):
        prepare(net, quantization)
    return model._replace(net=net)
