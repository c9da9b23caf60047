"""Linear layers for inference on CPUs, where most time goes into reading the weights.

Packed weights are laid out as oneDNN reads them; int8 weights take a quarter of the bytes and are
multiplied by FBGEMM. PyTorch has no public names for the operators, which its compiler and
`torch.ao.quantization` call, too.
"""

import warnings
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import check_choice, require
from modules.kernels.cpu import HAS_FBGEMM, HAS_ONEDNN, HAS_VNNI
from modules.kernels.linear import Linear
from modules.lm_heads import TokenHead

QuantizationName = Literal["int8"]
INT8_MAX = 127
X_MAX = INT8_MAX if HAS_VNNI else INT8_MAX // 2  # largest absolute value of a rounded x
TINY = 1e-9  # least scale: rows of zeros are not divided by 0
MIN_PACKED_PRODUCTS = 2**18  # multiplications below which a plain weight is faster


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (M, K) as int8 (M, K), and each row's scale (M, 1): 1/127 of its largest magnitude."""
    largest = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True)
    scales = largest.div_(INT8_MAX).clamp_(min=TINY)
    return (rows / scales).round_().to(torch.int8), scales


class PackedLinear(nn.Module):
    """x W^T + b, equal to that of the layer it is made of: float32 (..., K) -> (..., N).

    Takes W (N, K) and b (N,) or None, on the CPU. It has no parameters.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.table = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # (N, K), opaque
        self.product = torch.ops.mkldnn._linear_pointwise.default  # looked up once
        is_small = weight.numel() < MIN_PACKED_PRODUCTS
        self.plain = weight.detach() if is_small else None
        self.bias = None if bias is None else bias.detach()

    @property
    def weight(self) -> Tensor:
        """W as it was: (N, K)."""
        return self.table.to_dense() if self.plain is None else self.plain

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if self.plain is not None and x.numel() * len(self.plain) < MIN_PACKED_PRODUCTS:
            return F.linear(x, self.plain, self.bias)
        return self.product(x, self.table, self.bias, "none", [], "")


class QuantizedLinear(nn.Module):
    """x W^T + b with W and each vector x rounded to int8, sums exact in int32 (Dettmers 2022).

    Takes W (N, K) and b (N,) or None, on the CPU. For inference: it has no parameters. Without
    FBGEMM, whose kernels are for x86, only W is rounded, and products are in float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        require(
            weight.device.type == "cpu",
            f'int8 weights are for CPUs, but these are on "{weight.device}"; '
            "move them, or do without.",
        )
        rows, scales = quantize_rows(weight.detach().float())  # (N, K), (N, 1)
        self.packed = fbgemm_packed(rows, scales[:, 0]) if HAS_FBGEMM else (rows, scales)
        self.bias = None if bias is None else bias.detach().float()

    @property
    def weight(self) -> Tensor:
        """What W was rounded to, in float32: (N, K)."""
        if HAS_FBGEMM:
            return torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
        rows, scales = self.packed
        return rows * scales

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        rows = x.reshape(-1, x.shape[-1]).float()  # (M, K)
        out = self._int8_product(rows) if HAS_FBGEMM else F.linear(rows, self.weight)  # (M, N)
        if self.bias is not None:
            out += self.bias
        return out.to(x.dtype).view(*x.shape[:-1], out.shape[1])  # (M, N) -> (..., N)

    def _int8_product(self, rows: Tensor) -> Tensor:
        """(M, K) -> (M, N)."""
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        zero_point = X_MAX + 1  # of unsigned bytes
        if len(rows) == 1:  # a scale that is a number saves two passes over the row
            scale = max(torch.linalg.vector_norm(rows, torch.inf).item() / X_MAX, TINY)
            return product(rows, scale, zero_point, self.packed)
        scales = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True)  # (M, 1)
        scales.div_(X_MAX).clamp_(min=TINY)
        return product(rows * scales.reciprocal(), 1.0, zero_point, self.packed).mul_(scales)


def fbgemm_packed(rows: Tensor, scales: Tensor) -> Any:
    """int8 rows (N, K) with scales (N,), laid out as FBGEMM reads them."""
    zero_points = torch.zeros(len(rows), dtype=torch.int64)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        with warnings.catch_warnings():  # a type that a later PyTorch may not have
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch._make_per_channel_quantized_tensor(
                rows, scales.double(), zero_points, 0
            )
            return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = engine


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN takes these weights."""
    return HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32


def prepare(net: nn.Module, quantization: QuantizationName | None = None) -> nn.Module:
    """Replaces linear layers and the output layer (`TokenHead`) by layers for inference, in place.

    Afterwards `net` can neither be trained, nor saved, nor moved, nor called under autocast.
    "int8" rounds the weights; `ValueError` if they are not on the CPU, and for any other name.
    """
    if quantization is not None:
        check_choice("quantization", quantization, get_args(QuantizationName))
    layer: Any
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) in (Linear, TokenHead):  # a subclass may compute something else
                if quantization == "int8":
                    setattr(parent, name, QuantizedLinear(layer.weight, layer.bias))
                elif can_pack(layer.weight):
                    setattr(parent, name, PackedLinear(layer.weight, layer.bias))
    return net
