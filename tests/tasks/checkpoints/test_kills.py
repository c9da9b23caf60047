"""Runs that are killed or stopped by a signal and resumed end as one that was not, bit for bit."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tasks.base import Task
from tasks.cli.signals import SignalHandler
from tests.helpers.cases import (
    CASES,
    SHARED,
    TWO,
    UninterruptedRuns,
    assert_same,
    fill,
    first,
    random_states,
    signal_at,
)
from tests.helpers.command import Patch, run
from tests.helpers.faults import KILL_POINTS, send_signal
from tests.helpers.forked import Running, Server
from tests.helpers.results import checkpoint, metrics, same
from tests.helpers.tiny import SHORT


def end(running: Running, rank: int) -> int:
    """Exit code of a rank once it has ended; others, which may wait for it in vain, are killed."""
    (code,) = running.wait(slice(rank, rank + 1))
    for others in (slice(rank), slice(rank + 1, None)):
        running.kill(ranks=others)
    return code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to run in, with data."""
    return fill(tmp_path / "here")


# Kills --------------------------------------------------------------------------------------------


# Cases that also run with two processes: their samplers divide the samples in different ways.
WITH_TWO_RANKS = (
    "workers",
    "patches",
    "tokens per batch",
    "both lengths",
    "random windows",
    "pixels",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive_except("plain", "workers-2", "per batch-2", "patches", "pixels", "windows")
@pytest.mark.parametrize(
    "case, ranks", [*((case, 1) for case in CASES), *((case, 2) for case in WITH_TWO_RANKS)]
)
def test_killed_in_the_middle(
    case: str, ranks: int, server: Server, uninterrupted_runs: UninterruptedRuns, folder: Path
) -> None:
    """Of a step, the last rank, of a checkpoint and of a validation, the first, in one run."""
    task = CASES[case][0]
    line = first(case, ranks)
    for point in ("step", "half-written checkpoint", "validation"):
        killed = ranks - 1 if point == "step" else 0
        running = server.start(line, folder, task, signal_at(point, ranks=(killed,)), ranks)
        assert end(running, killed) == -signal.SIGKILL, running.output()
        partial = list((folder / "r" / "checkpoints").glob(".*.tmp"))
        assert partial or point != "half-written checkpoint"
        line = "fit --resume r"
    out = server.run(line, folder, task, ranks=ranks)
    assert "resuming from" not in out
    assert_same(folder / "r", uninterrupted_runs(case, ranks))


@pytest.mark.slow
def test_a_validation_between_steps_is_logged_once(server: Server, folder: Path) -> None:
    """Killed after it, and before the next step: the resumed run validates again."""
    line = f"fit {SHARED} --trainer.max_epochs 1 --trainer.limit_train_batches 16 --run_dir r"
    line += " --trainer.accumulate_grad_batches 4 --trainer.val_check_interval 6"
    line = line.replace("every_n_train_steps 2", "every_n_train_steps 1")
    assert server.start(line, folder, before=signal_at("step")).wait() == [-signal.SIGKILL]
    validated = [row for row in metrics(folder / "r") if "val/loss" in row]
    assert len(validated) == 1
    server.run("fit --resume r", folder)
    assert [row for row in metrics(folder / "r") if "val/loss" in row][0] == validated[0]
    assert sum("val/loss" in row for row in metrics(folder / "r")) == 3  # 6, 12, 16 batches


@pytest.mark.slow
@pytest.mark.parametrize("size, named", [(360, "make room"), (20_000, "last.ckpt")])
def test_a_full_disk(
    size: int, named: str, server: Server, uninterrupted_runs: UninterruptedRuns, folder: Path
) -> None:
    """Stops the run, at a row of metrics or at a checkpoint; what was saved before is complete."""
    running = server.start(first("plain"), folder, before=f"fill_disk('step', {size})")
    assert running.wait() == [1]
    (error,) = running.errors()
    assert named in error
    assert checkpoint(folder / "r")["global_step"] == 6
    assert not list((folder / "r").rglob(".*.tmp"))
    server.run("fit --resume r", folder)
    assert_same(folder / "r", uninterrupted_runs("plain"))


# ranks that are killed, and those that are left
OF_ONE = [(slice(1), slice(0))]
OF_TWO = [(slice(2), slice(0)), (slice(1), slice(1, 2)), (slice(1, 2), slice(1))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive_except("1")
@pytest.mark.parametrize("ranks, kills", [(1, OF_ONE * 5), (2, OF_TWO)], ids=["1", "2"])
def test_killed_again_and_again(
    ranks: int, kills: list[tuple[slice, slice]], server: Server, folder: Path, tmp_path: Path
) -> None:
    """One run, killed at random times of its training; of two processes both, or one, which ends
    the other.
    """
    uninterrupted = fill(tmp_path / "uninterrupted")
    rng = random.Random(0)
    line = first("both lengths", ranks).replace("max_epochs 2", "max_epochs 8")
    server.run(line, uninterrupted, "seq2seq", ranks=ranks)
    seconds = time.time() - (uninterrupted / "r" / "config.yaml").stat().st_mtime
    steps = [0]
    seen = 0
    config = folder / "r" / "config.yaml"
    for killed, left in kills:
        running = server.start(line, folder, "seq2seq", ranks=ranks)
        running.wait_for("r/config.yaml")
        while config.stat().st_mtime_ns == seen:  # written anew when training begins
            time.sleep(0.005)
        seen = config.stat().st_mtime_ns
        codes = running.kill(rng.uniform(0.0, seconds / len(kills)), killed)
        if set(codes) == {0}:
            running.wait(left)
            break  # it was faster than the uninterrupted run, and has ended
        assert set(codes) == {-signal.SIGKILL}
        since = time.monotonic()
        assert set(running.wait(left)) <= {1} and time.monotonic() - since < 60
        line = "fit --resume r"
        last = folder / "r" / "checkpoints" / "last.ckpt"
        steps.append(checkpoint(folder / "r")["global_step"] if last.exists() else 0)
    assert steps == sorted(steps) and len(set(steps)) > len(kills) // 4, steps
    server.run(line, folder, "seq2seq", ranks=ranks)
    assert_same(folder / "r", uninterrupted / "r")


@pytest.mark.slow
@pytest.mark.exhaustive_except("plain", "tokens per batch")
@pytest.mark.parametrize("case, ranks", [*((case, 1) for case in CASES), ("plain", 2)])
def test_other_batches_are_refused_by_name(
    case: str, ranks: int, server: Server, uninterrupted_runs: UninterruptedRuns
) -> None:
    """Another batch size in one process; another number of processes."""
    options = "--data.batch_size 3"
    named = "batch size"
    if case == "tokens per batch":
        options = "--data.loading.batch_tokens 128"
        named = "batch_tokens 256"
    if ranks == 2:
        options = TWO
        named = "number of devices 1"
    line = f"fit --resume r --trainer.max_epochs 9 --trainer.max_steps 99 {options}"
    running = server.start(line, uninterrupted_runs(case).parent, CASES[case][0], ranks=ranks)
    assert running.wait()[0] == 2, running.output()
    (error,) = running.errors()  # of whichever was first
    assert named in error


@pytest.mark.slow
def test_more_time(server: Server, uninterrupted_runs: UninterruptedRuns, folder: Path) -> None:
    """A run that `max_time` ended, in the middle of an epoch, resumes there."""
    line = f"{first('length buckets')} --trainer.max_time 00:00:00:02"
    server.run(line, folder, "bert", before="pause('step', 3)")
    assert checkpoint(folder / "r")["global_step"] == 2  # the eighth batch is of the third step
    server.run("fit --resume r --trainer.max_time 00:01:00:00", folder, "bert")
    ours, theirs = checkpoint(folder / "r"), checkpoint(uninterrupted_runs("length buckets"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert same(ours[part], theirs[part])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_generators_resume_where_they_were(
    ranks: int, server: Server, folder: Path, tmp_path: Path
) -> None:
    """What hooks of users sample between steps does not follow from the position in training."""
    task = CASES["plain"][0]
    line = first("plain", ranks)
    uninterrupted = fill(tmp_path / "uninterrupted")
    sampling = "sample_between_steps()\n"
    server.run(line, uninterrupted, task, before=sampling, ranks=ranks)
    running = server.start(line, folder, task, sampling + signal_at("step"), ranks)
    assert end(running, 0) == -signal.SIGKILL, running.output()
    line = "fit --resume r"
    running = server.start(
        line, folder, task, sampling + signal_at("validation", signal.SIGTERM), ranks
    )
    assert running.wait() == [128 + signal.SIGTERM] * ranks, running.output()
    server.run(line, folder, task, before=sampling, ranks=ranks)
    assert_same(folder / "r", uninterrupted / "r")
    states = random_states(checkpoint(folder / "r"))
    assert len(states) == ranks and len({str(one["torch"]) for one in states}) == ranks


@pytest.mark.slow
def test_one_process_at_a_time(
    server: Server, uninterrupted_runs: UninterruptedRuns, folder: Path
) -> None:
    running = server.start(first("plain"), folder, before=signal_at("step", signal.SIGSTOP))
    running.wait_for("r/checkpoints/last.ckpt")
    refused = server.start("fit --resume r", folder)
    assert refused.wait() == [2] and len(refused.errors()) == 1
    running.kill()
    server.run("fit --resume r", folder)
    assert_same(folder / "r", uninterrupted_runs("plain"))


# Signals ------------------------------------------------------------------------------------------

RESUME = "python -m tasks.{0} fit --resume {1}/r"
TEST = "after training, before the results; to test: python -m tasks.{0} test --ckpt_path {1}/r "
TEST += "--output {1}/r"


@pytest.mark.slow
@pytest.mark.exhaustive_except("both lengths", "end", "length buckets-step")
@pytest.mark.parametrize("case, point, size, to, number", [
    ("length buckets", "step", 1, (0,), signal.SIGTERM),
    ("both lengths", "validation", 1, (0,), signal.SIGINT),
    ("plain", "validation", 1, (0,), signal.SIGTERM),
    ("plain", "end", 1, (0,), signal.SIGTERM),
    *[("length buckets", point, 2, to, number) for point in ("step", "validation")
      for to, number in (((1,), signal.SIGTERM), ((0,), signal.SIGINT), ((0, 1), signal.SIGINT))],
])  # fmt: skip
def test_stopped_and_resumed(
    case: str,
    point: str,
    size: int,
    to: Any,
    number: int,
    server: Server,
    uninterrupted_runs: UninterruptedRuns,
    folder: Path,
) -> None:
    """A signal to some of the ranks stops all of them after a complete step."""
    task = CASES[case][0]
    running = server.start(first(case, size), folder, task, signal_at(point, number, to), size)
    assert running.wait() == [128 + number] * size, running.output()
    out = running.output()
    assert f"stopped by {signal.Signals(number).name} after step" in out
    assert out.count(RESUME.format(task, folder)) == 1 and not running.errors()
    assert size == 1 or "--resume" not in running.output(1)
    out = server.run("fit --resume r", folder, task, ranks=size)
    assert ("nothing was left to train" in out) == (point == "end")
    assert_same(folder / "r", uninterrupted_runs(case, size))


@pytest.mark.slow
@pytest.mark.parametrize("point, number, times, said", [
    ("step", signal.SIGINT, 2, RESUME),  # the second one stops at once
    ("test", signal.SIGTERM, 1, TEST),
    *((point, signal.SIGINT, 1, TEST) for point in ("before the test", "test", "results")),
    ("set-up", signal.SIGTERM, 1, "terminated"),
])  # fmt: skip
def test_stopped_at_once(
    point: str, number: int, times: int, said: str, server: Server, folder: Path
) -> None:
    before = f"send_signal({point!r}, {int(number)}, {times})"
    running = server.start(first("plain"), folder, before=before)
    assert running.wait() == [128 + number]
    assert said.format("vit", folder) in running.output().strip().splitlines()[-1]
    if said == TEST:
        server.run("test --ckpt_path r --output r", folder)
        assert (folder / "r/test.json").exists()
    if point == "step":
        assert checkpoint(folder / "r")["global_step"] == 6  # the seventh step is complete
    assert (folder / "r").exists() == (point != "set-up")


@pytest.mark.parametrize(
    "more", ["", "--checkpoint.every_n_train_steps 1 --checkpoint.save_top_k 1"]
)
def test_a_signal_saves_also_if_last_is_not_asked_for(more: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Task, "training_step", Task.training_step)  # to be put back
    monkeypatch.setitem(KILL_POINTS, "step", (Task, "training_step", 3))
    send_signal("step", signal.SIGTERM)
    assert run(f"fit {SHORT} --checkpoint.save_last false {more} --run_dir r") == 143
    assert checkpoint("r")["global_step"] == 3


def test_what_torchrun_repeats_is_no_second_signal(monkeypatch: Patch) -> None:
    signals = SignalHandler()
    signals.mode = "defer"
    signals(signal.SIGINT, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    signals(signal.SIGINT, None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(KeyboardInterrupt):
        signals(signal.SIGINT, None)
    assert signals.received == signal.SIGINT
