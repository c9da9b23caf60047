"""Runs that torchrun starts: its errors, restarts, signals, and two machines."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.cases import UninterruptedRuns, assert_same, fill, first
from tests.helpers.command import ROOT, run
from tests.helpers.launched import (
    FOUR_STEPS,
    TORCHRUN,
    assert_once,
    errors,
    finish,
    gone,
    run_folder_of,
    spied,
    start,
)
from tests.helpers.results import checkpoint, metrics, same, summary


def test_a_run_that_hangs_is_killed_and_says_where() -> None:
    code = (
        "import faulthandler, os, signal, time; faulthandler.register(signal.SIGUSR1)\n"
        "def wait(): time.sleep(600)\n"
        "os.fork(); print('ready', flush=True); wait()"
    )
    pipe = subprocess.PIPE
    ended, hanging = (
        subprocess.Popen(
            [sys.executable, "-c", line], stdout=pipe, stderr=subprocess.STDOUT, text=True
        )
        for line in ("print('done')", code)
    )
    started = time.monotonic()
    with pytest.raises(AssertionError) as error:
        finish(ended, hanging, seconds=5)
    assert time.monotonic() - started < 60
    said = str(error.value)
    assert said.startswith("done") and said.count("ready") == said.count("in wait") == 2
    assert hanging.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_torchrun_shows_its_own_error_first(tmp_path: Path) -> None:
    line = f"{TORCHRUN} -m tasks.vit fit {FOUR_STEPS} --run_dir r"
    process = start(line, tmp_path, END="1 2 ValueError")
    (said,) = finish(process)
    assert time.time() - (tmp_path / "ended").stat().st_mtime < 60
    assert process.returncode == 1
    assert errors(said)[0].startswith("error: ValueError: a bad sample"), said
    assert all("another process of this run ended" in line for line in errors(said)[1:])


@pytest.mark.slow
def test_torchrun_starts_again_where_it_was(tmp_path: Path) -> None:
    line = f"fit {FOUR_STEPS} --checkpoint.every_n_train_steps 2 --model.net.stack.dropout 0.1"
    line += " --trainer.max_epochs 2"
    again = f"{TORCHRUN} --max-restarts 1 -m tasks.vit {line}"
    processes = [
        start(again, tmp_path / "killed", END="1 7 SIGKILL"),
        start(f"tasks.vit {line} --trainer.devices 2", tmp_path / "uninterrupted"),
    ]
    said, _ = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert said.count("started again: continuing") == 1 and said.count("epoch 2/2") == 1, said
    assert [rank["first"] for rank in spied(tmp_path / "killed")] == [6, 6]
    ours, theirs = (run_folder_of(tmp_path / name) for name in ("killed", "uninterrupted"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(checkpoint(ours)[part], checkpoint(theirs)[part]), part
    assert metrics(ours) == metrics(theirs)


@pytest.mark.slow
def test_torchrun_stops_at_a_signal_and_resumes(
    uninterrupted_runs: UninterruptedRuns, tmp_path: Path
) -> None:
    """One for torchrun, one from a terminal, and one for a process that is slow to end: torchrun
    ends it meanwhile.
    """
    folder = fill(tmp_path / "here")
    command = f"{TORCHRUN} -m tasks.vit {first('workers', 2)}"
    for end in ("1 1 SIGTERM launcher", "0 2 SIGINT terminal", "0 4 SIGTERM slow"):
        (folder / "ended").unlink(missing_ok=True)
        process = start(command, folder, "setsid", END=end)
        (said,) = finish(process)
        stopped = time.time() - (folder / "ended").stat().st_mtime
        assert process.returncode == 1 and stopped < 30, said  # torchrun's own
        step = int(end.split()[1]) + 1
        assert checkpoint(folder / "r")["global_step"] == step, said
        (told,) = (line for line in said.splitlines() if line.startswith("stopped by "))
        how, _, command = told.partition(": TESSERA_TRUST=tests torchrun ")
        assert how.startswith(f"stopped by {end.split()[2]} after step {step};"), said
        assert command == f"--standalone --nproc_per_node 2 -m tasks.vit fit --resume {folder}/r"
        assert f"{ROOT}/tasks/" not in said and not errors(said), said  # torchrun's traceback only
        assert not re.findall(r"exitcode +: (?!143 )", said), said
        assert all(gone(rank["pid"]) for rank in spied(folder))
        command = f"torch.distributed.run {command}"
    process = start(command, folder)
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert [rank["first"] for rank in spied(folder)] == [step, step]
    assert (folder / "cleaned_up").exists()  # what the slow one had to do at its end
    assert_same(folder / "r", uninterrupted_runs("workers", 2))


@pytest.mark.slow
def test_torchrun_does_not_continue_the_run_of_another(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("{}")
    process = start(
        f"{TORCHRUN} --max-restarts 1 -m tasks.vit fit {FOUR_STEPS} --run_dir r", tmp_path
    )
    (said,) = finish(process)
    assert process.returncode == 1 and len(errors(said)) == 2  # one for each start
    assert all(f"--run_dir {tmp_path}/r" in error for error in errors(said))


@pytest.mark.slow
def test_two_machines_are_one_run(tmp_path: Path) -> None:
    """By the README's torchrun, here both on one machine, each in a folder of its own."""
    readme = (ROOT / "tasks/README.md").read_text()
    (line,) = re.findall(r"^    torchrun (--nnodes 2 .*)$", readme, re.MULTILINE)
    endpoint = f"127.0.0.1:{20000 + os.getpid() % 20000}"
    for there, here in (("HOST:29500", endpoint), ("nproc_per_node 4", "nproc_per_node 1")):
        assert there in line
        line = line.replace(there, here)
    line = f"torch.distributed.run {line} {FOUR_STEPS} --data.batch_size 32"
    processes = [start(line, tmp_path / side) for side in "ab"]
    said = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert_once("".join(said))
    assert [len(spied(tmp_path / side)) for side in "ab"] == [1, 1]
    folder = run_folder_of(tmp_path)
    assert run(f"fit {FOUR_STEPS} --data.batch_size 64 --run_dir alone") == 0
    ours, theirs = summary(folder), summary("alone")
    assert ours["steps"] == theirs["steps"] == 4
    assert ours["test/acc"] == theirs["test/acc"]
    assert ours["test/loss"] == pytest.approx(theirs["test/loss"], abs=1e-5)
