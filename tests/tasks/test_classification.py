"""What evaluations of classifiers write: reports of classes, confused classes."""

import csv
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import (
    average_precision_score,
    classification_report,
    precision_recall_fscore_support,
    roc_auc_score,
)
from torch import Tensor
from torch.nn import functional as F

from datamodules.images import ImageData, LoadingOptions
from tasks.bert.task import BertTask, auroc
from tasks.classification import ClassifierTask
from tasks.problems import PROBLEMS
from tasks.tracking.class_reports import class_report, label_report, most_confused
from tasks.tracking.evaluated import Evaluated
from tasks.tracking.media import MediaLogger, Table
from tasks.vit.task import MAX_MISTAKES, ViTTask
from tests.helpers.command import Console, run
from tests.helpers.results import logged
from tests.helpers.tiny import FEW_STEPS, NET, write_images

FIGURES = ("confusion", "roc", "calibration", "embeddings", "attention", "misclassified")
TINY_TEXTS = (
    "--model.net.stack.width 24 --model.net.stack.depth 1 --model.net.stack.heads 2 "
    "--model.net.pool mean"
)
RESULTS = {"report.csv", "predictions.csv", *(f"{name}.png" for name in FIGURES)}


def test_report_equals_that_of_scikit_learn() -> None:
    names = ["a", "b", "c, d", "never"]
    truth = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    guess = torch.tensor([0, 1, 0, 1, 1, 0, 2, 2, 1])
    counts = torch.zeros(4, 4, dtype=torch.int64)
    for pair in zip(truth, guess, strict=True):
        counts[pair] += 1
    expected = precision_recall_fscore_support(
        truth, guess, labels=range(4), average=None, zero_division=0.0
    )
    first, *columns = class_report(counts, names)
    assert first == [*names, "macro avg"]
    average = classification_report(truth, guess, output_dict=True)["macro avg"].values()
    for column, values, mean in zip(columns, expected, average, strict=True):
        assert column == pytest.approx([*values.tolist(), mean])
    found = list(zip(*most_confused(counts, names), strict=True))
    assert found[0] == ("a", "b", 1) and len(found) == 3
    assert {(row[0], row[1]) for row in found} == {("a", "b"), ("c, d", "a"), ("c, d", "b")}


def test_confused_pairs_are_listed_if_there_are_many_classes(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(25)]
    metadata = {"class_names": names, "target_mean": 0.0, "target_std": 1.0}
    problem = PROBLEMS["single_label_classification"](metadata)
    labels = torch.arange(50) % 25
    guesses = labels.clone()
    guesses[:30:5] = 24  # classes 0, 5, 10, 15, 20; class 0 twice
    probabilities = torch.eye(25)[guesses]  # (S, K)
    problem.save_reports(tmp_path, "", Evaluated(probabilities, labels, torch.arange(50)))
    with open(tmp_path / "confused.csv", newline="") as file:
        heads, first, *others = csv.reader(file)
    assert first == ["class 0", "class 24", "2"] and len(heads) == 3
    assert sorted(row[0] for row in others) == ["class 10", "class 15", "class 20", "class 5"]


@pytest.mark.filterwarnings("error")
def test_classes_without_samples_need_no_warning() -> None:
    """They are left out of the mean AUROC; the report shows their support."""
    draw = torch.Generator().manual_seed(0)
    probabilities = torch.rand(30, 3, generator=draw).softmax(1)
    labels = torch.arange(30) % 2
    expected = [roc_auc_score(labels == label, probabilities[:, label]) for label in (0, 1)]
    assert float(auroc(probabilities, labels)) == pytest.approx(sum(expected) / 2, abs=1e-6)
    assert auroc(probabilities, torch.zeros(30, dtype=torch.int64)).isnan()
    sets = torch.stack([labels, 1 - labels, 0 * labels], dim=1)
    found = label_report(Evaluated(probabilities, sets, torch.arange(30)), ["a", "b", "none"])
    ranked = [average_precision_score(sets[:, i], probabilities[:, i]) for i in (0, 1)]
    mean = sum(ranked) / 3
    assert found[4] == pytest.approx([*ranked, 0, mean], abs=1e-6) and found[5] == [15, 15, 0, 30]
    metadata = {"class_names": ["a", "b", "none"], "target_mean": 0.0, "target_std": 1.0}
    metrics = PROBLEMS["multi_label_classification"](metadata).metrics()
    metrics["map"].update(probabilities, sets)
    assert float(metrics["map"].compute()) == pytest.approx(sum(ranked) / 3, abs=1e-6)


