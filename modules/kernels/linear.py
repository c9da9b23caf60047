"""Matrix products with weights, by oneDNN on the CPUs where it is faster.

The operator has no public name; PyTorch's compiler calls it, too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import default
from modules.kernels.cpu import HAS_FULL_WIDTH, MIN_SIDE_GRADIENT, PREFERS_ONEDNN
from modules.kernels.derivatives import is_backward_only

# Multiplications below which the call itself costs more than oneDNN saves.
MIN_PRODUCTS = 2**22 if HAS_FULL_WIDTH else 2**25
# The same without autograd, which is the larger part of the call; and the size of weights with
# which oneDNN is faster for any number of rows.
MIN_PRODUCTS_NO_GRAD = 2**18 if HAS_FULL_WIDTH else 2**23
LARGE_WEIGHT = 2**18
MANY_OUTPUTS = 2**12  # above which MKL is up to 1.5 times as fast in parts
OUTPUTS_OF_PART = 2**9


class OneDnnLinear(torch.autograd.Function):
    """a b^T + bias by oneDNN: (M, K), (N, K), (N,) or None -> (M, N). Has second derivatives."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """(M, K), (N, K) -> (M, N). Keeps both factors for the backward pass."""
        ctx.save_for_backward(a, b)
        return onednn_product(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(M, N) -> (M, K), (N, K), (N,), by products of the same kind."""
        grad = grads[0]
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_bias = ctx.needs_input_grad
        # The gradient of the weights comes first: for it, oneDNN copies both factors.
        grad_b = weight_gradient(a, grad) if needs_b else None
        grad_a = product(grad, b.T) if needs_a else None
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_a, grad_b, grad_bias


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias: (M, K), (N, K), (N,) or None -> (M, N)."""
    if not is_backward_only():  # oneDNN's operator has no rules for other derivatives
        return F.linear(a, b, bias)
    if torch.is_grad_enabled():
        return OneDnnLinear.apply(a, b, bias)
    return onednn_product(a, b, bias)


def onednn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """As `product`, without derivatives."""
    if 0 in b.stride():  # expanded, such as the gradient of a sum: oneDNN is very slow with it
        b = b.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def weight_gradient(a: Tensor, grad: Tensor, by_onednn: bool | None = None) -> Tensor:
    """The gradient of b in `product`: (M, K), (M, N) -> (N, K).

    Computed by oneDNN if `by_onednn`, else by PyTorch; None: by the faster of the two here.
    """
    width, outputs = a.shape[1], grad.shape[1]
    if default(by_onednn, min(width, outputs) >= MIN_SIDE_GRADIENT):
        # Faster with the longer side as columns.
        return product(a.T, grad.T).T if outputs > width else product(grad.T, a.T)
    return grad.T @ a if outputs > width else (a.T @ grad).T  # faster with it as rows


def is_plain_float32(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is in float32 on the CPU, without compiler or autocast."""
    return (
        not torch.compiler.is_compiling()  # first: the compiler would take sizes for fixed
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether a product goes to oneDNN: plain float32, and large."""
    if not (PREFERS_ONEDNN and is_plain_float32(x, weight) and x.dim() > 1):
        return False
    products = x.numel() * weight.shape[0]
    if torch.is_grad_enabled():
        return products >= MIN_PRODUCTS
    return products >= MIN_PRODUCTS_NO_GRAD or (products > 0 and weight.numel() >= LARGE_WEIGHT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., K) with weight (N, K) -> (..., N). As `F.linear`, faster on CPUs."""
    if not takes_onednn(x, weight):
        return F.linear(x, weight, bias)
    return product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])  # (M, N) -> (..., N)


def linear_to_many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, for a vocabulary: (M, K) with weight (N, K) -> (M, N). Has no derivatives."""
    in_parts = (
        len(weight) > MANY_OUTPUTS and is_plain_float32(x, weight) and not takes_onednn(x, weight)
    )
    return (linear_in_parts if in_parts else linear)(x, weight, bias)


def linear_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, some outputs at a time: (M, K) with weight (N, K) -> (M, N)."""
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(weight), OUTPUTS_OF_PART):
        part = slice(start, start + OUTPUTS_OF_PART)
        torch.mm(x, weight[part].T, out=out[:, part])  # (M, K), (K, N') -> (M, N')
    return out if bias is None else out.add_(bias)


class Linear(nn.Linear):
    """`nn.Linear` by `linear`: (..., K) -> (..., N)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return linear(x, self.weight, self.bias)
