"""The views of a page as figures for papers, SVG and PNG."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.utils.files import replacing
from tasks.look.views import Curves, Heads, Matrix, Table, Tokens, View
from tasks.tracking.report import plain

MAX_LABELS = 40  # of an axis, else it has numbers
TOKENS_PER_LINE = 20  # tokens or cells of a line of coloured text
MAX_TABLE_ROWS = 40
TILE = 64  # pixels of a small heat map, at least


def save_figures(tabs: Mapping[str, Sequence[View]], folder: Path) -> list[Path]:
    """Writes each view as TAB-TITLE.svg and .png; returns the .svg files."""
    written = []
    for tab, views in tabs.items():
        for view in views:
            stem = re.sub(r"\W+", "-", f"{tab} {view.title}".lower()).strip("-")
            save_figure(DRAW[type(view)](view), folder / stem)
            written.append(folder / f"{stem}.svg")
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


def set_labels(axis: Any, rows: Any, columns: Any) -> None:
    """Labels beside and below a heat map, if they are few."""
    if len(rows) <= MAX_LABELS:
        axis.set_yticks(range(len(rows)), [plain(label) for label in rows], fontsize=6)
    if len(columns) <= MAX_LABELS:
        rotation = 90 if max(map(len, columns)) > 2 else 0
        labels = [plain(label) for label in columns]
        axis.set_xticks(range(len(columns)), labels, rotation=rotation, fontsize=6)


def draw_heads(view: Heads) -> Any:
    """A heat map for each layer (rows) and head (columns), of the last step."""
    weights = view.weights[-1]  # (L, H, N, M)
    layers, heads = weights.shape[:2]
    side = 5.0 if layers * heads == 1 else max(1.0, min(2.5, 14 / heads))
    figure = new_figure(side * heads + 0.5, side * layers + 0.6)
    panels = figure.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            panel = panels[layer, head]
            pixels = weights[layer, head].sqrt().numpy()
            panel.imshow(pixels, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            if layers * heads > 1:
                panel.set_title(f"layer {layer}, head {head}", fontsize=6, pad=2)
    if layers * heads == 1:
        set_labels(panels[0, 0], view.queries, view.keys)
    else:
        set_labels(panels[-1, 0], view.queries, view.keys)
    figure.supxlabel("keys", fontsize=8)
    figure.supylabel("queries", fontsize=8)
    figure.suptitle(f"{plain(view.title)}: colors show the root of the weight", fontsize=8)
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
    """A heat map with numbers or texts in its cells, if they are few."""
    rows, columns = view.values.shape
    wide = 0.75 if view.cells else 0.4
    figure = new_figure(min(16, wide * columns + 2), min(12, 0.32 * rows + 1.2))
    axis = figure.subplots()
    values = view.values.float().numpy()
    largest = abs(values).max()
    limits = {"vmin": -largest, "vmax": largest} if view.diverging else {}
    cmap = "RdBu" if view.diverging else "Blues"
    heat = axis.imshow(values, cmap=cmap, aspect="auto", interpolation="nearest", **limits)
    figure.colorbar(heat, ax=axis)
    set_labels(axis, view.rows, view.columns)
    if rows * columns <= 400 and columns <= MAX_LABELS:
        middle = (heat.norm.vmin + heat.norm.vmax) / 2
        for i in range(rows):
            for j in range(columns):
                text = plain(view.cells[i][j]) if view.cells else f"{values[i, j]:.2g}"
                dark = values[i, j] > middle and not view.diverging
                color = "white" if dark else "black"
                axis.text(j, i, text, ha="center", va="center", fontsize=5, color=color)
    axis.set(xlabel=view.column_name, ylabel=view.row_name)
    axis.set_title(plain(view.title), fontsize=9)
    return figure


def draw_lines(view: Curves) -> Any:
    figure = new_figure(6, 3.6)
    axis = figure.subplots()
    for name, values in view.lines.items():
        axis.plot(view.x, values, label=plain(name), linewidth=1)
    axis.set(xlabel=view.x_name, ylabel=view.y_name)
    axis.set_title(plain(view.title), fontsize=9)
    axis.legend(fontsize=6)
    return figure


def draw_tokens(view: Tokens) -> Any:
    """The tokens in lines, on a colour each."""
    import matplotlib

    lines = -(-len(view.tokens) // TOKENS_PER_LINE)
    figure = new_figure(12, 0.3 * lines + 0.6)
    axis = figure.subplots()
    largest = max((value for value in view.values if value is not None), default=1) or 1
    cmap = matplotlib.colormaps["Reds"]
    for index, (token, value) in enumerate(zip(view.tokens, view.values, strict=True)):
        row, column = divmod(index, TOKENS_PER_LINE)
        box = {"facecolor": cmap(0.7 * (value or 0) / largest), "edgecolor": "none", "pad": 1.5}
        axis.text(column, -row, plain(token), fontsize=7, ha="center", bbox=box)
    axis.set(xlim=(-1, TOKENS_PER_LINE), ylim=(-lines, 1))
    axis.set_axis_off()
    axis.set_title(f"{plain(view.title)}, darkest {largest:.3g} {view.unit}", fontsize=9)
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
    axis.set_title(plain(view.title), fontsize=9)
    return figure


DRAW: dict[type, Callable[[Any], Any]] = {
    Heads: draw_heads,
    Matrix: draw_matrix,
    Curves: draw_lines,
    Tokens: draw_tokens,
    Table: draw_table,
}
