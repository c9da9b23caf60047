"""Weighted sums with earlier tokens, with fewer passes over memory than PyTorch's autograd."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.kernels.derivatives import is_backward_only


def earlier(x: Tensor, k: int, count: int, visible: Tensor | None) -> Tensor:
    """The k-th tokens before the last N of (B, count + N, E), 0 if not visible: (B, N, E)."""
    tokens = x[:, count - k : x.shape[1] - k]  # (B, N, E)
    return tokens if visible is None else tokens * visible[k - 1]


class AddEarlier(torch.autograd.Function):
    """`add_earlier` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, visible: Tensor | None) -> Tensor:
        """(B, K + N, E), (K, E) -> (B, N, E). Keeps the inputs for the backward pass."""
        ctx.save_for_backward(x, weight, visible)
        count = len(weight)
        dtype = torch.promote_types(x.dtype, weight.dtype)
        result = x[:, count:].to(dtype, copy=True)  # (B, N, E)
        for k, row in enumerate(weight, 1):
            result.addcmul_(earlier(x, k, count, visible), row)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """(B, N, E) -> gradients with respect to x and weight."""
        x, weight, visible = ctx.saved_tensors
        count = len(weight)
        grad = grads[0]
        x_grad = F.pad(grad, (0, 0, count, 0))  # (B, K + N, E)
        rows = []
        for k, row in enumerate(weight, 1):
            part = grad if visible is None else grad * visible[k - 1]  # (B, N, E)
            x_grad[:, count - k : x.shape[1] - k].addcmul_(part, row)
            rows.append((part * earlier(x, k, count, None)).sum((0, 1)))  # (E,)
        return x_grad.to(x.dtype), torch.stack(rows).to(weight.dtype), None  # (K, E)


def add_earlier(x: Tensor, weight: Tensor, visible: Tensor | None = None) -> Tensor:
    """x_t + sum_k w_k x_{t-k} for k = 1 ... K, with a weight per channel.

    Args:
        x: K earlier tokens, then N new ones, (B, K + N, E).
        weight: (K, E).
        visible: Whether the token k places before counts, boolean (K, B, N, 1); None: all do.

    Returns:
        The new tokens, (B, N, E), in the wider dtype of the two.
    """
    if is_backward_only():
        return AddEarlier.apply(x, weight, visible)
    count = len(weight)
    parts = [earlier(x, k, count, visible) * row for k, row in enumerate(weight, 1)]  # (B, N, E)
    return sum(parts, x[:, count:])