@pytest.mark.parametrize("command", ["test", "validate"])
def test_evaluations_write_into_a_folder(
    command: str, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = "--trainer.max_epochs 1 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1"
    assert run(f"fit {NET} {few} --trainer.limit_test_batches 0 --run_dir r") == 0
    console.printed(f"{command} --ckpt_path r --output out")
    split = {"test": "test", "validate": "val"}[command]
    prefix = {"test": "", "validate": "val_"}[command]
    names = {f"{prefix}{name}" for name in RESULTS} | {f"{split}.json"}
    assert {path.name for path in Path("out").iterdir()} == names
    with open(f"out/{prefix}report.csv", newline="") as file:
        *rows, average = csv.DictReader(file)
    sizes = {"test": 359, "val": 143}
    assert average["class"] == "macro avg" and int(average["support"]) == sizes[split]
    assert sum(int(row["support"]) for row in rows) == sizes[split]
    found = json.loads(Path(f"out/{split}.json").read_text())
    right = sum(float(row["recall"]) * int(row["support"]) for row in rows)
    assert found[f"{split}/acc"] == pytest.approx(right / sizes[split], abs=1e-3)
    assert found[f"{split}/f1"] == pytest.approx(float(average["f1"]), abs=1e-5)
    assert found["task"] == "vit" and command in found["command"]
    assert found["device"] == "cpu" and found[f"{split}_samples"] == sizes[split]
    values = [value for value in found.values() if isinstance(value, float)]
    assert values and values == [float(f"{value:.6g}") for value in values]  # as in summary.json


def test_misclassified_images_are_from_all_parts_of_the_data(best: Path, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "digits", tuple("0123456789"), count=8, side=8)
    shutil.copytree(folder / "train", folder / "test")
    task = ViTTask.load_from_checkpoint(best)
    data = ImageData(path=str(folder), loading=LoadingOptions(eval_batch_size=16))
    data.set_metadata(task.metadata)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    pl.Trainer(logger=False, callbacks=[MediaLogger()], **quiet).test(task, data, verbose=False)
    shown = task.media("test")["misclassified"]
    assert isinstance(shown, Table) and len(shown.rows) == MAX_MISTAKES
    assert all(label != guess for _, label, guess, _ in shown.rows)
    assert len({label for _, label, _, _ in shown.rows}) >= 9


def labelled_texts(folder: Path, problem_type: str) -> str:
    """Options of a table of texts with numbers or sets of labels, which the words decide."""
    values = {"good": 3.0, "bad": -3.0, "long": 1.0, "short": -1.0}
    rows = []
    for words in itertools.product(values, repeat=3):
        number = 100 + sum(values[word] for word in words)
        labels = ",".join(sorted({word for word in words if word != "long"}))
        target = number if problem_type == "regression" else f'"{labels}"'
        rows.append(f"{' '.join(words)},{target}")
    path = folder / "train.csv"
    path.write_text("\n".join(["text,target", *rows]))
    return (
        f"--data.source csv --data.path {path} --data.dataset.label_column target "
        f"--model.problem_type {problem_type} --data.dataset.val_fraction 0.3 --data.batch_size 8 "
        "--data.tokenizer.vocabulary 300 --trainer.max_epochs 12 --model.optimizer.lr 4e-3"
    )


@pytest.mark.parametrize(
    ("problem_type", "metric", "limit", "figures"),
    [
        ("regression", "test/r2", 0.8, {"predicted.png", "embeddings.png"}),
        (
            "multi_label_classification",
            "test/map",
            0.9,
            {"roc.png", "report.csv", "calibration.png", "embeddings.png"},
        ),
    ],
)
def test_texts_of_other_problem_types_are_learned(
    problem_type: str,
    metric: str,
    limit: float,
    figures: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run(f"fit {TINY_TEXTS} {labelled_texts(tmp_path, problem_type)} --run_dir r", "bert") == 0
    )
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary[metric] > limit
    assert {path.name for path in Path("r").iterdir()} >= figures | {"predictions.csv"}
    rows = list(csv.DictReader(Path("r/predictions.csv").read_text().splitlines()))
    names = ["labels", "predictions", "bad", "good", "short"]
    names = ["target", "prediction"] if problem_type == "regression" else names
    assert [*rows[0]] == ["text", *names]  # the column of targets is there once
    if problem_type == "regression":
        errors = [abs(float(row["prediction"]) - float(row["target"])) for row in rows]
        assert sum(errors) / len(errors) == pytest.approx(summary["test/mae"], rel=1e-3)
    else:
        exact = [
            set(row["labels"].split(",")) == set(row["predictions"].split(",")) for row in rows
        ]
        assert sum(exact) / len(exact) == pytest.approx(summary["test/exact_match"], abs=1e-3)


@pytest.mark.parametrize("weights", ["{dog: 3}", "balanced"])
@pytest.mark.parametrize("task", [ViTTask, BertTask])
def test_class_weights_are_in_the_training_loss(
    task: type[ClassifierTask], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(Path("images"), ("cat",), count=12)
    write_images(Path("images"), ("dog",), count=4)
    Path("texts.csv").write_text("\n".join(["text,label", *["a,cat"] * 12, *["b,dog"] * 4]))
    lines = {
        "vit": f"{NET} --data.source folder --data.path images --model.net.image_size 12 "
        "--model.net.patch_size 4",
        "bert": f"{TINY_TEXTS} --data.source csv --data.path texts.csv",
    }
    step: Any = task.training_step
    losses = []

    def recorded(self: Any, batch: Any, *number: int) -> Any:
        """The same step, and the loss of the logits that it has computed."""
        logits: list[Tensor] = []
        hook = self.net.register_forward_hook(lambda net, inputs, output: logits.append(output))
        loss = step(self, batch, *number)
        hook.remove()
        counts = self.datamodule.dataset("train").labels.bincount()
        by_count = counts.sum() / (2 * counts)
        by_class = by_count if weights == "balanced" else torch.tensor([1.0, 3.0])
        total = F.cross_entropy(logits[0], batch["label"], by_class, reduction="sum")
        losses.append(float(total) / len(batch["label"]))
        return loss

    monkeypatch.setattr(task, "training_step", recorded)
    line = f"fit {lines[task.name]} {FEW_STEPS} --data.batch_size 4 --data.dataset.val_fraction 0.2"
    more = f"--model.class_weights '{weights}' --model.label_smoothing 0 --run_dir r"
    assert run(f"{line} {more}", task.name) == 0
    assert logged("r") == pytest.approx(losses, rel=1e-5) and len(losses) == 3


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_balanced_sampling_needs_one_class_for_each_sample(
    problem_type: str, tmp_path: Path, console: Console
) -> None:
    data = labelled_texts(tmp_path, problem_type)
    error = console.refused(
        f"fit {TINY_TEXTS} {data} --data.balanced true --run_dir r", task="bert"
    )
    message = "error: --data.balanced true needs samples with one class each: leave it out."
    assert error.strip() == message and not Path("r").exists()


@pytest.mark.parametrize("task", ["vit", "bert"])
def test_a_run_says_that_it_uses_a_part_of_the_labels(task: str, console: Console) -> None:
    line = f"fit {NET} --trainer.max_epochs 1 --trainer.limit_val_batches 1 --model.net.pool mean"
    line += " --trainer.limit_test_batches 1 --data.label_fraction 0.05 --run_dir r"
    out, _ = console.printed(line, task)
    (first,) = (text for text in out.splitlines() if text.startswith("data "))
    count = {"vit": 65, "bert": 400}[task]
    assert f"{count} training (5 % of the labels)" in first
    resumed = "fit --resume r --trainer.max_epochs 2"
    assert f"{count} training (5 %" in console.printed(resumed, task)[0]
    error = console.refused(f"{resumed} --data.label_fraction 0.1", "training samples", task=task)
    assert str(count) in error


def test_a_class_that_is_predicted_but_never_true_counts_in_the_mean() -> None:
    report = class_report(torch.tensor([[2, 1], [0, 0]]), ["a", "b"])
    assert report[2] == pytest.approx([2 / 3, 0, 1 / 3])
