"""A laboratory's file that is changed between two commands for one folder."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import UsageError
from tasks.lab.__main__ import main
from tasks.lab.plan import budget_words, make_plan
from tasks.lab.spec import read_lab
from tasks.lab.state import run_folder, save_command, save_plan
from tests.helpers.labs import LAB, rows, start, write_lab
from tests.helpers.results import summary

ONE: dict[str, Any] = {"axes": {"model.net.stack.order": ["pre"]}, "compare": {}}


def lab(**changes: Any) -> None:
    """Runs a laboratory with these entries to its end."""
    write_lab(**{**ONE, **changes})
    process = start("run lab.yaml --output out")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


@pytest.mark.slow
def test_a_stopped_run_with_other_options_starts_anew() -> None:
    write_lab(**ONE, budget={"steps": 3000})
    process = start("run lab.yaml --output out")
    target = Path("out/runs/order=pre,seed=0")
    while not list(target.glob("checkpoints/*.ckpt")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    (target / "mark").touch()
    Path("out").rename("moved")  # which changes nothing
    process = start("run lab.yaml --output moved")
    saved = Path("moved/runs/order=pre,seed=0/checkpoints/last.ckpt")
    before = saved.stat().st_mtime_ns
    while not saved.exists() or saved.stat().st_mtime_ns == before:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    Path("moved").rename("out")
    assert (target / "mark").exists()
    lab(budget={"steps": 4}, seeds=[0])
    assert summary(target)["steps"] == 4 and not (target / "mark").exists()
    assert rows()[0]["command"] == summary(target)["command"]


@pytest.mark.slow
def test_finished_runs_of_earlier_plans_are_not_mixed_with_others(capsys: Any) -> None:
    lab(seeds=[0], budget={"steps": 2})
    lab(seeds=[1], budget={"steps": 3})
    write_lab(**ONE, seeds=[0, 1], budget={"steps": 3})
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    assert "seed=0, which was run with other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("minutes", "limit"),
    [(0.001, "00:00:00:01"), (90, "00:01:30:00"), (6000, "04:04:00:00"), (1e6, "694:10:40:00")],
)
def test_minutes_of_a_budget_as_a_time_limit(minutes: float, limit: str) -> None:
    words, steps = budget_words({"minutes": minutes})
    assert words[:2] == ["--trainer.max_time", limit] and steps is None


@pytest.mark.parametrize("moved", ["moved", "moved to here"])
def test_finished_runs_of_a_moved_folder_are_kept(moved: str, tmp_path: Path) -> None:
    """Also with the folder's path in the name of the run before the grid."""
    before = {"task": "vit", "options": LAB["options"], "budget": {"steps": 2}}
    nested = {"model.teacher": {"path": "{before}/checkpoints/best.ckpt"}}
    axes = {"start": {"x": {"model.pretrained": "{before}", **nested}}}
    write_lab(before=before, axes=axes, compare={})
    folder = tmp_path / "out"
    plan = make_plan(read_lab("lab.yaml"), folder, [])
    (folder / "logs").mkdir(parents=True)
    save_plan(plan, folder)
    save_command(folder, plan.runs[0], "")
    run_folder(folder, plan.runs[0]).mkdir(parents=True)
    (run_folder(folder, plan.runs[0]) / "summary.json").touch()
    folder = folder.rename(tmp_path / moved)
    save_plan(make_plan(read_lab("lab.yaml"), folder, []), folder)
    write_lab(before=before, axes=axes, compare={}, budget={"steps": 4})
    with pytest.raises(UsageError, match="was run with other options"):
        save_plan(make_plan(read_lab("lab.yaml"), folder, []), folder)


def test_steps_of_a_config_file_do_not_end_a_run_of_minutes(capsys: Any) -> None:
    Path("short.yaml").write_text("trainer: {max_steps: 2}\n")
    rate = {"model.optimizer.schedule": "constant", "model.optimizer.warmup": 1}
    options = {**LAB["options"], **rate, "config": [LAB["options"]["config"], "short.yaml"]}
    write_lab(**ONE, options=options, budget={"minutes": 1})
    assert main(["run", "--dry_run", "lab.yaml", "--output", "out"]) == 0
    printed = capsys.readouterr().out
    assert "--trainer.max_time 00:00:01:00 --trainer.max_steps -1" in printed


