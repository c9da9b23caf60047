"""Position encodings: each overrides one of three hooks: `embed`, `rotate`, `bias`.

Positions are integers (B or 1, N, A): A = 1 axis for text, 2 axes (row, column) for images. They
are arguments, so that packed documents can restart at 0 and cached ones can be continued.
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import ATTENTIONS
from modules.config import StackConfig, default, require, variant
from modules.masks import is_cheap_to_read
from modules.rotary_scaling import RotaryScaling
from modules.rotation import Rotation
from modules.schema import check_value


def grid_positions(grid: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """Positions (1, N, A) of all points of a grid, last axis fastest."""
    axes = [torch.arange(size, device=device) for size in grid]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)  # (*grid, A)
    return points.flatten(0, -2)[None]  # (1, N, A)


def resize_grid(table: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Interpolates a table of positions: (*old grid, E) -> (*grid, E), one or two axes."""
    if tuple(table.shape[:-1]) == tuple(grid):
        return table
    require(
        table.dim() == len(grid) + 1,
        f"A table over {table.dim() - 1} axes cannot be resized to grid {grid}.",
    )
    image = table.movedim(-1, 0)[None].float()  # (1, E, *old grid)
    if len(grid) == 1:
        image = F.interpolate(image, size=grid, mode="linear", align_corners=False)
    else:
        image = F.interpolate(image, size=grid, mode="bicubic", antialias=True, align_corners=False)
    return image[0].movedim(0, -1).to(table.dtype)  # (1, E, *grid) -> (*grid, E)


