"""The allocator keeps its pages, on Linux with glibc; elsewhere nothing happens."""

import platform
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from torch import nn

from tasks.base import Task
from tasks.inference import prepare_model
from tasks.training import allocator
from tests.helpers.command import ROOT, run
from tests.helpers.tiny import SHORT


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again() -> None:
    # a step touches 96 MiB; the heap may grow by that once or twice, but not in every step
    faults = {}
    for how in ("plain", "tuned"):
        command = [sys.executable, "-m", "tests.helpers.page_faults", how]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        faults[how] = int(done.stdout)
    assert faults["tuned"] < 0.2 * faults["plain"], faults


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert allocator.tune_allocator() is False


def test_quantized_weights_stay_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    class Net(nn.Module):
        def to(self, device: str) -> "Net":  # type: ignore[override]
            devices.append(device)
            return self

    class Model(NamedTuple):
        net: Net

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    prepare_model(Model(Net()), "auto", "int8")
    assert devices == ["cpu"]


def test_steps_do_not_wait_for_a_bar_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning reads what is in the progress bar after each step."""
    in_bar: list[bool] = []
    original = Task.log

    def log(self: Task, name: str, value: Any, prog_bar: bool = False, **options: Any) -> None:
        if name == "train/loss":
            in_bar.append(prog_bar)
        original(self, name, value, prog_bar, **options)

    monkeypatch.setattr(Task, "log", log)
    assert run(f"fit {SHORT} --run_dir r") == 0
    assert in_bar and not any(in_bar)
