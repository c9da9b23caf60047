"""Run folders with odd names, in other places, and of runs that the time ended."""

from pathlib import Path

import pytest

from tests.helpers.command import Console, run
from tests.helpers.results import metrics
from tests.helpers.tiny import FEW_STEPS

LONG = f"{FEW_STEPS} --data.source digits --data.batch_size 16"


def test_latest_is_there_if_runs_is_a_link() -> None:
    Path("disk").mkdir()
    Path("runs").symlink_to("disk")
    assert run(f"fit {LONG}") == 0
    assert Path("runs/vit/latest/summary.json").exists()


def test_brackets_of_a_name_are_printed(console: Console) -> None:
    out, _ = console.printed(f"fit {LONG} --run_dir a[lr3]")
    cells = [line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│")]
    assert "a[lr3]/checkpoints/best.ckpt" in "".join(cells)  # a long path takes several lines


def test_a_run_with_its_checkpoints_elsewhere_resumes_from_any_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(f"fit {LONG} --run_dir a --checkpoint.dirpath kept") == 0
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    assert run("fit --resume ../a --trainer.max_epochs 2") == 0
    assert not list(Path().iterdir()) and metrics("../a")[-1]["epoch"] == "2"


def test_checkpoints_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    """A run that was killed before the first of them begins anew."""
    monkeypatch.setenv("HOME", str(Path("home").resolve()))
    assert run(f"fit {LONG} --run_dir a --checkpoint.dirpath ~/kept") == 0
    Path("home/kept/last.ckpt").unlink()
    Path("a/summary.json").unlink()
    out, _ = console.printed("fit --resume a")
    assert "from the beginning" in out and Path("home/kept/last.ckpt").exists()


def test_the_time_that_ended_a_run_is_named(console: Console) -> None:
    line = "fit --config configs/vit/digits.yaml --trainer.max_time 00:00:00:01"
    out, _ = console.printed(f"{line} --trainer.limit_test_batches 0 --run_dir a")
    assert "--trainer.max_time DD:HH:MM:SS" in out
    out, _ = console.printed("fit --resume a")
    assert "nothing was left" in out and "max_time" in out and "max_epochs" not in out


def test_a_run_cannot_be_longer_than_its_end(console: Console) -> None:
    for unit in ("epochs", "steps"):
        line = f"fit --trainer.min_{unit} 5 --trainer.max_{unit} 2"
        console.refused(line, f"min_{unit} 5 exceeds --trainer.max_{unit} 2")


@pytest.mark.parametrize("name", ["Timer", "BatchSizeFinder", "EMAWeightAveraging"])
def test_callbacks_that_cannot_be_used_are_refused(name: str, console: Console) -> None:
    console.refused(f"fit {LONG} --trainer.callbacks {name}", name)
    assert not Path("runs").exists()
