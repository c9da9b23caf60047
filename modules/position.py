"""Position encodings: each overrides one of three hooks that do nothing by default: `embed`, `rotate`, `bias`.

Coordinates are (B or 1, N, A): A = 1 axis for text, 2 axes (row, column) for images; they are passed in, so that packed
documents may restart at 0 and a cache may go on where it stopped.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import PositionConfig, RotaryScaling, require


def grid_coordinates(grid: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Coordinates (1, N, A) of all points of a grid, last axis fastest."""
    axes = [torch.arange(size, device=device) for size in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)[
        None
    ]  # (*grid, A) -> (1, N, A)


def resize_grid(table: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Interpolates a table of positions to another grid: (*old grid, E) -> (*grid, E), one or two axes, smoothly."""
    if tuple(table.shape[:-1]) == tuple(grid):
        return table
    require(
        table.dim() == len(grid) + 1,
        f"A table over {table.dim() - 1} axes cannot be resized to grid {grid}.",
    )
    image = table.movedim(-1, 0)[None].float()  # (1, E, *old grid)
    if len(grid) == 1:
        smooth = F.interpolate(image, size=grid, mode="linear", align_corners=False)
    else:
        smooth = F.interpolate(
            image, size=grid, mode="bicubic", antialias=True, align_corners=False
        )
    return smooth[0].movedim(0, -1).to(table.dtype)  # (*grid, E)


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Angles per position, base^(-2i / width): (ceil(width / 2),).

    Rounded as in most libraries: far from the start, the last bit of a frequency is seen in the scores.
    """
    return 1 / base ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def sinusoid(position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """sin and cos of position x frequency: (..., N), (K,) -> twice (..., N, K)."""
    angle = position[..., None].float() * frequency
    return angle.sin(), angle.cos()


def linear_scaling(frequency: Tensor, scaling: RotaryScaling) -> Tensor:
    """All frequencies lower by the factor, as if positions were closer (Chen 2023). Keeps the shape."""
    return frequency / scaling.factor


def llama3_scaling(frequency: Tensor, scaling: RotaryScaling) -> Tensor:
    """Low frequencies lower by the factor, high ones stay, blends between (Grattafiori 2024). Keeps the shape."""
    turns = scaling.original_max_length / (2 * math.pi / frequency)  # within the first context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


SCALINGS: dict[str, Callable[[Tensor, RotaryScaling], Tensor]] = {
    "linear": linear_scaling,
    "llama3": llama3_scaling,
}


@dataclass(frozen=True)
class Rotation:
    """Turns pairs of channels (i, i + R / 2) of queries and keys by angles.

    `cos` is (B or 1, 1, N, R), each half the same; `sin` likewise, its first half negative.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Queries or keys (B, H, N, D) -> the same, rotated; channels from R on stay as they are."""
        width = self.cos.shape[-1]
        turned, cos, sin = x[..., :width], self.cos.to(x.dtype), self.sin.to(x.dtype)
        turned = torch.addcmul(
            turned * cos, turned.roll(width // 2, -1), sin
        )  # (B, H, N, R); few passes over memory
        return (
            turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)
        )  # (B, H, N, D)

    def after_prefix(self, count: int) -> "Rotation":
        """The same behind `count` tokens that are not rotated (class and register tokens)."""
        return Rotation(
            F.pad(self.cos, (0, 0, count, 0), value=1.0), F.pad(self.sin, (0, 0, count, 0))
        )


class Position(nn.Module):
    """No positions: the base of all encodings.

    Args:
        config: Sizes and options of the encoding.
    """

    def __init__(self, config: PositionConfig) -> None:
        super().__init__()
        self.config = config

    def raster(self, coords: Tensor) -> Tensor:
        """One number per position, (B or 1, N): rows one after the other where there are two axes."""
        number = coords[..., 0]
        for axis, size in enumerate(self.config.grid[1:], start=1):
            number = number * size + coords[..., axis]
        return number

    def embed(self, x: Tensor, coords: Tensor | None = None) -> Tensor:
        """Token vectors (B, N, E) with positions added; `coords` None: the grid from its start, in order."""
        return x

    def rotate(self, coords: Tensor) -> Rotation | None:
        """How to turn queries and keys at `coords`; None: not at all."""
        return None

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """What to add to the scores, (B or 1, H, N, M), given coordinates (B or 1, N, A) and (B or 1, M, A)."""
        return None


class Learned(Position):
    """A learned vector per position, added to the tokens (Gehring 2017, Dosovitskiy 2021)."""

    def __init__(self, config: PositionConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.randn(*config.grid, config.width) * 0.02)

    def embed(self, x: Tensor, coords: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        table = self.table.flatten(0, -2)  # (positions, E)
        require(
            coords is not None or x.shape[1] <= len(table),
            f"{x.shape[1]} tokens are more than the {len(table)} learned positions; shorten them or resize the table.",
        )
        return x + (
            table[: x.shape[1]] if coords is None else F.embedding(self.raster(coords), table)
        )


class Sinusoidal(Position):
    """sin and cos of the position in turn, added to the tokens; any length, odd widths too (Vaswani 2017)."""

    def embed(self, x: Tensor, coords: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        number = (
            torch.arange(x.shape[1], device=x.device)[None]
            if coords is None
            else self.raster(coords)
        )
        frequency = frequencies(x.shape[-1], self.config.base, x.device)
        waves = torch.stack(sinusoid(number, frequency), -1).flatten(-2)  # (B, N, E or E + 1)
        return x + waves[..., : x.shape[-1]].to(x.dtype)


class SinCos2D(Position):
    """Half of the channels encode the row, half the column; each half is sines, then cosines (He 2022)."""

    def __init__(self, config: PositionConfig) -> None:
        super().__init__(config)
        require(
            len(config.grid) == 2,
            'position "sincos2d" needs two axes; use "sinusoidal" for sequences.',
        )
        require(
            config.width % 4 == 0,
            f'position "sincos2d" needs a width that 4 divides, not {config.width}.',
        )

    def embed(self, x: Tensor, coords: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        coords = grid_coordinates(self.config.grid, x.device) if coords is None else coords
        frequency = frequencies(x.shape[-1] // 2, self.config.base, x.device)
        waves = torch.cat(sinusoid(coords, frequency), -1)  # (B, N, 2, E / 2)
        return x + waves.flatten(-2).to(x.dtype)  # (B, N, E)


class Rotary(Position):
    """Turns queries and keys so that scores depend on the offset only (Su 2021); on images, along the raster."""

    axes = 1

    def __init__(self, config: PositionConfig) -> None:
        super().__init__(config)
        require(
            config.rotated_width > 0 and config.rotated_width % (2 * self.axes) == 0,
            f"Rotary positions turn {config.rotated_width} of {config.head_width} channels a head, which "
            f"{2 * self.axes} must divide; change width, heads or the rotated fraction.",
        )
        require(
            len(config.grid) >= self.axes,
            'position "rotary2d" needs two axes; use "rotary" for sequences.',
        )

    def rotate(self, coords: Tensor) -> Rotation:
        """Coordinates (B or 1, N, A) -> angles for pairs of channels."""
        places = self.raster(coords)[..., None] if self.axes == 1 else coords  # (B, N, axes)
        frequency = frequencies(
            self.config.rotated_width // self.axes, self.config.base, coords.device
        )
        if self.config.scaling is not None:
            frequency = SCALINGS[self.config.scaling.kind](frequency, self.config.scaling)
        sin, cos = (
            wave.flatten(-2)[:, None] for wave in sinusoid(places, frequency)
        )  # (B, 1, N, R / 2)
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))  # (B, 1, N, R)


class Rotary2D(Rotary):
    """Half of the rotated channels turn with the row, half with the column (Heo 2024)."""

    axes = 2


class ALiBi(Position):
    """Scores fall linearly with distance, each head at its own slope (Press 2022); Euclidean distance on images."""

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """-slope x distance: (B or 1, H, N, M)."""
        offset = (queries[:, :, None] - keys[:, None]).float()  # (B, N, M, A)
        distance = (
            offset.abs()[..., 0] if offset.shape[-1] == 1 else offset.norm(dim=-1)
        )  # (B, N, M)
        return -self.slopes(queries.device)[:, None, None] * distance[:, None]  # (B, H, N, M)

    def slopes(self, device: torch.device) -> Tensor:
        """2^(-8 / H), 2^(-16 / H), ...; if H is no power of two, every other slope of the next one fills up: (H,)."""
        heads = self.config.heads
        floor = 2 ** int(math.log2(heads))
        powers = [8 * (i + 1) / floor for i in range(floor)] + [
            4 * (2 * i + 1) / floor for i in range(heads - floor)
        ]
        return torch.tensor([2.0**-power for power in powers], device=device)


class T5Bias(Position):
    """A learned number per head and distance bucket; far distances share buckets (Raffel 2020). One table per axis."""

    def __init__(self, config: PositionConfig) -> None:
        super().__init__(config)
        require(
            config.buckets >= 4 and config.buckets % 2 == 0,
            f"T5 needs an even number of buckets, not {config.buckets}.",
        )
        self.table = nn.Parameter(
            torch.randn(len(config.grid), config.buckets, config.heads) * 0.02
        )

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Numbers looked up by distance: (B or 1, H, N, M)."""
        buckets = self.bucket(keys[:, None] - queries[:, :, None])  # (B, N, M, A)
        found = [F.embedding(buckets[..., axis], table) for axis, table in enumerate(self.table)]
        return sum(found[1:], start=found[0]).movedim(-1, 1)  # (B, N, M, H) -> (B, H, N, M)

    def bucket(self, offset: Tensor) -> Tensor:
        """Number of the bucket of each key - query offset; half of them exact, the rest spaced by logarithm."""
        buckets = self.config.buckets if self.config.causal else self.config.buckets // 2
        side = torch.zeros_like(offset) if self.config.causal else (offset > 0).long() * buckets
        distance = (-offset).clamp(min=0) if self.config.causal else offset.abs()
        exact = buckets // 2
        growth = torch.log(distance.float().clamp(min=1) / exact) / math.log(
            self.config.max_distance / exact
        )
        far = (exact + growth * (buckets - exact)).long().clamp(max=buckets - 1)
        return side + torch.where(distance < exact, distance, far)


POSITIONS: dict[str, type[Position]] = {
    "none": Position,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "sincos2d": SinCos2D,
    "rotary": Rotary,
    "rotary2d": Rotary2D,
    "alibi": ALiBi,
    "t5": T5Bias,
}
