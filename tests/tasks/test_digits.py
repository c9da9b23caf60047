"""The default run, in full, and its grey images in colour."""

import json
import time
from pathlib import Path

import pytest

from tests.tasks.command import DEFAULT_SECONDS, SHORT, checkpoint, metrics, process, run


@pytest.mark.slow
def test_the_default_run(tmp_path: Path) -> None:
    start = time.perf_counter()
    done = process("fit", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "runs/vit/latest/summary.json").read_text())
    assert summary["test/acc"] >= 0.98
    assert seconds <= DEFAULT_SECONDS


def test_grey_images_for_a_network_of_three_channels() -> None:
    assert run(f"fit {SHORT} --model.net.channels 3 --run_dir r") == 0
    kept, weights = (checkpoint("r", "best")[name] for name in ("tessera", "state_dict"))
    assert (
        kept["metadata"]["channels"] == 3 and len(set(kept["metadata"]["mean"])) == 1
    )  # three times the grey
    assert any(
        name.startswith("net.embed") and value.shape[1:2] == (3,) for name, value in weights.items()
    )
    assert checkpoint("r")["global_step"] == 8
    assert all(float(row["val/loss"]) < 10 for row in metrics("r") if "val/loss" in row)
