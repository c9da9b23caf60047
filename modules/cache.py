"""Interface of the caches of a stack of blocks; the classes here keep nothing.

`modules/kv_cache.py` keeps the keys and values of earlier tokens, `modules/record.py` attention
weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from modules.attention import NO_ATTENTION_CACHE, AttentionCache
from modules.convolution import NO_CONV_CACHE, ConvCache
from modules.masks import Mask, causal, none_if_no_padding, padding


class BlockCache(NamedTuple):
    """Caches of one block."""

    self_attn: AttentionCache = NO_ATTENTION_CACHE
    cross_attn: AttentionCache = NO_ATTENTION_CACHE
    conv1: ConvCache = NO_CONV_CACHE
    conv2: ConvCache = NO_CONV_CACHE


class TokenPositions(NamedTuple):
    """Where tokens are: positions of new ones, (B or 1, N, 1), and of all, kept and
    new, (B or 1, M, 1).

    `padding_mask` is that of all, boolean (B, M), False at padding; None: there is none.
    `in_order`: the new tokens are at 0, 1, ... in every row.
    """

    new: Tensor
    all: Tensor
    padding_mask: Tensor | None
    in_order: bool

    def mask(self, padding_mask: Tensor | None) -> Mask:
        """Mask of the padding of all tokens; `padding_mask` is that of the new ones."""
        if self.padding_mask is None or padding_mask is not None:
            return padding(self.padding_mask)
        return Mask(self.padding_mask[:, None, None])  # (B, 1, 1, M); no new token is padding


class StackCache:
    """Cache of a stack of blocks; the base class keeps nothing."""

    length = 0  # number of tokens that are kept, those of the last `add_tokens` too
    past = 0  # number of those before the last `add_tokens`

    def block(self, index: int) -> BlockCache:
        """The part of block `index`."""
        return NO_BLOCK_CACHE

    def add_tokens(
        self, tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None
    ) -> TokenPositions:
        """Positions of new tokens; a cache that keeps something makes room for them.

        Args:
            tokens: (B, N); only shape and device matter.
            padding_mask: Boolean (B, N), False at padding; None: there is none.
            positions: Integers (B, N); None: they continue those of the kept tokens; padding
                is not counted.
        """
        padding_mask = none_if_no_padding(padding_mask)
        in_order = padding_mask is None and positions is None
        if positions is None:
            if padding_mask is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)[None]  # (1, N)
            else:
                positions = positions_without_padding(padding_mask)
        positions = positions[..., None]  # (B or 1, N, 1)
        return TokenPositions(positions, positions, padding_mask, in_order)

    def causal_mask(self, count: int, device: torch.device) -> Mask:
        """Causal mask of the last `count` tokens that were added, after the `past` earlier ones."""
        return causal(count, self.past + count, device)


NO_BLOCK_CACHE = BlockCache()
NO_CACHE = StackCache()


def positions_without_padding(padding_mask: Tensor) -> Tensor:
    """Positions from 0 that skip padding: boolean (B, N) -> integers (B, N)."""
    return (padding_mask.long().cumsum(1) - 1).clamp(min=0)
