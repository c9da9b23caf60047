"""Cores that a process may use, in control groups as containers have them."""

import math
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from datamodules.utils import cores
from datamodules.utils.cores import (
    SCHED_SETATTR,
    SHORTEST_SLICE,
    cgroup_quota,
    usable_cores,
)
from tasks.cli.main import set_waiting_policy
from tasks.distributed.environment import share_cores
from tests.helpers.command import ROOT

SCHED = Path("/proc/self/sched")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the machine's control groups; four cores."""
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    (tmp_path / "own").write_text("3:memory:/\n2:cpuacct,cpu:/a/b\n0::/c/d\n")
    (tmp_path / "cpu" / "a" / "b").mkdir(parents=True)
    (tmp_path / "c" / "d").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("folder", [".", "c", "c/d"])
@pytest.mark.parametrize(
    "text, quota, usable",
    [
        ("max 100000", 4, 4),
        ("50000 100000", 0.5, 1),
        ("60000 40000", 1.5, 2),
        ("900000 100000", 4, 4),
        ("nonsense", 4, 4),
        ("100000 0", 4, 4),
        ("", 4, 4),
    ],
)
def test_quota_of_a_group(text: str, quota: float, usable: int, folder: str, groups: Path) -> None:
    (groups / folder / "cpu.max").write_text(text)
    assert cgroup_quota() == quota
    assert usable_cores() == usable


@pytest.mark.parametrize("folder", ["cpu", "cpu/a", "cpu/a/b"])
@pytest.mark.parametrize("allowed, quota", [("-1", 4), ("250000", 2.5), ("x", 4)])
def test_quota_of_version_1(allowed: str, quota: float, folder: str, groups: Path) -> None:
    (groups / folder / "cpu.cfs_quota_us").write_text(f"{allowed}\n")
    (groups / folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_quota() == quota


def test_files_that_cannot_be_read(groups: Path) -> None:
    (groups / "c" / "cpu.max").mkdir()
    assert cgroup_quota() == 4
    for content in (b"\n", b"nonsense\n", b"0:cpu\n", b"\xff\xfe:x:y\n"):
        (groups / "own").write_bytes(content)
        assert cgroup_quota() == 4, content
    (groups / "own").unlink()
    assert cgroup_quota() == 4


@pytest.mark.parametrize("processes, threads", [(1, 3), (2, 1), (4, 1)])
def test_threads_of_processes(
    processes: int, threads: int, groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (groups / "c" / "cpu.max").write_text("250000 100000")
    torch.set_num_threads(4)
    share_cores(processes)
    assert torch.get_num_threads() == threads
    assert os.environ.get("OMP_NUM_THREADS") == (None if processes == 1 else str(threads))


@pytest.mark.slow
@pytest.mark.parametrize("given, threads", [({}, "4"), ({"OMP_NUM_THREADS": "1"}, "1")])
def test_torchrun_sets_one_thread_only_for_those_who_do_not(
    given: dict[str, str], threads: str
) -> None:
    """Real processes: torchrun, and one of the two that it starts, on a machine of 8 cores."""
    child = """
import os
os.cpu_count = lambda: 8
from tasks.distributed import environment
environment.usable_cores = lambda: 8
environment.share_cores(2)
import torch
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])
"""
    parent = f"""
import os, subprocess, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    own = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    own |= {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", parent]
    done = subprocess.run(
        command, cwd=ROOT, env=own | given, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [threads, threads], done.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group that allows half a core."""
    parent = Path("/sys/fs/cgroup")
    if (parent / "cpu").is_dir():
        parent /= "cpu"
    folder = parent / f"tessera_{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("50000 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text("50000")
        yield folder
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    finally:
        with suppress(OSError):
            folder.rmdir()


@pytest.mark.slow
def test_a_real_group_and_the_threads_of_a_command(group: Path) -> None:
    code = f"""
from pathlib import Path
Path({str(group / "cgroup.procs")!r}).write_text("0")
from datamodules.utils.cores import cgroup_quota
from tasks.cli.main import set_waiting_policy
from tasks.distributed.environment import share_cores
share_cores()
import torch
print(cgroup_quota(), torch.get_num_threads())
"""
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["0.5", "1"], done.stderr


def test_free_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cores 1 and 2, the first was half idle meanwhile; core 3 is another process's."""
    stat = tmp_path / "stat"
    before = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu1 10 0 10 60 5 0 0 0 0 0\ncpu2 7 0 0 4 0 0 0 0 7 0\n"
    after = "cpu 9 9 9 9 9 9 9 9 9 9\ncpu1 13 0 11 63 6 0 0 0 0 0\ncpu2 12 0 0 4 0 0 0 3 9 0\n"
    stat.write_text(f"{before}cpu3 1 0 0 1 0 0 0 0 0 0\nintr 5\n")
    monkeypatch.setattr(cores, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2}, raising=False)
    monkeypatch.setattr(cores.time, "sleep", lambda seconds: stat.write_text(after))
    assert cores.free_cores() == 0.5
    for text in ("", "cpu1 nonsense\n", "cpu1\n", "cpux 1 2 3\n"):
        stat.write_text(text)
        monkeypatch.setattr(cores.time, "sleep", lambda seconds: None)
        assert cores.free_cores() == math.inf, text
    stat.unlink()
    assert cores.free_cores() == math.inf


@pytest.mark.parametrize(
    "free, given, spins",
    [(2.0, {}, "3000"), (1.6, {}, "3000"), (1.4, {}, "0"), (math.inf, {}, "3000")]
    + [(0.0, {"GOMP_SPINCOUNT": "7"}, "7"), (0.0, {"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_follows_free_cores_unless_it_is_set(
    free: float, given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "free_cores", lambda: free)
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    os.environ.update(given)
    set_waiting_policy()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.slow
def test_threads_do_not_spin_on_busy_cores() -> None:
    code = "from tasks.cli.main import set_waiting_policy as s; s(); import os; print(os.environ)"
    environment = {key: value for key, value in os.environ.items() if key not in WAITING}
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        for process in busy:
            process.kill()
    assert "'GOMP_SPINCOUNT': '0'" in done.stdout


SLICES = """
import os, re, sys, threading
from pathlib import Path
from datamodules.utils.cores import request_short_slices

def found():
    text = Path(f"/proc/self/task/{threading.get_native_id()}/sched").read_text()
    return re.search(r"se.slice +: +([0-9]+)", text)[1]

os.nice(3)
before = found()
request_short_slices()
after = []
thread = threading.Thread(target=lambda: after.append(found()))
thread.start()
thread.join()
print(before, found(), *after, os.nice(0), os.sched_getscheduler(0))
"""


@pytest.mark.skipif(
    platform.machine() not in SCHED_SETATTR
    or not SCHED.exists()
    or "se.slice" not in SCHED.read_text(),
    reason="needs Linux 6.12 or later, which shows the slices of threads",
)
def test_threads_get_short_slices_and_keep_their_priority() -> None:
    command = [sys.executable, "-c", SLICES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    before, *after, nice, policy = map(int, done.stdout.split())
    assert before > SHORTEST_SLICE and after == [SHORTEST_SLICE] * 2
    assert (nice, policy) == (3, os.SCHED_OTHER)
