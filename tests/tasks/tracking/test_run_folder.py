"""What a run leaves in its folder, how its config repeats it, and links and pipes in it."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from datamodules.sources import LabelledSource
from modules.kernels import cpu
from tasks.base import Task
from tasks.tracking import evaluation_figures, picture_grid, report
from tasks.tracking.metrics_csv import LoggedRows, MetricsCSV, read_rows
from tasks.tracking.record import RunRecord, best_validation
from tasks.tracking.report import curves_figure, write_png
from tasks.vit.task import ViTTask
from tests.helpers.command import Capture, Console, Patch, run
from tests.helpers.marks import slow_except
from tests.helpers.results import checkpoint, logged, metrics, same, summary
from tests.helpers.tiny import FEW_STEPS, SHORT, TINY, picture, write_data

pytestmark = pytest.mark.timeout(120)
RUN_FILES = {
    *(
        "config.yaml",
        "metrics.csv",
        "summary.json",
        "confusion.png",
        "curves.png",
        "report.csv",
        "predictions.csv",
        "roc.png",
        "calibration.png",
        "embeddings.png",
        "attention.png",
        "misclassified.png",
        ".lock",
    ),
    *("checkpoints/best.ckpt", "checkpoints/last.ckpt", "checkpoints/previous.ckpt"),
}


def files(folder: Path) -> dict[Path, bytes]:
    """All files below a folder, with what is in them."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files(finished: Path) -> None:
    assert {str(path.relative_to(finished)) for path in files(finished)} == RUN_FILES
    assert not (finished.parent / "latest").exists()  # that is for runs/vit


def test_figures(monkeypatch: Patch) -> None:
    """None is blank, and each axis that is shown has a name."""
    drawn: list[Any] = []

    def keep(figure: Any, path: Any) -> None:
        drawn.append(figure)
        write_png(figure, path)

    for module in (report, evaluation_figures, picture_grid):
        monkeypatch.setattr(module, "write_png", keep)  # instead of a blank picture
    assert run(f"fit {SHORT} --run_dir r") == 0
    pictures = list(Path("r").glob("*.png"))
    assert len(pictures) == len(drawn) == 7
    for path in pictures:
        with Image.open(path) as image:
            assert image.width >= 200 and len(set(image.convert("L").tobytes())) > 2
    for figure in drawn:
        for axis in figure.axes:
            if axis.axison:
                assert axis.get_xlabel() or figure.get_supxlabel()
                assert axis.get_ylabel() or figure.get_supylabel()


def test_of_equal_validations_the_latest_is_the_best() -> None:
    rows = [{"epoch": str(n), "val/acc": f"0.{score}"} for n, score in enumerate((5, 7, 7, 6), 1)]
    assert best_validation(rows, ViTTask()) == {"best val/acc": 0.7, "best epoch": 3}
    rows.append({"epoch": "5", "val/acc": "nan"})
    assert best_validation(rows, ViTTask()) == {"best val/acc": 0.7, "best epoch": 3}


def test_summary(finished: Path) -> None:
    found = summary(finished)
    weights = checkpoint(finished, "best")["state_dict"]
    sizes = {name: value.numel() for name, value in weights.items() if name.startswith("net.")}
    assert found["parameters"] == sum(sizes.values())
    assert found["steps"] == 8 and found["epochs"] == 2
    assert 0 <= found["test/acc"] <= 1 and found["test/loss"] > 0
    assert found["samples_per_s"] > 0 and found["seconds"] > 0
    assert {"tessera", "python", "torch", "pytorch-lightning"} <= found["versions"].keys()
    assert "git_commit" in found
    assert found["task"] == "vit" and " fit --" in found["command"]
    scores = logged(finished, "val/acc")
    assert found["best val/acc"] == pytest.approx(max(scores), rel=1e-5)
    assert found["best epoch"] == len(scores) - scores[::-1].index(max(scores))
    assert found["test_split"] == "test"
    seen = found[
        "test_samples"
    ]  # jsonargparse may take 1 batch for 1.0 in a process with other runs
    assert seen in (256, 359)
    assert found.get("evaluated") == (f"{seen} of 359 images" if seen < 359 else None)
    threads = {"name": cpu.NAME, "threads": torch.get_num_threads()}
    assert found["processor"] == threads | cpu.kernels()
    assert "cpu" in found["device"] and len(str(found["test/acc"])) <= 8


def test_a_limited_test_says_so(console: Console) -> None:
    one = "--data.loading.eval_batch_size 128 --trainer.limit_test_batches 1"
    out, _ = console.printed(f"fit {FEW_STEPS} {one} --run_dir r")
    assert "128 of 359 images" in out
    assert summary(Path("r"))["evaluated"] == "128 of 359 images"
    out, _ = console.printed(f"test --ckpt_path r {one} --output again")
    assert "128 of 359 images" in out
    assert json.loads(Path("again/test.json").read_text())["test_samples"] == 128


