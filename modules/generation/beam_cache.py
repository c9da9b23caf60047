"""Texts that branch off from those in a cache, as in beam search: what they have in common is held once.

No key or value moves when texts do: each text has a list of the slots that hold its tokens.
"""

from collections.abc import Iterable
from copy import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.config import StackConfig, require
from modules.kernels.upcast import exact
from modules.kv_cache import Cache, SourceMemory
from modules.masks import Mask
from modules.memory import BlockMemory, Memory, Places, StackMemory

ROOM = 64  # slots by which tables of keys grow; a multiple of what a vector register holds


class Branches(StackMemory):
    """K texts that go on from each row of a cache; to the model they are rows of their own, B x K.

    Args:
        cache: B rows of tokens, and the source that each looks at.
        beams: Number K.
        tokens: Number of tokens that there is room for in each text.
    """

    def __init__(self, cache: Cache, beams: int, tokens: int) -> None:
        self.config, self.beams, batch, device = (
            cache.config,
            beams,
            len(cache.keep),
            cache.keep.device,
        )
        self.past = self.filled = self.taken = (
            cache.filled
        )  # tokens of each text; slots that hold tokens
        self.length, self.size = (
            self.filled + tokens,
            self.filled + beams * tokens,
        )  # how many there is room for
        self.slots = torch.arange(self.filled, device=device).expand(batch, beams, -1)  # (B, K, M)
        self.index = Index(self.slots, self.size, self.config)
        coords = cache.coords[: batch if cache.uneven else 1, : self.filled]
        later = torch.arange(1, tokens + 1, device=device)[:, None]
        self.coords = torch.cat((coords, coords[:, -1:] + later), 1)  # (B or 1, length, 1)
        self.keep = (
            F.pad(cache.keep[:, : self.filled], (0, tokens), value=True) if cache.padded else None
        )
        self.fast = suits(device, self.config)
        keys, values = (
            cache.data[..., : self.filled, :].transpose(3, 4).unbind(1)
        )  # (depth, B, M, G, D) each
        if self.fast:
            self.keys = list(keys.permute(0, 1, 3, 4, 2))  # (B, G, D, M) of each layer
        else:
            self.keys = [with_room(layer, 1, self.size) for layer in keys]  # (B, size, G, D)
        self.values = [with_room(layer, 1, self.size) for layer in values]  # (B, size, G, D)
        self.sources = self.shared(cache.sources)

    def block(self, index: int) -> BlockMemory:
        """The part of block `index`."""
        return BlockMemory(
            (BagMemory if self.fast else SlotMemory)(self, index), self.sources[index]
        )

    def place(self, tokens: Tensor, keep: Tensor | None, coords: Tensor | None) -> Places:
        """Makes room for the next token of each text, (B K, 1), which goes on counting and is no padding.

        Raises:
            ValueError: There is not enough room, or `keep` or `coords` say something else.
        """
        batch, beams = self.slots.shape[:2]
        require(
            tokens.shape == (batch * beams, 1)
            and keep is None
            and coords is None
            and self.filled < self.length,
            f"{tokens.shape[1]} tokens in {len(tokens)} rows do not fit: {batch} x {beams} texts take one at a time, "
            f"and have {self.filled} of at most {self.length}; make more room, or shorten the text.",
        )
        new = torch.arange(self.taken, self.taken + beams, device=tokens.device)[:, None]
        self.slots = torch.cat((self.slots, new.expand(batch, -1, 1)), 2)  # (B, K, M)
        self.past, self.filled, self.taken = self.filled, self.filled + 1, self.taken + beams
        self.index = Index(self.slots, self.size, self.config, self.index.columns)
        seen = self.coords[:, : self.filled]
        if len(seen) > 1:
            seen = seen.repeat_interleave(beams, 0)  # (B K, M, 1)
        kept = (
            None if self.keep is None else self.keep[:, : self.filled].repeat_interleave(beams, 0)
        )  # (B K, M)
        return Places(seen[:, self.past :], seen, kept, False)

    def shared(self, sources: Iterable[SourceMemory]) -> list[SourceMemory]:
        """What cross-attention hands its tensors to."""
        pairs = [source.recall() for source in sources]
        make = partial(SourceBags, beams=self.beams, config=self.config, columns=self.index.columns)
        return [
            make(pair) if pair and self.fast else SourceMemory(pair, self.beams) for pair in pairs
        ]

    def reorder(self, texts: Tensor) -> None:
        """Lets each text go on with what another of its row held: integers (B, K) of K."""
        self.slots = self.slots.gather(1, texts[..., None].expand_as(self.slots))

    def select(self, rows: Tensor) -> "Branches":
        """Goes on with the texts of some rows only: (R,) of B."""
        other = copy(self)
        other.slots, other.index = self.slots[rows], Index(self.slots[rows], self.size, self.config)
        other.coords = self.coords[rows] if len(self.coords) > 1 else self.coords
        other.keep = None if self.keep is None else self.keep[rows]
        other.keys, other.values = (
            [layer[rows] for layer in part] for part in (self.keys, self.values)
        )
        other.sources = other.shared(source.select(rows) for source in self.sources)
        return other