def test_a_time_limit_of_a_config_file_is_refused(capsys: Any) -> None:
    Path("short.yaml").write_text("trainer: {max_time: 00:00:00:09}\n")
    options = {**LAB["options"], "config": [LAB["options"]["config"], "short.yaml"]}
    write_lab(**ONE, options=options)
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert "order=pre: trainer.max_time" in error and error.count("\n") == 1
    write_lab(**ONE, before={"task": "vit", "options": options})  # which may end by its options
    assert main(["run", "--dry_run", "lab.yaml", "--output", "out"]) == 0
    write_lab(**ONE, before={"task": "vit", "options": options, "budget": {"steps": 2}})
    assert main(["run", "--dry_run", "lab.yaml", "--output", "out"]) == 2


@pytest.mark.parametrize("nested", [True, False])
def test_given_steps_replace_what_ends_the_run_before_the_grid(nested: bool, capsys: Any) -> None:
    limit = "00:00:01:00"
    given = {"trainer": {"max_time": limit}} if nested else {"trainer.max_time": limit}
    write_lab(**ONE, before={"task": "vit", "options": {**LAB["options"], **given}})
    assert main(["run", "--dry_run", "lab.yaml", "--output", "out", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert "max_time" not in printed
    assert printed.count("--trainer.max_steps 2") == 2


def test_a_damaged_result_is_named(capsys: Any) -> None:
    write_lab(**ONE)
    plan = make_plan(read_lab("lab.yaml"), Path("out"), [])
    Path("out/logs").mkdir(parents=True)
    save_plan(plan, Path("out"))
    folder = run_folder(Path("out"), plan.runs[0])
    folder.mkdir(parents=True)
    (folder / "summary.json").touch()
    assert main(["report", "out"]) == 1
    error = capsys.readouterr().err
    assert f"{folder}/summary.json is damaged" in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_report_of_a_laboratory_that_was_moved(capsys: Any) -> None:
    lab(evaluations={"some": {"trainer.limit_test_batches": 1}})
    expected = rows()[0]["test/loss some"]
    for folder in ("out", "moved"):
        if folder == "moved":
            Path("out").rename("moved")
        assert main(["report", folder]) == 0
        assert "1 of 1 runs are finished" in capsys.readouterr().out
        assert rows(folder)[0]["test/loss some"] == expected


@pytest.mark.slow
def test_an_evaluation_with_other_options_is_done_again() -> None:
    found = []
    for batches in (1, 2):
        lab(evaluations={"some": {"trainer.limit_test_batches": batches}})
        found.append(rows()[0]["test/loss some"])
        assert f"--trainer.limit_test_batches {batches}" in rows()[0]["tests"]
    assert found[0] != found[1]
    times = [path.stat().st_mtime_ns for path in sorted(Path("out").rglob("summary.json"))]
    lab(evaluations={"some": {"trainer.limit_test_batches": 2}})
    assert times == [p.stat().st_mtime_ns for p in sorted(Path("out").rglob("summary.json"))]


def test_steps_of_a_model_of_pixels_are_counted(capsys: Any) -> None:
    options = {"data.batch_size": 16}
    write_lab(task="igpt", options=options, **ONE, budget={"tokens": 16 * 64 * 5})
    assert main(["run", "--dry_run", "lab.yaml", "--output", "out"]) == 0
    assert "--trainer.max_steps 5" in capsys.readouterr().out


METRICS = {"best val/loss": {}, "best train/loss": {}, "val/acc": {"evaluations": {"a": {}}}}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_that_no_file_will_hold_are_refused(name: str, capsys: Any) -> None:
    write_lab(**ONE, **METRICS[name], metric={"name": name, "goal": "minimize"})
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    assert f"there is no {name}" in capsys.readouterr().err and not Path("out").exists()
