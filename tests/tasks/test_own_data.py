"""A task of one's own on the made-up data of datamodules/README.md."""

import re
import shlex
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

from tasks.base import Batch, StepOutput, Task
from tasks.checkpoints.reading import read_checkpoint
from tasks.cli.app import App
from tasks.cli.main import main
from tests.helpers.command import ROOT, Capture, Patch

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


class PlainData(pl.LightningDataModule):
    """Not resumable."""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: Patch) -> App:
    """The copy task, on the data of the README."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "datamodules/README.md").read_text()
    (code,) = re.findall(r"```python\n((?:(?!```).)*class CopyData.*?)```", text, re.S)
    module = types.ModuleType("readme_data")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, "README.md", "exec", dont_inherit=True), vars(module))
    return App("copy", "Copying", f"{__name__}:CopyTask", "readme_data:CopyData")


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


def test_what_a_datamodule_lacks_is_named(app: App, capsys: Capture) -> None:
    base = "datamodules.base:ResumableDataModule"
    for data, wanted in ((f"{__name__}:PlainData", "PlainData"), (base, "`load`")):
        assert run(App("copy", "Copying", app.task, data), "fit") == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ") and wanted in error
