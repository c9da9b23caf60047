"""A signal at any moment: exit code 130 or 143, at most one line, nothing left behind."""

import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tasks.cli.signals import SIGNALS, Stopped
from tests.helpers.command import ROOT, environment
from tests.helpers.launched import gone
from tests.helpers.tiny import SHORT

NEVER = ("Traceback", "terminate called", "RecursionError", "Fatal", "Exception ignored")
FIT = f"tasks.vit fit {SHORT} --run_dir r"
GENERATE = "tasks.lm generate --ckpt_path {0} --prompt The --max_new_tokens 64"
EXPORT = "tasks.lm export --ckpt_path {0} --format safetensors --output out.safetensors"
WORKERS = f"{FIT} --data.loading.num_workers 2 --data.loading.memory_limit_mb 0"
TWO = f"{FIT} --trainer.strategy ddp --trainer.devices 2"


def own() -> dict[str, str]:
    """Variables with which a process finds modules in its folder."""
    return environment(PYTHONPATH=f".:{ROOT}", TESSERA_TRUST="tests")


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    """`python -m LINE` in a folder, of which nothing has happened but that it handles SIGTERM."""
    folder.mkdir()
    command = [sys.executable, "-m", *shlex.split(line)]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen(
            command, cwd=folder, env=own(), stdout=out, stderr=err, start_new_session=True
        )
    while process.poll() is None and not has(process.pid, "SigCgt"):
        time.sleep(0.001)
    # still before anything heavy
    assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
    return process


