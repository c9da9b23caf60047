"""The cache of generation: keys and values of earlier tokens, so that each token is computed once."""

import torch
from torch import Tensor

from modules.config import StackConfig, require
from modules.masks import Mask, is_full
from modules.memory import BlockMemory, Memory, Places, StackMemory, count


class Cache(StackMemory):
    """Keys and values of all blocks, allocated once and filled in place, and where their tokens stand.

    For inference: no gradient flows through it. A source that cross-attention looks at is projected once and kept.

    Args:
        config: Of the stack of blocks.
        batch: Number B of rows.
        length: Number of tokens that there is room for in each row.
        device: Where it lives.
        dtype: Of keys and values.
    """

    def __init__(
        self, config: StackConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, self.length = config, length
        shape = (config.depth, 2, batch, config.groups, length, config.head_width)
        self.data = torch.empty(shape, device=device, dtype=dtype)
        self.coords = torch.empty(batch, length, 1, device=device, dtype=torch.int64)
        self.keep = torch.empty(batch, length, device=device, dtype=torch.bool)
        self.blocks = [BlockMemory(KeysValues(self, *part), SourceMemory()) for part in self.data]
        self.clear()

    @classmethod
    def beside(cls, tensor: Tensor, config: StackConfig, batch: int, length: int) -> "Cache":
        """A cache where `tensor` is, and of its type, or autocast's; other arguments as for the class."""
        kind, is_cast = tensor.device.type, torch.is_autocast_enabled(tensor.device.type)
        return cls(config, batch, length, tensor.device, torch.get_autocast_dtype(kind) if is_cast else tensor.dtype)

    def clear(self) -> None:
        """Forgets all tokens, but not the source."""
        self.past, self.filled = 0, 0
        self.lines: Tensor | None = None  # which tokens belong to each text that branches off, (B, K, length)
        self.padded, self.uneven = False, False  # whether there is padding, whether rows differ in coordinates
        self.coords[:] = torch.arange(self.length, device=self.coords.device)[:, None]  # (length, 1)
        self.keep.fill_(True)

    def block(self, index: int) -> BlockMemory:
        """The part of block `index`."""
        return self.blocks[index]

    def place(self, tokens: Tensor, keep: Tensor | None, coords: Tensor | None) -> Places:
        """Makes room for new tokens, which go on where the others stopped; arguments as in `StackMemory.place`.

        Raises:
            ValueError: There is not enough room.
        """
        require(
            self.filled + tokens.shape[1] <= self.length and len(tokens) == len(self.keep),
            f"{tokens.shape[1]} tokens in {len(tokens)} rows do not fit into a cache of {len(self.keep)} rows by "
            f"{self.length} tokens of which {self.filled} are taken; make a larger one, or shorten the text.",
        )
        self.past, self.filled = self.filled, self.filled + tokens.shape[1]
        if keep is not None and is_full(keep):
            keep = None
        if keep is not None or coords is not None:
            self._note(keep, coords)
        if self.lines is not None:
            self.lines[:, :, self.past : self.filled] = torch.eye(tokens.shape[1], device=tokens.device)  # (K, K)
        rows = slice(None) if self.uneven else slice(1)
        new, seen = self.coords[rows, self.past : self.filled], self.coords[rows, : self.filled]
        keep = self.keep[:, : self.filled] if self.padded else None
        return Places(new, seen, keep, self.past == 0 and not self.uneven)

    def order(self, count: int, device: torch.device) -> Mask:
        """Which of the earlier and the `count` new tokens come before each new one, in its own text."""
        if self.lines is None:
            return super().order(count, device)
        mask = Mask(self.lines[:, None, :, : self.filled])  # (B, 1, K, M)
        return mask.with_bias(torch.zeros(1, 1, 1, 1, device=device))  # so that blocks need not make -inf of it, each

    def _note(self, keep: Tensor | None, coords: Tensor | None) -> None:
        """Writes down which of the new tokens are padding and where they stand; what comes later goes on from there."""
        self.uneven = True
        if keep is not None:
            self.padded = True
            self.keep[:, self.past : self.filled] = keep
        if coords is None and keep is not None:
            coords = self.coords[:, self.past] + count(keep)  # (B, 1) + (B, N)
        if coords is not None:
            self.coords[:, self.past : self.filled, 0] = coords
            later = torch.arange(1, self.length - self.filled + 1, device=coords.device)
            self.coords[:, self.filled :, 0] = coords[:, -1:] + later  # (B, length - filled)

    def branch(self, beams: int, tokens: int) -> "Cache":
        """A new cache in which several texts go on from each row, with room for so many more tokens of each.

        What they have in common is held once. From there on `place` takes the next token of all K = `beams` texts of a
        row, (B, K): they stand at the same coordinate, and each sees those of its own text. No key or value ever moves.
        """
        other = self.select(torch.arange(len(self.keep), device=self.keep.device), self.filled + beams * tokens)
        later = torch.arange(beams * tokens, device=self.coords.device)
        other.coords[:, self.filled :, 0] -= later - later // beams
        other.lines = self.keep.new_zeros(len(self.keep), beams, other.length)
        other.lines[:, :, : self.filled] = True
        return other

    def reorder(self, texts: Tensor) -> None:
        """Lets each text that branched off go on with what another of its row held: integers (B, K) of K."""
        assert self.lines is not None
        self.lines = self.lines.gather(1, texts[..., None].expand_as(self.lines))

    def select(self, rows: Tensor, length: int | None = None) -> "Cache":
        """A new cache of some rows, each as often as it is named: (R,) of B.

        Args:
            rows: Their numbers.
            length: Number of tokens that there is room for; None: as it was, which it must be once texts branched off.
        """
        length, was = length or self.length, self.length
        other = Cache(self.config, len(rows), length, self.data.device, self.data.dtype)
        other.filled, other.uneven, other.padded = self.filled, self.uneven, self.padded
        other.data[..., : self.filled, :] = self.data[..., : self.filled, :].index_select(2, rows)
        other.coords[:, :was], other.keep[:, :was] = self.coords[rows, :length], self.keep[rows, :length]
        later = torch.arange(1, max(0, length - was) + 1, device=rows.device)
        other.coords[:, was:, 0] = self.coords[rows, -1] + later  # (R, length - was)
        other.lines = None if self.lines is None else self.lines[rows]
        for mine, theirs in zip(self.blocks, other.blocks, strict=True):
            source = mine.cross.recall()
            if source is not None:
                theirs.cross.extend(source[0].index_select(0, rows), source[1].index_select(0, rows))
        return other


class KeysValues(Memory):
    """One layer's part of a cache.

    Args:
        cache: The whole.
        keys: (B, G, length, D).
        values: (B, G, length, D).
    """

    def __init__(self, cache: Cache, keys: Tensor, values: Tensor) -> None:
        self.cache, self.keys, self.values = cache, keys, values

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values, (B, G, N, D) each -> views of all that is filled, (B, G, M, D) each."""
        new, filled = slice(self.cache.past, self.cache.filled), self.cache.filled
        self.keys[:, :, new], self.values[:, :, new] = keys, values
        return self.keys[:, :, :filled], self.values[:, :, :filled]


class SourceMemory(Memory):
    """Keys and values of the source that one layer's cross-attention looks at."""

    def __init__(self) -> None:
        self.pair: tuple[Tensor, Tensor] | None = None

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values, (B, G, M, D) each; None: no source was projected yet."""
        return self.pair

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps keys and values, (B, G, M, D) each, in order in memory."""
        self.pair = keys.contiguous(), values.contiguous()
        return self.pair
