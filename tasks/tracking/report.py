"""What a run prints at its end, its curves and its confusion matrix."""

import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from datamodules.sources.base import shortened
from datamodules.utils.files import replacing, write_text

PANELS_IN_A_ROW = 3  # of curves.png
FEW_POINTS = 30  # of a curve, up to which each has a marker
MOST_LABELS = 50  # of classes beside a confusion matrix
METRIC_TITLES = {  # of axes
    "acc": "accuracy",
    "auroc": "area under the ROC curve",
    "bleu": "BLEU",
    "chrf": "chrF",
    "ece": "expected calibration error",
    "f1": "F1",
    "lr": "learning rate",
    "mae": "mean absolute error",
    "map": "mean average precision",
    "r2": "R²",
    "rmse": "root mean squared error",
}
DIGITS = 6  # significant ones of numbers in summary.json, test.json and val.json
MANY_CLASSES = 20  # more have no legend, and no numbers in a confusion matrix


def table(title: str, rows: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title, "bold"), show_header=False, title_justify="left")
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(Text(name), Text(f"{value:.4f}" if isinstance(value, float) else str(value)))
    Console(width=None if sys.stdout.isatty() else 120).print(grid)


def skipped_samples(datamodule: Any) -> dict[str, int]:
    """How many bad files, texts or pairs were skipped; nothing if none were."""
    skipped = getattr(datamodule, "skipped", [])
    return {"skipped": len(skipped)} if skipped else {}


def print_skipped(datamodule: Any, folder: str | Path | None = None, prefix: str = "") -> None:
    """Print the first names of what was skipped; list all in `PREFIXskipped.txt` in a folder."""
    skipped = getattr(datamodule, "skipped", [])
    where = ""
    if folder:
        file = Path(folder, f"{prefix}skipped.txt")
        write_skipped(file, skipped)
        where = f" (all in {file})"
    if skipped:
        print(f"skipped: {shortened(skipped)}{where}")


def write_skipped(file: Path, names: Sequence[str]) -> None:
    """Write the names of what was skipped; if nothing was, remove the file of an earlier run."""
    if names:
        write_text(file, "".join(f"{name}\n" for name in names))
    else:
        file.unlink(missing_ok=True)


def evaluated_samples(trainer: Any, datamodule: Any, split: str) -> tuple[int, int]:
    """How many samples of a split, "val" or "test", the latest evaluation has seen, and of all."""
    total = len(datamodule.dataset(split))
    batches = sum(getattr(trainer, f"num_{split}_batches"))  # of each process
    return min(total, batches * datamodule.eval_batch_size * trainer.world_size), total


def evaluation_notes(trainer: Any, datamodule: Any, split: str) -> dict[str, str]:
    """Which split a test has used, and whether an evaluation has seen a part of its split only.

    "test_split" is "val" if the data have no test split; "all" if all samples were tested.
    """
    notes = {}
    if split == "test":
        source = datamodule.source
        whole = source.is_evaluated_whole(split)
        notes["test_split"] = "all" if whole else "test" if source.has("test") else "val"
    seen, total = evaluated_samples(trainer, datamodule, split)
    if seen < total:
        notes["evaluated"] = f"{seen:,} of {total:,} {datamodule.noun}"
    return notes


def print_results(
    metrics: Mapping[str, Any], folder: Path | None = None, next_commands: Sequence[str] = ()
) -> None:
    """Print the metrics and, after a fit, its files and commands to try next."""
    rows: dict[str, Any] = {**metrics}
    best: Path | None = None
    if folder is not None:
        names = (folder / "checkpoints" / name for name in ("best.ckpt", "last.ckpt"))
        best = next((path for path in names if path.exists()), None)
        rows["run folder"] = folder
        if best is not None:
            rows["best checkpoint" if best.stem == "best" else "checkpoint"] = best
    table("Results", rows)
    if folder is not None and best is not None:
        quoted = {"best": shlex.quote(str(best)), "folder": shlex.quote(str(folder))}
        print("next:", *(f"  {line.format(**quoted)}" for line in next_commands), sep="\n")


