"""Runs that are killed, anywhere and any number of times, and resumed end with the bits of one that
was not.
"""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.tasks.cases import CASES, Wholes, assert_same, at, fill, first, random_states
from tests.tasks.command import checkpoint, metrics, same
from tests.tasks.forked import Running, Server


def end(running: Running, rank: int) -> int:
    """Exit code of a rank once it has ended; others, which may wait for it in vain, are killed."""
    (code,) = running.wait(slice(rank, rank + 1))
    for others in (slice(rank), slice(rank + 1, None)):
        running.kill(ranks=others)
    return code


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_killed_in_the_middle(
    case: str, ranks: int, server: Server, wholes: Wholes, tmp_path: Path
) -> None:
    """Of a step, the last rank, of a checkpoint and of a validation, the first, in one run."""
    folder, task, line = fill(tmp_path / "here"), CASES[case][0], first(case, ranks)
    for moment in ("step", "half-written checkpoint", "validation"):
        killed = ranks - 1 if moment == "step" else 0
        running = server.start(line, folder, task, at(moment, ranks=(killed,)), ranks)
        assert end(running, killed) == -signal.SIGKILL, running.output()
        assert moment != "half-written checkpoint" or list(
            (folder / "r" / "checkpoints").glob(".*.tmp")
        )
        line = "fit --resume r"
    out = server.run(line, folder, task, ranks=ranks)
    assert "resuming from" not in out
    assert_same(folder / "r", wholes(case, ranks))


KILL_AFTER_SAVING = """
import os, pathlib
import tasks.checkpoints.writing as files
real = files.sync_folder
def sync(folder):
    real(folder)
    if (pathlib.Path(folder) / "last.ckpt").exists():
        os.kill(os.getpid(), 9)
files.sync_folder = sync
"""


@pytest.mark.slow
def test_killed_after_the_checkpoint_of_an_epoch(server: Server, tmp_path: Path) -> None:
    """As checkpoints are saved by default: neither the epoch's row is lost, nor is its end done
    twice.
    """
    line = first("documents").replace(
        "--checkpoint.every_n_train_steps 2", "--trainer.callbacks+=EarlyStopping"
    )
    line = line.replace("--trainer.check_val_every_n_epoch 2", "--trainer.limit_train_batches 4")
    line += " --trainer.callbacks.monitor val/loss --trainer.callbacks.patience 9 --trainer.callbacks.min_delta 9"
    whole, folder = fill(tmp_path / "whole"), fill(tmp_path / "here")
    server.run(line, whole, "lm")
    assert server.start(line, folder, "lm", KILL_AFTER_SAVING).wait() == [-signal.SIGKILL]
    server.run("fit --resume r", folder, "lm")
    assert_same(folder / "r", whole / "r")
    assert sum("train/padding" in row for row in metrics(folder / "r")) == 2
    ours, theirs = (checkpoint(place / "r")["callbacks"] for place in (folder, whole))
    (stopping,) = (key for key in theirs if key.startswith("EarlyStopping"))
    assert same(ours[stopping], theirs[stopping]) and theirs[stopping]["wait_count"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, named", [(600, "make room"), (20_000, "last.ckpt could not be written")]
)
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


ONE = [(slice(1), slice(0))]  # ranks that are killed, and those that are left
TWO = [(slice(2), slice(0)), (slice(1), slice(1, 2)), (slice(1, 2), slice(1))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ranks, epochs, kills", [(1, 12, ONE * 10), (2, 12, TWO * 2)], ids=["1", "2"]
)
def test_killed_again_and_again(
    ranks: int, epochs: int, kills: list[tuple[slice, slice]], server: Server, tmp_path: Path
) -> None:
    """One run, killed at random moments of its training; of two processes both, or one, which ends
    the other.
    """
    folder, whole, moments = fill(tmp_path / "here"), fill(tmp_path / "whole"), random.Random(0)
    line = long = first("both lengths", ranks).replace(
        "--trainer.max_epochs 2", f"--trainer.max_epochs {epochs}"
    )
    server.run(long, whole, "seq2seq", ranks=ranks)
    seconds = (
        time.time() - (whole / "r" / "config.yaml").stat().st_mtime
    )  # half of them are used up by the kills
    steps, seen, config = [0], 0, folder / "r" / "config.yaml"
    for killed, left in kills:
        running = server.start(line, folder, "seq2seq", ranks=ranks)
        running.wait_for("r/config.yaml")
        while config.stat().st_mtime_ns == seen:  # written anew where training begins
            time.sleep(0.005)
        seen = config.stat().st_mtime_ns
        assert set(running.kill(moments.uniform(0.0, seconds / len(kills)), killed)) == {
            -signal.SIGKILL
        }
        since = time.monotonic()
        assert set(running.wait(left)) <= {1} and time.monotonic() - since < 60
        line = "fit --resume r"
        last = folder / "r" / "checkpoints" / "last.ckpt"
        steps.append(checkpoint(folder / "r")["global_step"] if last.exists() else 0)
    assert steps == sorted(steps) and len(set(steps)) > len(kills) // 4, steps
    server.run(line, folder, "seq2seq", ranks=ranks)
    assert_same(folder / "r", whole / "r")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_other_batches_are_refused_by_name(
    case: str, ranks: int, server: Server, wholes: Wholes
) -> None:
    """Another batch size in one process; another number of processes."""
    folder = wholes(case)
    size = (
        "--data.loading.batch_tokens 128" if case == "tokens per batch" else "--data.batch_size 3"
    )
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp"
    more = "--trainer.max_epochs 9 --trainer.max_steps 99"
    line = f"fit --resume r {more} {size if ranks == 1 else two}"
    running = server.start(line, folder.parent, CASES[case][0], ranks=ranks)
    assert running.wait()[0] == 2, running.output()
    named = (
        ("batch_tokens 256" if "tokens" in size else "batch size")
        if ranks == 1
        else "number of devices 1"
    )
    said = "".join(running.output(rank) for rank in range(ranks)).splitlines()
    (error,) = (line for line in said if line.startswith("error: "))  # by whichever was first
    assert error.startswith("error: the checkpoint was written with") and named in error


