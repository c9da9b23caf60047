"""Attention within the windows of a grid of tokens (Liu 2021, Liu 2022)."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import (
    NO_ATTENTION_CACHE,
    AttentionCache,
    MultiHeadAttention,
    attention,
)
from modules.init import truncated_normal
from modules.masks import NO_MASK, Mask
from modules.position import grid_positions
from modules.rotation import Rotation

# Added to the scores of tokens that are not neighbours in the image. The published weights were
# trained with it; minus infinity would change what they compute.
NOT_ADJACENT = -100.0
HIDDEN = 512  # of the MLP that computes a bias (code of Liu 2022)


class Windows(NamedTuple):
    """Windows of S x S tokens over a grid of G x G tokens, padded with zeros below and right.

    There are R rows of R windows, W = R^2 altogether, each with A = S^2 tokens.

    Args:
        grid: Side G of the grid.
        size: Side S of a window, at most G.
        shift: Tokens by which the grid is moved up and left, cyclically, before it is cut.
    """

    grid: int
    size: int
    shift: int = 0

    @property
    def rows(self) -> int:
        """Number R of rows of windows, as many as columns."""
        return math.ceil(self.grid / self.size)

    def pad(self, x: Tensor) -> Tensor:
        """Shifts the grid and pads it: (B, G G, E) -> (B, P P, E) with P = R S."""
        missing = self.rows * self.size - self.grid
        if not (self.shift or missing):
            return x
        x = x.unflatten(1, (self.grid, self.grid))  # (B, G, G, E)
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
        if missing:
            x = F.pad(x, (0, 0, 0, missing, 0, missing))  # (B, P, P, E)
        return x.flatten(1, 2)  # (B, P P, E)

    def crop(self, x: Tensor) -> Tensor:
        """The reverse of `pad`: (B, P P, E) -> (B, G G, E)."""
        side = self.rows * self.size
        if not (self.shift or side > self.grid):
            return x
        x = x.unflatten(1, (side, side))[:, : self.grid, : self.grid]  # (B, G, G, E)
        if self.shift:
            x = x.roll((self.shift, self.shift), (1, 2))
        return x.flatten(1, 2)  # (B, G G, E)

    def partition(self, x: Tensor) -> Tensor:
        """Heads in windows as further heads: (B, H, P P, D) -> (B, W H, A, D), D of any size."""
        x = x.unflatten(2, (self.rows, self.size, self.rows, self.size))
        x = x.permute(0, 2, 4, 1, 3, 5, 6)  # (B, H, R, S, R, S, D) -> (B, R, R, H, S, S, D)
        return x.flatten(4, 5).flatten(1, 3)  # (B, W H, A, D)

    def merge(self, x: Tensor) -> Tensor:
        """The reverse, with heads side by side: (B, W H, A, V) -> (B, P P, H V)."""
        x = x.unflatten(1, (self.rows, self.rows, -1)).unflatten(4, (self.size, self.size))
        x = x.permute(0, 1, 4, 2, 5, 3, 6)  # (B, R, R, H, S, S, V) -> (B, R, S, R, S, H, V)
        x = x.clone(memory_format=torch.contiguous_format)  # exported graphs rely on this layout
        return x.flatten(5).flatten(1, 4)  # (B, P P, H V)

    def tokens(self, device: torch.device) -> Tensor:
        """The token of the grid at each position of the windows, -1 at padding: (W, A)."""
        numbers = torch.arange(1, self.grid**2 + 1, device=device)[None, :, None]  # (1, G G, 1)
        padded = self.pad(numbers)[:, None]  # (1, 1, P P, 1)
        return self.partition(padded)[0, ..., 0] - 1  # (W, A)

    def to_grid(self, weights: Tensor) -> Tensor:
        """Attention weights of all tokens, 0 between windows: (B, W H, A, A) -> (B, H, G G, G G).

        Weights of padding are left out, so that rows may sum to less than 1.
        """
        size = self.grid**2
        tokens = self.tokens(weights.device)  # (W, A)
        parts = weights.unflatten(1, (self.rows**2, -1)).transpose(1, 2)  # (B, H, W, A, A)
        whole = parts.new_zeros(*parts.shape[:2], size + 1, size + 1)  # one more for -1
        whole[:, :, tokens[:, :, None], tokens[:, None]] = parts
        return whole[:, :, :size, :size]

    def from_grid(self, whole: Tensor, weights: Tensor) -> Tensor:
        """The reverse, with `weights` where windows are padded: -> (B, W H, A, A)."""
        tokens = self.tokens(whole.device)  # (W, A)
        found = whole[:, :, tokens[:, :, None], tokens[:, None]].transpose(1, 2)  # (B, W, H, A, A)
        is_token = tokens >= 0
        is_pair = is_token[:, :, None] & is_token[:, None]  # (W, A, A)
        parts = weights.unflatten(1, (len(tokens), -1))  # (B, W, H, A, A)
        return torch.where(is_pair[:, None], found, parts).flatten(1, 2)  # (B, W H, A, A)

    def shift_mask(self) -> Tensor:
        """Added to the scores of tokens that only the shift brought together: (W, 1, A, A).

        0 for neighbours, -100 for others. It is for the padded grid, as in timm and the published
        code: where that is larger, some of the tokens that were moved around still see others.
        """
        row = torch.arange(self.rows * self.size)  # (P,)
        # Rows before the last windows, then those in the last windows, then those moved there.
        part = (row >= len(row) - self.size).long() + (row >= len(row) - self.shift)
        parts = (3 * part[:, None] + part).flatten()[None, None, :, None]  # (1, 1, P P, 1)
        parts = self.partition(parts)[0]  # (W, A, 1)
        return ((parts != parts.mT) * NOT_ADJACENT)[:, None]  # (W, 1, A, A)


def relative_index(size: int) -> Tensor:
    """Row of query - key in a table of all offsets in a window of side S, from 0: (A, A)."""
    positions = grid_positions((size, size), torch.get_default_device())[0]  # (A, 2)
    offsets = positions[:, None] - positions + size - 1  # (A, A, 2), from 0
    return offsets[..., 0] * (2 * size - 1) + offsets[..., 1]


class RelativeBias(nn.Module):
    """Base of biases of H heads in windows of side `size`; subclasses have a table of offsets."""

    index: Tensor

    def __init__(self, heads: int, size: int, pretrained_size: int | None = None) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("index", relative_index(size), persistent=False)  # (A, A)

    def offsets(self) -> Tensor:
        """The bias of each offset of query and key, (2S-1, 2S-1, H)."""
        raise NotImplementedError

    def forward(self) -> Tensor:
        """The bias of each pair of query and key, (H, A, A)."""
        rows = F.embedding(self.index, self.offsets().flatten(0, 1))
        return rows.permute(2, 0, 1)  # (A, A, H) -> (H, A, A)


class TableBias(RelativeBias):
    """A learned number for each offset and head (Liu 2021, equation 4)."""

    def __init__(self, heads: int, size: int, pretrained_size: int | None = None) -> None:
        super().__init__(heads, size)
        self.table = nn.Parameter(torch.empty(2 * size - 1, 2 * size - 1, heads))
        truncated_normal(self.table, 0.02)

    def offsets(self) -> Tensor:
        """(2S-1, 2S-1, H)."""
        return self.table


class MLPBias(RelativeBias):
    """16 sigmoid(MLP(offset)), with offsets on a log scale (Liu 2022, section 3.3 and code).

    Offsets are relative to the windows that weights were first trained with, `pretrained_size`;
    None: to those of side `size`. The weights are parameters, not layers, so that they have no
    weight decay, as all positions.
    """

    pairs: Tensor

    def __init__(self, heads: int, size: int, pretrained_size: int | None = None) -> None:
        super().__init__(heads, size)
        reach = max(1, (pretrained_size or size) - 1)  # offset that becomes 8
        line = torch.arange(1 - size, size) * (8 / reach)  # (2S-1,)
        line = line.sign() * torch.log2(line.abs() + 1) / math.log2(8)
        pairs = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)  # (2S-1, 2S-1, 2)
        self.register_buffer("pairs", pairs, persistent=False)
        self.up = nn.Parameter(torch.empty(HIDDEN, 2))
        self.up_bias = nn.Parameter(torch.zeros(HIDDEN))
        self.down = nn.Parameter(torch.empty(heads, HIDDEN))
        for weight in (self.up, self.down):
            truncated_normal(weight, 0.02)

    def offsets(self) -> Tensor:
        """(2S-1, 2S-1, H)."""
        pairs = self.pairs.to(self.up.dtype)  # (2S-1, 2S-1, 2)
        hidden = F.linear(pairs, self.up, self.up_bias).relu()  # (2S-1, 2S-1, 512)
        return 16 * F.linear(hidden, self.down).sigmoid()


RELATIVE_BIASES: dict[str, Callable[..., RelativeBias]] = {"table": TableBias, "mlp": MLPBias}


class WindowAttention(nn.Module):
    """Attention within windows, with a bias for each offset of query and key.

    Args:
        attention: A self-attention whose scores are dot products.
        windows: The windows.
        bias: The bias of its heads.
    """

    shift_mask: Tensor | None

    def __init__(self, attention: MultiHeadAttention, windows: Windows, bias: RelativeBias) -> None:
        super().__init__()
        self.attention = attention
        self.windows = windows
        self.bias = bias
        shift_mask = windows.shift_mask() if windows.shift else None  # (W, 1, A, A)
        self.register_buffer("shift_mask", shift_mask, persistent=False)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask = NO_MASK,
        rotary: Rotation | None = None,
        cache: AttentionCache = NO_ATTENTION_CACHE,
    ) -> Tensor:
        """(B, G G, E) -> (B, G G, E); `context`, `mask` and `rotary` are ignored.

        A `cache` sees the weights as (B, W H, A, A).
        """
        windows = self.windows
        inner = self.attention
        # (B, H, P P, D), (B, K, P P, D), (B, K, P P, V); K key/value heads
        heads = inner.project(windows.pad(x), None, cache)
        # (B, W H, A, D), (B, W K, A, D), (B, W K, A, V)
        q, k, v = (windows.partition(part) for part in heads)
        bias = self.bias().expand(windows.rows**2, -1, -1, -1)  # (W, H, A, A)
        if self.shift_mask is not None:
            bias = bias + self.shift_mask
        near = NO_MASK.with_bias(bias.flatten(0, 1)[None])  # (1, W H, A, A)
        dropout = inner.dropout if self.training else 0.0
        out = attention(q, k, v, near, dropout, on_weights=cache.on_weights)
        return windows.crop(inner.output(windows.merge(out)))  # (B, P P, H V) -> (B, G G, E)
