"""The allocator keeps its pages, on Linux with glibc; elsewhere nothing happens."""

import platform
import subprocess
import sys

import pytest

from tasks.training import allocator
from tests.tasks.command import ROOT


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
