"""How long training takes, as it is said after its first seconds."""

import re
import time
from typing import Any

import pytest
import torch

from tasks.tracking import progress
from tasks.tracking.progress import TimeEstimate, duration
from tasks.vit.task import ViTTask
from tests.helpers.command import Console, Patch

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
    said = re.findall(r"^training takes about \d+ s more$", out, re.M)
    assert least <= len(said) <= 2, out
    assert abs(expected[-1] - ended[0]) < 0.2 * (ended[0] - start)


def test_no_estimate_without_an_end(console: Console, monkeypatch: Patch) -> None:
    monkeypatch.setattr(TimeEstimate.__init__, "__defaults__", (0.0,))
    endless = "--trainer.max_epochs -1 --trainer.max_time 00:00:00:01"
    schedule = "--model.optimizer.schedule constant --model.optimizer.warmup 0"
    out, _ = console.printed(f"{LINE} {endless} {schedule}")
    assert "training takes" not in out


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
