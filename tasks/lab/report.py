"""The report of a laboratory: tables, verdicts, pictures and commands."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from datamodules.utils.files import replacing, write_text
from tasks.lab.pictures import draw
from tasks.lab.plan import Plan, all_runs, read_plan
from tasks.lab.results import (
    Point,
    Result,
    axes_of,
    differences,
    metric_by_point,
    read_results,
    write_runs,
)
from tasks.lab.scaling import scaling_report
from tasks.lab.spec import option_names
from tasks.lab.statistics import CONFIDENCE, mean_and_deviation
from tasks.lab.tables import format_number, markdown
from tasks.tracking.report import digits, write_png

MAX_COMMANDS = 200  # listed in the report; `runs.csv` has all of the grid
OTHER_THREADS = "Runs had {} threads, so their seconds and minutes are not comparable."
TWO_PAIRS = "With two seeds the interval is unreliable: use three or more."
ONE_SEED = "One seed has no deviation and decides nothing: give several, as in `--seeds 0,1,2`."


def write_report(folder: Path) -> str:
    """Writes `runs.csv`, `report.md` and the pictures; returns the tables of the report."""
    plan = read_plan(folder)
    results = read_results(folder, plan)
    points = metric_by_point(results)
    write_runs(folder, plan, results)
    tables = heading(plan, results) + table_of_means(plan, results, points)
    tables += table_of_differences(plan, points)
    tables += table_of_failures(results) + table_of_refusals(results)
    if plan.lab["scaling_law"]:
        for evaluation in plan.lab["evaluations"] or [""]:
            tables += scaling_report(folder, results, evaluation)
    pictures = ""
    for name, options in plan.lab["pictures"].items():
        figure = draw(folder, plan, results, points, options)
        if figure is not None:
            with replacing(folder / f"{name}.png") as partial:
                write_png(figure, partial)
            pictures += f"\n![{name}]({name}.png)\n"
        elif any(one.state == "finished" for one in results):
            tables += f"\nThere is nothing to draw in `{name}`: no run has its metric.\n"
    write_text(folder / "report.md", tables + pictures + list_of_commands(plan))
    return f"{tables}\nwritten to {folder / 'report.md'}"


def heading(plan: Plan, results: list[Result]) -> str:
    """Title, claim, metric, and how many runs are finished."""
    lab = plan.lab
    text = f"# {lab['title']}\n\n"
    if lab["claim"]:
        text += f"The claim: {lab['claim']}\n\n"
    finished = sum(one.state == "finished" for one in results)
    if lab["overrides"]:
        text += f"The runs have `{lab['overrides']}` instead of what the file says.\n\n"
    better = "higher" if lab["goal"] == "maximize" else "lower"
    text += f"The metric is `{lab['metric']}`; {better} is better. "
    text += f"{finished} of {len(results)} runs are finished."
    values = [value for one in results for value in one.values.values()]
    if finished and not any(map(math.isfinite, values)):
        text += " None has the metric: it is not finite, the options switch it off, or the tests "
        text += "were refused."
    return f"{text}\n\n"


def table_of_means(
    plan: Plan, results: list[Result], points: Mapping[Point, Mapping[int, float]]
) -> str:
    """Mean and deviation over the seeds of each setting, and what its runs cost on average."""
    rows = []
    for point, by_seed in points.items():
        mean, deviation = mean_and_deviation(list(by_seed.values()))
        settings = len(plan.lab["axes"])
        runs = [one for one in results if (*one.run.values.values(),) == point[:settings]]
        trained = [one for one in runs if one.summary]
        costs = ["-"] * 4
        if trained:
            costs = [
                f"{np.mean([one.steps for one in trained]):,.0f}",
                f"{trained[0].summary['parameters']:,}",
                f"{np.mean([one.flops for one in trained]):.3g}",
                digits(float(np.mean([one.summary["seconds"] for one in trained]))),
            ]
        rows.append([*point, len(by_seed), format_number(mean), format_number(deviation), *costs])
    names = option_names(axes_of(plan))
    measured = ["runs", "mean", "deviation", "steps", "parameters", "FLOPs", "seconds"]
    text = markdown([*names, *measured], rows)
    if all(len(by_seed) <= 1 for by_seed in points.values()):
        text += f"\n{ONE_SEED}\n"
    threads = sorted({count for one in results if (count := one.threads) is not None})
    if len(threads) > 1:
        text += f"\n{OTHER_THREADS.format(' or '.join(map(str, threads)))}\n"
    return text


def table_of_differences(plan: Plan, points: Mapping[Point, Mapping[int, float]]) -> str:
    """Differences paired by seed, with what they decide; empty if nothing is compared."""
    rows = []
    for point, base, found in differences(plan, points):
        interval = "-"
        if found.pairs > 1:
            interval = f"{format_number(found.low)} to {format_number(found.high)}"
        mean = format_number(found.mean)
        rows.append([*point, base, found.pairs, mean, interval, found.verdict])
    if not rows:
        return ""
    names = option_names(axes_of(plan))
    percent = f"{CONFIDENCE * 100:g} %"
    header = [*names, "compared with", "pairs", "difference", f"{percent} interval", "verdict"]
    text = "\nDifferences are paired by seed, with Student's t interval. Of 20 comparisons without "
    text += "any effect, one is decided by chance on average. "
    text += "Equal: no pair differs. "
    text += "Inconclusive: the interval contains 0, or its width does not exceed the rounding.\n\n"
    if any(row[len(names) + 1] == 2 for row in rows):
        text += f"{TWO_PAIRS}\n\n"
    return text + markdown(header, rows)


def table_of_failures(results: list[Result]) -> str:
    rows = [[one.run.name, one.error] for one in results if one.error]
    return "\n" + markdown(["failed run", "error"], rows) if rows else ""


def table_of_refusals(results: list[Result]) -> str:
    rows = [[one.run.name, *refusal] for one in results for refusal in one.refusals.items()]
    return "\n" + markdown(["run", "refused test", "reason"], rows) if rows else ""


def list_of_commands(plan: Plan) -> str:
    commands = [line for run in all_runs(plan) for line in (run.command, *run.test_commands)]
    shown = "\n".join(commands[:MAX_COMMANDS])
    if len(commands) > MAX_COMMANDS:
        shown += f"\n... and {len(commands) - MAX_COMMANDS:,} more, as arguments in plan.json"
    return f"\n## Commands\n\n```\n{shown}\n```\n"
