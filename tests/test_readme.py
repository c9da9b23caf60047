"""The README's commands run and its examples hold."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TINY = "--trainer.max_steps 2 --trainer.max_epochs 1 --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"


def blocks(language: str) -> list[str]:
    """The README's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: re.search(r"class (\w+)", code)[1])
def test_examples(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datamodules.sources import SOURCES
    from modules.position import POSITIONS

    for registry in (SOURCES, POSITIONS):  # an example's entry must not outlive it
        for name, entry in list(registry.items()):
            monkeypatch.setitem(registry, name, entry)
    monkeypatch.chdir(tmp_path)
    before = {id(registry): set(registry) for registry in (SOURCES, POSITIONS)}
    try:
        exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "readme_example"})
    finally:
        for registry in (SOURCES, POSITIONS):
            for name in set(registry) - before[id(registry)]:
                del registry[name]
