"""The wheel holds the packages and the configs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("tasks/", "modules/", "datamodules/", "configs/")


@pytest.mark.slow
def test_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a clone, so that no build folder is left in ours
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*pip, str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.check_output(["git", "ls-files"], cwd=source, text=True).split()
    # `import tessera` finds tasks/tessera, which is nowhere else in the wheel.
    wanted = {
        name.removeprefix("tasks/") if name.startswith("tasks/tessera/") else name
        for name in tracked
        if name.startswith(PACKAGES)
    }
    assert wanted <= names
    assert not any(name.startswith("tasks/tessera/") for name in names)
    assert not any(name.startswith("tests/") for name in names)
