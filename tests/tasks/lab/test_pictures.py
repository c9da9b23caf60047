"""The values in the pictures and tables of a laboratory."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modules.models.swin import SWIN_PRESETS, Swin, SwinConfig
from modules.models.vit import ViT, ViTConfig
from modules.patch_embedding import STEMS
from tasks.lab.pictures import BLOCK, draw
from tasks.lab.plan import Plan, Run
from tasks.lab.report import table_of_means, write_report
from tasks.lab.results import metric_by_point, read_results
from tasks.lab.state import save_plan
from tasks.tracking.csv_files import write_csv
from tasks.training.gradient_norms import layer_of
from tests.helpers.tiny_models import MODELS, STACK, tiny

LENGTHS = {"512": 2.0, "1024": 3.0}
SEEDS = (0, 1)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Runs of two orders and two seeds, tested on two lengths, with their files in `tmp_path`."""
    runs = []
    for number, order in enumerate(("pre", "post")):
        for seed in SEEDS:
            name = f"order={order},seed={seed}"
            runs.append(Run(name, "lm", {"a.order": order}, seed, [], {key: [] for key in LENGTHS}))
            folder = tmp_path / "runs" / name
            folder.mkdir(parents=True)
            totals = {"steps": 20, "seconds": 120, "parameters": 1000, "test/loss": 1.0}
            (folder / "summary.json").write_text(json.dumps(totals))
            for length, loss in LENGTHS.items():
                (folder / f"test_{length}").mkdir()
                text = f'{{"test/loss": {loss + number + seed / 2}}}'
                (folder / f"test_{length}" / "test.json").write_text(text)
            steps = [10, 20]
            columns = {
                "step": steps,
                "train/loss": [4.0 + number + seed, 2.0 + number + seed],
                "grad_norm/stack.0": [1.0 + number, 10.0 + number],
                "grad_norm/stack.1": [2.0 + number, 20.0 + number],
                "grad_norm/head.linear": [9.0, 9.0],
                "grad_norm/embed.stem.layers.0": [9.0, 9.0],
            }
            write_csv(folder / "metrics.csv", list(columns), list(columns.values()))
    lab = {
        "title": "Orders",
        "claim": "",
        "overrides": "",
        "scaling_law": False,
        "pictures": {},
        "metric": "test/loss",
        "goal": "minimize",
        "axes": {"a.order": ["pre", "post"]},
        "evaluations": {key: {} for key in LENGTHS},
        "compare": {},
    }
    return Plan(lab, runs)


def drawn(plan: Plan, folder: Path, **options: Any) -> Any:
    """The axes of a picture."""
    results = read_results(folder, plan)
    figure = draw(folder, plan, results, metric_by_point(results), options)
    return figure.axes[0]


