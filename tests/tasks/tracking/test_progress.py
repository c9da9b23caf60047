"""Progress, and how long training takes, as it is said after its first seconds."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.tracking import progress
from tasks.tracking.progress import TimeEstimate, duration
from tasks.vit.task import ViTTask
from tests.helpers.command import Console, Patch, environment
from tests.helpers.results import logged, metrics
from tests.helpers.tiny import TINY, write_data

LINE = (
    "fit --data.batch_size 16 --data.loading.eval_batch_size 16 --model.net.stack.width 8"
    " --model.net.stack.depth 1 --model.net.stack.heads 1 --trainer.limit_train_batches 30"
    " --trainer.limit_val_batches 4 --trainer.limit_test_batches 1 --trainer.num_sanity_val_steps 1"
)


@pytest.mark.parametrize(
    "validation, least", [pytest.param(0.013, 1, marks=pytest.mark.slow), (0.3, 2)]
)
def test_the_estimate(validation: float, least: int, console: Console, monkeypatch: Patch) -> None:
    """Steps of 40 ms, and validation batches that take a third of that, or much longer."""
    expected: list[float] = []  # ends
    ended: list[float] = []

    class Estimate(TimeEstimate):
        def __init__(self) -> None:
            super().__init__(seconds=0.5)

        def _say(self, *both: Any) -> None:
            super()._say(*both)
            expected.append(self.end)

        def on_train_end(self, *_: Any) -> None:
            ended.append(time.monotonic())

    def slow(step: Any, seconds: float) -> Any:
        def run(task: ViTTask, *batch: Any) -> torch.Tensor:
            time.sleep(seconds)
            return step(task, *batch)

        return run

    monkeypatch.setattr(progress, "TimeEstimate", Estimate)
    monkeypatch.setattr(ViTTask, "training_step", slow(ViTTask.training_step, 0.04))
    monkeypatch.setattr(ViTTask, "validation_step", slow(ViTTask.validation_step, validation))
    start = time.monotonic()
    out, _ = console.printed(f"{LINE} --trainer.max_epochs 2")
    said = re.findall(r"^about \d+ s of training left$", out, re.M)
    assert len(said) >= least, out
    assert abs(expected[-1] - ended[0]) < 0.2 * (ended[0] - start)


def test_the_estimate_follows_the_speed(console: Console, monkeypatch: Patch) -> None:
    """90 steps of 0.1 s, then 60 of 1 s, by a clock that only training moves."""
    clock = [0.0]
    original = ViTTask.training_step

    def run(task: ViTTask, *batch: Any) -> torch.Tensor:
        clock[0] += 0.1 if task.global_step < 90 else 1.0
        return original(task, *batch)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ViTTask, "training_step", run)
    out, _ = console.printed(f"{LINE} --trainer.limit_val_batches 0 --trainer.max_epochs 5")
    said = [int(found) for found in re.findall(r"about (\d+) s of training left$", out, re.M)]
    assert said == [11, 9, 40], out  # after windows of 4, 8 and 16 s


def test_the_estimate_with_fewer_batches_in_the_last_step_of_an_epoch(
    console: Console, monkeypatch: Patch
) -> None:
    """One epoch of 30 batches of 1 s, a step of 29 and one of 1."""
    clock = [0.0]
    original = ViTTask.training_step

    def run(task: ViTTask, *batch: Any) -> torch.Tensor:
        clock[0] += 1
        return original(task, *batch)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ViTTask, "training_step", run)
    more = "--trainer.limit_val_batches 0 --trainer.max_epochs 1"
    out, _ = console.printed(f"{LINE} {more} --trainer.accumulate_grad_batches 29")
    first, *_ = re.findall(r"about (.*) of training left$", out, re.M)
    assert first == "30 s", out


def test_no_estimate_of_a_few_seconds(console: Console, monkeypatch: Patch) -> None:
    """Steps of 0.25 s, by a clock that only training moves: 11 s, of which the last 7 are left."""
    clock = [0.0]
    original = ViTTask.training_step

    def run(task: ViTTask, *batch: Any) -> torch.Tensor:
        clock[0] += 0.25
        return original(task, *batch)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ViTTask, "training_step", run)
    short = "--trainer.limit_val_batches 0 --trainer.max_steps 45"
    assert "training left" not in console.printed(f"{LINE} {short}")[0]


def test_no_estimate_without_an_end(console: Console, monkeypatch: Patch) -> None:
    monkeypatch.setattr(TimeEstimate.__init__, "__defaults__", (0.0,))
    endless = "--trainer.max_epochs -1 --trainer.max_time 00:00:00:01"
    schedule = "--model.optimizer.schedule constant --model.optimizer.warmup 0"
    out, _ = console.printed(f"{LINE} {endless} {schedule}")
    assert "training left" not in out


def test_a_line_has_the_mean_training_loss_since_the_line_before(console: Console) -> None:
    every_step = "--trainer.max_epochs 1 --trainer.log_every_n_steps 1 --run_dir r"
    out, _ = console.printed(f"{LINE} {every_step}")
    (shown,) = re.findall(r"^epoch 1/1  step 30  train/loss (\S+)", out, re.M)
    losses = logged("r")
    assert len(losses) == 30 and abs(losses[-1] - sum(losses) / 30) > 1e-3
    assert float(shown) == pytest.approx(sum(losses) / 30, abs=1e-4)


def test_a_run_of_few_steps_logs_the_last_one(console: Console) -> None:
    console.printed(f"{LINE} --trainer.max_epochs 2 --trainer.limit_train_batches 3 --run_dir r")
    assert [row["step"] for row in metrics("r") if "train/loss" in row] == ["6"]


def test_a_line_at_least_every_30_seconds(console: Console, monkeypatch: Patch) -> None:
    """Steps of 10 s, by a clock that only training moves."""
    clock = [0.0]
    original = ViTTask.training_step

    def run(task: ViTTask, *batch: Any) -> torch.Tensor:
        clock[0] += 10.0
        return original(task, *batch)

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(ViTTask, "training_step", run)
    endless = "--trainer.max_epochs -1 --trainer.max_steps 7 --trainer.limit_val_batches 0"
    out, _ = console.printed(f"{LINE} {endless} --trainer.log_every_n_steps 1")
    assert re.findall(r"^epoch 1/-  step (\d)/7  train/loss \d", out, re.M) == ["3", "6"]


def test_a_line_at_least_every_30_seconds_of_an_evaluation(
    console: Console, monkeypatch: Patch, best: Path
) -> None:
    """Batches of 10 s, by a clock that only evaluation moves."""
    clock = [0.0]

    def slow(step: Any) -> Any:
        def run(task: ViTTask, *batch: Any) -> Any:
            clock[0] += 10.0
            return step(task, *batch)

        return run

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for name in ("validation_step", "test_step"):
        monkeypatch.setattr(ViTTask, name, slow(getattr(ViTTask, name)))
    more = "--trainer.limit_val_batches 7 --trainer.limit_test_batches 4 --trainer.max_epochs 1"
    out, _ = console.printed(f"{LINE} {more}")
    assert re.findall(r"^(validation|test)  batch (\d/\d)$", out, re.M) == [
        *(("validation", "2/7"), ("validation", "5/7"), ("test", "3/4"))
    ]
    line = f"test --ckpt_path {best} --data.loading.eval_batch_size 16"
    out, _ = console.printed(f"{line} --trainer.limit_test_batches 7")
    assert re.findall(r"^test  batch (\d)/7$", out, re.M) == ["3", "6"]


def on_a_terminal(line: str, columns: int = 80) -> str:
    """What `python -m tasks.LINE` writes to a terminal."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", *line.split()]
    own = environment()
    own.pop("COLUMNS", None)
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, env=own) as run:
        os.close(secondary)
        found = b""
        with suppress(OSError):  # at the end
            while part := os.read(primary, 2**16):
                found += part
        os.close(primary)
    assert run.returncode == 0, found.decode()
    return found.decode()


