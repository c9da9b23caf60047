"""What a run prints at its end, and its two pictures."""

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from datamodules.utils.files import replacing


def table(title: str, rows: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console(width=None if sys.stdout.isatty() else 120).print(grid)


def skipped_samples(datamodule: Any) -> dict[str, int]:
    """How many bad files, texts or pairs were skipped; nothing if none were."""
    skipped = getattr(datamodule, "skipped", [])
    return {"skipped": len(skipped)} if skipped else {}


def print_results(
    metrics: Mapping[str, Any], folder: Path | None = None, next_commands: Sequence[str] = ()
) -> None:
    """Print the metrics and, after a fit, its files and commands to try next."""
    rows: dict[str, Any] = {**metrics}
    best: Path | None = None
    if folder is not None:
        names = (folder / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
        best = next((path for path in names if path.exists()), None)
        rows |= {
            "run folder": folder,
            "best checkpoint" if best and best.stem == "best" else "checkpoint": best,
        }
    table("Results", rows)
    if folder is not None and best is not None:
        quoted = {"best": shlex.quote(str(best)), "folder": shlex.quote(str(folder))}
        print("next:", *(f"  {line.format(**quoted)}" for line in next_commands), sep="\n")


def print_texts(texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        print(f"{name}:", textwrap.indent(text, "  ", lambda line: True).rstrip(), "", sep="\n")


def draw_curves(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw the rows of `metrics.csv` over steps: loss, learning rate and each validation metric."""
    import matplotlib.figure

    names = [name for name in sorted(set().union(*rows)) if name.startswith(("train/", "val/"))]
    validated = {name.split("/")[1] for name in names if name.startswith("val/")}
    panels = sorted(validated | {"loss", "lr"}, reverse=True)
    width = 4.2 * len(panels)
    figure = matplotlib.figure.Figure(figsize=(width, 3.2), dpi=120)
    # Fixed margins: a layout that measures all texts takes as long as the drawing.
    figure.subplots_adjust(0.6 / width, 0.15, 1 - 0.1 / width, 0.9, wspace=0.2)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in names:
            split, _, metric = name.partition("/")
            points = [(int(row["step"]), float(row[name])) for row in rows if name in row]
            if metric == panel and points:
                axis.plot(*zip(*points, strict=True), label=split)
        axis.set(xlabel="step", title=panel)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    with replacing(path) as partial:
        write_png(figure, partial)


def draw_confusion(counts: Tensor, names: Sequence[str], path: Path | BinaryIO) -> None:
    """Draw a confusion matrix (K, K), true class by predicted class; few classes have counts."""
    import matplotlib.figure

    size = min(3 + 0.35 * len(names), 14)
    figure = matplotlib.figure.Figure(figsize=(size, size), dpi=120, layout="constrained")
    axis = figure.subplots()
    fractions = counts / counts.sum(1, keepdim=True).clamp(min=1)  # (K, K)
    axis.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(names))
    axis.set(
        xlabel="predicted", ylabel="true", title=f"accuracy {counts.trace() / counts.sum():.4f}"
    )
    if len(names) <= 50:
        axis.set_xticks(ticks, names, rotation=90)
        axis.set_yticks(ticks, names)
    if len(names) <= 20:
        for row, column in counts.nonzero().tolist():
            colour = "white" if fractions[row, column] > 0.5 else "black"
            count = str(int(counts[row, column]))
            axis.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    write_png(figure, path)


def write_png(figure: Any, path: Path | BinaryIO) -> None:
    """Write a matplotlib figure; `Figure.savefig` draws one with a layout twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)
