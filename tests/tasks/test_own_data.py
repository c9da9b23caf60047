"""A task of one's own on the made-up data of datamodules/README.md."""

import json
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from datamodules.utils.files import write_text
from tasks.base import Batch, StepOutput, Task
from tasks.checkpoints.reading import read_checkpoint
from tasks.cli.app import App
from tasks.cli.main import main
from tasks.predictions import PredictionFile
from tests.helpers.command import ROOT, Capture, Patch, environment

SCRIPT = f"""
import sys
from tasks.cli.app import App
from tasks.cli.main import main

APP = App("copy", "Copying", "{__name__}:CopyTask", "copy_data:CopyData")
if __name__ == "__main__":
    sys.exit(main(APP))
"""
FIT = "--data.length 6 --data.batch_size 100 --model.optimizer.schedule constant"


@dataclass(frozen=True)
class CopyConfig:
    vocabulary: int


class CopyNet(nn.Module):
    def __init__(self, config: CopyConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Embedding(config.vocabulary, config.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).flatten(0, 1)  # (B, N, V) -> (B N, V)


class CopyTask(Task):
    name = "copy"

    def build(self, metadata: Mapping[str, Any]) -> nn.Module:
        return CopyNet(CopyConfig(metadata["vocabulary"]))

    def step(self, batch: Batch, training: bool) -> StepOutput:
        targets = batch["tokens"].flatten()  # (B N,)
        logits = self.net(batch["tokens"])
        return StepOutput(F.cross_entropy(logits, targets), len(targets), logits, targets)

    def make_metrics(self) -> dict[str, Metric]:
        return {"acc": MulticlassAccuracy(self.metadata["vocabulary"])}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the copied tokens (B, N)."""
        copied = self.net(batch["tokens"]).argmax(-1)  # (B N,)
        return copied.reshape(batch["tokens"].shape)  # (B N,) -> (B, N)

    def write_predictions(self, trainer: pl.Trainer, datamodule: Any, file: PredictionFile) -> None:
        rows = torch.cat(trainer.predict(self, datamodule=datamodule))
        write_text(file.path, "".join(f"{''.join(map(str, row))}\n" for row in rows.tolist()))


class PlainData(pl.LightningDataModule):
    """Not resumable."""


def data_code() -> str:
    """The code of the data of the README."""
    text = (ROOT / "datamodules/README.md").read_text()
    (code,) = re.findall(r"```python\n((?:(?!```).)*class CopyData.*?)```", text, re.S)
    return str(code)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: Patch) -> App:
    """The copy task, on the data of the README."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("readme_data")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(data_code(), "README.md", "exec", dont_inherit=True), vars(module))
    task = f"{__name__}:CopyTask"
    return App("copy", "Copying", task, "readme_data:CopyData", predict_input="lines of digits")


def run(app: App, line: str) -> int:
    return main(app, shlex.split(line))


def weights(folder: str) -> Tensor:
    table: Tensor = read_checkpoint(f"{folder}/checkpoints/last.ckpt")["state_dict"][
        "net.table.weight"
    ]
    return table


def test_made_up_data_train_resume_and_test(app: App, capsys: Capture) -> None:
    assert run(app, f"fit {FIT} --trainer.max_epochs 2 --run_dir whole") == 0
    assert run(app, f"fit {FIT} --trainer.max_epochs 1 --run_dir parts") == 0
    assert run(app, "fit --resume parts --trainer.max_epochs 2") == 0
    assert torch.equal(weights("parts"), weights("whole"))
    assert run(app, f"fit {FIT} --trainer.max_epochs 2 --run_dir other --seed_everything 1") == 0
    assert not torch.equal(weights("other"), weights("whole"))
    capsys.readouterr()
    for command, split in (("test", "test"), ("validate", "validate")):
        assert run(app, f"{command} --ckpt_path whole") == 0
        assert f"CopyData: 100 sequences to {split}\n" in capsys.readouterr().out
    task = CopyTask.load_from_checkpoint("whole")
    assert task.metadata == {"vocabulary": 10, "max_length": 6}


def test_own_predictions(app: App, capsys: Capture) -> None:
    assert run(app, f"fit {FIT} --model.optimizer.lr 0.1 --trainer.max_epochs 3 --run_dir run") == 0
    Path("lines.txt").write_text("0123\n9876\n")
    assert run(app, "predict --ckpt_path run --input lines.txt --output copied.csv") == 0
    assert Path("copied.csv").read_text() == "0123\n9876\n"
    capsys.readouterr()
    assert run(app, "predict --ckpt_path run") == 2
    error = capsys.readouterr().err
    assert "--input" in error and "lines of digits" in error and "Error" not in error


@pytest.mark.parametrize("option", ["--data.eval_batch_size", "--data.batch_size"])
def test_a_wrong_size_names_the_option(option: str, app: App, capsys: Capture) -> None:
    assert run(app, f"fit {option} 0") == 2
    assert f"error: {option} is 0" in capsys.readouterr().err


def test_what_a_datamodule_lacks_is_named(app: App, capsys: Capture) -> None:
    base = "datamodules.base:ResumableDataModule"
    for data, wanted in ((f"{__name__}:PlainData", "PlainData"), (base, "`load`")):
        assert run(App("copy", "Copying", app.task, data), "fit") == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and wanted in error


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the copy task as a script."""
    (tmp_path / "copy_data.py").write_text(data_code())
    (tmp_path / "copy_task.py").write_text(SCRIPT)
    return tmp_path


def printed(line: str, folder: Path) -> str:
    """What `python LINE` prints in a folder."""
    command = [sys.executable, *shlex.split(line)]
    paths = f"{folder}:{ROOT}"
    done = subprocess.run(
        command, cwd=folder, env=environment(PYTHONPATH=paths), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", ["copy_task.py", "-m copy_task"])
def test_a_script_names_itself(program: str, folder: Path) -> None:
    assert f"usage: python {program} COMMAND" in printed(f"{program} --help", folder)


@pytest.mark.slow
def test_the_command_that_a_script_prints_resumes_its_run(folder: Path) -> None:
    out = printed(f"copy_task.py fit {FIT} --trainer.max_epochs 1 --run_dir run", folder)
    (line,) = re.findall(r"python (.* --resume .* --trainer.max_epochs) N", out)
    printed(f"{line} 2", folder)
    summary = json.loads((folder / "run/summary.json").read_text())
    assert summary["epochs"] == 2
    assert summary["command"] == f"python {line} 2"
