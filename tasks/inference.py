"""Options of commands that use a trained model."""

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from modules.generation.quantized import QuantizationName, prepare
from tasks.errors import UsageError, usage_errors

DeviceName = Literal["auto", "cpu", "cuda"]
Model = TypeVar("Model", bound=Any)


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """A model to use.

    Args:
        ckpt_path: Checkpoint that `fit` wrote, `hf/<model>`, or a folder of Hugging Face's layout,
            whose generation_config.json then has the defaults.
        quantize: int8: weights in a quarter of the memory, on a CPU, slightly less exact; null: as
            they are.
        device: Where to compute; auto: on a GPU if there is one, but int8 on the CPU.
    """

    ckpt_path: str
    quantize: QuantizationName | None = None
    device: DeviceName = "auto"


def prepared(model: Model, name: DeviceName, quantization: QuantizationName | None = None) -> Model:
    """A model, a named tuple with a `net`, on a device and with quantized weights."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no GPU that torch can use; leave it out")
    wants_gpu = name == "cuda" or (name == "auto" and quantization is None)
    on_gpu = wants_gpu and torch.cuda.is_available()
    net = model.net.to("cuda" if on_gpu else "cpu")
    with usage_errors(f"--quantize {quantization}"):
        prepare(net, quantization)
    return model._replace(net=net)
