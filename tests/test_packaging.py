"""The wheel holds the four packages and the configs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(
        ["git", "clone", "-q", str(ROOT), str(source)], check=True
    )  # no build folder is left in this one
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=source, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = {
        name
        for name in tracked
        if name.startswith(("tasks/", "modules/", "datamodules/", "configs/"))
    }
    assert wanted <= names
    assert not any(name.startswith("tests/") for name in names)
