"""Cores that a process may use, in control groups as containers have them."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from datamodules.utils import cores
from datamodules.utils.cores import cgroup_quota, usable_cores
from tests.helpers.command import ROOT

ALL = os.cpu_count() or 1


@pytest.mark.parametrize(
    "text, expected",
    [
        ("max 100000", ALL),
        ("50000 100000", 0.5),
        ("20000 50000", 0.4),
        ("nonsense", ALL),
        ("100000 0", ALL),
        ("", ALL),
    ],
)
def test_quota_of_a_group(
    text: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_quota() == expected
    assert usable_cores() == max(1, min(round(expected), len(os.sched_getaffinity(0))))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    (tmp_path / "cpu.max").mkdir()
    assert cgroup_quota() == ALL


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group that allows half a core."""
    parent = Path("/sys/fs/cgroup/cpu")
    if not parent.is_dir():
        parent = parent.parent
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


def test_a_real_group_and_the_threads_of_a_command(group: Path) -> None:
    code = f"""
from pathlib import Path
Path({str(group / "cgroup.procs")!r}).write_text("0")
from datamodules.utils.cores import cgroup_quota
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
