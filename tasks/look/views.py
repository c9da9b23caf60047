"""What a page shows: views of a few kinds, which hold numbers and labels only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """Attention weights of all layers and heads, one large at a time.

    Args:
        title: Above it.
        weights: (S, L, H, N, M), of S steps of a training, or S = 1.
        queries: N labels.
        keys: M labels.
        steps: S labels; empty if there is one step.
        image: The picture whose patches are the last queries and the last keys, uint8
            (C, height, width).
        grid: Rows and columns of its patches.
    """

    title: str
    weights: Tensor
    queries: Sequence[str]
    keys: Sequence[str]
    steps: Sequence[str] = ()
    image: Tensor | None = None
    grid: tuple[int, int] | None = None


@dataclass(frozen=True)
class Matrix:
    """Numbers (R, C) as colours, with labels; `cells` are texts to write into them.

    `diverging`: white is 0, and the sign is a colour. `value_name` is what the numbers are, and
    `limits` are the ends of the colours; None: the least and the largest number. With limits,
    numbers may be NaN, which is grey.
    """

    title: str
    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    row_name: str
    column_name: str
    cells: Sequence[Sequence[str]] = ()
    diverging: bool = False
    note: str = ""
    value_name: str = ""
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Curves:
    """Lines (name: values) over x."""

    title: str
    x: Sequence[float]
    lines: dict[str, Sequence[float]]
    x_name: str
    y_name: str
    note: str = ""


@dataclass(frozen=True)
class Tokens:
    """A text whose tokens are coloured by a number each; None: it has none."""

    title: str
    tokens: Sequence[str]
    values: Sequence[float | None]
    unit: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of texts and numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""


View = Heads | Matrix | Curves | Tokens | Table


@dataclass(frozen=True)
class Sample:
    """One input: the views of each tab by the tab's name."""

    name: str
    tabs: dict[str, list[View]] = field(default_factory=dict)
