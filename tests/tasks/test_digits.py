"""The default run, in full."""

import json
import time
from pathlib import Path

import pytest

from tests.tasks.command import process


@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/vit/latest/summary.json").read_text())
    assert summary["test/acc"] >= 0.98
    assert seconds <= 90
