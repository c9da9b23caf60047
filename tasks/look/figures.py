"""The views of a page as figures for papers, SVG and PNG."""

import re
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.utils.files import replacing
from tasks.look.inspector import shortened
from tasks.look.views import Curves, Heads, Matrix, Table, Tokens, View
from tasks.tracking.report import plain

LABELS_PER_INCH = 11
PLOT_FRACTION = 0.75  # of a figure; the rest is margins and the colour bar
PANEL_FRACTION = 0.65  # of the side of a panel; the rest is the space around it
LABEL_LENGTH = 10  # of a cell or beside it
MAX_LINE_TOKENS = 40  # queries or keys of attention that is drawn as lines
MIN_LINE_WEIGHT = 0.05  # smaller weights have no line, as on the page
TOKENS_PER_LINE = 20  # cells of a line of texts
LETTERS_PER_LINE = 160  # of coloured tokens
MONOSPACE_WIDTH = 0.66  # of a letter in whole pixels, over the size of the font
MAX_TABLE_ROWS = 40
TILE = 64  # pixels of a small heat map, at least


def save_figures(tabs: Mapping[str, Sequence[View]], folder: Path, prefix: str = "") -> list[Path]:
    """Writes each view as TAB-TITLE.svg and .png after a prefix; returns the .svg files.

    Attention is also written over the picture, TAB-TITLE-picture, or as lines between tokens,
    TAB-TITLE-lines, if these are few.
    """
    written = []
    for tab, views in tabs.items():
        for view in views:
            stem = prefix + re.sub(r"\W+", "-", f"{tab} {view.title}".lower()).strip("-")
            figures = {stem: DRAW[type(view)](view)}
            if isinstance(view, Heads) and view.image is not None:
                figures[f"{stem}-picture"] = draw_pictures(view)
            elif isinstance(view, Heads) and max(view.weights.shape[-2:]) <= MAX_LINE_TOKENS:
                figures[f"{stem}-lines"] = draw_token_lines(view)
            for name, figure in figures.items():
                save_figure(figure, folder / name)
                written.append(folder / f"{name}.svg")
    return written


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as PATH.png and PATH.svg; characters that the font lacks become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        for format in ("png", "svg"):
            with replacing(path.with_name(f"{path.name}.{format}")) as partial:
                figure.savefig(partial, format=format, dpi=110, bbox_inches="tight")


def new_figure(width: float, height: float) -> Any:
    """A figure of a size in inches."""
    import matplotlib.figure

    return matplotlib.figure.Figure(figsize=(width, height))


def brief(label: str) -> str:
    """The beginning of a label."""
    label = plain(label)
    return label if len(label) <= LABEL_LENGTH else f"{label[: LABEL_LENGTH - 1]}…"