def print_texts(texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        print(f"{name}:", textwrap.indent(text, "  ", lambda line: True).rstrip(), "", sep="\n")


def draw_curves(rows: Sequence[Mapping[str, str]], path: Path, monitor: str) -> None:
    """Draw the rows of `metrics.csv` into a file; as `curves_figure`."""
    with replacing(path) as partial:
        write_png(curves_figure(rows, monitor), partial)


def curves_figure(rows: Sequence[Mapping[str, str]], monitor: str) -> Any:
    """A figure of the rows of `metrics.csv` over steps, in a grid of panels.

    The loss comes first, then the metric of `monitor`, the others of the validation, and the
    learning rate. Of the latter, what has one value only is left out.
    """
    import matplotlib.figure
    from matplotlib.ticker import MaxNLocator

    monitored = monitor.partition("/")[2]
    curves = curves_by_metric(rows, always=("loss", monitored))
    validated = [metric for metric, splits in curves.items() if "val" in splits]
    order = dict.fromkeys(("loss", monitored, *sorted(validated), "lr"))
    panels = [name for name in order if name in curves] or ["loss"]
    columns = min(len(panels), PANELS_IN_A_ROW)
    lines = -(-len(panels) // columns)
    figure = matplotlib.figure.Figure(figsize=(4.2 * columns, 3.2 * lines), dpi=120)
    # Fixed margins: a layout that measures all texts takes as long as the drawing.
    width = 4.2 * columns
    height = 3.2 * lines
    figure.subplots_adjust(
        0.9 / width, 0.5 / height, 1 - 0.2 / width, 1 - 0.15 / height, wspace=0.3, hspace=0.3
    )
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis, panel in zip(axes, panels, strict=False):
        for split, points in curves.get(panel, {}).items():
            marker = "o" if len(points) <= FEW_POINTS else ""
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=split)
        axis.set(xlabel="optimizer step", ylabel=METRIC_TITLES.get(panel, panel.replace("_", " ")))
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def curves_by_metric(
    rows: Sequence[Mapping[str, str]], always: Sequence[str]
) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Points (step, value) by metric and split, "train" or "val".

    Only of what has several values, and of the metrics in `always`.
    """
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for name in sorted(set().union(*rows)):
        split, _, metric = name.partition("/")
        points = [(int(row["step"]), float(row[name])) for row in rows if name in row]
        values = {value for _, value in points}
        if split in ("train", "val") and (len(values) > 1 or metric in always):
            curves.setdefault(metric, {})[split] = points
    return curves


def draw_confusion(counts: Tensor, names: Sequence[str], path: Path | BinaryIO) -> None:
    """Draw a confusion matrix (K, K), true class by predicted class; few classes have counts."""
    import matplotlib.figure

    labels = [plain(name) for name in names] if len(names) <= MOST_LABELS else ["9999"]
    side = min(2.2 + 0.35 * len(names), 13)  # inches, as all sizes here
    margin = 0.6 + text_width(labels)  # of tick labels and the axis' own
    width = margin + side + 0.2
    height = margin + side + 0.6
    figure = matplotlib.figure.Figure(figsize=(width, height), dpi=120)
    # Fixed margins: a layout that measures all texts takes as long as the drawing.
    axis = figure.add_axes((margin / width, margin / height, side / width, side / height))
    fractions = counts / counts.sum(1, keepdim=True).clamp(min=1)  # (K, K)
    axis.imshow(fractions.numpy(), cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(names))
    axis.set(
        xlabel="predicted class",
        ylabel="true class",
        title=f"accuracy {counts.trace() / counts.sum():.4f}\ncolour: fraction of each row",
    )
    if len(names) <= MOST_LABELS:
        axis.set_xticks(ticks, labels, rotation=90)
        axis.set_yticks(ticks, labels)
    if len(names) <= MANY_CLASSES:
        for row, column in counts.nonzero().tolist():
            colour = "white" if fractions[row, column] > 0.5 else "black"
            count = str(int(counts[row, column]))
            axis.text(column, row, count, ha="center", va="center", color=colour, fontsize=8)
    write_png(figure, path)


def text_width(texts: Sequence[str]) -> float:
    """Inches that the longest of some texts takes at the size of tick labels."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    measure = RendererAgg(1, 1, dpi=72).get_text_width_height_descent  # in 1/72 inch
    font = FontProperties(size=10)
    return max(measure(text, font, ismath=False)[0] for text in texts) / 72


def plain(text: str) -> str:
    """A text for a figure, where $ would begin a formula, and control characters have no shape.

    >>> plain("5 $\\x01")
    '5 \\\\$\\\\x01'
    """
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    return shown.replace("$", r"\$")


def write_png(figure: Any, path: Path | BinaryIO) -> None:
    """Write a matplotlib figure; `Figure.savefig` draws one with a layout twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(path)


def format_count(count: int, noun: str) -> str:
    """A number with its noun.

    >>> format_count(1, "image"), format_count(2000, "image")
    ('1 image', '2,000 images')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def digits(number: float) -> str:
    """A number with three significant digits; from 1,000 on a whole number.

    >>> digits(1234.5), digits(999.6), digits(12.345)
    ('1,234', '1,000', '12.3')
    """
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"
