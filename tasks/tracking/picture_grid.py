"""Pictures side by side: a column for each image, a row for each way to show it."""

from collections.abc import Mapping, Sequence
from typing import BinaryIO

from torch import Tensor

from tasks.tracking.report import plain, write_png


def draw_grid(
    rows: Mapping[str, Tensor],
    titles: Sequence[str],
    file: BinaryIO,
    heat: Tensor | None = None,
) -> None:
    """Writes a PNG.

    Args:
        rows: Images of each row, uint8 (B, C, H, W), by its name.
        titles: Of the B columns.
        file: Where to write.
        heat: Laid over the images of the last row, (B, rows, columns); None: nothing.
    """
    import matplotlib.figure

    count, _, height, width = next(iter(rows.values())).shape
    column = 1.05 * width
    row = 1.05 * height
    inches = (1.6 * count + 0.8, 1.6 * len(rows) + 1)
    figure = matplotlib.figure.Figure(figsize=inches, dpi=100)
    # One axis for all: each axis of its own takes longer than the pictures.
    bottom = 0.55 / inches[1]
    area = (0.7 / inches[0], bottom, 1 - 0.8 / inches[0], 1 - bottom - 0.42 / inches[1])
    axis = figure.add_axes(area)
    tops = [row * number - 0.5 for number in range(len(rows))]  # pixels have their centres at
    for number in range(count):  # whole numbers
        left = column * number - 0.5
        for top, images in zip(tops, rows.values(), strict=True):
            extent = (left, left + width, top + height, top)
            pixels = images[number].permute(1, 2, 0).cpu().numpy()  # (C, H, W) -> (H, W, C)
            axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, extent=extent)
        if heat is not None:
            weights = heat[number].cpu().numpy()
            axis.imshow(weights, cmap="inferno", alpha=0.6, extent=extent)
        axis.text(
            left + width / 2, -0.03 * height - 0.5, plain(titles[number]), fontsize=7, ha="center"
        )
    axis.set(
        xlim=(-0.5, column * (count - 1) + width - 0.5),
        ylim=(tops[-1] + height, -0.5),
    )
    for top, name in zip(tops, rows, strict=True):
        middle = top + height / 2
        axis.text(-0.16 * width, middle, name, fontsize=7, rotation=90, ha="right", va="center")
    figure.supxlabel("x (pixels)", fontsize=8)
    figure.supylabel("y (pixels)", fontsize=8)
    across = [0, width // 2]  # the last would touch the first of the next column
    places = [column * number + x for number in range(count) for x in across]
    axis.set_xticks(places, [*map(str, across)] * count, fontsize=6)
    down = [0, height // 2, height - 1]
    places = [row * number + y for number in range(len(rows)) for y in down]
    axis.set_yticks(places, [*map(str, down)] * len(rows), fontsize=6)
    axis.spines[:].set_visible(False)
    write_png(figure, file)
