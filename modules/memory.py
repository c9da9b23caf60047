"""What attention hands its tensors to: hooks that do nothing by default, as in `Position`.

A record keeps weights, a cache adds the keys and values of earlier tokens (modules/kv_cache.py,
modules/generation/beam_cache.py).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from modules.masks import Mask, causal, is_full, padding


class Memory:
    """Keeps nothing: the base of what one attention layer hands its tensors to."""

    wants_weights = False  # whether attention has to build its weights
    texts = 1  # that share each row of the source

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a source, (B, G, M, D) each, if it was projected before; None: it was not."""
        return None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values, (B, G, N, D) each -> all that are attended to, (B, G, M, D) each."""
        return keys, values

    def mix(self, q: Tensor, mask: Mask) -> Tensor | None:
        """Attention of queries, (B, H, N, D) -> (B, H, N, D), where it has a faster way; None: it has none."""

    def watch(self, weights: Tensor) -> None:
        """Takes attention weights, (B, H, N, M), before dropout."""


class BlockMemory(NamedTuple):
    """What one block hands its tensors to."""

    own: Memory = Memory()
    cross: Memory = Memory()


class Places(NamedTuple):
    """Where tokens stand: coordinates (B or 1, N, 1) of the new ones, (B or 1, M, 1) of all that they may attend to.

    `keep` tells which of those are no padding, (B, M); None: all. `in_order`: new ones are at 0, 1, ... everywhere.
    """

    new: Tensor
    all: Tensor
    keep: Tensor | None
    in_order: bool

    def mask(self, keep: Tensor | None) -> Mask:
        """Nobody sees padding; `keep` is that of the new tokens, as `StackMemory.place` took it."""
        if self.keep is None:
            return Mask()
        if keep is None:  # the new tokens see themselves, so there is none that sees nothing
            return Mask(self.keep[:, None, None])  # (B, 1, 1, M)
        return padding(self.keep)


class StackMemory:
    """Keeps nothing: the base of what a stack of blocks hands its tensors to."""

    filled = 0  # number of tokens that are kept
    past = 0  # number of them before the new ones
    nothing = BlockMemory()

    def block(self, index: int) -> BlockMemory:
        """The part of block `index`."""
        return self.nothing

    def place(self, tokens: Tensor, keep: Tensor | None, coords: Tensor | None) -> Places:
        """Where new tokens stand.

        Args:
            tokens: (B, N).
            keep: Boolean (B, N), False at padding; None: there is none.
            coords: Integers (B, N); None: they go on counting, leaving out padding.
        """
        keep = None if keep is None or is_full(keep) else keep
        in_order = keep is None and coords is None
        if coords is None and keep is not None:
            coords = count(keep)
        elif coords is None:
            coords = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, N)
        return Places(coords[..., None], coords[..., None], keep, in_order)  # (B or 1, N, 1)

    def order(self, count: int, device: torch.device) -> Mask:
        """Which of the earlier and the `count` new tokens come before each new one."""
        return causal(count, self.past + count, device)


def count(keep: Tensor) -> Tensor:
    """Numbers tokens that are no padding: boolean (B, N) -> integers (B, N), 0 for padding before the first."""
    return (keep.long().cumsum(1) - 1).clamp(min=0)


class WeightList(Memory):
    """Appends attention weights to a list.

    Args:
        weights: The list.
    """

    wants_weights = True

    def __init__(self, weights: list[Tensor]) -> None:
        self.weights = weights

    def watch(self, weights: Tensor) -> None:
        """Takes attention weights, (B, H, N, M), before dropout."""
        self.weights.append(weights)


@dataclass(frozen=True)
class AttentionRecord(StackMemory):
    """Collects attention weights, one (B, H, N, M) tensor per block."""

    own: list[Tensor] = field(default_factory=list)
    cross: list[Tensor] = field(default_factory=list)

    def block(self, index: int) -> BlockMemory:
        """The part of block `index`."""
        return BlockMemory(WeightList(self.own), WeightList(self.cross))
