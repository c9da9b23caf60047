"""The cache of beam search: tokens that sequences share are kept once.

Keys and values are not copied when beams are reordered. They are in tables, where a slot holds
those of one token, and each sequence has a list of the slots of its tokens. On CPUs, scores and
results of attention are weighted sums of table rows by `torch.embedding_bag`, which is faster than
batched matrix products with one query each.
"""

from copy import copy
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.attention import ATTENTIONS, AttentionCache, ScoreFunction, attention
from modules.cache import BlockCache, StackCache, TokenPositions
from modules.config import StackConfig, require
from modules.kernels.upcast import upcast
from modules.kv_cache import ContextCache, KVCache, LastTokens
from modules.masks import Mask

SLOT_STEP = 64  # slots by which tables of keys grow; a multiple of what a vector register holds


class BeamCache(StackCache):
    """K = `beams` sequences that continue each of the B rows of a cache: B x K rows for the model.

    There is room for `max_new_tokens` tokens in each sequence.
    """

    def __init__(self, cache: KVCache, beams: int, max_new_tokens: int) -> None:
        batch = len(cache.padding_mask)
        device = cache.padding_mask.device
        self.config = cache.config
        self.beams = beams
        self.past = cache.length
        self.length = cache.length  # tokens of each sequence
        self.max_length = self.length + max_new_tokens
        self.used_slots = self.length
        self.slot_count = self.length + beams * max_new_tokens
        self.slots = torch.arange(self.length, device=device).expand(batch, beams, -1)  # (B, K, M)
        self.use_embedding_bag = prefers_embedding_bag(device, self.config)
        self.index = self.make_index(self.make_key_bags())
        positions = cache.positions[:, : self.length]
        if not cache.per_row_positions:
            positions = positions[:1]
        steps = torch.arange(1, max_new_tokens + 1, device=device)[:, None]
        later = positions[:, -1:] + steps
        self.positions = torch.cat((positions, later), 1)  # (B or 1, max_length, 1)
        self.padding_mask = None
        if cache.has_padding:
            self.padding_mask = F.pad(
                cache.padding_mask[:, : self.length], (0, max_new_tokens), value=True
            )
        keys = cache.keys[..., : self.length, :]  # (depth, B, G, M, D)
        values = cache.values[..., : self.length, :].transpose(2, 3)  # (depth, B, M, G, V)
        if self.use_embedding_bag:
            self.keys = list(keys.mT)  # (B, G, D, M) of each layer
        else:
            self.keys = [grow_table(layer, 1, self.slot_count) for layer in keys.transpose(2, 3)]
        self.values = [
            grow_table(layer, 1, self.slot_count) for layer in values
        ]  # (B, slots, G, V)
        self.contexts = [self.share(context) for context in cache.contexts]
        self.conv_inputs = cache.conv_inputs.repeat_interleave(beams, 2)  # (depth, 2, B * K, ...)

    def make_index(self, key_bags: "EmbeddingBag | None") -> "TableIndex":
        """The index of all tokens."""
        return TableIndex(self.slots, self.slot_count, self.config, key_bags)

    def make_key_bags(self) -> "EmbeddingBag | None":
        """The bags of the batch's rows; None without `embedding_bag`."""
        if not self.use_embedding_bag:
            return None
        return make_key_bags(len(self.slots), self.beams, self.config, self.slots.device)

    def block(self, index: int) -> BlockCache:
        """The part of block `index`."""
        layer_cache = EmbeddingBagLayerCache if self.use_embedding_bag else GatheredLayerCache
        convs = [LastTokens(self.conv_inputs[index, i]) for i in range(2)]
        return BlockCache(layer_cache(self, index), self.contexts[index], *convs)

    def add_tokens(
        self, tokens: Tensor, padding_mask: Tensor | None, positions: Tensor | None
    ) -> TokenPositions:
        """Makes room for the next tokens, (B * K, 1); `ValueError` if there is none.

        Padding and positions are not supported.
        """
        batch, beams = self.slots.shape[:2]
        assert padding_mask is None and positions is None
        require(
            tokens.shape == (batch * beams, 1) and self.length < self.max_length,
            f"{tokens.shape[1]} tokens in {len(tokens)} rows do not fit: {batch} x {beams} "
            f"sequences take one at a time, and have {self.length} of at most {self.max_length}; "
            "make more room, or shorten the sequence.",
        )
        new = torch.arange(self.used_slots, self.used_slots + beams, device=tokens.device)[:, None]
        self.slots = torch.cat((self.slots, new.expand(batch, -1, 1)), 2)  # (B, K, M)
        self.past = self.length
        self.length += 1
        self.used_slots += beams
        self.index = self.make_index(self.index.key_bags)
        seen = self.positions[:, : self.length]
        if len(seen) > 1:
            seen = seen.repeat_interleave(beams, 0)  # (B * K, M, 1)
        mask = None
        if self.padding_mask is not None:
            mask = self.padding_mask[:, : self.length].repeat_interleave(beams, 0)  # (B * K, M)
        return TokenPositions(seen[:, self.past :], seen, mask, in_order=False)

    def share(self, context: ContextCache) -> ContextCache:
        """The cache of a context that K sequences attend to."""
        pair = context.cached_context()
        if pair is None:
            return context
        if self.use_embedding_bag:
            assert self.index.key_bags is not None
            return EmbeddingBagContextCache(pair, self.beams, self.config, self.index.key_bags)
        return SharedContextCache(pair, self.beams)

    def reorder(self, beams: Tensor) -> None:
        """Each sequence continues that of its row with the index in `beams`, (B, K)."""
        self.slots = self.slots.gather(1, beams[..., None].expand_as(self.slots))
        first = torch.arange(len(beams), device=beams.device)[:, None] * self.beams
        self.conv_inputs = self.conv_inputs.index_select(2, (first + beams).flatten())

    def select(self, rows: Tensor) -> "BeamCache":
        """Keeps only the sequences of the rows at the indices `rows`, (R,)."""
        other = copy(self)
        other.slots = self.slots[rows]
        other.index = other.make_index(other.make_key_bags())
        if len(self.positions) > 1:
            other.positions = self.positions[rows]
        if self.padding_mask is not None:
            other.padding_mask = self.padding_mask[rows]
        by_row = self.conv_inputs.unflatten(2, (-1, self.beams))  # (depth, 2, B, K, ...)
        other.conv_inputs = by_row[:, :, rows].flatten(2, 3)
        other.keys = [layer[rows] for layer in self.keys]
        other.values = [layer[rows] for layer in self.values]
        other.contexts = [other.share(context.select(rows)) for context in self.contexts]
        return other


