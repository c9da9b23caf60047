"""The cache of generation: keys and values of earlier tokens, so that each token is computed once."""

import torch
from torch import Tensor

from modules.config import StackConfig, require
from modules.masks import is_full
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
        self,
        config: StackConfig,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.length = config, length
        shape = (config.depth, 2, batch, config.groups, length, config.head_width)
        self.data = torch.empty(shape, device=device, dtype=dtype)
        self.coords = torch.empty(batch, length, 1, device=device, dtype=torch.int64)
        self.keep = torch.empty(batch, length, device=device, dtype=torch.bool)
        self.sources = [SourceMemory() for _ in self.data]
        self.clear()

    @classmethod
    def beside(cls, tensor: Tensor, config: StackConfig, batch: int, length: int) -> "Cache":
        """A cache where `tensor` is, and of its type, or autocast's; other arguments as for the class."""
        kind, is_cast = tensor.device.type, torch.is_autocast_enabled(tensor.device.type)
        return cls(
            config,
            batch,
            length,
            tensor.device,
            torch.get_autocast_dtype(kind) if is_cast else tensor.dtype,
        )

    def clear(self) -> None:
        """Forgets all tokens, but not the source."""
        self.past, self.filled = 0, 0
        self.padded, self.uneven = (
            False,
            False,
        )  # whether there is padding, whether rows differ in coordinates
        self.coords[:] = torch.arange(self.length, device=self.coords.device)[
            :, None
        ]  # (length, 1)
        self.keep.fill_(True)

    def block(self, index: int) -> BlockMemory:
        """The part of block `index`."""
        return BlockMemory(KeysValues(self, *self.data[index]), self.sources[index])

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
        rows = slice(None) if self.uneven else slice(1)
        new, seen = self.coords[rows, self.past : self.filled], self.coords[rows, : self.filled]
        keep = self.keep[:, : self.filled] if self.padded else None
        return Places(new, seen, keep, self.past == 0 and not self.uneven)

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

    def select(self, rows: Tensor) -> "Cache":
        """A new cache of some rows, each as often as it is named: (R,) of B."""
        other = Cache(self.config, len(rows), self.length, self.data.device, self.data.dtype)
        other.filled, other.uneven, other.padded = self.filled, self.uneven, self.padded
        other.data[..., : self.filled, :] = self.data[..., : self.filled, :].index_select(2, rows)
        other.coords, other.keep = self.coords[rows], self.keep[rows]
        other.sources = [source.select(rows) for source in self.sources]
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
    """Keys and values of the source that one layer's cross-attention looks at.

    Args:
        pair: Keys and values, (B, G, M, D) each; None: no source was projected yet.
        texts: Number of texts that look at each row.
    """

    def __init__(self, pair: tuple[Tensor, Tensor] | None = None, texts: int = 1) -> None:
        self.pair, self.texts = pair, texts

    def recall(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values, (B, G, M, D) each; None: no source was projected yet."""
        return self.pair

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps keys and values, (B, G, M, D) each, in order in memory."""
        self.pair = keys.contiguous(), values.contiguous()
        return self.pair

    def select(self, rows: Tensor) -> "SourceMemory":
        """Those of some rows, (R,) of B."""
        return SourceMemory(self.pair and (self.pair[0][rows], self.pair[1][rows]))