def set_labels(axis: Any, rows: Any, columns: Any, height: float, width: float) -> None:
    """Labels beside and below a heat map of a size in inches; if there are many, of every n-th."""
    down = -(-len(rows) // int(height * LABELS_PER_INCH))
    across = -(-len(columns) // int(width * LABELS_PER_INCH))
    axis.set_yticks(range(0, len(rows), down), [*map(brief, rows[::down])], fontsize=6)
    rotation = 90 if max(map(len, columns)) > 2 else 0
    labels = [*map(brief, columns[::across])]
    axis.set_xticks(range(0, len(columns), across), labels, rotation=rotation, fontsize=6)


def title_of(view: Any) -> str:
    """The title, and the note below it."""
    return "\n".join([plain(view.title), *textwrap.wrap(plain(view.note), 90)])


def panels_of(view: Heads) -> tuple[Any, list[Any], float]:
    """A figure, an axis for each layer (rows) and head (columns), and their side in inches."""
    layers, heads = view.weights.shape[1:3]
    side = 5.0 if layers * heads == 1 else max(1.0, min(2.5, 14 / heads))
    figure = new_figure(side * heads + 1.2, side * layers + 0.6)
    panels = figure.subplots(layers, heads, squeeze=False)
    for layer, head in product(range(layers), range(heads)):
        panel = panels[layer, head]
        panel.set_xticks([])
        panel.set_yticks([])
        if layers * heads > 1:
            panel.set_title(f"layer {layer}, head {head}", fontsize=6, pad=2)
    return figure, [*panels.flat], PANEL_FRACTION * side


def draw_heads(view: Heads) -> Any:
    """A heat map for each layer (rows) and head (columns), of the last step."""
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=1)  # keeps small weights apart
    figure, panels, side = panels_of(view)
    for panel, weights in zip(panels, view.weights[-1].flatten(0, 1), strict=True):  # (N, M)
        heat = panel.imshow(weights.numpy(), cmap="Blues", norm=norm, interpolation="nearest")
    set_labels(panels[-view.weights.shape[2]], view.queries, view.keys, side, side)
    figure.colorbar(heat, ax=panels, label="weight", fraction=0.05)
    figure.supxlabel("keys", fontsize=8)
    figure.supylabel("queries", fontsize=8)
    figure.suptitle(plain(view.title), fontsize=8)
    return figure


def draw_pictures(view: Heads) -> Any:
    """The picture with the attention to its patches, for each layer and head, of the last step."""
    assert view.image is not None and view.grid is not None
    rows, columns = view.grid
    count = rows * columns
    first = view.weights.shape[-2] - count  # query that is a patch
    height, width = view.image.shape[1:]
    image = view.image.permute(1, 2, 0).numpy()  # (C, H, W) -> (H, W, C)
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    figure, panels, _ = panels_of(view)
    for panel, weights in zip(panels, view.weights[-1].flatten(0, 1), strict=True):  # (N, M)
        weights = weights[0] if first else weights.mean(0)  # (M,)
        heat = weights[-count:].reshape(rows, columns)
        panel.imshow(image, cmap="gray", vmin=0, vmax=255, extent=extent)
        panel.imshow(heat.numpy(), cmap="inferno", alpha=0.6, extent=extent)
    query = f"of {view.queries[0]}" if first else "mean over all queries"
    title = f"{plain(view.title)} to the picture, {query}; bright: more, in each on its own scale"
    figure.suptitle(title, fontsize=8)
    return figure


def draw_token_lines(view: Heads) -> Any:
    """A line from query (left) to key (right) for each weight, wider and darker if it is larger.

    A panel for each layer and head, of the last step.
    """
    from matplotlib.collections import LineCollection

    figure, panels, side = panels_of(view)
    queries, keys = view.weights.shape[-2:]
    rows = max(queries, keys)
    for panel, weights in zip(panels, view.weights[-1].flatten(0, 1), strict=True):  # (N, M)
        drawn = (weights >= MIN_LINE_WEIGHT).nonzero().tolist()
        shown = [weights[query, key].item() for query, key in drawn]
        ends = [((0, query), (1, key)) for query, key in drawn]
        widths = [0.2 + 1.5 * weight for weight in shown]
        if drawn:  # `alpha` must not be empty
            lines = LineCollection(ends, linewidths=widths, colors="tab:blue", alpha=shown)
            panel.add_collection(lines)
        panel.set(xlim=(-0.02, 1.02), ylim=(rows - 0.5, -0.5))
    right = panels[-1].twinx()
    right.set(ylim=(rows - 0.5, -0.5), xticks=[])
    for axis, labels in ((panels[-view.weights.shape[2]], view.queries), (right, view.keys)):
        step = -(-len(labels) // int(side * LABELS_PER_INCH))
        axis.set_yticks(range(0, len(labels), step), [*map(brief, labels[::step])], fontsize=6)
    figure.suptitle(f"{plain(view.title)}: queries left, keys right", fontsize=8)
    return figure


def draw_tiles(weights: Tensor) -> Tensor:
    """Heat maps without labels: layers down, heads across, as in `draw_heads`, but quick.

    (L, H, N, M) -> uint8 (3, height, width).
    """
    import matplotlib

    queries, keys = weights.shape[-2:]
    colors = torch.tensor(matplotlib.colormaps["Blues"](range(256)))[:, :3]  # (256, 3)
    shades = weights.sqrt().clamp(0, 1).mul(255).round().int()
    tiles = colors.float()[shades].permute(4, 0, 1, 2, 3)  # (L, H, N, M, 3) -> (3, L, H, N, M)
    size = -(-TILE // max(queries, keys))
    tiles = tiles.repeat_interleave(size, 3).repeat_interleave(size, 4)
    tiles = F.pad(tiles, (0, 2, 0, 2), value=0.5)  # lines between them
    tiles = tiles.permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)  # (3, L height, H width)
    return tiles.mul(255).round().to(torch.uint8)


def draw_matrix(view: Matrix) -> Any:
    """A heat map with numbers or texts in its cells, if they are few; long texts in lines."""
    count = view.values.shape[1]
    length = min(TOKENS_PER_LINE, count) if view.cells else count
    starts = range(0, count, length)
    wide = 0.75 if view.cells else 0.4
    width = min(16, wide * min(count, length) + 2)
    height = min(12, 0.32 * len(view.values) + 1.2)
    figure = new_figure(width, height * len(starts))
    axes = figure.subplots(len(starts), squeeze=False)[:, 0]
    figure.subplots_adjust(hspace=0.8)
    low, high = view.limits or (float(view.values.min()), float(view.values.max()))
    if view.diverging:
        high = max(-low, high)
        low = -high
    for axis, start in zip(axes, starts, strict=True):
        part = slice(start, start + length)
        cells = [row[part] for row in view.cells]
        piece = replace(view, values=view.values[:, part], columns=view.columns[part], cells=cells)
        heat = draw_cells(axis, piece, low, high)
        sides = (PLOT_FRACTION * height, PLOT_FRACTION * width)
        set_labels(axis, piece.rows, piece.columns, *sides)
        axis.set(xlabel=view.column_name, ylabel=view.row_name, xlim=(-0.5, length - 0.5))
        axis.set_facecolor("lightgrey")  # right of the last column, and of NaN
    figure.colorbar(heat, ax=[*axes]).set_label(textwrap.fill(view.value_name, 24), fontsize=7)
    axes[0].set_title(title_of(view), fontsize=7)
    return figure


def draw_cells(axis: Any, view: Matrix, low: float, high: float) -> Any:
    """The heat map of a matrix, with colours from `low` to `high`."""
    rows, columns = view.values.shape
    values = view.values.float().numpy()
    cmap = "RdBu" if view.diverging else "Blues"
    limits = {"vmin": low, "vmax": high}
    heat = axis.imshow(values, cmap=cmap, aspect="auto", interpolation="nearest", **limits)
    if not view.cells and rows * columns > 400:
        return heat
    for i in range(rows):
        for j in range(columns):
            number = "" if np.isnan(values[i, j]) else f"{values[i, j]:.3g}"
            text = brief(view.cells[i][j]) if view.cells else number
            dark = values[i, j] > (low + high) / 2 and not view.diverging
            color = "white" if dark else "black"
            axis.text(j, i, text, ha="center", va="center", fontsize=5, color=color)
    return heat


def draw_lines(view: Curves) -> Any:
    figure = new_figure(6, 3.6)
    axis = figure.subplots()
    for name, values in view.lines.items():
        axis.plot(view.x, values, label=plain(name), linewidth=1)
    axis.set(xlabel=view.x_name, ylabel=view.y_name)
    axis.set_title(title_of(view), fontsize=9)
    axis.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def draw_tokens(view: Tokens) -> Any:
    """The tokens in lines, on a colour each."""
    import matplotlib

    largest = max((value for value in view.values if value is not None), default=1) or 1
    places = []  # x and y of each token
    x = 0
    y = 0
    labels = [shortened(plain(token)) for token in view.tokens]
    for label in labels:
        if x + len(label) > LETTERS_PER_LINE:
            x = 0
            y += 1
        places.append((x, y))
        x += len(label) + 1
    # One unit of x is one letter, so that no token covers the next.
    figure = new_figure(LETTERS_PER_LINE * 7 * MONOSPACE_WIDTH / 72, 0.25 * (y + 2))
    axis = figure.add_axes((0, 0, 1, 1))
    cmap = matplotlib.colormaps["Reds"]
    for label, value, (x, y) in zip(labels, view.values, places, strict=True):
        box = {"facecolor": cmap(0.7 * (value or 0) / largest), "edgecolor": "none", "pad": 1.5}
        axis.text(x, -y, label, fontsize=7, family="monospace", bbox=box)
    axis.set(xlim=(0, LETTERS_PER_LINE), ylim=(-y - 1, 1))
    axis.set_axis_off()
    axis.set_title(f"{title_of(view)}\ndarkest {largest:.3g} {view.unit}", fontsize=9)
    return figure


def draw_table(view: Table) -> Any:
    rows = [*view.rows][:MAX_TABLE_ROWS]
    figure = new_figure(2.2 * len(view.columns), 0.24 * len(rows) + 0.8)
    axis = figure.subplots()
    axis.set_axis_off()
    cells = [
        [f"{cell:.4g}" if isinstance(cell, float) else plain(str(cell)) for cell in row]
        for row in rows
    ]
    table = axis.table(cells or [[""] * len(view.columns)], colLabels=[*view.columns], loc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(6)
    table.auto_set_column_width([*range(len(view.columns))])
    title = title_of(view)
    if len(view.rows) > len(rows):
        title += f"\nthe first {len(rows)} of {len(view.rows):,} rows"
    axis.set_title(title, fontsize=9)
    return figure


DRAW: dict[type, Callable[[Any], Any]] = {
    Heads: draw_heads,
    Matrix: draw_matrix,
    Curves: draw_lines,
    Tokens: draw_tokens,
    Table: draw_table,
}