def checked_base(base: float) -> float:
    """Returns the base; raises `ValueError` unless it is above 0."""
    require(base > 0, f"base is {base}; give a number above 0.")
    return base


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Angles per position, base^(-2i / width): (ceil(width / 2),).

    Rounded as in Hugging Face and most libraries: at large positions, the last bit of a
    frequency changes the scores.
    """
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    return 1 / base**exponents


def sin_cos(position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """sin and cos of position x frequency: (..., N), (K,) -> twice (..., N, K)."""
    angle = position[..., None].float() * frequency
    return angle.sin(), angle.cos()


class Position(nn.Module):
    """No positions: the base of all encodings.

    Options of an encoding are further arguments of its class, with a type and a default; a model's
    `position_options` are passed to them.

    Args:
        stack: The blocks: width E, number H and size D of heads, causal or not.
        grid: Number of positions along each axis: (length,) for text, (rows, columns) for images.
    """

    dims: ClassVar[tuple[int, ...]] = (1, 2)  # supported numbers of axes
    is_rotary: ClassVar[bool] = False  # rotates queries and keys: for dot products only

    def __init__(self, stack: StackConfig, grid: tuple[int, ...]) -> None:
        super().__init__()
        self.grid = grid

    def check_length(self, length: int) -> None:
        """Raises `ValueError` if so many tokens have no positions."""

    def flat_index(self, positions: Tensor) -> Tensor:
        """One number per position, row by row: (B or 1, N, A) -> (B or 1, N)."""
        index = positions[..., 0]
        for axis, size in enumerate(self.grid[1:], start=1):
            index = index * size + positions[..., axis]
        return index

    def embed(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens (B, N, E) with positions added; None: the grid from its start, in order."""
        return x

    def rotate(self, positions: Tensor) -> Rotation | None:
        """How to rotate queries and keys at `positions`; None: not at all."""
        return None

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Added to the scores, (B or 1, H, N, M), for positions (B or 1, N or M, A)."""
        return None


class Learned(Position):
    """A learned vector per position, added to the tokens (Gehring 2017, Dosovitskiy 2021)."""

    def __init__(self, stack: StackConfig, grid: tuple[int, ...]) -> None:
        super().__init__(stack, grid)
        self.table = nn.Parameter(torch.randn(*grid, stack.width) * 0.02)

    def check_length(self, length: int) -> None:
        """Raises `ValueError` if so many tokens have no positions."""
        count = math.prod(self.grid)
        require(
            length <= count,
            f"{length} tokens are more than the {count} learned positions; shorten the sequence.",
        )

    def embed(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        table = self.table.flatten(0, -2)  # (*grid, E) -> (positions, E)
        if positions is not None:
            index = self.flat_index(positions)  # (B or 1, N)
            if index.numel() and is_cheap_to_read(index):
                self.check_length(int(index.max()) + 1)
            return x + F.embedding(index, table)
        self.check_length(x.shape[1])
        return x + table[: x.shape[1]]


class Sinusoidal(Position):
    """sin and cos of the position in turn, added to the tokens, for any length (Vaswani 2017).

    Channel 2i is sin(n / base^(2i / E)) at position n, channel 2i + 1 the cosine of the same.
    """

    def __init__(self, stack: StackConfig, grid: tuple[int, ...], base: float = 10000.0) -> None:
        super().__init__(stack, grid)
        self.base = checked_base(base)

    def embed(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if positions is None:
            index = torch.arange(x.shape[1], device=x.device)[None]  # (1, N)
        else:
            index = self.flat_index(positions)
        frequency = frequencies(x.shape[-1], self.base, x.device)
        waves = torch.stack(sin_cos(index, frequency), -1).flatten(-2)  # (B, N, E or E + 1)
        return x + waves[..., : x.shape[-1]].to(x.dtype)


class SinCos2D(Position):
    """The first half of the channels encodes the row, the second the column (He 2022).

    Each has sines, then cosines. The code of He (2022) has the column first.
    Frequencies are base^(-2i / (E / 2)), for i from 0 to E / 4 - 1.
    """

    dims = (2,)

    def __init__(self, stack: StackConfig, grid: tuple[int, ...], base: float = 10000.0) -> None:
        super().__init__(stack, grid)
        require(
            stack.width % 4 == 0,
            f'position "sincos2d" needs a width that 4 divides, not {stack.width}.',
        )
        self.base = checked_base(base)

    def embed(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if positions is None:
            positions = grid_positions(self.grid, x.device)
        frequency = frequencies(x.shape[-1] // 2, self.base, x.device)
        waves = torch.cat(sin_cos(positions, frequency), -1)  # (B, N, 2, E / 2)
        return x + waves.flatten(-2).to(x.dtype)  # (B, N, E)


class Rotary(Position):
    """Rotates queries and keys so that scores depend on the offset only (Su 2021).

    Images row by row.

    Args:
        base: Base of the frequencies base^(-2i / S), for i from 0 to S / 2 - 1: S = R / `axes` of
            the R channels of a head that are rotated belong to one axis; None: `default_base`.
        fraction: Part of each head's channels that is rotated, above 0 up to 1.
        scaling: Lower frequencies, for longer sequences; None: as they are.

    >>> position = Rotary(StackConfig(width=16, depth=1, heads=2), (5,))
    >>> rotation = position.rotate(torch.arange(5)[None, :, None])  # positions (1, N, 1)
    >>> queries = torch.ones(1, 2, 5, 8)  # (B, H, N, D)
    >>> rotation(queries).shape  # or MultiHeadAttention(16, 2)(x, rotary=rotation)
    torch.Size([1, 2, 5, 8])
    """

    is_rotary = True
    axes: ClassVar[int] = 1  # between which channels are split
    default_base: ClassVar[float] = 10000.0

    def __init__(
        self,
        stack: StackConfig,
        grid: tuple[int, ...],
        base: float | None = None,
        fraction: float = 1.0,
        scaling: RotaryScaling | None = None,
    ) -> None:
        super().__init__(stack, grid)
        require(0 < fraction <= 1, f"The rotated fraction is {fraction}; give a number up to 1.")
        self.base = checked_base(default(base, self.default_base))
        self.scaling = scaling
        self.rotary_dim = round(stack.resolved.head_dim * fraction)  # R, channels that are rotated
        require(
            self.rotary_dim > 0 and self.rotary_dim % (2 * self.axes) == 0,
            f"Rotary positions rotate {self.rotary_dim} of {stack.resolved.head_dim} channels a "
            f"head, which {2 * self.axes} must divide; change width, heads or the fraction.",
        )

    def rotate(self, positions: Tensor) -> Rotation:
        """Positions (B or 1, N, A) -> angles for pairs of channels.

        Raises `ValueError` if positions have another shape.
        """
        require(
            positions.dim() == 3 and positions.shape[2] == len(self.grid),
            f"positions have shape {tuple(positions.shape)}, but need (B or 1, N, "
            f"{len(self.grid)}), as `grid_positions` has for a grid.",
        )
        if self.axes == 1:
            positions = self.flat_index(positions)[..., None]  # (B, N, 1)
        frequency = frequencies(self.rotary_dim // self.axes, self.base, positions.device)
        if self.scaling is not None:
            frequency = self.scaling.scale(frequency)
        sin, cos = sin_cos(positions, frequency)  # (B, N, axes, R / 2 / axes)
        sin = sin.flatten(-2)[:, None]  # (B, 1, N, R / 2)
        cos = cos.flatten(-2)[:, None]  # (B, 1, N, R / 2)
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))  # (B, 1, N, R)


class Rotary2D(Rotary):
    """Half of the rotated channels turn with the row, half with the column (Heo 2024)."""

    dims = (2,)
    axes = 2
    default_base = 100.0


class ALiBi(Position):
    """Scores fall linearly with the (Euclidean) distance, at a slope per head (Press 2022)."""

    def __init__(self, stack: StackConfig, grid: tuple[int, ...]) -> None:
        super().__init__(stack, grid)
        self.heads = stack.heads

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """-slope x distance: (B or 1, H, N, M)."""
        offset = (queries[:, :, None] - keys[:, None]).float()  # (B, N, M, A)
        distance = offset.abs()[..., 0] if offset.shape[-1] == 1 else offset.norm(dim=-1)
        return -self.slopes(queries.device)[:, None, None] * distance[:, None]  # (B, H, N, M)

    def slopes(self, device: torch.device) -> Tensor:
        """2^(-8 i / n) for i = 1 ... n, the largest power of two up to H: (H,).

        Further heads take every other slope of 2 n.
        """
        floor = 2 ** int(math.log2(self.heads))
        powers = [8 * (i + 1) / floor for i in range(floor)]
        powers += [4 * (2 * i + 1) / floor for i in range(self.heads - floor)]
        return torch.tensor([2.0**-power for power in powers], device=device)


class T5Bias(Position):
    """A learned number per head and distance bucket, one table per axis (Raffel 2020).

    With `stack.causal`, all buckets are for earlier tokens.

    Args:
        buckets: Number of buckets, even, at least 4; far distances share one.
        max_distance: Distance, in tokens, at which the logarithmic buckets end; the last one begins
            before it, at 91 of 128 tokens with 32 buckets (causal: 113).
    """

    def __init__(
        self, stack: StackConfig, grid: tuple[int, ...], buckets: int = 32, max_distance: int = 128
    ) -> None:
        super().__init__(stack, grid)
        require(
            buckets >= 4 and buckets % 2 == 0,
            f"T5 needs an even number of buckets, at least 4, not {buckets}.",
        )
        require(
            max_distance > buckets // 2,
            f"T5 needs a max_distance above half of its {buckets} buckets, not {max_distance}.",
        )
        self.causal = stack.causal
        self.max_distance = max_distance
        self.table = nn.Parameter(torch.randn(len(grid), buckets, stack.heads) * 0.02)

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Numbers looked up by distance: (B or 1, H, N, M)."""
        buckets = self.bucket(keys[:, None] - queries[:, :, None])  # (B, N, M, A)
        total = F.embedding(buckets[..., 0], self.table[0])
        for axis, table in enumerate(self.table[1:], start=1):
            total = total + F.embedding(buckets[..., axis], table)
        return total.movedim(-1, 1)  # (B, N, M, H) -> (B, H, N, M)

    def bucket(self, offset: Tensor) -> Tensor:
        """Bucket of each key - query offset: half hold one distance each, the rest grow by log."""
        buckets = self.table.shape[1]
        first: Tensor | int = 0
        if self.causal:
            distance = (-offset).clamp(min=0)
        else:
            buckets //= 2
            first = (offset > 0) * buckets
            distance = offset.abs()
        exact = buckets // 2
        ratio = distance.float().clamp(min=1) / exact
        far = exact + ratio.log() / math.log(self.max_distance / exact) * (buckets - exact)
        return first + torch.where(distance < exact, distance, far.long().clamp(max=buckets - 1))


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


