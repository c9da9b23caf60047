"""Pictures of generated images: grids of small images, enlarged so that pixels can be seen."""

import math
from collections.abc import Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from tasks.tracking.media import Picture, render_picture
from tasks.tracking.report import plain, write_png

SHOWN = 96  # pixels of a small image in a grid, at least
UNKNOWN = (60, 90, 130)  # colour between images, and in place of pixels that are not known


def canvas(*shape: int) -> Tensor:
    """RGB images (..., 3, H, W) of the colour `UNKNOWN`."""
    colour = torch.tensor(UNKNOWN, dtype=torch.uint8)[:, None, None]  # (3, 1, 1)
    return colour.expand(*shape).clone()


def tile(images: Tensor) -> Picture:
    """Images in rows, enlarged: uint8 (R, N, 3, S, S) -> (3, H, W)."""
    rows, columns, _, side, _ = images.shape
    scale = max(1, -(-SHOWN // side))
    images = images.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    side *= scale
    gap = max(2, side // 16)
    step = side + gap
    grid = canvas(3, rows * step + gap, columns * step + gap)
    for row in range(rows):
        for column in range(columns):
            top = row * step + gap
            left = column * step + gap
            grid[:, top : top + side, left : left + side] = images[row, column]
    return grid


def sample_grid(images: Tensor) -> Picture:
    """Images (B, C, S, S) in a square grid."""
    columns = math.ceil(len(images) ** 0.5)
    rows = -(-len(images) // columns)
    cells = canvas(rows * columns, 3, *images.shape[-2:])
    cells[: len(images)] = images
    return tile(cells.unflatten(0, (rows, columns)))  # (R N, 3, S, S) -> (R, N, 3, S, S)


def completion_grid(originals: Tensor, completed: Tensor) -> Picture:
    """A row for each image: its upper half, the completions, the original.

    Args:
        originals: uint8 (B, C, S, S), in the colours of the palette.
        completed: uint8 (B, K, C, S, S).
    """
    count, _, side, _ = originals.shape
    given = canvas(count, 3, side, side)
    given[:, :, : side // 2] = originals[:, :, : side // 2]
    rows = [given[:, None], completed.expand(-1, -1, 3, -1, -1)]  # (B, 1 or K, 3, S, S)
    rows.append(originals.expand(-1, 3, -1, -1)[:, None])
    grid = tile(torch.cat(rows, 1))
    titles = ["given", *["completed"] * completed.shape[1], "original"]
    return render_picture(lambda file: draw_columns(grid, titles, file))


def draw_columns(grid: Picture, titles: Sequence[str], file: BinaryIO) -> None:
    """Writes a grid as PNG, with a title above each of its columns."""
    import matplotlib.figure

    _, height, width = grid.shape
    margin = 24  # pixels above the grid
    inches = (width / 100, (height + margin) / 100)
    figure = matplotlib.figure.Figure(figsize=inches, dpi=100)
    axis = figure.add_axes((0, 0, 1, height / (height + margin)))
    axis.set_axis_off()
    axis.imshow(grid.permute(1, 2, 0).numpy(), aspect="auto")  # (3, H, W) -> (H, W, 3)
    for number, title in enumerate(titles):
        middle = (number + 0.5) * width / len(titles)
        axis.text(middle, -margin / 4, plain(title), fontsize=8, ha="center", va="bottom")
    write_png(figure, file)
