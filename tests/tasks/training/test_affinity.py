"""A training's threads on cores that other jobs use, too."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.utils import cores
from tasks.training import affinity
from tasks.training.affinity import BINDINGS, CpuAffinity
from tests.helpers.command import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity"
)
CPU: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
Load = Callable[[float, dict[int, float]], set[int]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Four cores. A function of the own and the idle cores of two seconds, which adjusts."""
    for name in BINDINGS:
        monkeypatch.delenv(name, raising=False)
    bound = {0, 1, 2, 3}
    clock, own = [0.0], [0.0]
    ticks = {core: (0, 0) for core in bound}

    def core_times(allowed: set[int]) -> dict[int, tuple[int, int]]:
        assert allowed == {0, 1, 2, 3}
        return dict(ticks)

    def bind(chosen: set[int]) -> None:
        bound.clear()
        bound.update(chosen)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(bound))
    monkeypatch.setattr(os, "register_at_fork", lambda **given: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(affinity, "core_times", core_times)
    monkeypatch.setattr(affinity, "set_affinity", bind)
    monkeypatch.setattr(affinity.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(affinity.time, "process_time", lambda: own[0])
    callback = CpuAffinity()
    callback.on_train_start(CPU, CPU)

    def pass_two_seconds(own_cores: float, idle: dict[int, float]) -> set[int]:
        clock[0] += 2
        own[0] += 2 * own_cores
        for core, (idle_ticks, total) in ticks.items():
            ticks[core] = idle_ticks + int(200 * idle.get(core, 0)), total + 200
        callback.on_train_batch_end(CPU, CPU, None, None, 0)
        return set(bound)

    yield pass_two_seconds
    callback.teardown(CPU, CPU, "fit")
    assert bound == {0, 1, 2, 3}


def test_threads_are_bound_to_as_many_cores_as_they_get(machine: Load) -> None:
    assert machine(3.9, {}) == {0, 1, 2, 3}  # nobody else
    assert machine(0.5, {0: 0.9, 1: 0.9, 2: 0.9, 3: 0.8}) == {0, 1, 2, 3}  # it waits for data
    assert machine(1.6, {2: 0.3, 1: 0.4}) == {1, 2}  # the idlest two
    assert machine(2.0, {}) == {1, 2}
    assert len(machine(1.2, {})) == 1
    assert len(machine(0.7, {})) == 1
    assert len(machine(0.1, {})) == 1  # never none
    assert machine(1.0, {0: 1, 1: 1, 2: 1}) == {0, 1, 2, 3}  # the others have ended


def test_runs_side_by_side_choose_different_cores(machine: Load) -> None:
    found = set()
    for _ in range(50):
        found |= machine(1.0, {})
        machine(4.0, {})
    assert found == {0, 1, 2, 3}


@pytest.mark.parametrize("name", sorted(BINDINGS))
def test_bindings_of_the_user_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "true")
    callback = CpuAffinity()
    callback.on_train_start(CPU, CPU)
    assert not callback.allowed


def test_unknown_times_change_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "STAT", tmp_path / "missing")
    monkeypatch.setattr(affinity, "SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    before = os.sched_getaffinity(0)
    callback = CpuAffinity()
    callback.on_train_start(CPU, CPU)
    callback.on_train_batch_end(CPU, CPU, None, None, 0)
    assert os.sched_getaffinity(0) == before
    callback.teardown(CPU, CPU, "fit")


FIT = "-m tasks.vit fit --trainer.max_epochs 1000 --trainer.limit_val_batches 0"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="needs two cores")
def test_threads_of_a_real_run_follow_other_jobs(tmp_path: Any) -> None:
    """All threads are bound to one core while another job uses both, and then to both again."""
    command = [sys.executable, *FIT.split(), "--run_dir", str(tmp_path / "run")]
    environment = {key: value for key, value in os.environ.items() if key not in BINDINGS}
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "2"}, stdout=subprocess.DEVNULL
    )
    spin = "while True: pass"
    busy: list[subprocess.Popen[bytes]] = []
    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.csv").exists(), 90)
        wait_for(lambda: affinities(run.pid) == {2}, 20)
        busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(4)]
        wait_for(lambda: affinities(run.pid) == {1}, 30)
        for job in busy:
            job.kill()
        wait_for(lambda: affinities(run.pid) == {2}, 30)
        assert run.poll() is None
    finally:
        for job in (*busy, run):
            job.kill()
            job.wait()


def affinities(process: int) -> set[int]:
    """To how many cores each thread is bound."""
    threads = os.listdir(f"/proc/{process}/task")
    return {len(os.sched_getaffinity(int(thread))) for thread in threads}


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.2)
