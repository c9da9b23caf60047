"""Evaluation on several ranks gives the figures of one process, to the last bit: uneven batches,
and ranks without.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

from tasks.base import Task
from tasks.bert.task import CalibrationError
from tasks.text import MeanOf
from tasks.training.evaluation import count
from tasks.training.optim import OptimConfig
from tests.tasks.command import (
    PAIRS,
    SMALL_LM,
    SMALL_S2S,
    checkpoint,
    metrics,
    write_corpus,
    write_pairs,
)
from tests.tasks.forked import Server

TEXT = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --data.max_length 32"
TASKS = {  # and how many samples make an odd number of batches
    "vit": ("--model.net.stack.depth 1", 130),
    "bert": (f"{TEXT} --data.tokenizer.vocabulary 300", 150),
    "mlm": (
        f"{TEXT} --data.tokenizer.vocabulary 300 --data.next_sentence true --model.net.segments 2",
        500,
    ),
    "lm": (f"{SMALL_LM} --data.source files --data.path texts --data.packing documents", 3),
    "seq2seq": (f"{SMALL_S2S} {PAIRS}", 7),
}
FIT = (
    "fit --trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.val_check_interval 1 "
    "--data.batch_size 4 "
    "--trainer.log_every_n_steps 1"
)
FOUND = """
import json, pathlib, tasks.cli.lightning_cli as cli
def keep(found, *_):
    found = {name: float(value) for name, value in found.items() if "/" in name}
    pathlib.Path("found.json").write_text(json.dumps(found))
cli.print_results = keep
"""
Figures = dict[str, float]
METRICS = (CalibrationError, MulticlassAUROC, MulticlassConfusionMatrix)


@pytest.fixture
def evaluated(server: Server, tmp_path: Path) -> Callable[..., Figures]:
    """A function from a command, a task and a number of ranks to what it finds."""
    write_corpus(tmp_path / "texts", 40)
    write_pairs(tmp_path / "pairs")

    def found(line: str, task: str, ranks: int) -> Figures:
        devices = f"--trainer.devices {ranks} --trainer.strategy ddp" if ranks > 1 else ""
        server.run(
            f"{line} --trainer.accelerator cpu {devices}", tmp_path, task, before=FOUND, ranks=ranks
        )
        return json.loads((tmp_path / "found.json").read_text())

    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_figures_are_those_of_one_process(task: str, evaluated: Callable[..., Figures]) -> None:
    options, size = TASKS[task]
    batches = "--data.loading.eval_batch_size"
    summary = evaluated(f"{FIT} {options} {batches} {size} --run_dir r", task, 2)
    step = checkpoint("r", "best")["global_step"] - 1
    (row,) = (row for row in metrics("r") if int(row["step"]) == step and "val/loss" in row)
    logged = {name: float(value) for name, value in row.items() if name.startswith("val/")}
    best = "--ckpt_path r/checkpoints/best.ckpt"
    assert evaluated(f"validate {best}", task, 1) == logged
    alone = evaluated(f"test {best}", task, 1)
    assert len(alone) > 1 and alone == {
        name: value for name, value in summary.items() if name.startswith("test/")
    }
    many = f"test {best} {batches} 5000"  # the second rank and the third have none
    assert evaluated(many, task, 3) == evaluated(many, task, 1)


def test_calibration_does_not_depend_on_the_order() -> None:
    probabilities, labels = torch.randn(5000, 3).mul(3).softmax(-1), torch.randint(3, (5000,))
    found = set()
    for order in (torch.arange(5000), torch.randperm(5000), probabilities[:, 0].argsort()):
        metric = CalibrationError(3).to(torch.float64)
        for part in order.split(700):
            metric.update(probabilities[part], labels[part])
        found.add(float(metric.compute().float()))
    assert len(found) == 1


class Two(Task):
    """Has two means of figures of its steps."""

    def build(self, metadata: Mapping[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)

    def make_metrics(self) -> dict[str, Metric]:
        return {name: MeanOf(name) for name in ("one", "two")}


def test_means_that_begin_alike_stay_apart() -> None:
    task = Two(OptimConfig())
    task.metadata = {"known": True}
    task.configure_model()
    for value in (1.0, 0.0):
        figures = {"one": torch.tensor(value), "two": torch.tensor(1.0)}
        task.metrics["val"].update(figures, dict.fromkeys(figures, 1))
    assert task.metrics["val"].compute() == {"val/one": 0.5, "val/two": 1.0}


def test_a_batch_of_another_rank_adds_nothing() -> None:
    ours, theirs = [kind(3) for kind in METRICS], [kind(3) for kind in METRICS]
    probabilities, labels = torch.randn(9, 3).softmax(-1), torch.randint(3, (9,))
    for one, other in zip(ours, theirs, strict=True):
        one.update(probabilities[:5], labels[:5])
        count(other, (probabilities[:5], labels[:5]), True)
        count(other, (probabilities[5:], labels[5:]), False)
        assert torch.equal(one.compute(), other.compute()), one
