"""Laboratories as real processes: refused files, failing runs, kills, locks and full disks."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import RunError
from tasks.lab import runner
from tasks.lab.__main__ import main
from tasks.lab.plan import Run, make_plan
from tasks.lab.runner import Job, Runner
from tasks.lab.spec import read_lab
from tasks.lab.state import error_of, failure_file, log_file, run_folder, save_plan
from tasks.tracking.csv_files import write_csv
from tests.helpers.command import ROOT, Capture, Patch
from tests.helpers.labs import LAB, rows, start, write_lab
from tests.helpers.results import summary
from tests.helpers.wandb_files import records


def stamps(folder: Path) -> dict[Path, int]:
    """When each file of a folder was last written, in ns."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 500
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


BEFORE = {"task": "vit", "options": LAB["options"], "budget": {"steps": 2}}
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"axes": {"model.net.stack.ordre": ["pre"]}}, ("ordre=pre", "order")),
    ({"axes": {"model.net.stack.order": ["pre", "prr"]}}, ("order=prr", "did you mean pre")),
    ({"axes": {"model.net.stack.order": []}}, ("axes.model.net.stack.order", "empty")),
    ({"axes": {"model.net.stack.heads": [2, 5]}}, ("heads=5",)),
    ({"axes": {"trainer.max_epochs": [2, 5]}}, ("trainer.max_epochs", "budget")),
    ({"options": {"trainer": {"max_steps": 5}}}, ("options", "trainer.max_steps", "budget")),
    ({"options": {"trainer.max_time": {"minutes": 5}}}, ("options", "trainer.max_time", "budget")),
    ({"axes": {"model.net.stack.heads": [1, 1.0]}}, ("axes.model.net.stack.heads", "equal")),
    ({"axes": {"model.net.stack.causal": [False, 0]}}, ("axes.model.net.stack.causal", "equal")),
    ({"options": {"trainer.max_time": "00:00:00:09"}}, ("options", "trainer.max_time", "budget")),
    ({"before": {"task": "mlm", "option": {}}}, ("before", "'options'")),
    ({"before": {"task": "mlm", "options": {"run_dir": "x"}}}, ("before.options", "run_dir")),
    ({"task": "vti"}, ("task", "'vit'")),
    ({"seeds": [0, "one"]}, ("seeds", "one")),
    ({"axes": {"width": {"a b": {}, "a_b": {}}}}, ("axes", "width=a_b")),
    ({"seeds": []}, ("seeds",)),
    ({"budget": {"stpes": 3}}, ("budget", "'steps'")),
    ({"budget": {"steps": -3}}, ("budget.steps", "-3")),
    (
        {"budget": {"minutes": 1}},
        ("order=pre", "schedule: constant", "warmup: 10", "budget.steps"),
    ),
    ({"metric": {"name": "test/bleu", "goal": "maximize"}}, ("test/bleu", "test/acc")),
    ({"compare": {"model.net.stack.order": "pro"}}, ("compare", "'pre'")),
    ({"compare": {"model.net.stack.order": None}}, ("compare", "pre, post")),
    ({"evaluations": {"far": {"data.lenght": 9}}}, ("evaluations.far", "--data.lenght")),
    ({"axes": {"start": {"x": {"model.pretrained": "{before}"}}}}, ("start=x", "before")),
    (
        {"before": BEFORE, "axes": {"start": {"x": {"model.pretraind": "{before}"}}}},
        ("start=x", "--model.pretrained"),
    ),
    (
        {"before": BEFORE, "evaluations": {"far": {"data.pth": "{before}/texts.csv"}}},
        ("evaluations.far", "--data.path"),
    ),
    ({"evaluations": {"a/b": {}}}, ("evaluations", "a_b")),
    ({"evaluations": {"a": {}}, "axes": {"evaluation": {"x": {}}}}, ("axes.evaluation",)),
    ({"axes": {"seed": [1], "b": {"x": {"seed": 2}}}}, ("axes", "seed and b both set seed")),
    (
        {
            "axes": {
                "a": {"x": {"model.net": {"stack": {"depth": 1}}}},
                "model.net.stack.depth": [1],
            }
        },
        ("axes", "a and model.net.stack.depth both set model.net.stack.depth"),
    ),
    (
        {"axes": {"a": {"x": {"model.net.stack.depth": 1}}, "b": {"y": {"model": {"net": None}}}}},
        ("axes", "a and b both set model.net"),
    ),
    ({"metric": {"name": "test/loss", "goal": "minimize", "mode": "x"}}, ("metric", "mode")),
    ({"pictures": {"a": {"kind": "curves", "x": "hours"}}}, ("pictures.a.x", "minutes")),
    ({"pictures": {"a": {"kind": "bars", "x": "evaluation"}}}, ("pictures.a.x", "evaluation")),
    ({"axes": {}, "pictures": {"a": {"kind": "bars"}}}, ("pictures.a", "axis")),
    ({"pictures": {"a": {"kind": "line", "scale": "lgo"}}}, ("pictures.a.scale", "'log'")),
    ({"pictures": {"a": {"kind": "layers", "at": "lats"}}}, ("pictures.a.at", "'last'")),
    ({"pictures": {"a": {"kind": "bars", "metric": "val/loss"}}}, ("pictures.a", "metric")),
    ({"scaling_law": True, "pictures": {"scaling": {"kind": "curves"}}}, ("scaling", "another")),
    ({"scaling_law": True, "pictures": {"scaling_a": {"kind": "bars"}}}, ("scaling_a", "another")),
    ({"colour": 1}, ("colour",)),
]


