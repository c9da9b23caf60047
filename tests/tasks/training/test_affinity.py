"""A training's threads on cores that other jobs use, too."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
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
CPU: Any = SimpleNamespace(
    strategy=SimpleNamespace(root_device=torch.device("cpu")),
    train_dataloader=SimpleNamespace(num_workers=0),
)
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
    assert len(machine_cores := set(bound)) == 1  # at the end of each test
    callback.on_exception(CPU, CPU, RuntimeError())
    assert machine_cores < bound == {0, 1, 2, 3}


def test_threads_are_bound_to_as_many_cores_as_they_get(machine: Load) -> None:
    assert machine(3.9, {}) == {0, 1, 2, 3}  # nobody else
    assert machine(0.5, {0: 0.9, 1: 0.9, 2: 0.9, 3: 0.8}) == {0, 1, 2, 3}  # it waits for data
    assert machine(2.8, {}) == {0, 1, 2, 3}  # fewer than two threads a core
    two = machine(1.6, {2: 0.3, 1: 0.4})
    assert len(two) == 2
    assert machine(2.0, {}) == machine(1.6, {}) == two
    assert machine(0.9, {0: 1, 1: 1, 2: 1}) == {0, 1, 2, 3}  # the others have ended
    assert len(machine(1.2, {})) == 1
    assert len(machine(0.7, {})) == 1
    assert len(machine(0.1, {})) == 1  # never none


def test_runs_side_by_side_find_different_cores(machine: Load) -> None:
    """A run that gets too little of its core chooses anew, at random."""
    machine(1.0, {})
    found = [machine(0.5, {}) for _ in range(100)]
    assert set.union(*found) == {0, 1, 2, 3}
    assert machine(1.0, {}) == found[-1]


def is_followed() -> bool:
    """Whether a training that starts now would be bound beside other jobs."""
    callback = CpuAffinity()
    callback.on_train_start(CPU, CPU)
    return bool(callback.allowed)


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which the user did not bind threads."""
    for name in BINDINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", sorted(BINDINGS))
def test_bindings_of_the_user_are_left_alone(
    name: str, unbound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_followed()
    monkeypatch.setenv(name, "true")
    assert not is_followed()


def test_trainings_with_data_workers_keep_all_cores(
    unbound: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_followed()
    monkeypatch.setattr(CPU.train_dataloader, "num_workers", 2)
    assert not is_followed()


@pytest.mark.parametrize("times", ["unreadable", "standing still"])
def test_unknown_times_change_nothing(
    times: str, unbound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[set[int]] = []
    stat = tmp_path / "stat"
    if times == "standing still":
        stat.write_text("".join(f"cpu{core} 1 1 1 1 1 1 1 1\n" for core in range(999)))
    monkeypatch.setattr(cores, "STAT", stat)
    monkeypatch.setattr(affinity, "SECONDS", 0.0)
    monkeypatch.setattr(affinity, "set_affinity", calls.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    callback = CpuAffinity()
    callback.on_train_start(CPU, CPU)
    callback.on_train_batch_end(CPU, CPU, None, None, 0)
    callback.teardown(CPU, CPU, "fit")
    assert not calls


FIT = "-m tasks.vit fit --trainer.max_epochs 1000 --trainer.limit_val_batches 0"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(cores.usable_cores() != 2, reason="needs two cores")
def test_threads_of_a_real_run_follow_other_jobs(tmp_path: Path) -> None:
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
