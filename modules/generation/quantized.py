"""Linear layers for inference on CPUs, where most time goes into reading the weights.

Packed weights are laid out as oneDNN reads them; int8 weights take a quarter of the bytes. PyTorch
has no public names for the operators, `mkldnn._linear_pointwise` and `_int_mm`, which its compiler
calls, too.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import require
from modules.kernels.linear import HAS_ONEDNN, MIN_PRODUCTS_NO_GRAD, Linear
from modules.lm_heads import TokenHead

QuantizationName = Literal["int8"]
INT8_MAX = 127
TINY = 1e-9  # least maximum of a row: rows of zeros are not divided by 0


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (M, K) as int8 (M, K), and the scale of each row (M, 1): 1/127 of its largest number."""
    largest = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True)
    steps = largest.clamp_(min=TINY).div_(INT8_MAX)
    return (rows / steps).round_().to(torch.int8), steps


class PackedLinear(nn.Module):
    """x W^T + b, equal to that of the layer it is made of: float32 (..., K) -> (..., N).

    Takes W (N, K) and b (N,) or None, on the CPU. It has no parameters.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.table = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # (N, K), opaque
        self.product = torch.ops.mkldnn._linear_pointwise.default  # looked up once
        # With fewer multiplications `F.linear` is faster: for few rows of a small weight.
        is_small = weight.numel() < MIN_PRODUCTS_NO_GRAD
        self.plain = weight.detach() if is_small else None
        self.bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        """W as it was: (N, K)."""
        return self.table.to_dense() if self.plain is None else self.plain

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.plain is not None and x.numel() * len(self.plain) < MIN_PRODUCTS_NO_GRAD:
            return F.linear(x, self.plain, self.bias)
        return self.product(x, self.table, self.bias, "none", [], "")


class QuantizedLinear(nn.Module):
    """x W^T + b with W and each vector x rounded to int8, sums exact in int32 (Dettmers 2022).

    Takes W (N, K) and b (N,) or None, on the CPU. For inference: it has no parameters.
    """

    table: Tensor
    steps: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        require(
            weight.device.type == "cpu",
            f'int8 weights are for CPUs, but these are on "{weight.device}"; '
            "move them, or do without.",
        )
        table, steps = quantize_rows(weight.detach().float())
        self.register_buffer("table", table)  # int8 (N, K)
        self.register_buffer("steps", steps[:, 0])  # (N,)
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def weight(self) -> Tensor:
        """What W was rounded to, in float32: (N, K)."""
        return self.table * self.steps[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        rows, steps = quantize_rows(x.flatten(0, -2).float())  # (M, K), (M, 1)
        sums = torch._int_mm(rows, self.table.T) * self.steps  # (M, N)
        out = sums.mul_(steps) if self.bias is None else torch.addcmul(self.bias, sums, steps)
        return out.to(x.dtype).unflatten(0, x.shape[:-1])  # (M, N) -> (..., N)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes these weights."""
    return HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32


def prepare(net: nn.Module, quantization: QuantizationName | None = None) -> nn.Module:
    """Replaces linear layers and the output layer (`TokenHead`) by layers for inference, in place.

    Afterwards `net` can neither be trained, nor saved, nor moved, nor called under autocast.
    "int8" rounds the weights; `ValueError` if they are not on the CPU.
    """
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Linear | TokenHead):
                if quantization == "int8":
                    setattr(parent, name, QuantizedLinear(layer.weight, layer.bias))
                elif can_pack(layer.weight):
                    setattr(parent, name, PackedLinear(layer.weight, layer.bias))
    return net
