"""A small laboratory file, its processes, and what they leave."""

import csv
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.command import environment

LAB: dict[str, Any] = {
    "title": "Norms before or after",
    "task": "vit",
    "options": {
        "config": "configs/vit/digits.yaml",
        "model.net.stack.width": 32,
        "model.net.stack.depth": 1,
        "model.net.stack.heads": 2,
        "trainer.limit_val_batches": 1,
        "trainer.limit_test_batches": 1,
    },
    "axes": {"model.net.stack.order": ["pre", "post"]},
    "seeds": [0],
    "budget": {"steps": 3},
    "metric": {"name": "test/loss", "goal": "minimize"},
    "compare": {"model.net.stack.order": "pre"},
}


def write_lab(**changes: Any) -> None:
    Path("lab.yaml").write_text(yaml.safe_dump({**LAB, **changes}, sort_keys=False))


def start(line: str, before: str = "") -> subprocess.Popen[str]:
    """`python -m tasks.lab LINE`, after commands of a shell."""
    command = f"{before} exec {shlex.quote(sys.executable)} -m tasks.lab {line}"
    return subprocess.Popen(
        ["bash", "-c", command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows(folder: str = "out") -> list[dict[str, str]]:
    with open(Path(folder, "runs.csv"), newline="") as file:
        return list(csv.DictReader(file))