def test_rates_of_all_groups_end_with_the_schedule() -> None:
    options = "--model.optimizer.layer_decay 0.5 --trainer.log_every_n_steps 1"
    steps = "--trainer.max_steps 4 --trainer.limit_test_batches 0"
    assert run(f"fit {TINY['vit']} {steps} {options} --run_dir r") == 0
    rows = [row for row in metrics("r") if row.get("train/lr")]
    names = [name for name in rows[0] if name.startswith("train/lr_")]
    assert len(names) > 2
    assert {float(rows[-1][name]) for name in ["train/lr", *names]} == {0.0}
    shares = [float(rows[0][name]) / float(rows[0]["train/lr"]) for name in names]
    assert [float(rows[-2][name]) / float(rows[-2]["train/lr"]) for name in names] == (
        pytest.approx(shares, rel=1e-4)
    )


def test_samples_are_not_timed_as_training(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, {}, [])
    task = SimpleNamespace(untimed_seconds=0.0)
    record.start_clock(task)
    record.new_samples = 1
    time.sleep(0.2)
    task.untimed_seconds += 0.2
    assert record.state_dict()["seconds"] < 0.1


def test_steps_and_epochs_are_those_of_the_console(finished: Path) -> None:
    rows = metrics(finished)
    found = {
        name: [(row["epoch"], row["step"]) for row in rows if name in row]
        for name in ("val/loss", "test/loss")
    }
    assert found == {"val/loss": [("1", "4"), ("2", "8")], "test/loss": [("2", "8")]}
    assert summary(finished)["steps"] == 8 and summary(finished)["epochs"] == 2


def test_numbers_are_short_and_exact(finished: Path) -> None:
    cells = [cell for row in metrics(finished) for cell in row.values()]
    assert max(map(len, cells)) <= 15
    value = torch.tensor(0.1) / 3
    Path("new").mkdir()
    logger = MetricsCSV(Path("new"), LoggedRows(None))
    logger.log_metrics({"train/loss": value}, 0)
    logger.save()
    assert torch.equal(torch.tensor(float(metrics("new")[0]["train/loss"])), value)


def test_best_is_the_best_and_the_latest_of_equals(finished: Path) -> None:
    scores = logged(finished, "val/acc")
    assert len(scores) == 2
    assert checkpoint(finished, "best")["epoch"] == scores.index(max(scores))
    assert checkpoint(finished)["global_step"] == 8
    line = f"fit {SHORT} --model.optimizer.lr 1e-12 --trainer.limit_test_batches 0 --run_dir r"
    assert run(line) == 0
    assert len(set(logged("r", "val/acc"))) == 1
    assert checkpoint("r", "best")["global_step"] == 8


