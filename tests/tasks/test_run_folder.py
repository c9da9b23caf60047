"""What a run leaves in its folder, how its config repeats it, and links and pipes in it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from datamodules.sources import LabelledSource
from tasks.base import Task
from tasks.cli.lightning_cli import TaskCLI
from tasks.tracking.metrics_csv import LoggedRows, read_rows
from tests.tasks.command import (
    PAIRS,
    SHORT,
    SMALL_LM,
    SMALL_S2S,
    checkpoint,
    metrics,
    picture,
    run,
    same,
    write_corpus,
    write_pairs,
)
from tests.tasks.test_bad_input import assert_refused

pytestmark = pytest.mark.timeout(120)
RUN_FILES = {
    *("config.yaml", "metrics.csv", "summary.json", "confusion.png", "curves.png", ".lock"),
    *("checkpoints/best.ckpt", "checkpoints/last.ckpt", "checkpoints/previous.ckpt"),
}


def files(folder: Path) -> dict[Path, bytes]:
    """All files below a folder, with what is in them."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_files(finished: Path) -> None:
    assert {str(path.relative_to(finished)) for path in files(finished)} == RUN_FILES
    assert not (finished.parent / "latest").exists()  # that is for runs/vit
    for name in ("confusion.png", "curves.png"):
        with Image.open(finished / name) as image:
            assert image.width >= 200 and len(set(image.convert("L").tobytes())) > 2


def test_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    weights = checkpoint(finished, "best")["state_dict"]
    assert summary["parameters"] == sum(
        value.numel() for name, value in weights.items() if name.startswith("net.")
    )
    assert summary["steps"] == 8 and summary["epochs"] == 2
    assert 0 <= summary["test/acc"] <= 1 and summary["test/loss"] > 0
    assert summary["samples_per_s"] > 0 and summary["seconds"] > 0
    assert {"tessera", "python", "torch", "pytorch-lightning"} <= summary["versions"].keys()
    assert "git_commit" in summary


def test_best_is_the_best_and_the_latest_of_equals(finished: Path) -> None:
    scores = [float(row["val/acc"]) for row in metrics(finished) if "val/acc" in row]
    assert len(scores) == 2
    assert checkpoint(finished, "best")["epoch"] == scores.index(max(scores))
    assert checkpoint(finished)["global_step"] == 8
    line = f"fit {SHORT} --model.optimizer.lr 1e-12 --trainer.limit_test_batches 0 --run_dir r"
    assert run(line) == 0
    assert len({row["val/acc"] for row in metrics("r") if "val/acc" in row}) == 1
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