def suits(device: torch.device, config: StackConfig) -> bool:
    """Whether attention is of dot products, which sums of rows can give, and on a CPU, where these are faster."""
    return device.type == "cpu" and config.attention == "dot"


class Index:
    """Where tables have the keys and values that each text sees, for H heads of size D that share G.

    Args:
        slots: Those of each text's tokens, (B, K, M).
        size: Number of slots of each row.
        config: Of the stack of blocks.
        columns: Those of an index of the same rows; None: they are counted.
    """

    def __init__(
        self, slots: Tensor, size: int, config: StackConfig, columns: "Bags | None" = None
    ) -> None:
        (batch, beams), heads, width = slots.shape[:2], config.heads, config.head_width
        groups = torch.arange(heads, device=slots.device)[:, None] // (
            heads // config.groups
        )  # (H, 1)
        first = torch.arange(batch, device=slots.device)[:, None, None]
        rows = (first * size + slots).flatten(0, 1)[
            :, None
        ] * config.groups + groups  # (B K, H, M) of B size G
        if columns is None:
            numbers = (first * config.groups + groups) * width + torch.arange(
                width, device=slots.device
            )  # (B, H, D)
            columns = Bags(numbers.repeat_interleave(beams, 0))
        self.columns, self.rows = columns, Bags(rows)
        self.slots = slots.flatten(0, 1)[:, None].expand(-1, heads, -1)  # (B K, H, M) of size


class Bags:
    """Rows of a table that are to be summed ("bags"), the same number each time.

    Args:
        rows: Their numbers, (..., M).
    """

    def __init__(self, rows: Tensor) -> None:
        self.numbers = rows.flatten()
        self.starts = torch.arange(0, len(self.numbers), rows.shape[-1], device=rows.device)

    def sums(self, table: Tensor, weights: Tensor) -> Tensor:
        """Sums with weights, (..., M), of rows of a table, (R, D): (bags, D), of the table's type."""
        weights = weights.to(table.dtype).flatten()
        return torch.embedding_bag(table, self.numbers, self.starts, False, 0, False, weights)[
            0
        ]  # mode 0: sum


