"""SIGTERM and Ctrl-C, to any process, stop a run after a complete step, with a checkpoint and the
right exit code.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tasks.base import Task
from tasks.cli.signals import SignalHandler
from tests.tasks.cases import CASES, Wholes, assert_same, at, fill, first
from tests.tasks.command import ROOT, SHORT, checkpoint, run
from tests.tasks.forked import Server

BEFORE = """
import os
from tasks.base import Task
real = Task.configure_model
def configure(self):
    os.kill(os.getpid(), 15)
    return real(self)
Task.configure_model = configure
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, moment, number",
    [
        ("length buckets", "step", signal.SIGTERM),
        ("both lengths", "validation", signal.SIGINT),
        ("plain", "validation", signal.SIGTERM),
    ],
)
def test_stopped_and_resumed(
    case: str,
    moment: str,
    number: int,
    server: Server,
    wholes: Wholes,
    tmp_path: Path,
) -> None:
    folder, task = fill(tmp_path / "here"), CASES[case][0]
    running = server.start(first(case), folder, task, at(moment, number))
    assert running.wait() == [128 + number]
    name, out = signal.Signals(number).name, running.output()
    assert f"stopped by {name} after step" in out and "Traceback" not in out
    command = out.strip().splitlines()[-1].partition("to go on: ")[2]
    assert command.startswith(f"python -m tasks.{task} fit --resume {folder}/r")
    state = checkpoint(folder / "r")["loops"]["fit_loop"]["epoch_loop.state_dict"]
    due = (
        moment == "validation" and case == "plain"
    )  # the other one comes in the middle of a step, which is done again
    assert state["validates"] == due
    server.run(command.partition(f"tasks.{task} ")[2], folder, task)
    assert_same(folder / "r", wholes(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, number", [((1,), signal.SIGTERM), ((0,), signal.SIGINT), ((0, 1), signal.SIGINT)]
)
@pytest.mark.parametrize("moment", ["step", "validation"])
def test_any_rank_stops_all(
    ranks: tuple[int, ...],
    number: int,
    moment: str,
    server: Server,
    wholes: Wholes,
    tmp_path: Path,
) -> None:
    folder = fill(tmp_path / "here")
    running = server.start(first("length buckets", 2), folder, "bert", at(moment, number, ranks), 2)
    assert running.wait() == [128 + number] * 2, running.output() + running.output(1)
    assert running.output().count("to go on: python -m tasks.bert fit --resume") == 1
    assert "to go on" not in running.output(1) and "error" not in running.output(1)
    server.run("fit --resume r", folder, "bert", ranks=2)
    assert_same(folder / "r", wholes("length buckets", 2))


@pytest.mark.slow
def test_the_second_stops_at_once(server: Server, tmp_path: Path) -> None:
    before = at("step", signal.SIGINT).replace(
        "def strike(*_):", "def strike(*_):\n    os.kill(os.getpid(), 2)"
    )
    running = server.start(first("plain"), fill(tmp_path / "here"), before=before)
    assert running.wait() == [130] and "interrupted" in running.output()
    assert (
        checkpoint(tmp_path / "here" / "r")["global_step"] == 6
    )  # the seventh step was complete, the eighth was not


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_in_the_test_after_training(number: int, server: Server, tmp_path: Path) -> None:
    running = server.start(first("plain"), fill(tmp_path / "here"), before=at("test", number))
    assert running.wait() == [128 + number]
    last = running.output().strip().splitlines()[-1]
    assert (
        last == "error: interrupted"
        if number == signal.SIGINT
        else "to go on: python -m tasks.vit" in last
    )


@pytest.mark.slow
def test_after_the_last_step(server: Server, wholes: Wholes, tmp_path: Path) -> None:
    folder = fill(tmp_path / "here")
    last = BEFORE.replace("configure_model", "on_train_end")
    running = server.start(first("plain"), folder, before=last)
    assert running.wait() == [128 + signal.SIGTERM]
    assert "stopped by SIGTERM after step 24; to go on: " in running.output()
    out = server.run("fit --resume r", folder)
    assert "nothing was left to train after step 24" in out and "test/acc" in out
    assert_same(folder / "r", wholes("plain"))


@pytest.mark.slow
def test_before_training_nothing_is_left(server: Server, tmp_path: Path) -> None:
    running = server.start(first("plain"), fill(tmp_path / "here"), before=BEFORE)
    assert running.wait() == [143] and running.output().strip() == "terminated"
    assert not (tmp_path / "here" / "r").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("to, number", [("launcher", signal.SIGTERM), ("group", signal.SIGINT)])
def test_processes_that_lightning_launches(to: str, number: int, tmp_path: Path) -> None:
    line = first("workers", 2).replace("max_epochs 3", "max_epochs 1000")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TESSERA_RUN_DIR", None)
    command = [sys.executable, "-m", "tasks.vit", *shlex.split(line)]
    with open(tmp_path / "out", "w") as out:
        running = subprocess.Popen(
            command,
            cwd=fill(tmp_path / "here"),
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "here/r/checkpoints/previous.ckpt").exists():
            assert running.poll() is None and time.monotonic() < deadline, (
                tmp_path / "out"
            ).read_text()
            time.sleep(0.05)
        start = time.monotonic()
        os.killpg(running.pid, number) if to == "group" else running.send_signal(number)
        assert running.wait(60) == 128 + number, (tmp_path / "out").read_text()
        print(f"stopped in {time.monotonic() - start:.1f} s")
        text = (tmp_path / "out").read_text()
        assert (
            text.count("to go on: python -m tasks.vit fit --resume") == 1
            and "Traceback" not in text
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "more", ["", "--checkpoint.every_n_train_steps 1 --checkpoint.save_top_k 1"]
)
def test_saves_also_where_last_is_not_asked_for(
    more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Task.training_step

    def struck(self: Task, batch: Any, number: int) -> Any:
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, number)

    monkeypatch.setattr(Task, "training_step", struck)
    assert run(f"fit {SHORT} --checkpoint.save_last false {more} --run_dir r") == 143
    assert "stopped by SIGTERM after step 3; to go on: " in capsys.readouterr().err
    assert checkpoint("r")["global_step"] == 3


def test_what_torchrun_repeats_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = SignalHandler()
    signals.mode = "defer"
    signals(signal.SIGINT, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    signals(signal.SIGINT, None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(KeyboardInterrupt):
        signals(signal.SIGINT, None)
    assert signals.received == signal.SIGINT