def has(pid: int, name: str) -> bool:
    """Whether SIGTERM is in a mask of a process, such as "SigCgt", the signals that it handles."""
    (mask,) = re.findall(rf"{name}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def launched(process: subprocess.Popen[str]) -> int:
    """Waits for the process that Lightning launches; returns its id."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None:
        for child in children.read_text().split():
            with suppress(OSError):  # it has ended
                if b"LOCAL_RANK=1" in Path(f"/proc/{child}/environ").read_bytes():
                    return int(child)
        time.sleep(0.001)
    raise AssertionError("no process was launched")


def signal_after(line: str, delay: float, number: int, folder: Path, group: bool = False) -> None:
    """Start a command, send it a signal after some seconds, and look at how it ends."""
    process = start(line, folder)
    try:
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, number) if group else process.send_signal(number)
        code = process.wait(90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    error = (folder / "err").read_text()
    assert code in (128 + number, 0), f"{code} after {delay:.2f} s: {error}"
    assert not any(word in error for word in NEVER), error
    assert error.count("\n") <= 1 or "--resume" in error, error
    left = {path.name for path in folder.iterdir()} - {"out", "err"}
    with suppress(FileNotFoundError):  # an export may have ended before the signal
        load_file(folder / "out.safetensors")
        left.remove("out.safetensors")
    assert not left or (folder / "r" / "config.yaml").exists() or code == 0, left
    assert not list(folder.rglob(".*.tmp"))


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("line, delay, number", [
    (FIT, 0.0, signal.SIGINT), (FIT, 0.6, signal.SIGTERM), (GENERATE, 1.5, signal.SIGINT),
])  # fmt: skip
def test_a_few_moments(
    line: str, delay: float, number: int, lm_letters: Path, tmp_path: Path
) -> None:
    signal_after(line.format(lm_letters), delay, number, tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.015, 0.1])
def test_a_launched_process_that_starts(delay: float, tmp_path: Path) -> None:
    """It has no handlers yet, and the process that launched it may wait for it in C++.

    That one ends it before its own connection, or torch would print stacks.
    """
    slow = " --trainer.callbacks+=tests.helpers.callbacks.SlowToEnd"
    process = start(TWO + slow, tmp_path / "here")
    try:
        child = launched(process)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(90) == 128 + signal.SIGTERM
        for _ in range(100):
            if gone(child):
                break
            time.sleep(0.1)
        assert gone(child)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "here" / "err").read_text() == "terminated\n"


@pytest.mark.slow
@pytest.mark.exhaustive_except("line0")  # a training
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "line, most, count",
    [(FIT, 10, 4), (GENERATE, 4, 3), (EXPORT, 4, 2), (WORKERS, 12, 2), (TWO, 10, 3)],
)
def test_many_moments(line: str, most: float, count: int, lm_letters: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    for turn in range(count):
        delay = most * (turn + rng.random()) / count
        number = rng.choice((signal.SIGINT, signal.SIGTERM))
        group = line == TWO or rng.random() < 0.5
        signal_after(line.format(lm_letters), delay, number, tmp_path / str(turn), group)


HALF_A_MODULE = """
import os, time
try:
    os.kill(os.getpid(), {0})
    time.sleep(5)
except BaseException as error:
    raise RuntimeError("half a module") from error
"""
WAITS_AT_ITS_END = """
import os, threading, time
threading.Thread(target=time.sleep, args=(3,)).start()
threading.Timer(2, os.kill, (os.getpid(), {0})).start()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("module, code, line", [
    ("pytorch_lightning", HALF_A_MODULE, "fit"), ("sitecustomize", WAITS_AT_ITS_END, "--version"),
])  # fmt: skip
def test_in_an_import_and_after_the_end(module: str, code: str, line: str, number: int) -> None:
    Path(f"{module}.py").write_text(code.format(int(number)))
    command = [sys.executable, "-m", "tasks.vit", line]
    done = subprocess.run(command, capture_output=True, text=True, env=own())
    assert done.returncode == 128 + number
    assert done.stderr in ("error: interrupted\n", "terminated\n")
    assert done.stdout.startswith("tessera ") == (line == "--version")


DATA_WORKERS = """
import os, signal, time
from torch.utils.data import DataLoader
from tasks.cli.signals import SIGNALS, Stopped

class Samples:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(index)
        return index

SIGNALS.install()
with SIGNALS.raising():
    loader = iter(DataLoader(Samples(), num_workers=2))
    next(loader)
    try:
        print(flush=True)
        time.sleep(20)
    except Stopped:
        time.sleep(0.5)  # until the workers have ended
        del loader
"""


def test_data_workers_that_get_the_signal_too() -> None:
    command = [sys.executable, "-c", DATA_WORKERS]
    with subprocess.Popen(
        command, env=own(), stdout=-1, stderr=-1, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGTERM)
        assert (process.communicate()[1], process.returncode) == ("", 0)


AT_A_FORK = """
import os, signal, time
from tasks.cli.signals import SIGNALS, Stopped

class Faulty:
    def __del__(self):
        raise ValueError("of another kind")

os.register_at_fork(after_in_parent=lambda: signal.raise_signal({}))
SIGNALS.install()
Faulty()
with SIGNALS.raising():
    try:
        if os.fork() == 0:
            os._exit(0)
        time.sleep(20)
    except (KeyboardInterrupt, Stopped) as stop:
        print(type(stop).__name__)
"""


@pytest.mark.parametrize("number, name", [(2, "KeyboardInterrupt"), (15, "Stopped")])
def test_where_python_ignores_exceptions(number: int, name: str) -> None:
    """A signal is not lost; other exceptions are shown as by Python."""
    command = [sys.executable, "-c", AT_A_FORK.format(number)]
    done = subprocess.run(command, capture_output=True, text=True, env=own())
    assert (done.stdout, done.returncode) == (f"{name}\n", 0)
    assert done.stderr.count("Exception ignored") == 1 and "of another kind" in done.stderr


def test_a_process_that_only_imports_keeps_its_handlers() -> None:
    now = "[signal.getsignal(number) for number in (2, 15)]"
    code = f"import signal; before = {now}\nimport tasks.vit.__main__, tasks.cli.signals\n"
    subprocess.run([sys.executable, "-c", f"{code}assert before == {now}"], check=True, env=own())


def test_launched_processes_end_before_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        launched_by_lightning = [child]
        monkeypatch.setattr(SIGNALS, "launched", launched_by_lightning)
        with pytest.raises(Stopped), SIGNALS.installed():
            signal.raise_signal(signal.SIGTERM)
        assert child.wait(10) == -signal.SIGKILL
    assert not launched_by_lightning  # or its observer would kill this process
