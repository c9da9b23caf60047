"""The audit of CI fails if there is a known vulnerability, and passes if nothing can be known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import ROOT

KNOWN = {"name": "b", "version": "1", "vulns": []}
HOLE = {"id": "PYSEC-2024-1", "fix_versions": ["2.0"], "aliases": ["CVE-2024-1"]}
VULNERABLE = {"name": "a", "version": "1", "vulns": [HOLE | {"description": "bad"}]}
UNKNOWN = {"name": "a", "skip_reason": "Dependency not found on PyPI"}
CASES = {  # what pip-audit reports: exit code, number of lines, and what they hold
    "vulnerable": ([VULNERABLE, KNOWN], 1, 2, "a 1: "),
    "not vulnerable": ([KNOWN], 0, 1, "1 packages"),
    "unknown": ([UNKNOWN], 0, 1, "cannot be reached"),
    "no connection": (None, 0, 1, "cannot be reached"),
}


@pytest.mark.parametrize("case", CASES)
def test_audit(case: str, tmp_path: Path) -> None:
    packages, code, lines, held = CASES[case]
    printed = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    status = code or int(packages is None)
    fake = tmp_path / "pip-audit"
    fake.write_text(f"#!{sys.executable}\nprint({printed!r})\nraise SystemExit({status})\n")
    fake.chmod(0o755)
    command = [sys.executable, str(ROOT / ".ci" / "audit.py")]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (code, lines, "")
    assert held in done.stdout
