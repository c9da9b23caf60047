"""Measures of attention weights and other activations, without units unless stated.

Weights are (..., N, M): from N queries to M keys, with rows that sum to 1, or to less where windows
are padded.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.activations import stacks
from modules.position import grid_positions


def entropy(weights: Tensor) -> Tensor:
    """-sum(w log w) of each query's weights, in nats: (..., N, M) -> (..., N).

    0: all attention is on one key; log M: on all alike. Rows are first divided by their sums, which
    are below 1 where windows are padded.
    """
    return torch.special.entr(with_sums_of_1(weights)).sum(-1)


def with_sums_of_1(weights: Tensor) -> Tensor:
    """Rows divided by their sums, in float32: (..., N, M) -> (..., N, M); rows of zeros stay."""
    weights = weights.float()
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12)


def grid_distances(positions: Tensor) -> Tensor:
    """Euclidean distances of positions (N, A), one or two axes: (N, N)."""
    offsets = (positions[:, None] - positions[None]).float()  # (N, N, A)
    return offsets.norm(dim=-1)


def mean_distance(weights: Tensor, distances: Tensor) -> Tensor:
    """Mean of sum(w d) over the queries (Dosovitskiy 2021, figure 7): (..., N, M) -> (...).

    Args:
        weights: (..., N, M).
        distances: (N, M), such as `grid_distances`.
    """
    return (weights.float() * distances).sum(-1).mean(-1)


def token_distance(weights: Tensor) -> Tensor:
    """Mean distance of self-attention in tokens: (..., N, N) -> (...)."""
    positions = torch.arange(weights.shape[-1], device=weights.device)[:, None]  # (N, 1)
    return mean_distance(weights, grid_distances(positions))


def patch_distance(weights: Tensor, grid: tuple[int, int], patch_size: int) -> Tensor:
    """Mean distance of self-attention in pixels, between the centres of patches.

    Args:
        weights: (..., N, N), of class and register tokens, which are left out, then of P patches.
        grid: Rows and columns of the patches.
        patch_size: Height and width of a patch, in pixels.

    Returns:
        (...).
    """
    positions = grid_positions(grid, weights.device)[0]  # (P, 2)
    patches = weights[..., -len(positions) :, -len(positions) :]  # (..., P, P)
    return mean_distance(with_sums_of_1(patches), grid_distances(positions) * patch_size)


def rollout(layers: Sequence[Tensor]) -> Tensor:
    """Attention to the input over all layers: the product of (W + I) / 2 (Abnar & Zuidema 2020).

    Args:
        layers: Weights of each layer's self-attention, (B, H, N, N), whose heads are averaged after
            rows are divided by their sums.

    Returns:
        (B, N, N), rows sum to 1.
    """
    size = layers[0].shape[-1]
    identity = torch.eye(size, device=layers[0].device)  # (N, N)
    total = identity
    with torch.autocast(identity.device.type, enabled=False):  # which would multiply in 16 bits
        for weights in layers:
            heads_mean = with_sums_of_1(weights).mean(1)  # (B, H, N, N) -> (B, N, N)
            total = (heads_mean + identity) / 2 @ total  # (B, N, N)
    return total


def previous_token_score(weights: Tensor) -> Tensor:
    """Mean weight from a token to the one before it (Olsson 2022): (..., N, N) -> (...)."""
    return weights.float().diagonal(-1, -2, -1).mean(-1)


def induction_score(weights: Tensor, period: int) -> Tensor:
    """Mean weight to the token after the earlier copy of the same one (Olsson 2022).

    Args:
        weights: (..., N, N) for a sequence that repeats itself after `period` tokens.
        period: Tokens of the repeated part.

    Returns:
        (...): the mean of w[i, i - period + 1] over i >= period.
    """
    diagonal = weights.float().diagonal(1 - period, -2, -1)  # (..., N - period + 1)
    return diagonal[..., 1:].mean(-1)  # its first query is the last of the first copy


def repeated_tokens(vocabulary: int, period: int, copies: int = 2, seed: int = 0) -> Tensor:
    """Random tokens (period,) that repeat: (1, copies x period), for `induction_score`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (1, period), generator=generator)
    return tokens.repeat(1, copies)


@torch.no_grad()
def logit_lens(net: torch.nn.Module, hidden: Tensor, prefix: str = "") -> Tensor:
    """Logits as if the network ended after a block: the last norm, then the head
    (nostalgebraist 2020).

    Args:
        net: The network, with a head that reads the stack's vectors.
        hidden: (..., E), after some block.
        prefix: Of the stack, as in `modules.activations`.

    Returns:
        (..., V).
    """
    hidden = stacks(net)[prefix].norm(hidden)  # (..., E)
    if hasattr(net, "project_out"):  # to the width of the embedding
        hidden = net.project_out(hidden)  # type: ignore[operator]
    return net.head(hidden)  # type: ignore[operator]


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy of each token, in nats: (N, V), (N,) -> (N,)."""
    return F.cross_entropy(logits.float(), tokens, reduction="none")


def cosine_similarity(vectors: Tensor) -> Tensor:
    """Cosine of the angle between each pair of vectors: (N, E) -> (N, N)."""
    unit = F.normalize(vectors.float(), dim=-1)
    return unit @ unit.T


def nearest(table: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For some vectors of a table, the others with the largest cosine to each.

    Args:
        table: (V, E).
        rows: Integers (S,).
        count: Number K of neighbours, at most V - 1.

    Returns:
        Cosines and rows, (S, K) each, nearest first.
    """
    unit = F.normalize(table.float(), dim=-1)
    cosines = unit[rows] @ unit.T  # (S, V)
    cosines.scatter_(1, rows[:, None], -torch.inf)
    found = cosines.topk(count)
    return found.values, found.indices