@pytest.mark.slow
def test_more_time(server: Server, wholes: Wholes, tmp_path: Path) -> None:
    """A run that `max_time` ended, in the middle of an epoch, goes on where it stopped."""
    folder, case = fill(tmp_path / "here"), "length buckets"
    slow = at("step").replace(
        "def strike(*_):", "def strike(*_):\n    import time; time.sleep(3); return"
    )
    server.run(f"{first(case)} --trainer.max_time 00:00:00:02", folder, "bert", before=slow)
    assert (
        checkpoint(folder / "r")["global_step"] == 2
    )  # the eighth batch belongs to the third step
    server.run("fit --resume r --trainer.max_time 00:01:00:00", folder, "bert")
    ours, theirs = checkpoint(folder / "r"), checkpoint(wholes(case))
    assert all(
        same(ours[part], theirs[part])
        for part in ("state_dict", "optimizer_states", "lr_schedulers")
    )


DRAWS = """
import random, numpy, torch, torch.distributed
from tasks.base import Task
def draw(name):
    real = getattr(Task, name)
    def hook(self, *a):
        self.drawn = torch.rand(()) + random.random() + numpy.random.rand()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.drawn)
        return real(self, *a)
    setattr(Task, name, hook)
for name in ("on_train_epoch_start", "on_train_batch_start", "on_validation_epoch_start"):
    draw(name)
def on_before_optimizer_step(self, optimizer):
    for parameter in self.net.parameters():
        parameter.grad += self.drawn
Task.on_before_optimizer_step = on_before_optimizer_step
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", ["plain", "both lengths"])
def test_what_others_draw_goes_on(case: str, ranks: int, server: Server, tmp_path: Path) -> None:
    """Numbers drawn between steps, which do not follow from the position in training, from any
    generator.
    """
    task, line, whole, folder = (
        CASES[case][0],
        first(case, ranks),
        fill(tmp_path / "whole"),
        fill(tmp_path / "here"),
    )
    server.run(line, whole, task, before=DRAWS, ranks=ranks)
    running = server.start(line, folder, task, DRAWS + at("step"), ranks)
    assert end(running, 0) == -signal.SIGKILL, running.output()
    line = "fit --resume r"
    running = server.start(line, folder, task, DRAWS + at("validation", signal.SIGTERM), ranks)
    assert running.wait() == [128 + signal.SIGTERM] * ranks, running.output()
    server.run(line, folder, task, before=DRAWS, ranks=ranks)
    assert_same(folder / "r", whole / "r")
    states = random_states(checkpoint(folder / "r"))
    assert len(states) == ranks and len({str(one["torch"]) for one in states}) == ranks


@pytest.mark.slow
def test_one_process_at_a_time(server: Server, wholes: Wholes, tmp_path: Path) -> None:
    folder, line = fill(tmp_path / "here"), first("plain")
    running = server.start(line, folder, before=at("step", signal.SIGSTOP))
    running.wait_for("r/checkpoints/last.ckpt")
    refused = server.start("fit --resume r", folder)
    assert refused.wait() == [2]
    (said,) = (line for line in refused.output().splitlines() if line.startswith("error: "))
    assert (
        said.startswith("error: another process is training in ")
        and "changed" not in refused.output()
    )
    running.kill()
    server.run("fit --resume r", folder)
    assert_same(folder / "r", wholes("plain"))
