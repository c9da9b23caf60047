"""CI's audit fails if there is a known vulnerability, and passes if nothing can be known."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AUDIT = Path(__file__).parents[1] / ".ci" / "audit.py"
HOLE = {"id": "PYSEC-2024-1", "fix_versions": ["2.0"], "aliases": [], "description": "bad"}
CLEAN = {"name": "b", "version": "1", "vulns": []}
UNKNOWN = {"name": "a", "skip_reason": "Dependency not found on PyPI"}
CASES = {  # what pip-audit prints: exit code and number of lines
    "vulnerable": ([{**CLEAN, "name": "a", "vulns": [HOLE]}, CLEAN], 1, 2),
    "clean": ([CLEAN], 0, 1),
    "unknown": ([UNKNOWN], 0, 1),
    "no connection": (None, 0, 1),
}


@pytest.mark.parametrize("packages, code, lines", CASES.values(), ids=CASES)
def test_audit(packages: list[Any] | None, code: int, lines: int, tmp_path: Path) -> None:
    printed = "" if packages is None else json.dumps({"dependencies": packages, "fixes": []})
    fake = tmp_path / "pip-audit"
    fake.write_text(f"#!{sys.executable}\nprint({printed!r})\nraise SystemExit({code})\n")
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, str(AUDIT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (code, lines, "")
    assert ("packages" in done.stdout) == any("vulns" in package for package in packages or [])
