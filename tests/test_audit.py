"""The audit of CI fails for a known hole, and passes if nothing can be known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tasks.command import ROOT

HOLE = {"id": "PYSEC-2024-1", "fix_versions": ["2.0"], "aliases": ["CVE-2024-1"]}
BAD = {"name": "a", "version": "1", "vulns": [HOLE | {"description": "bad"}]}
GOOD = {"name": "b", "version": "1", "vulns": []}
UNKNOWN = {"name": "a", "skip_reason": "Dependency not found on PyPI"}
SAID = {  # what pip-audit lists: exit code, number of lines and a word of our output
    "a hole": ([BAD, GOOD], 1, 2, "a 1: "),
    "no hole": ([GOOD], 0, 1, "1 packages"),
    "unknown": ([UNKNOWN], 0, 1, "cannot be asked"),
    "no connection": (None, 0, 1, "cannot be asked"),
}


@pytest.mark.parametrize("case", SAID)
def test_audit(case: str, tmp_path: Path) -> None:
    packages, code, lines, word = SAID[case]
    printed = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    fake = tmp_path / "pip-audit"
    status = code or int(packages is None)
    fake.write_text(f"#!{sys.executable}\nprint({printed!r})\nraise SystemExit({status})\n")
    fake.chmod(0o755)
    command = [sys.executable, str(ROOT / ".ci" / "audit.py")]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (code, lines, "")
    assert word in done.stdout
