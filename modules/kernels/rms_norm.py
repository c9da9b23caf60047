"""RMSNorm (Zhang & Sennrich 2019). LayerNorm's kernel computes its gradient, faster on CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.kernels.derivatives import is_backward_only


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis: (..., E) -> (..., 1)."""
    squares = torch.linalg.vecdot(x, x)  # (...)
    return (squares / x.shape[-1] + eps).rsqrt()[..., None]


class RMSNormFunction(torch.autograd.Function):
    """`rms_norm` with its gradient. Has second derivatives, but not forward mode nor vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(..., E), (E,) -> (..., E). Keeps the inputs for the backward pass."""
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return (x * inverse_rms(x, eps)).mul_(weight)

    @staticmethod
    @torch.autocast("cpu", enabled=False)  # the forward pass was in full precision, too
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """(..., E) -> gradients with respect to x and weight.

        With h = grad * weight and r = inverse_rms(x), they are r * (h - x * r^2 * mean(h * x)) and
        the sum of grad * x * r.
        """
        x, weight = ctx.saved_tensors
        grad = grads[0]
        r = inverse_rms(x, ctx.eps)  # (..., 1)
        if torch.is_grad_enabled():  # with create_graph=True
            h = grad * weight
            x_grad = r * (h - x * r**2 * (h * x).mean(-1, keepdim=True))
            return x_grad, (grad * x * r).sum_to_size(weight.shape), None
        # Given 0 as the mean and r, this returns r (h - mean(h) - x r^2 mean(h x)).
        mean = torch.zeros_like(r)
        needed = [*ctx.needs_input_grad]
        x_grad, weight_grad, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, r.contiguous(), weight, None, needed
        )
        if x_grad is not None:
            sums = torch.linalg.vecdot(grad, weight)[..., None]  # of h: (..., 1)
            x_grad.addcmul_(sums, r, value=1 / x.shape[-1])  # + r mean(h)
        return x_grad, weight_grad, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: (..., E), (E,) -> (..., E).

    As `F.rms_norm`, faster in training on CPUs.
    """
    is_fast = (
        torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and is_backward_only()
    )
    if is_fast:
        return RMSNormFunction.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)