class SlotMemory(Memory):
    """One layer's keys and values in slots, read out for each text.

    Args:
        branches: The whole.
        layer: Number of the layer.
    """

    def __init__(self, branches: Branches, layer: int) -> None:
        self.branches, self.layer = branches, layer
        self.new = slice(branches.taken - branches.beams, branches.taken)  # slots

    def by_row(self, new: Tensor) -> Tensor:
        """(B K, G, 1, D) -> (B, K, G, D)."""
        return new[:, :, 0].unflatten(0, (-1, self.branches.beams))

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values, (B K, G, 1, D) each -> those of all tokens of each text, (B K, G, M, D) each."""
        config, tables = (
            self.branches.config,
            (self.branches.keys[self.layer], self.branches.values[self.layer]),
        )
        rows = self.branches.index.rows.numbers.view(len(keys), config.heads, -1)  # (B K, H, M)
        rows = rows[:, :: config.heads // config.groups]  # (B K, G, M)
        for table, new in zip(tables, (keys, values), strict=True):
            table[:, self.new] = self.by_row(new)
        k, v = (table.flatten(0, 2)[rows] for table in tables)
        return k, v


class BagMemory(SlotMemory):
    """The same for dot products on CPUs, where nothing is read out: see `mix`. Arguments as `SlotMemory`."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps new keys and values, (B K, G, 1, D) each, and gives them back."""
        columns = self.branches.keys[self.layer]  # (B, G, D, slots)
        if self.new.stop > columns.shape[3]:
            columns = self.branches.keys[self.layer] = with_room(
                columns, 3, -(-self.new.stop // ROOM) * ROOM
            )
        columns[..., self.new] = self.by_row(keys).permute(0, 2, 3, 1)  # (B, G, D, K)
        self.branches.values[self.layer][:, self.new] = self.by_row(values)
        return keys, values

    def mix(self, q: Tensor, mask: Mask) -> Tensor:
        """Attention of each text's query to its own tokens: (B K, H, 1, D) -> (B K, H, 1, D)."""
        keys, values = self.branches.keys[self.layer], self.branches.values[self.layer]
        return attend_by_sums(q, keys, values, self.branches.index, mask)


class SourceBags(SourceMemory):
    """One layer's keys and values of the source, where K texts look at each row.

    Args:
        pair: Keys and values, (B, G, M, D) each.
        beams: Number K.
        config: Of the stack of blocks.
        columns: Those of the index of the texts.
    """

    def __init__(
        self, pair: tuple[Tensor, Tensor], beams: int, config: StackConfig, columns: Bags
    ) -> None:
        super().__init__(pair, beams)
        batch, _, length, _ = pair[0].shape
        slots = torch.arange(length, device=pair[0].device).expand(batch, beams, -1)  # (B, K, M)
        self.index = Index(slots, length, config, columns)
        self.keys, self.values = pair[0].mT.contiguous(), pair[1].transpose(1, 2).contiguous()

    def mix(self, q: Tensor, mask: Mask) -> Tensor:
        """Attention of each text's query to the source: (B, H, K, D) -> (B, H, K, D)."""
        return attend_by_sums(q, self.keys, self.values, self.index, mask)


def attend_by_sums(q: Tensor, keys: Tensor, values: Tensor, index: Index, mask: Mask) -> Tensor:
    """Attention of K texts with one query each, by sums of rows: these are so small that matrix products are slower.

    Scores are the sum of the keys' columns with the query as weights, results that of the values with the weights.

    Args:
        q: (B, H, K, D) or (B K, H, 1, D).
        keys: (B, G, D, size).
        values: (B, size, G, D).
        index: Which of them each text sees.
        mask: Who else may attend to whom.

    Returns:
        The shape of `q`.
    """
    (batch, heads, queries, width), size = q.shape, keys.shape[3]
    scores = index.columns.sums(
        keys.view(-1, size), q.transpose(1, 2) * width**-0.5
    )  # (B K H, size)
    scores = exact(scores).view(-1, heads, size)
    if size > index.slots.shape[2]:
        scores = scores.gather(2, index.slots)  # (B K, H, M)
    mask.add_to(scores.view(batch, queries, heads, -1).transpose(1, 2))  # as (B, H, K, M)
    mixed = index.rows.sums(values.view(-1, width), scores.softmax(-1))  # (B K H, D)
    return mixed.view(batch, queries, heads, width).transpose(1, 2)


def with_room(table: Tensor, dim: int, size: int) -> Tensor:
    """A copy with room for `size` in one dimension."""
    shape = [*table.shape]
    shape[dim] = size
    larger = table.new_empty(shape)
    larger.narrow(dim, 0, table.shape[dim]).copy_(table)
    return larger
