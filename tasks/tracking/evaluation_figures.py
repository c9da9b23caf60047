"""Figures of an evaluated classifier: ROC curves, calibration, embeddings and images."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from datamodules.utils.files import replacing
from tasks.tracking.class_scores import BINS, calibration_bins, calibration_error, roc_curves
from tasks.tracking.evaluated import PooledVectors
from tasks.tracking.media import Picture, Table
from tasks.tracking.report import MANY_CLASSES, plain, write_png

IMAGES_IN_A_ROW = 8
TITLE_CHARACTERS = 26  # of a line above an image


def save_media(folder: Path, prefix: str, media: Mapping[str, Table | Picture]) -> None:
    """Writes what the loggers get of an evaluation as `<prefix><name>.png`."""
    from PIL import Image

    for name, shown in media.items():
        with replacing(folder / f"{prefix}{name}.png") as partial:
            if isinstance(shown, Table):
                draw_images(shown, partial)
            else:
                pixels = shown.permute(1, 2, 0)  # (C, H, W) -> (H, W, C)
                Image.fromarray(pixels.numpy()).save(partial, "png")


def draw_images(table: Table, path: Path | BinaryIO) -> None:
    """Draws a grid of the pictures in the first column of a table, the others above them."""
    import matplotlib.figure

    columns = max(1, min(len(table.rows), IMAGES_IN_A_ROW))
    rows = max(1, -(-len(table.rows) // columns))
    lines = len(table.columns) - 1
    text_height = 0.14 * lines + 0.06  # inches, as all sizes here
    width = 1.4 * columns
    height = (1.2 + text_height) * rows
    figure = matplotlib.figure.Figure(figsize=(width, height), dpi=100)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    for number, (picture, *values) in enumerate(table.rows):
        row, column = divmod(number, columns)
        left = 1.4 * column + 0.15
        top = height - (1.2 + text_height) * row - text_height
        pixels = picture.permute(1, 2, 0).numpy()  # (C, H, W) -> (H, W, C)
        axis.imshow(
            pixels, cmap="gray", vmin=0, vmax=255, extent=(left, left + 1.1, top - 1.1, top)
        )
        axis.text(left, top + 0.03, title(table.columns[1:], values), fontsize=6, va="bottom")
    if not table.rows:
        axis.text(width / 2, height / 2, "none", ha="center")
    axis.set(xlim=(0, width), ylim=(0, height))
    write_png(figure, path)


def title(columns: Sequence[str], values: Sequence[Any]) -> str:
    """A line for each value: `label: cat`."""
    lines = []
    for column, value in zip(columns, values, strict=True):
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        lines.append(textwrap.shorten(f"{column}: {text}", TITLE_CHARACTERS, placeholder="..."))
    return plain("\n".join(lines))


def class_colours(count: int) -> Any:
    """A colormap that has a colour for each class number."""
    import matplotlib

    if count > MANY_CLASSES:
        return matplotlib.colormaps["turbo"].resampled(count)
    return matplotlib.colormaps["tab10" if count <= 10 else "tab20"]


def draw_roc(
    probabilities: Tensor, labels: Tensor, names: Sequence[str], path: Path | BinaryIO
) -> None:
    """Draws ROC curves with their areas (AUC); see `roc_curves` for which and the arguments."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 6), dpi=120)
    axis = figure.subplots()
    curves = roc_curves(probabilities, labels, names)
    has_macro = len(curves) > 1  # which comes first
    colours = class_colours(len(curves) - has_macro)
    for number, curve in enumerate(curves):
        is_macro = has_macro and number == 0
        axis.plot(
            curve.false_positive_rate,
            curve.true_positive_rate,
            color="black" if is_macro else colours(number - has_macro),
            label=f"{plain(curve.name)} (AUC {curve.auc:.4f})",
        )
    axis.plot((0, 1), (0, 1), color="grey", linestyle="--", label="chance")
    axis.set(
        xlabel="false positive rate (fraction)",
        ylabel="true positive rate (fraction)",
        title="ROC, each class against the rest" if len(names) > 2 else "ROC",
    )
    axis.legend(fontsize=7, loc="lower right")
    write_png(figure, path)


