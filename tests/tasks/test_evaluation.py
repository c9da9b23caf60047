"""Evaluation on several ranks gives the metrics of one process, to the last bit."""

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
from tasks.training.evaluation import update_metric
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

TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 "
    "--data.max_length 32 --data.tokenizer.vocabulary 300"
)
TASKS = {  # options, and a batch size that makes an odd number of batches
    "vit": ("--model.net.stack.depth 1", 130),
    "bert": (TEXT, 150),
    "mlm": (f"{TEXT} --data.next_sentence true --model.net.segments 2", 500),
    "lm": (f"{SMALL_LM} --data.source files --data.path texts --data.packing documents", 3),
    "seq2seq": (f"{SMALL_S2S} {PAIRS}", 7),
}
FIT = (
    "fit --trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.val_check_interval 1 "
    "--data.batch_size 4 --trainer.log_every_n_steps 1"
)
KEEP_METRICS = """
import json, pathlib, tasks.cli.lightning_cli as cli
def keep(found, *_):
    found = {name: float(value) for name, value in found.items() if "/" in name}
    pathlib.Path("found.json").write_text(json.dumps(found))
cli.print_results = keep
"""
Evaluate = Callable[[str, str, int], dict[str, float]]


@pytest.fixture
def evaluate(server: Server, tmp_path: Path) -> Evaluate:
    """A function from a command, a task and a number of ranks to the metrics."""
    write_corpus(tmp_path / "texts", 40)
    write_pairs(tmp_path / "pairs")

    def found(line: str, task: str, ranks: int) -> dict[str, float]:
        line += " --trainer.accelerator cpu"
        if ranks > 1:
            line += f" --trainer.devices {ranks} --trainer.strategy ddp"
        server.run(line, tmp_path, task, before=KEEP_METRICS, ranks=ranks)
        return json.loads((tmp_path / "found.json").read_text())

    return found


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_metrics_are_those_of_one_process(task: str, evaluate: Evaluate) -> None:
    options, size = TASKS[task]
    batches = "--data.loading.eval_batch_size"
    summary = evaluate(f"{FIT} {options} {batches} {size} --run_dir r", task, 2)
    step = checkpoint("r", "best")["global_step"] - 1
    (row,) = (row for row in metrics("r") if int(row["step"]) == step and "val/loss" in row)
    logged = {name: float(value) for name, value in row.items() if name.startswith("val/")}
    best = "--ckpt_path r/checkpoints/best.ckpt"
    assert evaluate(f"validate {best}", task, 1) == logged
    alone = evaluate(f"test {best}", task, 1)
    assert len(alone) > 1
    assert alone == {name: value for name, value in summary.items() if name.startswith("test/")}
    one_batch = f"test {best} {batches} 5000"  # the second rank and the third have none
    assert evaluate(one_batch, task, 3) == evaluate(one_batch, task, 1)


def test_calibration_does_not_depend_on_the_order() -> None:
    probabilities = torch.randn(5000, 3).mul(3).softmax(-1)
    labels = torch.randint(3, (5000,))
    found = set()
    for order in (torch.arange(5000), torch.randperm(5000), probabilities[:, 0].argsort()):
        metric = CalibrationError(3).to(torch.float64)
        for part in order.split(700):
            metric.update(probabilities[part], labels[part])
        found.add(float(metric.compute().float()))
    assert len(found) == 1


class TwoMeans(Task):
    """A task with two means of the same shape."""

    def build(self, metadata: Mapping[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)

    def make_metrics(self) -> dict[str, Metric]:
        return {name: MeanOf(name) for name in ("one", "two")}


def test_means_that_begin_alike_stay_apart() -> None:
    task = TwoMeans(OptimConfig())
    task.metadata = {"known": True}
    task.configure_model()
    for value in (1.0, 0.0):
        values = {"one": torch.tensor(value), "two": torch.tensor(1.0)}
        task.metrics["val"].update(values, dict.fromkeys(values, 1))
    assert task.metrics["val"].compute() == {"val/one": 0.5, "val/two": 1.0}


@pytest.mark.parametrize("kind", (CalibrationError, MulticlassAUROC, MulticlassConfusionMatrix))
def test_batch_that_does_not_count_adds_nothing(kind: type[Metric]) -> None:
    ours = kind(3)
    theirs = kind(3)
    probabilities = torch.randn(9, 3).softmax(-1)
    labels = torch.randint(3, (9,))
    ours.update(probabilities[:5], labels[:5])
    update_metric(theirs, (probabilities[:5], labels[:5]), True)
    update_metric(theirs, (probabilities[5:], labels[5:]), False)
    assert torch.equal(ours.compute(), theirs.compute())
