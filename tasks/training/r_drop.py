"""R-Drop (Liang 2021): two passes with dropout learn to agree."""

from torch import Tensor


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
