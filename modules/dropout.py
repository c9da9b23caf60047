"""Dropout with cheap random numbers on CPUs: PyTorch's own draws there one number at a time, and keeps a float mask."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 2**16  # a draw is one of so many numbers, all as likely


def draws(shape: torch.Size) -> Tensor:
    """Random int16 numbers on the CPU, all as likely: each random int64 gives four."""
    count = shape.numel()
    wide = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    return wide.view(torch.int16)[:count].view(shape)  # (4 x draws,) -> shape


class CheapDropout(torch.autograd.Function):
    """x * keep / share kept, for x on the CPU; keeps a boolean mask for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Any shape -> the same."""
        dropped = min(max(round(p * LEVELS), 1), LEVELS - 1)
        keep = draws(x.shape) >= dropped - LEVELS // 2
        ctx.save_for_backward(keep)
        ctx.scale = LEVELS / (LEVELS - dropped)  # of the share that is really kept
        return masked(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The same mask and scale for the gradient."""
        return masked(grads[0], ctx.saved_tensors[0], ctx.scale), None


def masked(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """x * keep * scale."""
    return torch.ops.aten.native_dropout_backward(x, keep, scale)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """`F.dropout`, faster on CPUs; `p` is rounded to 1 / 65536 there. Keeps the shape.

    Args:
        x: Any shape.
        p: Probability of dropping a value, below 1.
        training: Whether anything is dropped at all.
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, p)
    return CheapDropout.apply(x, p)


class Dropout(nn.Dropout):
    """`nn.Dropout` by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        return dropout(x, self.p, self.training)
