"""Blocks and data in a module of one's own, which TESSERA_TRUST names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import Console, environment, python

MODULE = '''
from pytorch_lightning import Callback
from torch import nn

from datamodules.sources import SOURCES
from modules.norm import NORMS


class Halved(nn.LayerNorm):
    """LayerNorm(x) / 2: (B, N, E) -> (B, N, E)."""

    def forward(self, x):
        return super().forward(x) / 2


class Timer(Callback):  # has the name of one of Lightning
    pass


NORMS["halved"] = Halved
SOURCES["numerals"] = SOURCES["digits"]
'''
FIT = "fit --trainer.max_steps 2 --trainer.limit_val_batches 1"
OWN = (
    "--preset digits --model.net.stack.norm halved --data.source numerals --run_dir runs/own "
    "--trainer.callbacks my_blocks.Timer"
)


def test_a_file_in_place_of_a_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my_blocks.py").write_text(MODULE)
    for name in ("my_blocks.py", str(tmp_path / "my_blocks.py")):
        done = python("tasks.vit fit --print_config", tmp_path, TESSERA_TRUST=name)
        assert done.returncode == 2 and "such as my_blocks for" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_commands_use_blocks_and_data_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "my_blocks.py").write_text(MODULE)
    trusting = {"TESSERA_TRUST": "my_blocks"}
    done = python(f"tasks.vit {FIT} {OWN}", tmp_path, **trusting)
    assert done.returncode == 0, done.stderr
    suggested = done.stdout.partition("next:\n")[2].splitlines()
    assert suggested
    assert all(line.split()[0] == "TESSERA_TRUST=my_blocks" for line in suggested)
    first = json.loads((tmp_path / "runs/own/summary.json").read_text())
    done = python("tasks.vit test --ckpt_path runs/own --output again", tmp_path, **trusting)
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "again/test.json").read_text())
    assert again["test/acc"] == first["test/acc"]
    file = tmp_path / "runs/own/config.yaml"
    for line in ("fit --resume", "export --format safetensors --ckpt_path", "fit --resume"):
        done = python(f"tasks.vit {line} runs/own", tmp_path)
        file.write_text(file.read_text().replace("numerals", "digits"))  # only the block is left
        assert done.returncode in (1, 2) and "TESSERA_TRUST" in done.stderr
        assert "Traceback" not in done.stderr
    done = python("tasks.vit test --ckpt_path runs/own", tmp_path)
    assert done.returncode == 2 and "numerals" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_command_tessera_finds_modules_of_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_blocks.py").write_text(MODULE)
    (tmp_path / "tasks.py").write_text("hides = ours")
    script = tmp_path / "bin/tessera"  # as pip writes it
    script.parent.mkdir()
    script.write_text("import sys\nfrom tasks.tessera.command import main\nsys.exit(main())\n")
    line = "vit fit --model.net.stack.norm halved --print_config"
    done = subprocess.run(
        [sys.executable, script, *line.split()],
        cwd=tmp_path,
        env=environment(TESSERA_TRUST="my_blocks"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "norm: halved" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_trusted_module_that_does_not_exist(tmp_path: Path) -> None:
    done = python(f"tasks.vit {FIT}", tmp_path, TESSERA_TRUST="my_blocks")
    assert done.returncode == 2
    assert "my_blocks" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_laboratory_of_blocks_of_your_own(tmp_path: Path) -> None:
    (tmp_path / "my_blocks.py").write_text(MODULE)
    (tmp_path / "norms.yaml").write_text(
        "title: Norms\ntask: vit\nseeds: [0]\nbudget: {steps: 1}\n"
        "axes: {model.net.stack.norm: [layernorm, halved]}\n"
        "metric: {name: test/acc, goal: maximize}\n"
    )
    line = "tasks.lab run norms.yaml --dry_run"
    done = python(line, tmp_path, TESSERA_TRUST="my_blocks")
    assert done.returncode == 0, done.stderr
    assert "--model.net.stack.norm halved" in done.stdout
    done = python(line, tmp_path)
    assert done.returncode == 2 and "halved" in done.stderr


@pytest.mark.parametrize(
    ("topic", "is_said"),
    [("model.net.position", True), ("model.net.stack.norm", True), ("model.net.image_size", False)],
)
def test_help_says_how_to_name_a_block_of_your_own(
    topic: str, is_said: bool, console: Console
) -> None:
    assert ("TESSERA_TRUST" in console.printed(f"fit --help {topic}")[0]) == is_said


@pytest.mark.slow
def test_a_block_of_your_own_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "my_blocks.py").write_text(MODULE.replace('"halved"', '"rmsnorm"'))
    done = python(f"tasks.vit {FIT} --run_dir runs/own", tmp_path, TESSERA_TRUST="my_blocks")
    assert done.returncode == 2 and "norm rmsnorm" in done.stderr
    assert "choose a new name" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