def test_config_repeats_the_run(finished: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["net"]["num_classes"] == 10 and config["model"]["net"]["channels"] == 1
    assert config["data"]["dataset"]["class_names"] == [str(digit) for digit in range(10)]
    assert len(config["data"]["dataset"]["mean"]) == len(config["data"]["dataset"]["std"]) == 1
    assert config["seed_everything"] == 0 and config["trainer"]["max_epochs"] == 2
    assert not {"run_dir", "resume", "config", "preset"} & config.keys()
    assert run(f"fit --config {finished / 'config.yaml'} --run_dir again") == 0
    assert same(checkpoint("again")["state_dict"], checkpoint(finished)["state_dict"])
    assert metrics("again") == metrics(finished)
    assert Path("again/config.yaml").read_text() == (finished / "config.yaml").read_text()


def test_half_a_row_is_none(tmp_path: Path) -> None:
    """As a kill leaves it."""
    (tmp_path / "metrics.csv").write_text("step,train/loss\r\n0,0.5\r\n1,0.2")
    assert read_rows(tmp_path / "metrics.csv") == [{"step": "0", "train/loss": "0.5"}]


def test_default_folder_and_latest(tmp_path: Path) -> None:
    line = "fit --trainer.max_steps 1 --trainer.limit_test_batches 0 --model.net.stack.depth 1"
    for _ in range(2):
        assert run(f"{line} --trainer.limit_val_batches 1") == 0
    runs = sorted(path for path in (tmp_path / "runs/vit").iterdir() if not path.is_symlink())
    assert len(runs) == 2
    assert (tmp_path / "runs/vit/latest").resolve() in runs
    assert (runs[0] / "checkpoints/last.ckpt").exists()


def test_fast_dev_run_keeps_no_record() -> None:
    assert run(f"fit {SHORT} --trainer.fast_dev_run true --run_dir r") == 0
    assert not Path("r/config.yaml").exists() and not Path("latest").exists()


def test_more_options_of_the_trainer() -> None:
    callback = "EarlyStopping --trainer.callbacks.monitor=val/loss"
    line = f"{SHORT} --trainer.callbacks+=pytorch_lightning.callbacks.{callback}"
    line += " --trainer.precision bf16-mixed --trainer.accumulate_grad_batches 2"
    line += " --checkpoint.monitor train/loss --checkpoint.save_top_k 1 --checkpoint.filename least"
    assert run(f"fit {line} --trainer.logger false --run_dir r") == 0
    last = checkpoint("r")
    assert last["global_step"] == 4 and checkpoint("r", "least")["global_step"] in (2, 4)
    assert any("EarlyStopping" in name for name in last["callbacks"])
    assert run(f"fit {SHORT} --checkpoint.monitor step --checkpoint.save_top_k 1 --run_dir b") == 0


@pytest.mark.parametrize("task", ("vit", "bert"))
def test_no_test_leaves_the_test_split_unread(task: str, monkeypatch: Patch) -> None:
    asked: list[str] = []
    split = LabelledSource.split
    monkeypatch.setattr(
        LabelledSource, "split", lambda self, name: asked.append(name) or split(self, name)
    )
    assert run(f"fit {SHORT} --trainer.limit_test_batches 0 --run_dir r", task) == 0
    assert set(asked) == {"train", "val"}
    found = summary("r")
    assert not [name for name in found if name.startswith("test/")]
    assert found["val/acc"] == pytest.approx(logged("r", "val/acc")[-1]) and found["steps"] == 8
    assert Path("r/curves.png").exists() and not Path("r/confusion.png").exists()


def test_interrupted(monkeypatch: Patch, capsys: Capture) -> None:
    def interrupt(self: Task, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Task, "training_step", interrupt)
    assert run(f"fit {SHORT} --run_dir r") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


NEXT_SENTENCE = "--data.next_sentence true --model.net.segments 2"
MONITORED = {**TINY, "mlm": f"{TINY['mlm']} {NEXT_SENTENCE}"}
MONITORED["vit"] += " --model.optimizer.optimizer muon --model.optimizer.muon_lr 0.1"


@pytest.mark.parametrize("task", slow_except(["vit", "lm"], MONITORED))
def test_names_to_monitor_are_those_that_are_logged(task: str, console: Console) -> None:
    write_data()
    line = f"fit {MONITORED[task]} {FEW_STEPS} --trainer.limit_test_batches 0 --run_dir r"
    error = console.refused(f"{line} --checkpoint.monitor nope", task=task)
    listed = error.strip().partition("there is ")[2].split(", ")
    assert run(line, task) == 0
    header = Path("r/metrics.csv").read_text().splitlines()[0].split(",")
    assert sorted(listed) == sorted(header)


# Links and pipes ----------------------------------------------------------------------------------

RESUME = "fit --resume run --trainer.max_epochs 3"
SOURCES = {"vit": "finished", "lm": "lm_letters", "seq2seq": "translator"}
WRITTEN = ("summary.json", "curves.png", "checkpoints/previous.ckpt")
KINDS = ["link", "hard link", "broken link", "pipe"]


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(
    ("task", "kind"),
    [*(("vit", kind) for kind in KINDS), ("lm", "link"), ("seq2seq", "link")],
)
def test_what_is_no_file_of_its_own_is_replaced(
    task: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Links to files elsewhere, which stay as they are; links to nothing, and pipes."""
    source: Path = request.getfixturevalue(SOURCES[task])
    folder = Path(shutil.copytree(source if task == "vit" else source.parents[1], "run"))
    Path("elsewhere").mkdir()
    for number, path in enumerate(files(folder)):
        elsewhere = Path("elsewhere", str(number)).absolute()
        is_read = str(path.relative_to(folder)) not in WRITTEN
        if kind == "hard link":
            os.link(path, elsewhere)
        elif path.name != ".lock" and not (is_read and kind in ("broken link", "pipe")):
            if kind == "link":
                shutil.copy(path, elsewhere)
            path.unlink()
            os.mkfifo(path) if kind == "pipe" else path.symlink_to(elsewhere)
    before = files(Path("elsewhere"))
    (folder / "checkpoints/.last.ckpt.1.tmp").symlink_to(Path("elsewhere/new").absolute())
    steps = checkpoint("run")["global_step"] + 2
    line = f"fit --resume run --trainer.max_epochs -1 --trainer.max_steps {steps}"
    line += " --trainer.limit_val_batches 1 --trainer.limit_test_batches 1"
    assert run(line, task) == 0
    assert files(Path("elsewhere")) == before
    assert all((folder / name).is_file() for name in WRITTEN)
    for name in ("summary.json", "curves.png", "metrics.csv", "checkpoints/last.ckpt"):
        assert not (folder / name).is_symlink()
    assert not (folder / "checkpoints/.last.ckpt.1.tmp").is_symlink()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", ".lock", "checkpoints/last.ckpt"])
def test_pipes_that_are_read_are_refused(name: str, run_copy: Path, console: Console) -> None:
    (run_copy / name).unlink()
    os.mkfifo(run_copy / name)
    console.refused(RESUME, Path(name).name, code=1 if name == ".lock" else 2)


def test_lock_is_no_link(run_copy: Path, console: Console) -> None:
    Path("file").write_text("kept")
    (run_copy / ".lock").unlink()
    (run_copy / ".lock").symlink_to(Path("file").absolute())
    console.refused(RESUME, ".lock", code=1)
    assert Path("file").read_text() == "kept"


def test_predictions_replace_links_and_exports_refuse_them(best: Path) -> None:
    picture(8, "L").save("one.png")
    Path("file").write_text("kept")
    for name in ("predictions.csv", "model.safetensors"):
        Path(name).symlink_to("file")
    assert run(f"predict --ckpt_path {best} --input one.png --output predictions.csv") == 0
    assert run(f"export --ckpt_path {best} --format safetensors --output model.safetensors") == 2
    assert Path("model.safetensors").is_symlink()
    assert Path("file").read_text() == "kept" and not Path("predictions.csv").is_symlink()


def test_folders_may_be_links(run_copy: Path) -> None:
    """The run folder itself, as `latest` is, and that of its checkpoints, on a larger disk."""
    shutil.move(run_copy / "checkpoints", "large_disk")
    (run_copy / "checkpoints").symlink_to(Path("large_disk").absolute())
    Path("latest").symlink_to("run")
    assert run("fit --resume latest --trainer.max_epochs 3") == 0
    assert (run_copy / "checkpoints").is_symlink() and Path("latest").is_symlink()
    assert torch.load("large_disk/last.ckpt", weights_only=True)["global_step"] == 12


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00binary\n\n", b"loss\n1\n", b"step,train/loss\n1,y\n", b"step\n1,2\n"]
)
def test_metrics_that_are_something_else(content: bytes, run_copy: Path, console: Console) -> None:
    (run_copy / "metrics.csv").write_bytes(content)
    before = files(run_copy)
    console.refused(RESUME, "metrics.csv", code=1)
    assert files(run_copy) == before


def test_curves_are_a_grid_without_constants() -> None:
    rows = [
        {"step": str(step), "train/loss": str(1 / step), "train/lr": "0.1", "epoch": "0"}
        for step in range(1, 50)
    ]
    rows += [
        {"step": step, "val/loss": "0.5", "val/acc": step, "val/f1": step, "val/ece": "0.25"}
        for step in ("20", "40")
    ]
    axes = curves_figure(rows, "val/f1").axes
    assert [axis.get_ylabel() for axis in axes] == ["loss", "F1", "accuracy"]
    train, val = axes[0].lines
    assert (train.get_marker(), val.get_marker()) == ("", "o")
    assert [len(line.get_xdata()) for line in axes[0].lines] == [49, 2]
    assert all(len(axis.lines) == 1 for axis in axes[1:])
    assert curves_figure([], "val/loss").axes


def test_curves_spell_out_the_names_of_metrics() -> None:
    rows = [{"step": step, "val/ece": step, "val/auroc": step} for step in ("1", "2")]
    titles = [axis.get_ylabel() for axis in curves_figure(rows, "val/ece").axes]
    assert titles == ["expected calibration error", "area under the ROC curve"]


@pytest.mark.parametrize("step", [1, 3, 938])
def test_curves_of_a_single_validation(step: int) -> None:
    rows = [
        {"step": "1", "train/loss": "2.5"},
        {"step": str(step), "val/loss": "1.5", "val/acc": "0.75", "val/f1": "0.5"},
    ]
    axes = curves_figure(rows, "val/acc").axes
    assert [axis.get_ylabel() for axis in axes] == ["loss", "accuracy"]
    (line,) = axes[1].lines
    assert ([*line.get_xdata()], [*line.get_ydata()]) == ([step], [0.75])
    assert line.get_marker() == "o"
    for axis in axes:
        low, high = axis.get_xlim()
        shown = [tick for tick in axis.get_xticks() if low <= tick <= high]
        assert shown and all(tick == round(tick) for tick in shown)