def prefers_embedding_bag(device: torch.device, config: StackConfig) -> bool:
    """Whether sums of rows are the faster way: for dot products on CPUs."""
    return device.type == "cpu" and ATTENTIONS[config.attention].score_fn is None


class TableIndex:
    """Which rows of the tables of keys and values each sequence attends to.

    Args:
        slots: Slot of each token of the sequences, (B, K, M).
        slot_count: Number of slots in each row of the batch.
        config: Of the stack of blocks.
        key_bags: Of the batch, which `attention_by_embedding_bag` needs; see `make_key_bags`.
    """

    def __init__(
        self,
        slots: Tensor,
        slot_count: int,
        config: StackConfig,
        key_bags: "EmbeddingBag | None" = None,
    ) -> None:
        row = torch.arange(len(slots), device=slots.device)[:, None, None]
        self.rows = (row * slot_count + slots).flatten(0, 1)  # (B * K, M), of B * slots
        self.slots = slots.flatten(0, 1)[:, None].expand(-1, config.heads, -1)  # (B * K, H, M)
        self.config = config
        self.key_bags = key_bags

    @cached_property
    def value_bags(self) -> "EmbeddingBag":
        """For each head and sequence, the rows of its tokens in a table (B * slots * G, V)."""
        kv_heads = self.config.resolved.kv_heads
        groups = kv_head_of_each_head(self.config, self.rows.device)
        return EmbeddingBag(self.rows[:, None] * kv_heads + groups)  # (B * K, H, M)


