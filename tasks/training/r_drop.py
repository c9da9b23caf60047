"""R-Drop (Liang 2021): two passes with dropout learn to agree."""

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
    return TokenRDrop.apply(*hidden, head.weight, head.bias, targets, smoothing, weight)


class TokenRDrop(torch.autograd.Function):
    """`token_r_drop_loss`; computes the gradients with the loss, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden1: Tensor,
        hidden2: Tensor,
        table: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        weight: float,
    ) -> Tensor:
        """(S, E) twice, (V, E), (V,) or None, (S,) -> ()."""
        inputs = [one for one in (hidden1, hidden2, table, bias) if one is not None]
        grads = [torch.zeros_like(one) for one in inputs]
        total = table.new_zeros(())
        for start in range(0, len(targets), TOKENS_PER_CHUNK):
            rows = slice(start, start + TOKENS_PER_CHUNK)
            views = [grads[0][rows], grads[1][rows], *grads[2:]]
            with torch.enable_grad():
                leaves = [hidden1[rows], hidden2[rows], *inputs[2:]]
                leaves = [one.detach().requires_grad_() for one in leaves]
                log_p, log_q = (
                    linear(one, *leaves[2:]).log_softmax(-1, torch.float32) for one in leaves[:2]
                )  # (C, V) each
                loss1 = smoothed_losses(log_p, targets[rows], smoothing).mean()
                loss2 = smoothed_losses(log_q, targets[rows], smoothing).mean()
                loss = r_drop_loss(loss1, loss2, class_divergence(log_p, log_q), weight)
                loss = loss * (len(log_p) / len(targets))
            for grad, found in zip(views, torch.autograd.grad(loss, leaves), strict=True):
                grad += found
            total += loss.detach()
        ctx.save_for_backward(*grads)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """() -> the gradients of the hidden states, the table and the bias."""
        found = [grad * one for one in ctx.saved_tensors]
        return (*found, *[None] * (7 - len(found)))
