"""Mutants of a small project: one per function, the same for a seed, caught if a test fails."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import Mutant, sample

SOURCES = {
    "modules/__init__.py": "",
    "modules/sums.py": '''
def total(values: list[int], start: int = 0) -> int:
    """The sum."""
    for value in values:
        start = start + value
    return start


def is_small(value: float) -> bool:
    if value < 0.5 and value > -0.5:
        return True
    raise ValueError(f"{value + 1} is not")


def unused(value: int) -> int:
    return value * 2
''',
    "tasks/run.py": "class Run:\n    def ready(self):\n        self.start()\n        return True\n",
    "tests/test_sums.py": """
import pytest
from modules.sums import is_small, total

def test_sums():
    assert total([1, 2]) == 3
    assert is_small(0.2)
    for value in (0.5, -0.5, 0.9, -0.9):
        with pytest.raises(ValueError):
            is_small(value)
""",
    "tests/test_failing.py": """
from modules.sums import total, unused

def test_broken():
    assert total([1]) == 2

def test_weak():
    unused(2)
""",
    "tests/test_importing.py": """
from modules.sums import total
assert total([1]) == 1
import nothing_of_the_kind
""",
    "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['slow']\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with three tested functions and two others."""
    for name, text in SOURCES.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "project" / "datamodules").mkdir()
    return tmp_path / "project"


def by_function(mutants: list[Mutant]) -> dict[str, Mutant]:
    """Mutants by file, line and function."""
    return {mutant.key.partition(": ")[0].split()[-1]: mutant for mutant in mutants}


def test_the_sample_has_one_valid_change_of_each_function(project: Path) -> None:
    for seed in range(30):
        mutants = sample(project, 10, seed)
        assert set(by_function(mutants)) == {"total", "is_small", "unused", "Run.ready"}
        for mutant in mutants:
            before = ast.dump(ast.parse(SOURCES[mutant.path]))
            assert ast.dump(ast.parse(mutant.text)) != before
            assert "The sum." in mutant.text or mutant.path != "modules/sums.py"
            assert "is not" in mutant.text or mutant.path != "modules/sums.py"
    assert len({mutant.key for seed in range(30) for mutant in sample(project, 10, seed)}) > 10


def test_the_sample_depends_on_seed_and_functions_only(project: Path) -> None:
    before = by_function(sample(project, 10, 3))
    assert by_function(sample(project, 2, 3)).items() <= before.items()
    (project / "tasks" / "other.py").write_text("def other():\n    return 1\n")
    after = by_function(sample(project, 10, 3))
    assert after.pop("other").path == "tasks/other.py"
    assert after == before


@pytest.mark.slow
def test_mutants_are_caught_by_the_tests_that_execute_them(project: Path) -> None:
    command = [sys.executable, "-m", "tests.mutants", "--source", str(project)]
    files = ["--out", str(project / "out.jsonl"), "--lines", str(project / "lines.jsonl")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    for _ in range(2):  # the second run finds all in the files
        printed = subprocess.check_output([*command, *files], text=True, env=environment)
        assert "caught 2 of 4" in printed
        assert "without a mutant: tests/test_failing.py::test_broken" in printed
        assert "without a mutant: tests/test_importing.py" in printed
    verdicts = [json.loads(line) for line in (project / "out.jsonl").read_text().splitlines()]
    by_test = [verdict["files"] for verdict in verdicts if verdict["caught"]]
    by_none = [verdict["files"] for verdict in verdicts if not verdict["caught"]]
    assert (sorted(by_test), sorted(by_none)) == ([1, 2], [0, 1])
    assert (project / "modules/sums.py").read_text() == SOURCES["modules/sums.py"]
