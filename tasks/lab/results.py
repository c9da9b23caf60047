"""What the runs of a laboratory have measured."""

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from datamodules.utils.files import replacing
from tasks.errors import RunError
from tasks.lab.plan import Plan, Run
from tasks.lab.spec import option_names
from tasks.lab.state import error_of, is_evaluated, is_finished, refusals_of, run_folder
from tasks.lab.statistics import Difference, paired_difference
from tasks.tracking.metrics_csv import read_rows

Point = tuple[Any, ...]  # a setting's value on each axis, then its evaluation if there are any


@dataclass
class Result:
    """A run, and what it did and measured.

    Args:
        run: As planned.
        state: "finished", "failed" or "unfinished".
        error: Of the training or an evaluation.
        summary: Of `summary.json`; empty before the end of the training.
        steps: Optimizer steps that were done.
        values: The metric by the name of the evaluation ("" if there are none); NaN if missing.
        refusals: Why the network refuses evaluations, by their names.
    """

    run: Run
    state: str
    error: str
    summary: Mapping[str, Any]
    steps: int
    values: Mapping[str, float]
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> float:
        """Of all steps."""
        return self.steps * self.run.step_tokens

    @property
    def threads(self) -> int | None:
        """Of its process on the CPU; None before the end of the training."""
        count: int | None = self.summary.get("processor", {}).get("threads")
        return count

    @property
    def flops(self) -> float:
        """Of all steps."""
        return self.steps * self.run.step_flops


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file; empty if there is none. Raises `RunError` if it is damaged."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise RunError(f"{path} is damaged: remove it, and run the laboratory again") from error


def read_results(folder: Path, plan: Plan) -> list[Result]:
    """What is there, also of a lab that is not finished."""
    return [read_result(folder, run, plan.lab["metric"]) for run in plan.runs]


def read_result(folder: Path, run: Run, metric: str) -> Result:
    target = run_folder(folder, run)
    summary = read_json(target / "summary.json")
    rows = read_rows(target / "metrics.csv")
    last_step = max((int(row["step"]) for row in rows), default=0)
    error = error_of(folder, run)
    if error:
        state = "failed"
    else:
        state = "finished" if is_finished(folder, run) else "unfinished"
    values = {"": math.nan}
    if run.evaluations:
        done = [name for name in run.evaluations if is_evaluated(folder, run, name)]
        tests = {name: read_json(target / f"test_{name}" / "test.json") for name in done}
        tests |= {name: {} for name in run.evaluations if name not in done}
        # None: not finite, or missing
        found = {name: test.get(metric) for name, test in tests.items()}
        values = {name: math.nan if one is None else float(one) for name, one in found.items()}
    elif isinstance(summary.get(metric), int | float):
        values[""] = float(summary[metric])
    elif summary:
        logged = [float(row[metric]) for row in rows if metric in row]
        values[""] = logged[-1] if logged else math.nan
    steps = summary.get("steps", last_step)
    return Result(run, state, error, summary, steps, values, refusals_of(folder, run))


def write_runs(folder: Path, plan: Plan, results: list[Result]) -> None:
    """Writes `runs.csv`, a row for each run."""
    metric = plan.lab["metric"]
    tested = sorted({name for one in results for name in one.summary if "test/" in name})
    rows = []
    for one in results:
        run = one.run
        row: dict[str, Any] = {"seed": run.seed, "state": one.state}
        row |= {f"{metric} {name}".strip(): value for name, value in one.values.items()}
        row |= {name: one.summary.get(name) for name in tested if name not in row}
        row |= {
            "steps": one.steps,
            "tokens": round(one.tokens),
            "parameters": one.summary.get("parameters", run.parameters),
            "flops": round(one.flops),
            "seconds": one.summary.get("seconds"),
            "threads": one.threads,
            "error": one.error,
            "refused": "; ".join(one.refusals.values()),
            "command": run.command,
            "tests": "; ".join(run.test_commands),
        }
        names = option_names(run.values)
        axes = [f"axis {name}" if name in row else name for name in names]
        rows.append(dict(zip(axes, run.values.values(), strict=True)) | row)
    header = list(dict.fromkeys(name for row in rows for name in row))
    with replacing(folder / "runs.csv") as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def axes_of(plan: Plan) -> dict[str, list[Any]]:
    """Names of the values of each axis, those of the evaluations last."""
    axes: dict[str, list[Any]] = dict(plan.lab["axes"])
    if plan.lab["evaluations"]:
        axes["evaluation"] = list(plan.lab["evaluations"])
    return axes


def metric_by_point(results: list[Result]) -> dict[Point, dict[int, float]]:
    """The metric by seed, for each setting and evaluation; only numbers that are finite."""
    points: dict[Point, dict[int, float]] = {}
    for one in results:
        for evaluation, value in one.values.items():
            point = (*one.run.values.values(), *([evaluation] if evaluation else []))
            by_seed = points.setdefault(point, {})
            if math.isfinite(value):
                by_seed[one.run.seed] = value
    return points


def differences(
    plan: Plan, points: Mapping[Point, Mapping[int, float]]
) -> list[tuple[Point, Any, Difference]]:
    """For each point and axis to compare along: the value it is compared with, and the outcome.

    After the points of an axis, those with "all" in place of the other axes compare the means over
    these, if there are several settings of them.
    """
    found = []
    goal = plan.lab["goal"]
    axes = axes_of(plan)
    names = list(axes)
    for axis, base in plan.lab["compare"].items():
        index = names.index(axis)
        for point, by_seed in points.items():
            if point[index] != base:
                other = (*point[:index], base, *point[index + 1 :])
                found.append((point, base, paired_difference(by_seed, points[other], goal)))
        if len(points) == len(axes[axis]):
            continue
        base_means = mean_by_seed(points, index, base)
        for value in axes[axis]:
            if value != base:
                outcome = paired_difference(mean_by_seed(points, index, value), base_means, goal)
                pooled = ["all"] * len(axes)
                pooled[index] = value
                found.append(((*pooled,), base, outcome))
    return found


def mean_by_seed(
    points: Mapping[Point, Mapping[int, float]], index: int, value: Any
) -> dict[int, float]:
    """The mean over all points with a value on one axis, by seed; only seeds that all have."""
    found = [by_seed for point, by_seed in points.items() if point[index] == value]
    seeds = set.intersection(*({*by_seed} for by_seed in found))
    return {seed: fmean(by_seed[seed] for by_seed in found) for seed in seeds}
