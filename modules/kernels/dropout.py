"""Dropout with cheap random numbers on CPUs, where PyTorch generates one float after the other."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.kernels.derivatives import is_backward_only

LEVELS = 2**16  # a random number is one of so many, all equally likely


def random_int16(shape: torch.Size) -> Tensor:
    """Random int16 numbers on the CPU: each random int64 gives four."""
    count = shape.numel()
    wide = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    return wide.view(torch.int16)[:count].view(shape)  # (4 x count,) -> shape


class MaskedScale(torch.autograd.Function):
    """Drops values whose random number is below `threshold`, scales the rest. Keeps the shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, threshold: int) -> Tensor:
        """Any shape on the CPU, random numbers of that shape -> the same shape.

        Keeps the random numbers for the backward pass, half the size of a float mask.
        """
        ctx.threshold = threshold
        ctx.save_for_backward(numbers)
        kept = torch.ge(numbers, threshold, out=torch.empty_like(x))  # as floats: one pass, not two
        return kept.mul_(LEVELS / (LEVELS // 2 - threshold)).mul_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The same for the gradient."""
        return MaskedScale.apply(grads[0], ctx.saved_tensors[0], ctx.threshold), None, None


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """`F.dropout`, faster on CPUs. Keeps the shape.

    On CPUs, `p` is rounded to a multiple of 1 / 65536, at least 1 and at most 65535 of them.

    Args:
        x: Any shape.
        p: Probability of dropping a value, below 1.
        training: Whether anything is dropped at all.
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not is_backward_only():
        return F.dropout(x, p)
    dropped = min(max(round(p * LEVELS), 1), LEVELS - 1)
    return MaskedScale.apply(x, random_int16(x.shape), dropped - LEVELS // 2)


class Dropout(nn.Dropout):
    """`nn.Dropout` by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape."""
        return dropout(x, self.p, self.training)
