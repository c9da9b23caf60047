"""The allocator keeps its pages, on Linux with glibc; elsewhere nothing happens."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.training import allocator

ROOT = Path(__file__).parents[2]
FAULTS = """
import resource, sys
from tasks.training.allocator import tune_allocator
assert "torch" not in sys.modules
tuned = sys.argv[1] == "tuned" and tune_allocator()
import torch
# 48 MiB twice, more than glibc ever keeps by itself
step = lambda: torch.ones(192, 2**16).mul(2.0).add_(1.0)
for _ in range(3):
    step()
start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
"""


def faults(how: str) -> int:
    """Page faults of twenty steps in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_used_again() -> None:
    # a step touches 96 MiB; the heap may grow by that once or twice, but not in every step
    plain, tuned = faults("plain"), faults("tuned")
    assert tuned < 0.2 * plain, (plain, tuned)


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.platform, "system", lambda: "Darwin")
    assert allocator.tune_allocator() is False
