"""Runs of several processes that others start, and what each of them saw."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.command import environment as variables
from tests.helpers.results import metrics

FOUR_STEPS = (
    "--trainer.limit_train_batches 4 --trainer.limit_val_batches 1 --trainer.max_epochs 1 "
    "--trainer.log_every_n_steps 1 --model.net.stack.depth 1 --model.augment.crop_padding 0"
)
TORCHRUN = "torch.distributed.run --standalone --nproc_per_node 2"
DDP = "--config configs/trainer/ddp.yaml"


def start(line: str, folder: Path, before: str = "", **more: str) -> subprocess.Popen[str]:
    """`python -m LINE` in `folder`, with a callback that says what it saw; one thread unless told
    otherwise.
    """
    folder.mkdir(exist_ok=True)
    line += " --trainer.callbacks+=tests.helpers.callbacks.Spy"
    command = [*shlex.split(before), sys.executable, "-m", *shlex.split(line)]
    own = {name: value for name, value in variables(TESSERA_TRUST="tests", **more).items() if value}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=own, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes: subprocess.Popen[str], seconds: float = 200) -> list[str]:
    """What the processes said, once all have ended; if they hang, an error with their stacks."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in processes]
    except subprocess.TimeoutExpired:
        said = [stop(process) for process in processes]
        raise AssertionError("\n\n".join(said)) from None


def stop(process: subprocess.Popen[str]) -> str:
    """Kills a process and those it started; what they said, with their stacks if they print them.

    They print them at SIGUSR1, where `Spy` is imported.
    """
    running = writers(process)
    for pid in running:
        with suppress(OSError, subprocess.TimeoutExpired):  # it may have ended
            if handles(pid, signal.SIGUSR1):
                os.kill(pid, signal.SIGUSR1)
                process.communicate(timeout=0.5)  # one after the other, or stacks would be mixed
    for pid in running:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return process.communicate(timeout=20)[0]


def writers(process: subprocess.Popen[str]) -> list[int]:
    """All processes whose output goes to the same pipe."""
    assert process.stdout
    if process.stdout.closed:  # it has ended, and all was read
        return []
    pipe = os.readlink(f"/proc/self/fd/{process.stdout.fileno()}")
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if os.readlink(output) == pipe:
                found.append(int(output.parts[2]))
    return found


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def spied(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def assert_once(text: str) -> None:
    for word in ("Results", "run folder", "next:", "epoch 1/1"):
        assert text.count(word) == 1, text


def assert_logged(folder: Path, steps: int) -> None:
    """Each step once, and validation and test once."""
    rows = metrics(folder)
    assert [int(row["step"]) for row in rows if "train/loss" in row] == list(range(1, steps + 1))
    assert [sum(name in row for row in rows) for name in ("val/loss", "test/loss")] == [1, 1]


def run_folder_of(folder: Path) -> Path:
    """The only one below a folder."""
    (found,) = {path.parent for path in folder.rglob("metrics.csv")}
    assert len([path for path in found.parent.iterdir() if (path / "config.yaml").exists()]) <= 2
    return found


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