@pytest.mark.parametrize(("changes", "names"), BAD, ids=[names[0] for _, names in BAD])
def test_what_is_wrong_is_said_before_the_first_run(
    changes: dict[str, Any], names: tuple[str, ...], capsys: Capture
) -> None:
    write_lab(**{"compare": {}, **changes})
    assert main(["run", "lab.yaml", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for name in ("lab.yaml", *names):
        assert name in error
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("values", "base", "name"),
    [
        ([None, 0.1], None, "null"),
        (["x", ["a", "b"]], ["a", "b"], '["a", "b"]'),
        ([True, False], True, True),
        ({None: {}, "x": {}}, None, None),
    ],
)
def test_values_to_compare_with_are_named_as_those_of_axes(
    values: Any, base: Any, name: Any
) -> None:
    write_lab(axes={"a": values}, compare={"a": base})
    lab = read_lab("lab.yaml")
    assert lab.compare == {"a": name} and name in lab.axes["a"]


def test_pictures_over_evaluations_need_some() -> None:
    pictures = {"a": {"kind": "line", "x": "evaluation", "scale": "linear"}}
    write_lab(evaluations={"far": {}}, pictures=pictures)
    assert read_lab("lab.yaml").pictures == pictures


def test_options_of_a_run_that_is_missing_are_accepted() -> None:
    """Whether they are read before the parser, or name data or a file."""
    start = {"model.pretrained": "{before}", "model.teacher.path": "{before}/checkpoints/best.ckpt"}
    nested = {"data": {"path": "{before}/images", "batch_size": 4}}
    axes = {"start": {"here": start, "there": nested}}
    evaluations = {"far": {"data.path": "{before}/images.csv"}}
    write_lab(before=BEFORE, axes=axes, evaluations=evaluations, compare={})
    plan = make_plan(read_lab("lab.yaml"), Path("out"), [])
    here, there = plan.runs
    assert "out/runs/before" in here.arguments
    assert "out/runs/before/checkpoints/best.ckpt" in here.arguments
    assert '{"path": "out/runs/before/images", "batch_size": 4}' in there.arguments
    assert "out/runs/before/images.csv" in there.evaluations["far"]


def test_commands_begin_with_the_run_before_the_grid(capsys: Capture) -> None:
    axes = {"start": {"x": {"model.pretrained": "{before}"}}}
    write_lab(before=BEFORE, axes=axes, compare={})
    assert main(["run", "--dry_run", "lab.yaml", "--output", "out"]) == 0
    printed = capsys.readouterr().out.splitlines()[-2:]
    folder = Path("out").resolve()
    for line, words in zip(printed, ("--trainer.max_steps 2", "--model.pretrained"), strict=True):
        assert line.startswith("python -m tasks.vit fit") and words in line
    assert printed[0].endswith(f"--run_dir {folder}/runs/before") and not folder.exists()
    folder.mkdir()
    save_plan(make_plan(read_lab("lab.yaml"), folder, []), folder)
    assert main(["report", "out"]) == 0
    assert "\n".join(printed) in Path("out/report.md").read_text()


@pytest.mark.slow
def test_a_failing_run_among_good_ones_and_what_is_written() -> None:
    rates = {"good": {"model.optimizer.lr": 1e-3}, "bad": {"model.optimizer.lr": 1e30}}
    write_lab(axes={"lr": rates}, compare={"lr": "good"}, seeds=[0], budget={"steps": 30})
    process = start("run lab.yaml --output out --config configs/logger/wandb.yaml")
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    finished = "finished lr=good,seed=0; 1 of 2 runs are finished; about "
    assert [line for line in out.splitlines() if line.startswith(finished)]
    good, bad = rows()
    assert (good["state"], bad["state"]) == ("finished", "failed")
    assert "NaN" in bad["error"] and "NaN" in Path("out/report.md").read_text()
    found = summary(f"out/runs/lr=good,seed={good['seed']}")
    assert float(good["test/loss"]) == found["test/loss"]
    assert good["command"] == found["command"] and int(good["steps"]) == 30
    assert good["parameters"] == str(found["parameters"])
    groups = {record.run.run_group for record in records(Path("out")) if record.run.run_id}
    assert groups == {LAB["title"]}
    Path("out/bars.png").unlink()
    assert main(["report", "out"]) == 0
    assert Path("out/bars.png").exists()


@pytest.mark.slow
def test_a_lab_whose_runs_all_fail_exits_with_1() -> None:
    rates = {"bad": {"model.optimizer.lr": 1e30}, "worse": {"model.optimizer.lr": 1e35}}
    write_lab(axes={"lr": rates}, compare={}, budget={"steps": 30})
    process = start("run lab.yaml --output out")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 1 and err.count("\n") == 1 and "out/report.md" in err, err
    assert [row["state"] for row in rows()] == ["failed", "failed"]
    assert "NaN" in Path("out/report.md").read_text()


@pytest.mark.slow
def test_a_killed_lab_resumes_and_keeps_what_is_finished() -> None:
    write_lab(budget={"steps": 100})
    process = start("run lab.yaml --output out")
    first, second = (Path(f"out/runs/order={order},seed=0") for order in ("pre", "post"))
    wait_for((second / "checkpoints/last.ckpt").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = stamps(first)
    assert first / "summary.json" in before and not (second / "summary.json").exists()
    log = Path("out/logs/order=post,seed=0.txt")
    log_start = log.stat().st_size
    assert main(["report", "out"]) == 0
    assert [row["state"] for row in rows()] == ["finished", "unfinished"]
    again = start("run lab.yaml --output out")
    out, err = again.communicate(timeout=500)
    assert again.returncode == 0, err
    assert stamps(first) == before
    assert "fit --resume" in summary(second)["command"]
    resumed = log.read_bytes()[log_start:].decode()
    assert re.search(r"100 optimizer steps, \d+ of them done", resumed)
    assert "epoch 1/" not in resumed and "epoch 5/" in resumed
    assert [row["state"] for row in rows()] == ["finished", "finished"]


@pytest.mark.slow
def test_two_labs_in_a_folder_and_ctrl_c() -> None:
    write_lab(budget={"steps": 2000})
    first = start("run lab.yaml --output out")
    wait_for(Path("out/runs/order=pre,seed=0/metrics.csv").exists, first)
    second = start("run lab.yaml --output out")
    _, err = second.communicate(timeout=500)
    assert second.returncode == 2 and err.count("\n") == 1 and "out" in err
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=500)
    assert first.returncode == 130 and "to resume: python -m tasks.lab run lab.yaml" in err
    assert "0 of 2 runs are finished" in Path("out/report.md").read_text()
    processes = [Path(f"/proc/{name}/cmdline") for name in os.listdir("/proc") if name.isdecimal()]
    here = str(Path("out").resolve())
    for path in processes:
        try:
            assert here not in path.read_text()
        except OSError:
            continue  # it has ended


@pytest.mark.slow
def test_a_full_disk_ends_the_lab_with_one_sentence_and_keeps_what_is_finished() -> None:
    write_lab(axes={"model.net.stack.order": ["pre"]})
    command = "run lab.yaml --output out --seeds"
    process = start(f"{command} 0")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    finished = Path("out/runs/order=pre,seed=0")
    before = stamps(finished)
    process = start(f"{command} 0,1", before="ulimit -f 20;")
    _, err = process.communicate(timeout=500)
    assert process.returncode == 1 and err.count("\n") == 1 and "make room" in err, err
    assert "1 of 2 runs are finished, and are kept" in err
    assert stamps(finished) == before
    again = start(f"{command} 0,1")
    _, err = again.communicate(timeout=500)
    assert again.returncode == 0, err
    assert stamps(finished) == before
    assert [row["state"] for row in rows()] == ["finished", "finished"]


def test_errors_are_those_of_the_last_process(tmp_path: Path) -> None:
    run = Run("one", "vit", {}, 0, [])
    (tmp_path / "logs").mkdir()
    log_file(tmp_path, run).write_text("error: No space left on device\n")
    start_of_log = log_file(tmp_path, run).stat().st_size
    process = subprocess.Popen(["bash", "-c", "exit 7"])
    process.wait()
    Runner("", tmp_path, 1, "").finish(Job(run, "", process, start_of_log))
    assert "7" in error_of(tmp_path, run) and "space" not in error_of(tmp_path, run)
    process = subprocess.Popen(["bash", "-c", "exit 1"])
    process.wait()
    with pytest.raises(RunError):
        Runner("", tmp_path, 1, "").finish(Job(run, "", process, 0))


def test_what_was_finished_before_is_said_once(
    tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)  # before the second run has ended
    first = Run("first", "vit", {}, 0, [])
    second = Run("second", "lab", {}, 0, ["no_command"])
    (tmp_path / "logs").mkdir()
    run_folder(tmp_path, first).mkdir(parents=True)
    (run_folder(tmp_path, first) / "summary.json").touch()
    Runner("", tmp_path, 1, "").run([first, second])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 of 2 runs are finished already"
    assert lines[1].startswith("second failed") and len(lines) == 2


def test_progress_estimates_the_time_that_is_left(tmp_path: Path, capsys: Capture) -> None:
    """Two short runs, of which one was finished before, and half of a long one in 110 s."""
    short, long, last = runs = [
        Run(name, "vit", {}, 0, [], steps=100, step_flops=flops)
        for name, flops in (("short", 1e6), ("long", 2e6), ("last", 1e6))
    ]
    for run in (short, long):
        run_folder(tmp_path, run).mkdir(parents=True)
    (run_folder(tmp_path, short) / "summary.json").touch()
    runner = Runner("", tmp_path, 1, "")
    runner.started = time.monotonic() - 1000
    runner.run([short])  # as the run before the grid, whose time does not count
    assert time.monotonic() - runner.started < 100
    capsys.readouterr()
    runner.runs = runs
    runner.work_before = runner.work_done()
    runner.print_progress()
    write_csv(run_folder(tmp_path, long) / "metrics.csv", ["step"], [[10, 50]])
    runner.started = time.monotonic() - 110
    runner.print_progress()
    (tmp_path / "logs").mkdir()
    failure_file(tmp_path, last).write_text("NaN")
    runner.print_progress("last failed")
    start, half, failed = capsys.readouterr().out.splitlines()
    counts = "1 of 3 runs are finished"
    assert start == counts
    # A process's start is a tenth of the long training: 0.55 of 2.3 are done, 1.15 are left.
    assert re.fullmatch(f"{counts}; about 3 min 5\\d s left", half)
    assert re.fullmatch(f"last failed; {counts}; 1 failed; about 5\\d s left", failed)


FILES = sorted((ROOT / "configs/lab").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_read(path: Path) -> None:
    lab = read_lab(str(path))
    assert lab.claim and lab.settings
    assert lab.compare or lab.scaling_law
    assert path.read_text().startswith("# ")
    assert f"\n| [`{path.name}`](lab/{path.name}) | " in (ROOT / "configs/README.md").read_text()


@pytest.mark.slow
@pytest.mark.exhaustive_except("rmsnorm", "block_variants")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_pass_the_checks(path: Path) -> None:
    assert main(["run", str(path), "--seeds", "0", "--dry_run", "true"]) == 0
