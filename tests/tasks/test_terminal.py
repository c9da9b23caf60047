"""Progress as a person at a terminal sees it, and as a log file does."""

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks.command import ROOT, SHORT, run

PLAIN = r"epoch \d/2  step \d  train/loss \d"


def on_a_terminal(line: str, folder: Path) -> tuple[int, str]:
    """Exit code of `python -m tasks.vit LINE` in `folder`, and what its terminal was sent, control
    codes left out.
    """
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TERM": "xterm-256color",
        "COLUMNS": "200",
        "LINES": "50",
    }
    command = [sys.executable, "-m", "tasks.vit", *shlex.split(line)]
    child = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    sent = b""
    try:
        while part := os.read(ours, 65536):
            sent += part
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    return child.wait(), re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", sent.decode())


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    code, screen = on_a_terminal(f"fit {SHORT} --run_dir r", tmp_path)
    assert code == 0, screen
    for epoch in (0, 1):
        assert re.search(rf"Epoch {epoch}/1 +━+.* [1-4]/4 .*train/loss: \d+\.\d+", screen), screen
    assert re.search(r"val/acc: \d\.\d+", screen)
    assert not re.search(PLAIN, screen)
    assert re.search(r"Results.*test/acc.*run folder.*best checkpoint", screen, re.DOTALL)


def test_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"fit {SHORT} --run_dir r") == 0
    printed = capsys.readouterr().out
    assert re.search(
        r"^epoch 2/2  step 8  train/loss \d\.\d+  val/acc \d\.\d+  val/loss \d\.\d+$", printed, re.M
    )
    assert "\x1b" not in printed and "Epoch" not in printed


def test_no_progress_where_it_is_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"fit {SHORT} --trainer.enable_progress_bar false --run_dir r") == 0
    assert not re.search(PLAIN, capsys.readouterr().out)
