"""Losses that never hold more than they must.

`torch.nn.functional.linear_cross_entropy` (torch 2.15) is not used: it saves as much memory, but takes more than twice
the time on CPUs, and it tells neither how many guesses are right nor the softmax's denominator, for the z-loss.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.kernels.linear import linear

IGNORED = -100  # the target that does not count, as in `F.cross_entropy`
CHUNK = 2**23  # logits at a time


class Guess(NamedTuple):
    """What to guess, (S,), and how: vectors at a time, label smoothing, weight of the z-loss, whether to learn."""

    targets: Tensor
    rows: int
    smoothing: float
    z_loss: float
    learning: bool


class ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy of x W^T + b, its gradients made chunk by chunk beside the loss: logits are never kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, guess: Guess
    ) -> tuple[Tensor, Tensor]:
        """(S, E), (V, E), (V,), (S,) -> mean loss and number of right guesses."""
        targets, rows, smoothing, z_loss, learning = guess
        counted, exact = targets != IGNORED, torch.promote_types(x.dtype, torch.float32)
        share = counted.sum().clamp(min=1).to(exact).reciprocal()
        loss, right = x.new_zeros((), dtype=exact), targets.new_zeros(())
        needed = [learning and wanted for wanted in ctx.needs_input_grad[:3]]
        for_x = torch.empty_like(x) if needed[0] else None
        for_weight = torch.zeros_like(weight, dtype=exact) if needed[1] else None
        for_bias = weight.new_zeros(len(weight), dtype=exact) if needed[2] else None
        step = max(1, CHUNK // 4 // x.shape[1])
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            valid, target = counted[part], targets[part].clamp(min=0)[:, None]  # (S',), (S', 1)
            logits = linear(x[part], weight, bias)  # (S', V)
            own = logits.gather(1, target) if z_loss else None  # (S', 1)
            logs = logits.log_softmax(1, dtype=exact)
            del logits
            right += ((logs.argmax(1) == target[:, 0]) & valid).sum()
            missed = (smoothing - 1) * logs.gather(1, target)[:, 0]  # (S',)
            if smoothing:
                missed -= smoothing * logs.mean(1)
            if own is not None:
                size = (
                    own[:, 0] - logs.gather(1, target)[:, 0]
                )  # log of the sum of all exponentials: (S',)
                missed += z_loss * size.square()
            loss += missed.masked_fill(~valid, 0.0).sum()
            if not any(needed):
                continue
            grad = logs.exp_()  # softmax, less the targets: (S', V)
            if own is not None:
                grad *= (1 + 2 * z_loss * size)[:, None]
            if smoothing:
                grad -= smoothing / len(weight)
            grad.scatter_add_(1, target, grad.new_full((), smoothing - 1).expand_as(target))
            grad = grad.mul_((share * valid)[:, None]).to(x.dtype)
            if for_x is not None:
                for_x[part] = linear(grad, weight.T)
            if for_weight is not None:
                for place in range(0, len(weight), step):  # in parts: no second table is held
                    some = slice(place, place + step)
                    for_weight[some] += linear(grad.T[some], x[part].T)  # (V', E)
            if for_bias is not None:
                for_bias += grad.sum(0)
        ctx.save_for_backward(for_x, for_weight, for_bias)
        ctx.mark_non_differentiable(right)
        return loss * share, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the gradients that the forward pass has made."""
        return *(None if made is None else made * grads[0] for made in ctx.saved_tensors), None


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float = 0.0,
    rows: int | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`F.cross_entropy(x W^T + b, targets)` in the memory of one chunk of logits, and the number of right guesses.

    Args:
        x: Vectors (S, E).
        weight: Table (V, E).
        bias: (V,) or None.
        targets: Right rows of the table (S,), or -100 where there is nothing to guess. All such or none at all: loss 0.
        smoothing: Share of the target spread evenly over the table (Szegedy 2016).
        rows: Vectors at a time; None: as many as make 2^23 logits.
        z_loss: Weight of the mean of log(sum of exp(logits))^2, which is added to the loss (Chowdhery 2022).

    Returns:
        Mean loss, in float32 or float64, and how many targets have the largest score; both have no axes.
    """
    rows = rows or max(1, CHUNK // len(weight))
    return ChunkedCrossEntropy.apply(
        x, weight, bias, Guess(targets, rows, smoothing, z_loss, torch.is_grad_enabled())
    )