def kv_head_of_each_head(config: StackConfig, device: torch.device) -> Tensor:
    """The number of the key/value head that each head reads, (H, 1)."""
    group_size = config.heads // config.resolved.kv_heads
    return torch.arange(config.heads, device=device)[:, None] // group_size


def make_key_bags(
    batch: int, beams: int, config: StackConfig, device: torch.device
) -> "EmbeddingBag":
    """For each head of B x K sequences, the rows of its channels in a table (B * G * D, slots)."""
    sizes = config.resolved
    row = torch.arange(batch, device=device)[:, None, None]
    groups = kv_head_of_each_head(config, device)
    channel = torch.arange(sizes.head_dim, device=device)
    table_rows = (row * sizes.kv_heads + groups) * sizes.head_dim + channel  # (B, H, D)
    return EmbeddingBag(table_rows.repeat_interleave(beams, 0))  # (B * K, H, D)


class EmbeddingBag:
    """Weighted sums of rows of a table, M rows each (`torch.nn.functional.embedding_bag`).

    Args:
        rows: Numbers of the rows, (..., M).
    """

    def __init__(self, rows: Tensor) -> None:
        self.indices = rows.flatten()
        self.offsets = torch.arange(0, len(self.indices), rows.shape[-1], device=rows.device)

    def __call__(self, table: Tensor, weights: Tensor) -> Tensor:
        """Sums with weights (..., M) of rows of a table (R, D): (sums, D), of its type."""
        weights = weights.to(table.dtype).flatten()
        return F.embedding_bag(
            self.indices, table, self.offsets, mode="sum", per_sample_weights=weights
        )


