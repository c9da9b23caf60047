"""The wheel holds the four packages and the configs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tasks/", "modules/", "datamodules/", "configs/")


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a clone, so that a build folder leaves nothing here
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    listed = subprocess.check_output(["git", "ls-files", *PACKAGES], cwd=source, text=True)
    assert set(listed.split()) <= set(names)
    assert not any(name.startswith("tests/") for name in names)
