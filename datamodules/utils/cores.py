"""The cores that this process may use."""

import ctypes
import math
import os
import platform
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

STAT = Path("/proc/stat")
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # Linux's system call, which Python lacks
KEEP_POLICY = 8  # its flag SCHED_FLAG_KEEP_POLICY
SHORTEST_SLICE = 100_000  # ns


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, math.ceil(cgroup_quota())))


def free_cores(seconds: float = 0.1) -> float:
    """Cores that no process used while this one slept; infinity if the system does not tell."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    before = core_times(cores)
    time.sleep(seconds)
    idle = idle_shares(before, core_times(cores))
    return sum(idle.values()) if idle else math.inf


def core_times(cores: set[int]) -> dict[int, tuple[int, int]]:
    """Of each core: the time without work, and all time, in ticks. Empty if Linux does not tell."""
    found = {}
    try:
        for line in STAT.read_text().splitlines():
            name, *values = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
                ticks = [int(value) for value in values[:8]]  # the first includes the guests' time
                idle = ticks[3] + ticks[4]  # without work, and waiting for disks
                found[int(name[3:])] = idle, sum(ticks)
    except (OSError, ValueError, IndexError):
        return {}
    return found


def idle_shares(
    before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]]
) -> dict[int, float]:
    """The part of the time between two `core_times` in which each core had no work.

    Without cores whose time did not advance.
    """
    return {
        core: (after[core][0] - idle) / (after[core][1] - total)
        for core, (idle, total) in before.items()
        if core in after and after[core][1] > total
    }


def set_affinity(cores: set[int]) -> None:
    """Binds all threads of this process to some cores."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # the thread has ended, or the cores are not allowed any more
            os.sched_setaffinity(int(thread), cores)


def cgroup_quota() -> float:
    """Cores that Linux control groups allow, such as 1.5; the number of cores if there is no limit.

    A limit of a group holds for those below it. A container sees its own group as the root.
    """
    quotas = [float(os.cpu_count() or 1)]
    try:
        lines = OWN_GROUPS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        controllers, is_group, path = line.partition(":")[2].partition(":")
        # Version 2 names no controllers.
        if is_group and (not controllers or "cpu" in controllers.split(",")):
            group = Path(CGROUPS, "cpu" if controllers else "", path.lstrip("/"))
            quotas += [quota(folder) for folder in (group, *group.parents)]
    return min(quotas)


def quota(folder: Path) -> float:
    """Cores that one control group allows; infinity if it has no limit, or cannot be read."""
    try:
        if (folder / "cpu.max").exists():  # version 2
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(allowed) / int(period) if int(allowed) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return math.inf


def request_short_slices() -> None:
    """Ask Linux to run the threads of this process sooner after a wait, in shorter turns.

    So threads that wait for each other lose less on cores that other jobs use, too. Neither share
    nor priority change. Threads and processes that are started later inherit it. Linux before 6.12
    ignores it: https://docs.kernel.org/scheduler/sched-eevdf.html
    """
    number = SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
        attributes = struct.pack("IIQiIQQQ", 48, 0, KEEP_POLICY, nice, 0, SHORTEST_SLICE, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # if it fails, nothing changes
