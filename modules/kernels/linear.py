"""Matrix products with weights, on CPUs by oneDNN: its float32 kernels use AVX-512 on processors of every maker.

PyTorch's own float32 product is MKL's, which stays with AVX2 on processors that are not Intel's: half the speed.
"""

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AT_HAND = torch.backends.mkldnn.is_available() and platform.machine().lower() in ("x86_64", "amd64")
SMALLEST = 2**22  # multiplications below which the call itself costs more than oneDNN saves
SMALLEST_BARE = 2**18  # the same without autograd, whose part of the call is the larger


class Product(torch.autograd.Function):
    """a b^T + bias by oneDNN: (M, K), (N, K), (N,) or None -> (M, N). Differentiable any number of times."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """(M, K), (N, K) -> (M, N)."""
        return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        """Keeps both factors for the backward pass."""
        ctx.save_for_backward(inputs[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(M, N) -> (M, K), (N, K), (N,): products of the same kind; the longer side goes where oneDNN splits it."""
        (grad,), (a, b), needed = grads, ctx.saved_tensors, ctx.needs_input_grad
        for_a = product(grad, b.T) if needed[0] else None
        for_b = None
        if needed[1]:
            for_b = product(a.T, grad.T).T if len(b) > a.shape[1] else product(grad.T, a.T)
        return for_a, for_b, grad.sum(0) if needed[2] else None


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias: (M, K), (N, K), (N,) or None -> (M, N)."""
    return (Product.apply if torch.is_grad_enabled() else Product.forward)(a, b, bias)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN takes this product: float32 on the CPU, large enough, no compiler or autocast that has its own."""
    return (
        AT_HAND
        and x.numel() * weight.shape[0] >= (SMALLEST if torch.is_grad_enabled() else SMALLEST_BARE)
        and x.dim() > 1
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., K) with weight (N, K) -> (..., N). As `F.linear`, faster on CPUs."""
    if not suits(x, weight):
        return F.linear(x, weight, bias)
    return product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])  # (M, N) -> (..., N)


class Linear(nn.Linear):
    """`nn.Linear` by `linear`: (..., K) -> (..., N)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        return linear(x, self.weight, self.bias)