@pytest.mark.parametrize("validation_due, ends", [(False, False), (False, True), (True, True)])
def test_rows_that_come_again_are_left_out(validation_due: bool, ends: bool) -> None:
    """Of the step of a checkpoint whose validation, or end of the epoch, is still to come."""
    loops = {
        "epoch_loop.state_dict": {"validates": validation_due},
        "epoch_progress": {"current": {"completed": 0 if ends else 1, "ready": 1}},
    }
    earlier = LoggedRows({"global_step": 4, "loops": {"fit_loop": loops}})
    rows = [
        ("3", "train/grad_norm", True),
        ("3", "val/loss", not validation_due),
        ("3", "train/padding", not ends),
        ("2", "val/loss", True),
        ("4", "train/loss", False),
    ]
    for step, name, kept in rows:
        assert earlier.keeps({"step": step, name: "1"}) == kept


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
def test_no_test_leaves_the_test_split_unread(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    split = LabelledSource.split
    monkeypatch.setattr(
        LabelledSource, "split", lambda self, name: asked.append(name) or split(self, name)
    )
    assert run(f"fit {SHORT} --trainer.limit_test_batches 0 --run_dir r", task) == 0
    assert set(asked) == {"train", "val"}
    summary = json.loads(Path("r/summary.json").read_text())
    last = [row for row in metrics("r") if "val/acc" in row][-1]
    assert not [name for name in summary if name.startswith("test/")]
    assert summary["val/acc"] == pytest.approx(float(last["val/acc"])) and summary["steps"] == 8
    assert Path("r/curves.png").exists() and not Path("r/confusion.png").exists()


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(self: Task, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Task, "training_step", interrupt)
    assert run(f"fit {SHORT} --run_dir r") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_run_is_not_overwritten(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run_copy)
    assert_refused(f"fit {SHORT} --run_dir {run_copy}", 2, f"--resume {run_copy}", capsys)
    assert files(run_copy) == before


def test_evaluation_builds_no_loggers(best: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(TaskCLI, "fit_callbacks", refuse)
    monkeypatch.setattr("tasks.cli.lightning_cli.MetricsCSV", refuse)
    assert run(f"test --ckpt_path {best} --trainer.limit_test_batches 1") == 0
    assert list(Path().iterdir()) == []


DEPTH_1 = "--model.net.stack.depth 1"
TINY = (
    f"--model.net.stack.width 32 {DEPTH_1} --model.net.stack.heads 2 --data.max_length 32 "
    "--data.tokenizer.vocabulary 300"
)
FEW = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0 "
    "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)
LOGGED = {
    "vit": f"{DEPTH_1} --model.optimizer.optimizer muon --model.optimizer.muon_lr 0.1",
    "bert": TINY,
    "mlm": f"{TINY} --data.next_sentence true --model.net.segments 2 --data.batch_size 8",
    "lm": f"{SMALL_LM} --data.source files --data.path texts --data.tokenizer.vocabulary 400",
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}


@pytest.mark.parametrize("task", LOGGED)
def test_names_to_monitor_are_those_that_are_logged(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "texts")
    write_pairs(tmp_path / "pairs")
    line = f"fit {FEW} {LOGGED[task]}"
    assert run(f"{line} --checkpoint.monitor nope --run_dir refused", task) == 2
    listed = capsys.readouterr().err.strip().partition("there is ")[2].split(", ")
    assert run(f"{line} --run_dir r", task) == 0
    header = Path("r/metrics.csv").read_text().splitlines()[0].split(",")
    assert sorted(listed) == sorted(header)


# Links and pipes ----------------------------------------------------------------------------------

SOURCES = {"vit": ("finished", 3), "lm": ("lm_letters", 2), "seq2seq": ("translator", 18)}


@pytest.mark.parametrize("task", SOURCES)
def test_links_are_replaced(task: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """All files of a run are links to files elsewhere, which stay as they are."""
    fixture, epochs = SOURCES[task]
    source: Path = request.getfixturevalue(fixture)
    folder = Path(shutil.copytree(source if task == "vit" else source.parents[1], "run"))
    elsewhere = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    for path in files(folder):
        path.unlink()
        if path.name != ".lock":
            path.symlink_to(elsewhere / path.relative_to(folder))
    before = files(elsewhere)
    line = f"fit --resume run --trainer.max_epochs {epochs} --trainer.limit_train_batches 2"
    assert run(f"{line} --trainer.limit_val_batches 1", task) == 0
    assert files(elsewhere) == before
    for name in ("metrics.csv", "summary.json", "curves.png", "checkpoints/last.ckpt"):
        assert not (folder / name).is_symlink()
        assert (folder / name).read_bytes() != (elsewhere / name).read_bytes()


RESUME = "fit --resume run --trainer.max_epochs 3"
WRITTEN = ("summary.json", "confusion.png", "curves.png", "checkpoints/previous.ckpt")


def test_hard_links_are_cut(run_copy: Path) -> None:
    Path("elsewhere").mkdir()
    for path in files(run_copy):
        os.link(path, Path("elsewhere", path.name))
    before = files(Path("elsewhere"))
    assert run(RESUME) == 0
    assert files(Path("elsewhere")) == before


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_to_nothing_and_pipes_are_replaced(kind: str, run_copy: Path) -> None:
    (run_copy / "checkpoints/.last.ckpt.1.tmp").symlink_to("elsewhere")
    for name in WRITTEN:
        (run_copy / name).unlink()
        if kind == "pipe":
            os.mkfifo(run_copy / name)
        else:
            (run_copy / name).symlink_to(Path(f"new_{Path(name).name}").absolute())
    assert run(RESUME) == 0
    assert not list(Path().glob("new_*"))
    assert all((run_copy / name).is_file() for name in WRITTEN)
    assert not (run_copy / "checkpoints/.last.ckpt.1.tmp").is_symlink()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.csv", ".lock", "checkpoints/last.ckpt"])
def test_pipes_that_are_read_are_refused(
    name: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy / name).unlink()
    os.mkfifo(run_copy / name)
    code = 1 if name == ".lock" else 2
    assert_refused(RESUME, code, Path(name).name, capsys)


def test_lock_is_no_link(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("kept")
    (run_copy / ".lock").unlink()
    (run_copy / ".lock").symlink_to(Path("file").absolute())
    assert_refused(RESUME, 1, ".lock", capsys)
    assert Path("file").read_text() == "kept"


def test_exports_and_predictions_replace_links(best: Path) -> None:
    picture(8, "L").save("one.png")
    Path("file").write_text("kept")
    for name in ("predictions.csv", "model.safetensors"):
        Path(name).symlink_to("file")
    assert run(f"predict --ckpt_path {best} --data.predict_path one.png") == 0
    assert run(f"export --ckpt_path {best} --format safetensors --output model.safetensors") == 0
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
def test_metrics_that_are_something_else(
    content: bytes, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy / "metrics.csv").write_bytes(content)
    before = files(run_copy)
    assert_refused(RESUME, 1, "metrics.csv", capsys)
    assert files(run_copy) == before
