"""Reports of unusual results, from files written by hand, and laboratories that are refused."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tasks.lab.__main__ import main
from tasks.lab.plan import Plan, make_plan
from tasks.lab.report import write_report
from tasks.lab.spec import read_lab
from tasks.lab.state import run_folder, save_command, save_plan
from tests.helpers.labs import LAB, rows, write_lab

OUT = Path("out")
WIDTHS = {"model.net.stack.width": [24, 48]}


def plan_of(**changes: Any) -> Plan:
    """The plan of a laboratory with these entries, which has a folder."""
    write_lab(**{"compare": {}, "axes": WIDTHS, **changes})
    (OUT / "logs").mkdir(parents=True, exist_ok=True)
    plan = make_plan(read_lab("lab.yaml"), OUT, [])
    save_plan(plan, OUT)
    return plan


def finish(plan: Plan, losses: list[float | None], evaluation: str = "") -> None:
    """Writes the results of all runs."""
    for run, loss in zip(plan.runs, losses, strict=True):
        target = run_folder(OUT, run)
        target.mkdir(parents=True, exist_ok=True)
        content = {"steps": 3, "seconds": 1.0, "parameters": run.parameters}
        if evaluation:
            test = target / f"test_{evaluation}"
            test.mkdir()
            (test / "test.json").write_text(json.dumps({"test/loss": loss}))
        elif loss is not None:
            content["test/loss"] = loss
        (target / "summary.json").write_text(json.dumps(content))


def test_an_evaluation_that_is_not_finite_is_left_out() -> None:
    finish(plan_of(evaluations={"some": {"trainer.limit_test_batches": 1}}), [None, 0.5], "some")
    text = write_report(OUT)
    assert "2 of 2 runs are finished" in text
    assert "| 24 | some | 0 | - |" in text and "| 48 | some | 1 | 0.5 |" in text


def test_a_metric_that_no_run_has_is_said() -> None:
    finish(plan_of(), [None, None])
    assert "2 of 2 runs are finished. None has the metric" in write_report(OUT)
    finish(plan_of(), [None, 1.0])
    assert "None has the metric" not in write_report(OUT)


def test_another_task_is_not_taken_for_the_same_runs(capsys: Any) -> None:
    options = {"data.source": "digits", "data.batch_size": 16}
    plan = plan_of(task="igpt", options=options)
    for run in plan.runs:
        save_command(OUT, run, "")
    finish(plan, [1.0, 2.0])
    plan_of(task="igpt", options=options)
    write_lab(task="mae", options=options, compare={}, axes=WIDTHS)
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    assert "which was run with other options" in capsys.readouterr().err


def test_a_changed_config_is_not_taken_for_the_same(capsys: Any) -> None:
    Path("short.yaml").write_text("model: {label_smoothing: 0.1}\n")
    options = {**LAB["options"], "config": [LAB["options"]["config"], "short.yaml"]}
    plan = plan_of(options=options)
    for run in plan.runs:
        save_command(OUT, run, "")
    finish(plan, [1.0, 2.0])
    plan_of(options=options, seeds=[0])
    Path("short.yaml").write_text("model: {label_smoothing: 0.2}\n")
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    assert "which was run with other options" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["seed", "tokens", "test/loss"])
def test_an_axis_has_a_column_of_its_own(name: str) -> None:
    values = {"few": {"data.batch_size": 4}, "many": {"data.batch_size": 8}}
    finish(plan_of(axes={name: values}), [1.0, 2.0])
    write_report(OUT)
    assert [row[f"axis {name}"] for row in rows()] == ["few", "many"]
    assert [row["test/loss"] for row in rows()] == ["1.0", "2.0"]
    with open(OUT / "runs.csv", newline="") as file:
        header = next(csv.reader(file))
    assert len(set(header)) == len(header)


def test_bars_and_lines_in_a_name_do_not_end_a_cell() -> None:
    values = {"a|b": {"data.batch_size": 4}, "c\nd": {"data.batch_size": 8}}
    finish(plan_of(axes={"size": values}), [1.0, 2.0])
    text = write_report(OUT)
    assert "| a\\|b | 1 |" in text and "| c d | 1 |" in text


def test_a_law_needs_losses_above_0() -> None:
    axes = {
        "model.net.stack.width": [8, 16, 32, 64],
        "trainer.accumulate_grad_batches": [1, 2, 3],
    }
    plan = plan_of(axes=axes, scaling_law=True)
    losses: list[float | None] = [1 / (2 + number) for number in range(12)]
    finish(plan, losses)
    assert "95 % interval" in write_report(OUT)
    finish(plan, [*losses[:-1], 0.0])
    assert "It needs losses above 0" in write_report(OUT)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"scaling_law": "no"}, "scaling_law: give true or false"),
        ({"scaling_law": True, "metric": {"name": "test/acc", "goal": "maximize"}}, "minimize"),
        (
            {"pictures": {"p": {"kind": "layers", "metric": 5}}},
            "pictures.p.metric: give a name, not 5",
        ),
        ({"evaluations": {"": {}}}, "evaluations: a name is empty"),
        ({"evaluations": {"x" * 60: {}}}, "too long for a file's name"),
        ({"axes": {"size": {"x" * 200: {"data.batch_size": 4}}}}, "too long for a folder's name"),
    ],
)
def test_mistakes_are_said_before_the_first_run(
    changes: dict[str, Any], named: str, capsys: Any
) -> None:
    write_lab(**{"compare": {}, **changes})
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not OUT.exists()
