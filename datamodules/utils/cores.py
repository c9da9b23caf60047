"""The cores that this process may use."""

import math
import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, math.ceil(cgroup_quota())))


def cgroup_quota() -> float:
    """Cores that Linux control groups allow, such as 1.5; the number of cores if there is no limit.

    A limit of a group holds for those below it. A container sees its own group as the root.
    """
    quotas = [float(os.cpu_count() or 1)]
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)  # version 2 names no controllers
        if not controllers or "cpu" in controllers.split(","):
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