class GatheredLayerCache(AttentionCache):
    """One layer's keys and values in slots, gathered for each sequence."""

    def __init__(self, cache: BeamCache, layer: int) -> None:
        self.cache = cache
        self.layer = layer
        self.new = slice(cache.used_slots - cache.beams, cache.used_slots)

    def by_row(self, new: Tensor) -> Tensor:
        """(B * K, G, 1, D or V) -> (B, K, G, D or V)."""
        return new[:, :, 0].unflatten(0, (-1, self.cache.beams))

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values, (B * K, G, 1, ...) -> those of each sequence, (B * K, G, M, ...)."""
        rows = self.cache.index.rows  # (B * K, M)
        keys = self.cache.keys[self.layer]  # (B, slots, G, D)
        values = self.cache.values[self.layer]
        keys[:, self.new] = self.by_row(k)
        values[:, self.new] = self.by_row(v)
        keys = keys.flatten(0, 1)[rows]  # (B * slots, G, D) -> (B * K, M, G, D)
        values = values.flatten(0, 1)[rows]  # (B * slots, G, V) -> (B * K, M, G, V)
        return keys.transpose(1, 2), values.transpose(1, 2)  # (B * K, G, M, D or V)


class EmbeddingBagLayerCache(GatheredLayerCache):
    """The same for `attention_by_embedding_bag`: nothing is gathered."""

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps new keys and values, (B * K, G, 1, D or V), and gives them back."""
        keys = self.cache.keys[self.layer]  # (B, G, D, slots)
        if self.new.stop > keys.shape[3]:
            size = -(-self.new.stop // SLOT_STEP) * SLOT_STEP
            keys = grow_table(keys, 3, size)
            self.cache.keys[self.layer] = keys
        keys[..., self.new] = self.by_row(k).permute(0, 2, 3, 1)  # (B, G, D, K)
        self.cache.values[self.layer][:, self.new] = self.by_row(v)
        return k, v

    def attend(self, q: Tensor, mask: Mask, score_fn: ScoreFunction | None) -> Tensor:
        """Attention of each sequence's query to its own tokens: (B * K, H, 1, D) -> (.., V)."""
        cache = self.cache
        return attention_by_embedding_bag(
            q, cache.keys[self.layer], cache.values[self.layer], cache.index, mask
        )


class SharedContextCache(ContextCache):
    """One layer's keys (B, G, M, D), values (B, G, M, V) of a context of K sequences each."""

    def __init__(self, pair: tuple[Tensor, Tensor], beams: int) -> None:
        super().__init__(pair)
        self.beams = beams

    def attend(self, q: Tensor, mask: Mask, score_fn: ScoreFunction | None) -> Tensor:
        """Attention of each sequence's query to the context: (B * K, H, 1, D) -> (.., V)."""
        k, v = cast(tuple[Tensor, Tensor], self.pair)
        queries = q[:, :, 0].unflatten(0, (-1, self.beams)).transpose(1, 2)  # (B, H, K, D)
        out = attention(queries, k, v, mask, score_fn=score_fn).transpose(1, 2)  # (B, K, H, V)
        return out.flatten(0, 1)[:, :, None]  # (B * K, H, 1, V)


class EmbeddingBagContextCache(SharedContextCache):
    """The same for `attention_by_embedding_bag`, with the key bags of the sequences' index."""

    def __init__(
        self, pair: tuple[Tensor, Tensor], beams: int, config: StackConfig, key_bags: EmbeddingBag
    ) -> None:
        super().__init__(pair, beams)
        k, v = pair
        batch, _, length, _ = k.shape
        slots = torch.arange(length, device=k.device).expand(batch, beams, -1)  # (B, K, M)
        self.index = TableIndex(slots, length, config, key_bags)
        self.keys = k.mT.contiguous()  # (B, G, D, M)
        self.values = v.transpose(1, 2).contiguous()  # (B, M, G, V)

    def attend(self, q: Tensor, mask: Mask, score_fn: ScoreFunction | None) -> Tensor:
        """Attention of each sequence's query to the context: (B * K, H, 1, D) -> (.., V)."""
        return attention_by_embedding_bag(q, self.keys, self.values, self.index, mask, self.beams)


def attention_by_embedding_bag(
    q: Tensor, keys: Tensor, values: Tensor, index: TableIndex, mask: Mask, beams: int = 1
) -> Tensor:
    """Attention with one query each, by weighted sums of rows of tables.

    Scores are the sum of the keys' channels weighted by the query, results that of the values
    weighted by the probabilities.

    Args:
        q: (B * K, H, 1, D).
        keys: (B, G, D, slots).
        values: (B, slots, G, V).
        index: Which of them each sequence sees.
        mask: Broadcastable to (B, H, K, M) if `beams` is K, to (B * K, H, 1, M) if it is 1.
        beams: Number of sequences that share a row of the mask.

    Returns:
        (B * K, H, 1, V).
    """
    rows, heads, _, width = q.shape
    value_dim = values.shape[3]
    slot_count = keys.shape[3]
    assert index.key_bags is not None
    scores = index.key_bags(keys.view(-1, slot_count), q * width**-0.5)  # (B * K * H, slots)
    scores = upcast(scores).view(rows, heads, slot_count)
    if slot_count > index.slots.shape[2]:
        scores = scores.gather(2, index.slots)  # (B * K, H, M)
    by_mask = scores.unflatten(0, (-1, beams)).transpose(1, 2)  # (B, H, K, M), a view
    mask.add_to(by_mask)
    out = index.value_bags(values.view(-1, value_dim), scores.softmax(-1))  # (B * K * H, V)
    out = out.view(-1, beams, heads, value_dim).transpose(1, 2)  # (B, H, K, V)
    out = mask.zero_masked_rows(out).transpose(1, 2)  # (B, K, H, V)
    return out.reshape(rows, heads, 1, value_dim)


def grow_table(table: Tensor, dim: int, size: int) -> Tensor:
    """A copy with room for `size` in one dimension."""
    shape = [*table.shape]
    shape[dim] = size
    larger = table.new_empty(shape)
    larger.narrow(dim, 0, table.shape[dim]).copy_(table)
    return larger
