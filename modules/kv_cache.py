"""The cache of generation: keys, values and inputs of convolutions, each computed once."""

import torch
from torch import Tensor

from modules.attention import AttentionCache
from modules.cache import BlockCache, StackCache, TokenPositions, positions_without_padding
from modules.config import StackConfig, require
from modules.convolution import ConvCache
from modules.masks import none_if_no_padding


class KVCache(StackCache):
    """Keys, values and positions of the tokens of all blocks, allocated once and filled in place.

    For inference: no gradient flows through it. The context of cross-attention is projected once
    and kept.

    Args:
        config: Of the stack of blocks.
        batch: Number B of rows.
        max_length: Number of tokens that there is room for in each row.
        device: Of the tensors.
        dtype: Of keys and values.
    """

    def __init__(
        self,
        config: StackConfig,
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = config
        self.max_length = max_length
        sizes = config.resolved
        shape = (config.depth, batch, sizes.kv_heads, max_length)
        self.keys = torch.empty(*shape, sizes.head_dim, device=device, dtype=dtype)
        self.values = torch.empty(*shape, sizes.value_dim, device=device, dtype=dtype)
        earlier = (config.conv_kernel or 1) - 1
        conv_shape = (config.depth, 2, batch, earlier, config.width)
        self.conv_inputs = torch.empty(conv_shape, device=device, dtype=dtype)
        self.positions = torch.empty(batch, max_length, 1, device=device, dtype=torch.int64)
        self.padding_mask = torch.empty(batch, max_length, device=device, dtype=torch.bool)
        self.contexts = [ContextCache() for _ in range(config.depth)]
        self.clear()

    @classmethod
    def like(cls, tensor: Tensor, config: StackConfig, batch: int, max_length: int) -> "KVCache":
        """A cache on the device of `tensor`, of its dtype or autocast's."""
        kind = tensor.device.type
        is_cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_cast else tensor.dtype
        return cls(config, batch, max_length, tensor.device, dtype)

    def clear(self) -> None:
        """Removes all tokens, but keeps the context."""
        self.past = 0
        self.length = 0
        self.has_padding = False
        self.per_row_positions = False  # False: those of row 0 stand for all
        device = self.positions.device
        self.positions[:] = torch.arange(self.max_length, device=device)[:, None]  # (max_length, 1)
        self.padding_mask.fill_(True)
        self.conv_inputs.zero_()

    def block(self, index: int) -> BlockCache:
        """The part of block `index`."""
        convs = [LastTokens(self.conv_inputs[index, i]) for i in range(2)]
        layer = KVLayerCache(self, self.keys[index], self.values[index])
        return BlockCache(layer, self.contexts[index], *convs)

    def add_tokens(
        self, tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None
    ) -> TokenPositions:
        """Makes room for new tokens after the others; `ValueError` if there is not enough."""
        rows, count = tokens.shape
        require(
            self.length + count <= self.max_length and rows == len(self.padding_mask),
            f"{count} tokens in {rows} rows do not fit into a cache of {len(self.padding_mask)} "
            f"rows by {self.max_length} tokens of which {self.length} are taken; make a larger "
            "one, or shorten the sequence.",
        )
        self.past = self.length
        self.length += count
        padding_mask = none_if_no_padding(padding_mask)
        if padding_mask is not None or positions is not None:
            self._set_positions(padding_mask, positions)
        seen = self.positions[:, : self.length]
        if not self.per_row_positions:
            seen = seen[:1]  # (1, M, 1)
        return TokenPositions(
            new=seen[:, self.past :],
            all=seen,
            padding_mask=self.padding_mask[:, : self.length] if self.has_padding else None,
            in_order=self.past == 0 and not self.per_row_positions,
        )

    def _set_positions(self, padding_mask: Tensor | None, positions: Tensor | None) -> None:
        """Keeps padding and positions of the new tokens; later ones count on from there."""
        self.per_row_positions = True
        if padding_mask is not None:
            self.has_padding = True
            self.padding_mask[:, self.past : self.length] = padding_mask
        start = self.positions[:, self.past]  # (B, 1)
        if positions is not None:
            end = positions[:, -1:] + 1  # (B, 1)
        else:
            assert padding_mask is not None
            end = start + padding_mask.sum(1, keepdim=True)  # (B, 1)
            positions = start + positions_without_padding(padding_mask)  # (B, N)
        later = torch.arange(self.max_length - self.length, device=start.device)
        self.positions[:, self.length :, 0] = end + later  # (B, max_length - length)
        self.positions[:, self.past : self.length, 0] = positions

    def select(self, rows: Tensor) -> "KVCache":
        """A new cache of the rows at the indices `rows`, (R,), which may repeat."""
        keys = self.keys
        other = KVCache(self.config, len(rows), self.max_length, keys.device, keys.dtype)
        other.length = self.length
        other.per_row_positions = self.per_row_positions
        other.has_padding = self.has_padding
        for old, new in ((self.keys, other.keys), (self.values, other.values)):
            new[..., : self.length, :] = old[..., : self.length, :].index_select(1, rows)
        other.conv_inputs = self.conv_inputs.index_select(2, rows)
        other.positions = self.positions[rows]
        other.padding_mask = self.padding_mask[rows]
        other.contexts = [context.select(rows) for context in self.contexts]
        return other


class KVLayerCache(AttentionCache):
    """One layer's part of a cache: keys (B, G, max_length, D), values (B, G, max_length, V)."""

    def __init__(self, cache: KVCache, keys: Tensor, values: Tensor) -> None:
        self.cache = cache
        self.keys = keys
        self.values = values

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys (B, G, N, D), values (B, G, N, V) -> views of those of all M tokens."""
        length = self.cache.length
        self.keys[:, :, self.cache.past : length] = k.detach()
        self.values[:, :, self.cache.past : length] = v.detach()
        return self.keys[:, :, :length], self.values[:, :, :length]


class LastTokens(ConvCache):
    """The last inputs of one convolution, (B, K, E), overwritten by the next ones."""

    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    def update(self, x: Tensor, count: int) -> Tensor:
        """New tokens (B, N, E) -> the K before them, then the new ones, (B, K + N, E)."""
        joined = torch.cat((self.inputs, x), 1)  # (B, K + N, E)
        self.inputs.copy_(joined[:, x.shape[1] :].detach())
        return joined


class ContextCache(AttentionCache):
    """Keys (B, G, M, D) and values (B, G, M, V) of the context of one layer's cross-attention.

    `pair` is None before they are projected.
    """

    def __init__(self, pair: tuple[Tensor, Tensor] | None = None) -> None:
        self.pair = pair

    def cached_context(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values; None: not projected yet."""
        return self.pair

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps keys (B, G, M, D) and values (B, G, M, V), contiguous."""
        self.pair = (k.contiguous(), v.contiguous())
        return self.pair

    def select(self, rows: Tensor) -> "ContextCache":
        """Those of the rows at the indices `rows`, (R,)."""
        if self.pair is None:
            return ContextCache()
        k, v = self.pair
        return ContextCache((k[rows], v[rows]))