def _inputs(dims: Iterable[int]) -> str:
    """Inputs with these numbers of axes: "sequences (1 axis)", "images (2 axes)"."""
    names = {1: "sequences (1 axis)", 2: "images (2 axes)"}
    return " or ".join(names.get(axes, f"inputs of {axes} axes") for axes in dims)


def build_position(
    name: str, options: Mapping[str, Any], stack: StackConfig, grid: tuple[int, ...]
) -> Position:
    """The encoding `POSITIONS[name]` with these options; those left out have their defaults.

    Raises `ValueError` if there is no such encoding or option, or it does not fit blocks or grid.
    """
    fitting = {other: kind for other, kind in POSITIONS.items() if len(grid) in kind.dims}
    if name in POSITIONS and name not in fitting:
        raise ValueError(
            f'position "{name}" is for {_inputs(POSITIONS[name].dims)}, but this model is for '
            f"{_inputs([len(grid)])}; choose from {', '.join(fitting)}."
        )
    kind = variant("position", name, fitting)
    require(
        not kind.is_rotary or variant("attention", stack.attention, ATTENTIONS).takes_rotary,
        f'position "{name}" works on dot products; use attention "dot" or another position.',
    )
    is_added = kind.rotate is Position.rotate and kind.bias is Position.bias
    require(
        is_added or stack.order != "mixer",
        f'position "{name}" acts in attention, which order "mixer" does not have; choose "none" '
        'or "learned".',
    )
    parameters = inspect.signature(kind, eval_str=True).parameters
    known = dict(list(parameters.items())[2:])  # after stack and grid
    for option in options:
        require(
            option in known,
            f'position_options: position "{name}" has no option "{option}"; '
            f"its options are: {', '.join(known) or 'none'}.",
        )
    values = {
        option: check_value(known[option].annotation, value, f"position_options.{option}")
        for option, value in options.items()
    }
    return kind(stack, grid, **values)


def check_position(
    name: str, options: Mapping[str, Any], stack: StackConfig, grid: tuple[int, ...]
) -> None:
    """Raises `ValueError` like `build_position`, but needs no memory and no random numbers."""
    with torch.device("meta"):
        build_position(name, options, stack, grid)