@pytest.mark.slow
def test_a_terminal_shows_a_bar_of_every_evaluation(best: Path) -> None:
    out = on_a_terminal(f"tasks.vit {LINE} --trainer.max_epochs 1")
    assert re.search("epoch 1/1.*30/30", out)
    assert re.search("validation.*4/4", out) and re.search("test.*1/1", out)
    more = "--data.loading.eval_batch_size 8 --trainer.limit_test_batches 5"
    assert re.search("test.*5/5", on_a_terminal(f"tasks.vit test --ckpt_path {best} {more}"))


@pytest.mark.slow
@pytest.mark.parametrize("task, monitor, columns", [
    ("vit", "val/acc", 80), ("mlm", "", 80), ("seq2seq", "val/bleu", 80), ("bert", "", 60),
])  # fmt: skip
def test_kept_lines_fit_the_terminal(task: str, monitor: str, columns: int) -> None:
    """The losses come first, then the metric that decides which checkpoint is best."""
    write_data(Path.cwd())
    few = "--trainer.limit_train_batches 3 --trainer.limit_test_batches 1 --trainer.max_epochs 2"
    out = on_a_terminal(f"tasks.{task} fit {TINY[task]} {few} --run_dir r", columns)
    screen = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out)
    lines = re.findall(r"epoch \d/2  step [^\r\n]*", screen)
    assert len(lines) == 2, screen
    for line in lines:
        assert len(line) <= columns
        assert re.match(rf".*  train/loss \d\S+  val/loss \d\S+.*{monitor}", line), line


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_larger_batches_of_validations_are_estimated(monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "Task", SimpleNamespace)
    data = SimpleNamespace(batch_size=8, eval_batch_size=32)
    task: Any = SimpleNamespace(total_steps=lambda: 10, datamodule=data)
    trainer: Any = SimpleNamespace(
        global_step=0,
        accumulate_grad_batches=1,
        num_training_batches=10,
        num_val_batches=[2],
        val_check_batch=10,
        check_val_every_n_epoch=1,
    )
    estimate = TimeEstimate()
    estimate.seconds_per_batch = 3.0
    # A validation batch has 4 times the samples, of a third of the time each.
    assert estimate.seconds_left(trainer, task) == 10 * 3 + 2 * 4 * 3 / 3


def test_validations_that_are_left_are_estimated_by_their_mean(monkeypatch: Patch) -> None:
    monkeypatch.setattr(progress, "Task", SimpleNamespace)
    estimate = TimeEstimate()
    estimate.seconds_per_batch = 1.0
    estimate.validations = 2
    estimate.validation_seconds = 6.0
    task: Any = SimpleNamespace(total_steps=lambda: 100)
    trainer: Any = SimpleNamespace(
        global_step=0,
        accumulate_grad_batches=1,
        num_training_batches=10,
        val_check_batch=10,
        check_val_every_n_epoch=2,
    )
    assert estimate.seconds_left(trainer, task) == 100 + 5 * 3  # after every second epoch
