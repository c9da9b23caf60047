"""Commands on a checkpoint; their metrics do not depend on batches or processes."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix

from datamodules.images import ImageData
from modules.models.vit import ViT, ViTConfig
from tasks.base import Task
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tasks.text import MeanOf
from tasks.tracking.class_scores import calibration_error
from tasks.tracking.evaluated import EvaluatedSamples
from tasks.training.evaluation import update_metric
from tasks.training.optim import OptimConfig
from tests.helpers.command import Console, run
from tests.helpers.forked import Server
from tests.helpers.results import checkpoint, metrics, summary
from tests.helpers.tables import write
from tests.helpers.tiny import FEW_STEPS, NET, TINY, picture, write_data

# One process --------------------------------------------------------------------------------------


def logits(checkpoint: Path, pixels: Tensor) -> Tensor:
    """What a checkpoint's network says about images (B, C, H, W) of uint8."""
    saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    metadata = saved[KEY]["metadata"]
    net = ViT(load_config(ViTConfig, saved[KEY]["config"]["model"]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    with torch.no_grad():
        return net((pixels / 255 - metadata["mean"][0]) / metadata["std"][0])


@pytest.mark.parametrize("steps, validated", [(6, [4, 6]), (8, [4, 8])])
def test_training_ends_with_a_validation(
    steps: int, validated: list[int], tmp_path: Path, console: Console
) -> None:
    line = f"fit {NET} --trainer.limit_train_batches 4 --trainer.limit_val_batches 1"
    line += f" --trainer.limit_test_batches 1 --run_dir r --trainer.max_steps {steps}"
    console.printed(f"{line} --checkpoint.every_n_train_steps 100")
    rows = [int(row["step"]) for row in metrics("r") if "val/loss" in row]
    assert rows == validated
    assert checkpoint("r", "best")["global_step"] in validated


def test_an_interval_of_validations_longer_than_an_epoch(tmp_path: Path, console: Console) -> None:
    line = f"fit {NET} --trainer.limit_train_batches 2 --trainer.limit_val_batches 1"
    line += " --trainer.limit_test_batches 1 --trainer.max_epochs 2 --trainer.val_check_interval 3"
    way_out = "--trainer.check_val_every_n_epoch null"
    console.refused(line, "3 is more than an epoch has batches (2)", way_out)
    console.printed(f"{line} {way_out} --run_dir r")
    assert [int(row["step"]) for row in metrics("r") if "val/loss" in row][0] == 3
    timed = line.replace("val_check_interval 3", "val_check_interval 00:00:10:00")
    console.printed(f"{timed} --run_dir timed --trainer.max_steps 3")
    resumed, _ = console.printed("fit --resume timed --trainer.max_steps 1")
    assert "run     nothing left of 1 optimizer step, in " in resumed


def test_scores_of_images(finished: Path, best: Path, console: Console) -> None:
    """Those of a forward pass over all of the test split; those that the run found."""
    found = summary(finished)
    out, _ = console.printed(f"test --ckpt_path {best} --trainer.limit_test_batches 1")
    assert f"{found['test/acc']:.4f}" in out and f"{found['test/loss']:.4f}" in out
    assert "val/acc" in console.printed(f"validate --ckpt_path {best}")[0]
    data = ImageData()
    data.setup("test")
    batches = list(data.test_dataloader())
    labels = torch.cat([batch["label"] for batch in batches])
    scores = torch.cat([logits(best, batch["image"]) for batch in batches])
    assert 350 <= len(labels) <= 370
    out, _ = console.printed(f"test --ckpt_path {best}")
    assert f"{float((scores.argmax(1) == labels).double().mean()):.4f}" in out
    assert f"{float(F.cross_entropy(scores, labels)):.4f}" in out
    assert list(Path().iterdir()) == []


def predictions(path: str = "predictions.csv") -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_of_images(best: Path, console: Console) -> None:
    line = f"predict --ckpt_path {best} --input"
    picture(8, "L").save("a.png")
    answer, _ = console.printed(f"{line} a.png")
    assert answer.startswith("label ") and not Path("predictions.csv").exists()
    assert run(f"{line} a.png --output predictions.csv") == 0
    (row,) = predictions()
    assert list(row) == ["path", "label", *map(str, range(10))] and row["path"].endswith("a.png")
    probabilities = torch.tensor([float(row[str(digit)]) for digit in range(10)])
    pixels = torch.tensor(list(Image.open("a.png").tobytes())).reshape(1, 1, 8, 8)
    expected = logits(best, pixels).softmax(-1)[0]
    torch.testing.assert_close(probabilities, expected, atol=1e-5, rtol=0)
    assert row["label"] == str(int(expected.argmax()))
    Path("images/deeper").mkdir(parents=True)
    for mode in ("L", "RGB", "CMYK"):
        picture(11).convert(mode).save(f"images/deeper/{mode}.tif")
    Path("predictions.csv").unlink()
    assert run(f"{line} images --output out/predictions.csv") == 0
    found = predictions("out/predictions.csv")
    assert [Path(row["path"]).stem for row in found] == ["CMYK", "L", "RGB"]
    assert not Path("predictions.csv").exists()
    Path("config.yaml").touch()  # of a run folder
    Path("predictions.csv").write_text("those of the test")
    console.refused(f"{line} images", "--output")
    Path("config.yaml").unlink()
    Path("images/bad.png").write_bytes(b"not an image")
    console.refused(f"{line} images --output new.csv", "bad.png", "skip_bad", code=1)
    out, _ = console.printed(f"{line} images --data.skip_bad true")
    assert "1 bad file skipped: images/bad.png" in out and len(predictions()) == 3
    alone = "--data.loading.eval_batch_size 1 --data.loading.memory_limit_mb 0"
    out, _ = console.printed(f"{line} images --data.skip_bad true {alone}")
    assert "1 bad file skipped: images/bad.png" in out and len(predictions()) == 3
    bad = f"{line} images/bad.png --data.skip_bad true {alone} --output none.csv"
    console.refused(bad, "no input can be read", "bad.png", code=1)
    assert not list(Path().glob("none*"))


@pytest.mark.parametrize("name", ["d/asked.csv", "d/asked.jsonl"])
def test_predictions_of_images_in_a_table(name: str, best: Path, console: Console) -> None:
    """Paths are relative to the folder of the table, and written as there; no labels are needed."""
    for number in range(3):
        Path("d/images").mkdir(parents=True, exist_ok=True)
        picture(8, "L").save(f"d/images/{number}.png")
    rows: list[dict[str, Any]] = [
        {"file_name": f"images/{number}.png", "label": 0.5, "id": number} for number in (2, 0, 1)
    ]
    line = f"predict --ckpt_path {best} --input"
    console.printed(f"{line} {write(Path(name), rows)}")
    found = predictions()
    assert [row["path"] for row in found] == [row["file_name"] for row in rows]
    assert [row["id"] for row in found] == ["2", "0", "1"]
    console.printed(f"{line} d/images")
    labels = {row["path"].removeprefix("d/"): row["label"] for row in predictions()}
    assert {row["path"]: row["label"] for row in found} == labels
    write(Path(name), [{"photo": row["file_name"]} for row in rows])
    console.refused(f"{line} {name}", "image_column to photo")
    console.printed(f"{line} {name} --data.dataset.image_column photo")
    Path("d/images/1.png").unlink()
    bad = f"{line} {name} --data.dataset.image_column photo"
    console.refused(bad, "d/images/1.png", "does not exist", name, code=1)
    assert "1 bad file skipped" in console.printed(f"{bad} --data.skip_bad true")[0]
    console.refused(f"{line} nowhere.csv", "nowhere.csv", "CSV")


# Several processes --------------------------------------------------------------------------------

SIZES = {  # that make an odd number of batches
    "vit": "130",
    "mae": "130",
    "bert": "150",
    "mlm": "10 --data.next_sentence true --model.net.segments 2",
    "lm": "3 --data.packing documents",
    "seq2seq": "7",
}
FIT = (
    "fit --trainer.max_epochs 1 --trainer.limit_train_batches 2 --trainer.val_check_interval 1 "
    "--trainer.log_every_n_steps 1"
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
    write_data(tmp_path, texts=40)

    def found(line: str, task: str, ranks: int) -> dict[str, float]:
        line += " --trainer.accelerator cpu"
        if ranks > 1:
            line += f" --trainer.devices {ranks} --trainer.strategy ddp"
        server.run(line, tmp_path, task, before=KEEP_METRICS, ranks=ranks)
        return json.loads((tmp_path / "found.json").read_text())

    return found


@pytest.mark.slow
@pytest.mark.exhaustive_except("vit", "lm", "seq2seq")
@pytest.mark.parametrize("task", SIZES)
def test_metrics_are_those_of_one_process(task: str, evaluate: Evaluate) -> None:
    batches = "--data.loading.eval_batch_size"
    line = f"{FIT} {TINY[task]} --data.batch_size 4 {batches} {SIZES[task]} --run_dir r"
    found = evaluate(line, task, 2)
    step = checkpoint("r", "best")["global_step"]
    (row,) = (row for row in metrics("r") if int(row["step"]) == step and "val/loss" in row)
    logged = {name: float(value) for name, value in row.items() if name.startswith("val/")}
    best = "--ckpt_path r/checkpoints/best.ckpt"
    assert evaluate(f"validate {best}", task, 1) == pytest.approx(logged, rel=1e-7)
    alone = evaluate(f"test {best}", task, 1)
    assert len(alone) > (task != "mae")  # which has a loss only
    assert alone == {name: value for name, value in found.items() if name.startswith("test/")}
    one_batch = f"test {best} {batches} 5000"  # the second rank and the third have none
    assert evaluate(one_batch, task, 3) == evaluate(one_batch, task, 1)
    limited = f"test {best} {batches} 2 --trainer.limit_test_batches"
    assert evaluate(f"{limited} 1", task, 2) == evaluate(f"{limited} 2", task, 1)


@pytest.mark.slow
def test_numbers_of_two_processes(evaluate: Evaluate, tmp_path: Path) -> None:
    """One of them has no batch in an evaluation."""
    rows = [f"{'good ' * (number % 5)}film,{number % 5}.5" for number in range(60)]
    (tmp_path / "numbers.csv").write_text("\n".join(["text,label", *rows]))
    line = f"{FIT} {NET} --data.path numbers.csv --model.problem_type regression"
    found = evaluate(f"{line} --data.batch_size 4 --run_dir r", "bert", 2)
    alone = evaluate("test --ckpt_path r", "bert", 1)
    assert alone == {name: value for name, value in found.items() if name.startswith("test/")}
    assert "test/r2" in alone


@pytest.mark.slow
def test_the_first_of_two_processes_tells_when_to_validate(
    evaluate: Evaluate, tmp_path: Path
) -> None:
    often = "--trainer.max_time 00:00:00:06 --trainer.val_check_interval 00:00:00:01"
    few = "--trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
    line = f"fit {TINY['vit']} {often} {few} --run_dir r"
    evaluate(line, "vit", 2)
    assert sum("val/loss" in row for row in metrics(tmp_path / "r")) > 1


# Metrics ------------------------------------------------------------------------------------------


def test_undefined_measures_are_null_in_json(console: Console) -> None:
    """Texts of one class have no area under the ROC curve; JSON has no NaN."""
    Path("texts.csv").write_text("text,label\n" + "good,a\nbad,b\n" * 8)
    Path("one.csv").write_text("text,label\ngood,a\nfine,a\n")
    line = f"fit {NET} {FEW_STEPS} --data.max_length 16 --data.batch_size 4"
    assert run(f"{line} --data.path texts.csv --run_dir r", "bert") == 0
    assert run("test --ckpt_path r --data.path one.csv --output out", "bert") == 0
    found = json.loads(Path("out/test.json").read_text(), parse_constant=pytest.fail)
    assert found["test/auroc"] is None and found["test/acc"] is not None


def test_calibration_does_not_depend_on_the_order() -> None:
    probabilities = torch.randn(5000, 3).mul(3).softmax(-1)
    labels = torch.randint(3, (5000,))
    found = set()
    for order in (torch.arange(5000), torch.randperm(5000), probabilities[:, 0].argsort()):
        metric = EvaluatedSamples({"ece": calibration_error})
        for part in order.split(700):
            metric.update(probabilities[part], labels[part], part)
        found.add(float(metric.compute()["ece"].float()))
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


@pytest.mark.parametrize("kind", (MulticlassAUROC, MulticlassConfusionMatrix))
def test_batch_that_does_not_count_adds_nothing(kind: type[Metric]) -> None:
    ours = kind(3)
    theirs = kind(3)
    probabilities = torch.randn(9, 3).softmax(-1)
    labels = torch.randint(3, (9,))
    ours.update(probabilities[:5], labels[:5])
    update_metric(theirs, (probabilities[:5], labels[:5]), True)
    update_metric(theirs, (probabilities[5:], labels[5:]), False)
    assert torch.equal(ours.compute(), theirs.compute())
