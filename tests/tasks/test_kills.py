"""Runs that are killed, anywhere and any number of times, and resumed end with the bits of one that was not."""

import random
import signal
from pathlib import Path

import pytest

from tests.tasks.cases import CASES, Wholes, assert_same, at, fill, first
from tests.tasks.command import checkpoint
from tests.tasks.forked import Running, Server


def end(running: Running) -> list[int]:
    """Exit codes once the first rank has ended; others may wait for it in vain."""
    (code,) = running.wait(slice(1))
    return [code, *running.kill(ranks=slice(1, None))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_killed_in_the_middle(case: str, ranks: int, server: Server, wholes: Wholes, tmp_path: Path) -> None:
    """Of a step, of a checkpoint, of a validation, in one run."""
    folder, task, line = fill(tmp_path / "here"), CASES[case][0], first(case, ranks)
    for moment in ("step", "half-written checkpoint", "validation"):
        running = server.start(line, folder, task, at(moment), ranks)
        assert end(running)[0] == -signal.SIGKILL, running.output()
        assert moment != "half-written checkpoint" or list((folder / "r" / "checkpoints").glob(".*.tmp"))
        line = "fit --resume r"
    out = server.run(line, folder, task, ranks=ranks)
    assert "going on from" not in out
    assert_same(folder / "r", wholes(case, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("size, named", [(10, "make room"), (20_000, "last.ckpt could not be written")])
def test_a_full_disk(size: int, named: str, server: Server, wholes: Wholes, tmp_path: Path) -> None:
    """Stops the run, at a row of metrics or at a checkpoint; what was saved before is whole."""
    folder = fill(tmp_path / "here")
    running = server.start(first("plain"), folder, before=at("full disk", size))
    assert running.wait() == [1]
    errors = [line for line in running.output().splitlines() if line]
    assert len(errors) == 1 and named in errors[0] and errors[0].startswith("error: ")
    assert checkpoint(folder / "r")["global_step"] == 6
    assert not list((folder / "r").rglob(".*.tmp"))
    server.run("fit --resume r", folder)
    assert_same(folder / "r", wholes("plain"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_again_and_again(server: Server, wholes: Wholes, tmp_path: Path) -> None:
    """One run, killed at 20 random moments."""
    folder, moments, kills = fill(tmp_path / "here"), random.Random(0), 0
    line, steps = first("both lengths"), set()
    while kills < 20:
        (code,) = server.start(line, folder, "seq2seq").kill(moments.uniform(0.3, 1.0))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        if (folder / "r" / "config.yaml").exists():
            line = "fit --resume r"
        if (folder / "r" / "checkpoints" / "last.ckpt").exists():
            steps.add(checkpoint(folder / "r")["global_step"])
    print(f"{kills} kills, checkpoints of steps {sorted(steps)}")
    server.run(line, folder, "seq2seq")
    assert_same(folder / "r", wholes("both lengths"))