def lines(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    """(x, y) of the lines of an axis by their label."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axis.lines}


def test_lines_show_means_and_deviations_over_numbers(plan: Plan, tmp_path: Path) -> None:
    axis = drawn(plan, tmp_path, kind="line", x="evaluation", scale="log")
    for number, container in enumerate(axis.containers):
        assert container.get_label() == ("pre", "post")[number]
        line, _, (bars,) = container.lines
        assert np.allclose(line.get_xdata(), [512, 1024])
        assert np.allclose(line.get_ydata(), [2.25 + number, 3.25 + number])
        half = np.diff([segment[:, 1] for segment in bars.get_segments()])[:, 0] / 2
        assert np.allclose(half, np.std([0, 0.5], ddof=1))
    assert len(axis.containers) == 2 and axis.get_xscale() == "log"


def test_bars_show_means_and_all_of_their_deviations(plan: Plan, tmp_path: Path) -> None:
    axis = drawn(plan, tmp_path, kind="bars", x="a.order")
    found = [c for c in axis.containers if c.get_label() in LENGTHS]
    assert [[bar.get_height() for bar in c] for c in found] == [[2.25, 3.25], [3.25, 4.25]]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["pre", "post"]
    low, high = axis.get_ylim()
    assert low == 0 and high >= 4.25 + np.std([0, 0.5], ddof=1)
    assert "standard deviation over seeds" in axis.get_title()


def test_one_seed_has_no_error_bar(plan: Plan, tmp_path: Path) -> None:
    plan.runs = [run for run in plan.runs if run.seed == 0]
    for container in drawn(plan, tmp_path, kind="line", x="evaluation").containers:
        segments = container.lines[2][0].get_segments()
        assert not [one for one in segments if len(one) and np.isfinite(one).all()]
        assert math.isfinite(container.lines[0].get_ydata()[0])


def test_curves_show_the_mean_over_seeds(plan: Plan, tmp_path: Path) -> None:
    found = lines(drawn(plan, tmp_path, kind="curves"))
    assert found == {"pre": ([10, 20], [4.5, 2.5]), "post": ([10, 20], [5.5, 3.5])}
    found = lines(drawn(plan, tmp_path, kind="curves", x="minutes"))
    assert found == {"pre": ([1, 2], [4.5, 2.5]), "post": ([1, 2], [5.5, 3.5])}


def test_curves_end_where_the_first_seed_does(plan: Plan, tmp_path: Path) -> None:
    shorter = tmp_path / "runs" / plan.runs[1].name / "metrics.csv"
    write_csv(shorter, ["step", "train/loss"], [[10], [5.0]])
    found = lines(drawn(plan, tmp_path, kind="curves"))
    assert found == {"pre": ([10], [4.5]), "post": ([10, 20], [5.5, 3.5])}


def test_curves_have_a_band_over_several_seeds(plan: Plan, tmp_path: Path) -> None:
    axis = drawn(plan, tmp_path, kind="curves")
    assert len(axis.collections) == 2 and "minimum and maximum" in axis.get_title()
    corners = {tuple(corner) for corner in axis.collections[0].get_paths()[0].vertices}
    assert corners == {(10, 4), (10, 5), (20, 2), (20, 3)}
    plan.runs = [run for run in plan.runs if run.seed == 0]
    axis = drawn(plan, tmp_path, kind="curves")
    assert not axis.collections and len(axis.lines) == 2 and "seeds" not in axis.get_title()


@pytest.mark.parametrize(("at", "factor"), [("first", 1), ("last", 10)])
def test_layers_show_one_step(at: str, factor: int, plan: Plan, tmp_path: Path) -> None:
    axis = drawn(plan, tmp_path, kind="layers", at=at)
    assert axis.get_ylabel() == f"grad_norm at step {10 if at == 'first' else 20}"
    found = lines(axis)
    assert set(found) == {"pre", "post"}
    assert found["pre"] == ([0, 1], [1.0 * factor, 2.0 * factor])
    assert found["post"] == ([0, 1], [1.0 * factor + 1, 2.0 * factor + 1])


def test_layers_are_the_blocks_of_all_networks() -> None:
    stack = replace(SWIN_PRESETS["swin_cifar"].stack, width=16, depth=2)
    nets = [*map(tiny, MODELS), Swin(SwinConfig(32, depths=(1, 1), window_size=4, stack=stack))]
    nets += [ViT(ViTConfig(32, 8, 3, 3, stem=stem, stack=STACK)) for stem in STEMS]
    for net in nets:
        for name, _ in net.named_parameters():
            assert (".blocks." in name) == bool(BLOCK.fullmatch(f"grad_norm/{layer_of(name)}"))


def test_nothing_is_drawn_before_the_first_run(plan: Plan, tmp_path: Path) -> None:
    for kind in ("bars", "line", "curves", "layers"):
        results = read_results(tmp_path / "other", plan)
        options = {"kind": kind}
        assert draw(tmp_path / "other", plan, results, metric_by_point(results), options) is None


def test_the_report_has_means_and_deviations_over_seeds(plan: Plan, tmp_path: Path) -> None:
    save_plan(plan, tmp_path)
    printed = write_report(tmp_path)
    report = (tmp_path / "report.md").read_text()
    header = "| order | evaluation | runs | mean | deviation | steps | parameters |"
    for text in (printed, report):
        assert header in text
        for number, order in enumerate(("pre", "post")):
            for length, mean in (("512", 2.25), ("1024", 3.25)):
                cells = f"| {order} | {length} | 2 | {mean + number} | 0.3536 | 20 | 1,000 |"
                assert f"\n{cells}" in text


def test_runs_of_other_threads_are_said_not_to_be_comparable(plan: Plan, tmp_path: Path) -> None:
    points = metric_by_point(read_results(tmp_path, plan))
    file = tmp_path / "runs" / plan.runs[0].name / "summary.json"
    for threads, is_said in ((2, False), (1, True)):
        content = {"steps": 20, "seconds": 120, "parameters": 1, "processor": {"threads": threads}}
        file.write_text(json.dumps(content))
        last = {**content, "processor": {"threads": 2}}
        for run in plan.runs[1:]:
            (tmp_path / "runs" / run.name / "summary.json").write_text(json.dumps(last))
        table = table_of_means(plan, read_results(tmp_path, plan), points)
        assert ("1 or 2 threads" in table) == is_said


def test_runs_without_a_step_are_not_in_pictures_of_minutes(plan: Plan, tmp_path: Path) -> None:
    for run in plan.runs[:2]:  # those of "pre"
        (tmp_path / "runs" / run.name / "metrics.csv").unlink()
        path = tmp_path / "runs" / run.name / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "steps": 0}))
    assert [*lines(drawn(plan, tmp_path, kind="curves", x="minutes"))] == ["post"]


def test_a_picture_that_finds_nothing_is_named(plan: Plan, tmp_path: Path) -> None:
    plan.lab["pictures"] = {"typo": {"kind": "curves", "metric": "train/los"}}
    save_plan(plan, tmp_path)
    assert "nothing to draw in `typo`" in write_report(tmp_path)
    assert not (tmp_path / "typo.png").exists()
