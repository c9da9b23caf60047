"""R-Drop (Liang 2021): two passes with dropout learn to agree."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.kernels.cross_entropy import smoothed_losses
from modules.kernels.linear import linear
from modules.lm_heads import TokenHead

TOKENS_PER_CHUNK = 256  # whose log probabilities are held at a time


def check_r_drop(weight: float) -> None:
    """Raises `ValueError` for a weight below 0."""
    if weight < 0:
        raise ValueError(f"r_drop {weight} must not be negative")


def class_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Mean of both KL divergences of log probabilities (S, K), over the samples, ()."""
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean() / 2


def r_drop_loss(loss1: Tensor, loss2: Tensor, divergence: Tensor, weight: float) -> Tensor:
    """Loss () of a batch from the losses () of its two passes and their divergence ().

    Half of the paper's equation 4, so that it is the usual loss where both passes agree.
    """
    return (loss1 + loss2) / 2 + weight * divergence / 2


def token_r_drop_loss(
    head: TokenHead, hidden: tuple[Tensor, Tensor], targets: Tensor, smoothing: float, weight: float
) -> Tensor:
    """`r_drop_loss` of S tokens (), without holding the log probabilities of all.

    Args:
        head: Maps hidden states to the logits of V tokens.
        hidden: Of both passes, (S, E) each.
        targets: Token ids (S,).
        smoothing: Label smoothing.
        weight: Of the divergence.
    """

    def chunk_loss(rows: slice, hidden1: Tensor, hidden2: Tensor, *head: Tensor) -> Tensor:
        """The share of C tokens, (C, E) twice, in the loss, ()."""
        log_p = linear(hidden1, *head).log_softmax(-1, torch.float32)  # (C, V)
        log_q = linear(hidden2, *head).log_softmax(-1, torch.float32)
        loss1 = smoothed_losses(log_p, targets[rows], smoothing).mean()
        loss2 = smoothed_losses(log_q, targets[rows], smoothing).mean()
        loss = r_drop_loss(loss1, loss2, class_divergence(log_p, log_q), weight)
        return loss * (len(log_p) / len(targets))

    table = [head.weight] if head.bias is None else [head.weight, head.bias]
    return ChunkedLoss.apply(chunk_loss, *hidden, *table)


class ChunkedLoss(torch.autograd.Function):
    """Sum of the losses of chunks of rows; their gradients are computed with them, one by one."""

    @staticmethod
    def forward(
        ctx: Any, loss: Callable[..., Tensor], hidden1: Tensor, hidden2: Tensor, *head: Tensor
    ) -> Tensor:
        """(S, E) twice, and the parameters of the head -> ()."""
        grads = [torch.zeros_like(one) for one in (hidden1, hidden2, *head)]
        total = hidden1.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden1), TOKENS_PER_CHUNK):
            rows = slice(start, start + TOKENS_PER_CHUNK)
            views = [grads[0][rows], grads[1][rows], *grads[2:]]
            with torch.enable_grad():
                inputs = (hidden1[rows], hidden2[rows], *head)
                leaves = [one.detach().requires_grad_() for one in inputs]
                part = loss(rows, *leaves)
            for grad, found in zip(views, torch.autograd.grad(part, leaves), strict=True):
                grad += found
            total += part.detach()
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """() -> the gradients of the hidden states and of the head."""
        return None, *(grad * one for one in ctx.saved_tensors)