def draw_calibration(probabilities: Tensor, labels: Tensor, path: Path | BinaryIO) -> None:
    """Draws a reliability diagram (Guo 2017); the arguments are those of `calibration_bins`.

    Below it, the number of samples, or of labels of all samples, in each bin.
    """
    import matplotlib.figure

    has_several = labels.ndim == 2
    score = "frequency" if has_several else "accuracy"
    figure = matplotlib.figure.Figure(figsize=(6, 7), dpi=120)
    axis, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    bins = calibration_bins(probabilities, labels)
    filled = bins.counts > 0  # (BINS,)
    accuracy = bins.accuracy[filled]
    middles = (torch.arange(BINS)[filled] + 0.5) / BINS
    look: dict[str, Any] = {"width": 1 / BINS, "color": "lightsteelblue", "edgecolor": "black"}
    axis.bar(middles, accuracy, label=f"{score} in {BINS} bins", **look)
    means = bins.confidence[filled]
    # In front of the frame (2.5), on which points at 1 lie.
    axis.plot(means, accuracy, "o", clip_on=False, zorder=3, label="at mean confidence")
    axis.plot((0, 1), (0, 1), color="grey", linestyle="--", label="perfect calibration")
    error = float(calibration_error(probabilities, labels))
    axis.set(ylabel=f"{score} (fraction)", xlim=(0, 1), ylim=(0, 1))
    axis.set_title(f"expected calibration error {error:.4f}", pad=26)  # above the legend
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.01), ncols=3, fontsize=7)
    bars = below.bar(middles, bins.counts[filled], **look)
    below.bar_label(bars, fontsize=6, fmt="{:,.0f}")
    below.margins(y=0.2)  # for the numbers
    below.set(ylabel="labels" if has_several else "samples")
    what = "a label" if has_several else "the predicted class"
    figure.supxlabel(f"confidence (probability of {what})", y=0.03, fontsize="medium")
    write_png(figure, path)


def principal_components(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The first two principal components (S, 2) of vectors (S, E), S and E at least 2.

    Also the fractions of the variance that they explain, (2,). The result is deterministic.
    """
    centred = vectors.double() - vectors.double().mean(0)
    with torch.random.fork_rng(devices=[]):  # the algorithm is randomised
        torch.manual_seed(0)
        rank = min(10, *centred.shape)
        _, values, directions = torch.pca_lowrank(centred, rank, center=False, niter=8)
    variance = centred.square().sum().clamp(min=1e-12)
    return centred @ directions[:, :2], values[:2].square() / variance


def draw_embeddings(
    vectors: Tensor, labels: Tensor, names: Sequence[str], path: Path | BinaryIO
) -> None:
    """Draws vectors (S, E) in two dimensions, coloured by class (S,) or number (S, 1).

    Few classes have a legend. Of several labels per sample, 0 or 1, (S, K), those samples are
    coloured that have a single one.
    """
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7, 6), dpi=120)
    axis = figure.subplots()
    points, explained = principal_components(vectors)
    if labels.ndim == 2 and labels.shape[1] == 1:  # a number each
        dots = axis.scatter(points[:, 0], points[:, 1], s=6, c=labels[:, 0])
        figure.colorbar(dots, label=plain(names[0]))
    else:
        colours = class_colours(len(names))
        shown = points
        if labels.ndim == 2:
            single = labels.sum(1) == 1  # (S,)
            others = points[~single]
            axis.scatter(
                others[:, 0], others[:, 1], s=6, color="lightgrey", label="no label, or several"
            )
            shown, labels = points[single], labels[single].argmax(1)
        axis.scatter(shown[:, 0], shown[:, 1], s=6, c=colours(labels.numpy()))
    if labels.ndim == 1 and len(names) <= MANY_CLASSES:
        for number, name in enumerate(names):
            axis.scatter([], [], color=colours(number), label=plain(name))
        axis.legend(fontsize=7)
    axis.set(
        xlabel=f"first principal component ({explained[0]:.0%} of the variance)",
        ylabel=f"second principal component ({explained[1]:.0%} of the variance)",
        title=f"embeddings of {len(points):,} samples (PCA)",
    )
    write_png(figure, path)


def draw_numbers(predicted: Tensor, truth: Tensor, name: str, path: Path | BinaryIO) -> None:
    """Draws predicted over true numbers, (S,) each, and the line on which both are equal."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(6, 6), dpi=120)
    axis = figure.subplots()
    axis.scatter(truth, predicted, s=6, alpha=0.5)
    ends = (float(truth.min()), float(truth.max()))
    axis.plot(ends, ends, color="grey", linestyle="--", label="equal")
    axis.set(xlabel=f"true {plain(name)}", ylabel=f"predicted {plain(name)}")
    axis.legend(loc="upper left")
    write_png(figure, path)


def save_embeddings(folder: Path, prefix: str, pooled: PooledVectors, names: Sequence[str]) -> None:
    """Writes embeddings.png of two vectors or more."""
    if not pooled.vectors:
        return
    vectors = torch.cat(pooled.vectors)  # (S, E)
    labels = torch.cat(pooled.labels)
    if len(vectors) < 2:
        return
    with replacing(folder / f"{prefix}embeddings.png") as partial:
        draw_embeddings(vectors, labels, names, partial)
