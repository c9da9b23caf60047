"""The pictures of a laboratory."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasks.lab.plan import Plan
from tasks.lab.results import Point, Result, axes_of
from tasks.lab.spec import option_names
from tasks.lab.state import run_folder
from tasks.lab.statistics import mean_and_deviation
from tasks.tracking.metrics_csv import read_rows
from tasks.tracking.report import plain

Series = dict[tuple[Any, ...], list[tuple[float, float, float]]]  # (x, mean, deviation) by label
# The column of a block, as `training.gradient_norms.layer_of` names it: its stack, and its number.
BLOCK = re.compile(r"(?:.*/)?(stack|encoder|decoder|stages\.\d+)\.(\d+)")


def draw(
    folder: Path,
    plan: Plan,
    results: list[Result],
    points: Mapping[Point, Mapping[int, float]],
    options: Mapping[str, Any],
) -> Any:
    """A figure of one entry of `pictures`; None if there is nothing to draw yet."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(7, 4.5), dpi=120, layout="constrained")
    axis = figure.subplots()
    if options["kind"] in ("bars", "line"):
        draw_metric(axis, plan, points, options)
    elif options["kind"] == "curves":
        draw_curves(axis, folder, plan, results, options)
    else:
        draw_layers(axis, folder, plan, results, options)
    if not axis.has_data():
        return None
    title = plain(plan.lab["title"])
    if options["kind"] in ("bars", "line"):
        title += "\nmean and standard deviation over seeds"
    elif axis.collections:
        title += "\nmean, minimum and maximum over seeds"
    axis.set_title(title, fontsize=10)
    return figure


def label_of(values: tuple[Any, ...]) -> str:
    return plain(", ".join(map(str, values)))


def add_legend(axis: Any, names: list[str]) -> None:
    """A legend whose title are the axes that its labels are values of; none without axes."""
    if names and axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, title=plain(", ".join(names)), title_fontsize=7)


# The metric over one axis of the grid -------------------------------------------------------------


def draw_metric(
    axis: Any,
    plan: Plan,
    points: Mapping[Point, Mapping[int, float]],
    options: Mapping[str, Any],
) -> None:
    """Means with the deviation over seeds; a colour for each combination of the other axes."""
    axes = axes_of(plan)
    x = options.get("x", next(iter(axes)))
    index = list(axes).index(x)
    is_line = options["kind"] == "line"
    is_scaled = is_line and all(is_number(value) for value in axes[x])
    series: Series = {}
    for point, by_seed in points.items():
        if by_seed:
            value = point[index]
            others = (*point[:index], *point[index + 1 :])
            where = float(value) if is_scaled else float(axes[x].index(value))
            found = (where, *mean_and_deviation(list(by_seed.values())))
            series.setdefault(others, []).append(found)
    if is_line:
        draw_lines(axis, series)
    else:
        draw_bars(axis, series)
    if not is_scaled:
        axis.set_xticks(range(len(axes[x])), [plain(str(value)) for value in axes[x]])
    elif options.get("scale") == "log":
        axis.set_xscale("log")
    names = option_names(axes)
    axis.set(xlabel=plain(names.pop(index)), ylabel=plan.lab["metric"] + axis.get_ylabel())
    add_legend(axis, names)


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def draw_lines(axis: Any, series: Series) -> None:
    for label, found in series.items():
        where, means, deviations = zip(*sorted(found), strict=True)
        axis.errorbar(where, means, deviations, marker="o", capsize=3, label=label_of(label))


def draw_bars(axis: Any, series: Series) -> None:
    """Bars from 0, or above it, which is then said, if they would look all the same."""
    width = 0.8 / max(1, len(series))
    ends = []
    for order, (label, found) in enumerate(series.items()):
        where, means, deviations = np.array(found).T  # (3, bars)
        where = where + (order - (len(series) - 1) / 2) * width
        axis.bar(where, means, width, yerr=deviations, capsize=3, label=label_of(label))
        ends += [*(means - np.nan_to_num(deviations)), *(means + np.nan_to_num(deviations))]
    if ends and max(ends) > min(ends) > max(ends) / 2:
        axis.set_ylim(bottom=min(ends) - 0.2 * (max(ends) - min(ends)))
        axis.set_ylabel(" (not from 0)")


# What runs have logged ----------------------------------------------------------------------------


def draw_curves(
    axis: Any, folder: Path, plan: Plan, results: list[Result], options: Mapping[str, Any]
) -> None:
    """A column of `metrics.csv` over steps, the mean over seeds and a band of all of them.

    Steps that some seeds lack are left out: where a run ends early, the mean would jump.

    With `x: minutes` over the minutes of finished runs, test included, of which each step has the
    same part.
    """
    metric = options.get("metric", "train/loss")
    in_minutes = options.get("x") == "minutes"
    by_step: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    minutes: dict[tuple[Any, ...], list[float]] = {}  # of a step
    for one in results:
        label = (*one.run.values.values(),)
        if in_minutes:
            if not one.summary or not one.steps:
                continue
            minutes.setdefault(label, []).append(one.summary["seconds"] / 60 / one.steps)
        curve = by_step.setdefault(label, {})
        for row in read_rows(run_folder(folder, one.run) / "metrics.csv"):
            if metric in row:
                curve.setdefault(int(row["step"]), []).append(float(row[metric]))
    for label, curve in by_step.items():
        if curve:
            most = max(map(len, curve.values()))
            steps = sorted(step for step in curve if len(curve[step]) == most)
            means = [float(np.mean(curve[step])) for step in steps]
            where = np.array(steps) * (float(np.mean(minutes[label])) if in_minutes else 1)
            (line,) = axis.plot(where, means, label=label_of(label))
            if any(len(curve[step]) > 1 for step in steps):
                lows = [min(curve[step]) for step in steps]
                highs = [max(curve[step]) for step in steps]
                axis.fill_between(where, lows, highs, color=line.get_color(), alpha=0.2, lw=0)
    axis.set(xlabel="minutes" if in_minutes else "optimizer step", ylabel=metric)
    add_legend(axis, option_names(plan.lab["axes"]))


def draw_layers(
    axis: Any, folder: Path, plan: Plan, results: list[Result], options: Mapping[str, Any]
) -> None:
    """Columns of `metrics.csv` over the blocks of the network, the mean over seeds.

    `metric` is the beginning of their names; `at` says whether the "first" or "last" logged step is
    drawn, which the axis names.
    """
    prefix = options.get("metric", "grad_norm/")
    by_layer: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    steps = set()
    for one in results:
        rows = read_rows(run_folder(folder, one.run) / "metrics.csv")
        logged = [row for row in rows if any(name.startswith(prefix) for name in row)]
        if not logged:
            continue
        row = logged[-1 if options.get("at") == "last" else 0]
        steps.add(int(row["step"]))
        for name, value in row.items():
            block = BLOCK.fullmatch(name)
            if name.startswith(prefix) and block is not None:
                stack, layer = block.groups()
                label = (*one.run.values.values(), *([] if stack == "stack" else [stack]))
                by_layer.setdefault(label, {}).setdefault(int(layer), []).append(float(value))
    for label, found in by_layer.items():
        layers = sorted(found)
        means = [float(np.mean(found[layer])) for layer in layers]
        axis.plot(layers, means, marker="o", label=label_of(label))
    when = f"step {' or '.join(map(str, sorted(steps)))}"
    axis.set(xlabel="block", ylabel=f"{prefix.rstrip('/')} at {when}", yscale="log")
    add_legend(axis, option_names(plan.lab["axes"]))
