"""What ends a run, and what is said and kept if nothing was left to train."""

import re

import pytest

from tests.helpers.command import Console
from tests.helpers.results import summary
from tests.helpers.tiny import NET

LINE = f"{NET} --trainer.limit_train_batches 4 --trainer.limit_val_batches 1"
LINE += " --trainer.limit_test_batches 0"


def limit_named(out: str) -> str:
    """The option of the command that is said to train longer."""
    (found,) = re.findall(r"fit --resume \S+ --trainer\.(\w+) N", out)
    return found


def test_the_option_that_ended_the_run_is_named(console: Console) -> None:
    limits = "--trainer.max_epochs 1 --trainer.max_steps 6"
    out, _ = console.printed(f"fit {LINE} {limits} --run_dir r")
    assert limit_named(out) == "max_epochs" and "step 4/4" in out
    out, _ = console.printed("fit --resume r --trainer.max_epochs 9")
    assert limit_named(out) == "max_steps" and "step 6/6" in out


def test_nothing_left_to_train_keeps_the_results(console: Console) -> None:
    out, _ = console.printed(f"fit {LINE} --trainer.max_epochs 1 --run_dir r")
    before = summary("r")
    out, _ = console.printed("fit --resume r --trainer.max_steps 50")
    assert "nothing was left" in out and limit_named(out) == "max_epochs"
    after = summary("r")
    names = [name for name in before if name.startswith(("val/", "best "))]
    assert len(names) >= 3
    assert {name: after[name] for name in names} == pytest.approx(
        {name: before[name] for name in names}, rel=1e-6
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ("--checkpoint.save_weights_only true", "--checkpoint.save_weights_only true"),
        ("--trainer.logger CSVLogger --trainer.logger.save_dir here", "CSVLogger with save_dir"),
    ],
)
def test_what_no_run_could_use_is_refused(options: str, message: str, console: Console) -> None:
    console.refused(f"fit {LINE} {options}", message)
