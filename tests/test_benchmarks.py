"""Every benchmark that the README names runs and prints its table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMED = sorted(set(re.findall(r"python -m (tests\.benchmarks\.\w+)", (ROOT / "README.md").read_text())))
SHORT = {"tests.benchmarks.cifar_peer": ["--minutes", "0.5"]}


@pytest.mark.slow
@pytest.mark.parametrize("module", NAMED)
def test_benchmark(module: str, request: pytest.FixtureRequest) -> None:
    if "TESSERA_DATA" in (ROOT / f"{module.replace('.', '/')}.py").read_text():
        request.getfixturevalue("real_data")
    command = [sys.executable, "-m", module, *SHORT.get(module, ["--rounds", "1"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"\d+\.\d", done.stdout), done.stdout


def test_every_benchmark_is_named() -> None:
    files = {path.stem for path in (ROOT / "tests" / "benchmarks").glob("[a-z]*.py")}
    assert {f"tests.benchmarks.{name}" for name in files} == set(NAMED)
