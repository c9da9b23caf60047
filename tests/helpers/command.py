"""Running the command line, in this process or another; reading what it prints and leaves."""

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.cli.main import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[2]


def run(line: str, task: str = "vit") -> int:
    """The exit code of `python -m tasks.TASK LINE`, run here; progress is not printed."""
    os.environ.pop("TESSERA_RUN_DIR", None)
    try:
        return main(import_module(f"tasks.{task}.__main__").APP, shlex.split(line))
    except SystemExit as stop:
        return int(stop.code or 0)


def environment(**more: str) -> dict[str, str]:
    """Variables for other processes, by default with one thread for each."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = {**os.environ, **own, **more}
    # Runs in this process set these. One of another process would end with it, or be kept open.
    for name in ("TESSERA_RUN_DIR", "TESSERA_MAIN", "WANDB_SERVICE"):
        found.pop(name, None)
    return found


def process(
    line: str, before: str = "", task: str = "vit", **options: Any
) -> subprocess.CompletedProcess[str]:
    """`python -m tasks.TASK LINE` in a process of its own, after the Python code `before`; prints
    what it imported.
    """
    code = (
        f"import sys\n{before}\n"
        f"from tasks.cli.main import main\nfrom tasks.{task}.__main__ import APP\n"
        f"code = main(APP, {shlex.split(line)!r})\n"
        "print('imported', *{name.partition('.')[0] for name in sys.modules})\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code]
    own = environment(OMP_NUM_THREADS=str(torch.get_num_threads()))
    return subprocess.run(command, capture_output=True, text=True, env=own, **options)


def python(line: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python -m LINE` in a folder."""
    command = [sys.executable, "-m", *shlex.split(line)]
    return subprocess.run(
        command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=300
    )


class Console:
    """Runs commands here and reads what they print."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture

    def printed(self, line: str, task: str = "vit") -> tuple[str, str]:
        """Standard output and standard error of a command that succeeds."""
        self.capture.readouterr()
        code = run(line, task)
        out, err = self.capture.readouterr()
        assert code == 0, err
        return out, err

    def objects(self, line: str, task: str) -> list[dict[str, Any]]:
        """The objects that a command prints with `--json`."""
        return [json.loads(text) for text in self.printed(f"{line} --json", task)[0].splitlines()]

    def refused(self, line: str, *names: str, task: str = "vit", code: int | None = 2) -> str:
        """The one sentence of a command that fails; it has these names and leaves no file.

        Args:
            line: the command line.
            names: what the sentence names.
            task: of the command.
            code: 2 if the command line is wrong, 1 if something else is, None for either.
        """
        before = sorted(Path().rglob("*"))
        self.capture.readouterr()
        found = run(line, task)
        error = self.capture.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        assert "--debug" not in error and found in ((1, 2) if code is None else (code,)), error
        for name in names:
            assert name in error
        assert sorted(Path().rglob("*")) == before
        return error
