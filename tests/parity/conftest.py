"""A folder of its own for each test, and one thread."""

from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def one_thread(end_of_process: None) -> None:
    """A second one costs more than it brings if tensors are this small."""
    torch.set_num_threads(1)
