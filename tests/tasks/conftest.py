"""One short run that many tests look at, and a folder of its own for each test."""

import shutil
from pathlib import Path

import pytest

from tests.tasks.command import SHORT, run


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, two short epochs; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(f"fit {SHORT} --run_dir {folder}") == 0
    return folder


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run to continue or to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def best(finished: Path) -> Path:
    """Its best checkpoint."""
    return finished / "checkpoints" / "best.ckpt"
