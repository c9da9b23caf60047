"""What a run leaves behind, and that its configuration repeats it."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from datamodules.sources import Source
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


def test_files(finished: Path) -> None:
    files = {str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file()}
    assert files == {
        "config.yaml", "metrics.csv", "summary.json", "confusion.png", "curves.png",
        "checkpoints/best.ckpt", "checkpoints/last.ckpt", "checkpoints/previous.ckpt",
    }  # fmt: skip
    assert not (finished.parent / "latest").exists()  # that is for runs/vit
    for name in ("confusion.png", "curves.png"):
        with Image.open(finished / name) as image:
            assert image.width >= 200 and len(set(image.convert("L").tobytes())) > 2


def test_summary(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    saved = checkpoint(finished, "best")
    parameters = sum(
        value.numel() for name, value in saved["state_dict"].items() if name.startswith("net.")
    )
    assert summary["parameters"] == parameters
    assert summary["steps"] == 8 and summary["epochs"] == 2
    assert 0 <= summary["test/acc"] <= 1 and summary["test/loss"] > 0
    assert summary["samples_per_s"] > 0 and summary["seconds"] > 0
    assert {"tessera", "python", "torch", "pytorch-lightning"} <= summary["versions"].keys()
    assert "git_commit" in summary


def test_best_is_the_best(finished: Path) -> None:
    scores = [float(row["val/acc"]) for row in metrics(finished) if "val/acc" in row]
    assert len(scores) == 2
    assert checkpoint(finished, "best")["epoch"] == scores.index(max(scores))
    assert checkpoint(finished)["global_step"] == 8


def test_of_those_that_are_as_good_the_latest_is_the_best() -> None:
    assert run(f"fit {SHORT} --model.optimizer.lr 1e-12 --run_dir r") == 0
    scores = {row["val/acc"] for row in metrics("r") if "val/acc" in row}
    assert len(scores) == 1 and checkpoint("r", "best")["global_step"] == 8


def test_config_is_complete(finished: Path) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["model"]["net"]["num_classes"] == 10 and config["model"]["net"]["channels"] == 1
    assert config["data"]["dataset"]["class_names"] == [str(digit) for digit in range(10)]
    assert len(config["data"]["dataset"]["mean"]) == len(config["data"]["dataset"]["std"]) == 1
    assert config["seed_everything"] == 0 and config["trainer"]["max_epochs"] == 2
    assert not {"run_dir", "resume", "config", "preset"} & config.keys()


def test_config_repeats_the_run(finished: Path) -> None:
    assert run(f"fit --config {finished / 'config.yaml'} --run_dir again") == 0
    assert same(checkpoint("again")["state_dict"], checkpoint(finished)["state_dict"])
    assert metrics("again") == metrics(finished)
    assert Path("again/config.yaml").read_text() == (finished / "config.yaml").read_text()


def test_rows(finished: Path) -> None:
    rows = metrics(finished)
    names = {name for row in rows for name in row}
    assert {
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "val/loss",
        "val/acc",
        "test/loss",
        "test/acc",
    } <= names
    assert "train/samples_per_s" in (finished / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.parametrize("validates, ends", [(False, False), (False, True), (True, True)])
def test_rows_that_come_again_go(validates: bool, ends: bool) -> None:
    """Of the step that a checkpoint is of: where its validation, or the end of its epoch, is still
    to come.
    """
    loops = {"epoch_loop.state_dict": {"validates": validates}}
    progress = {"epoch_progress": {"current": {"completed": 0 if ends else 1, "ready": 1}}}
    earlier = LoggedRows({"global_step": 4, "loops": {"fit_loop": loops | progress}})
    rows = [
        ("3", "train/grad_norm"),
        ("3", "val/loss"),
        ("3", "train/padding"),
        ("2", "val/loss"),
        ("4", "train/loss"),
    ]
    kept = [earlier.keeps({"step": step, name: "1"}) for step, name in rows]
    assert kept == [True, not validates, not ends, True, False]


def test_half_a_row_is_none(tmp_path: Path) -> None:
    """As a kill leaves it."""
    (tmp_path / "metrics.csv").write_text("step,train/loss\r\n0,0.5\r\n1,0.2")
    assert read_rows(tmp_path / "metrics.csv") == [{"step": "0", "train/loss": "0.5"}]


def test_default_place_and_latest(tmp_path: Path) -> None:
    for _ in range(2):  # within one second or not
        assert (
            run(
                "fit --trainer.max_steps 1 --trainer.limit_test_batches 1 --model.net.stack.depth 1"
            )
            == 0
        )
    runs = sorted(path for path in (tmp_path / "runs" / "vit").iterdir() if not path.is_symlink())
    assert len(runs) == 2
    assert (tmp_path / "runs" / "vit" / "latest").resolve() in runs
    assert (runs[0] / "checkpoints" / "last.ckpt").exists()


def test_fast_dev_run_keeps_no_record() -> None:
    assert run(f"fit {SHORT} --trainer.fast_dev_run true --run_dir r") == 0
    assert not Path("r/config.yaml").exists() and not Path("latest").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--trainer.precision bf16-mixed",
        "--trainer.accumulate_grad_batches 2",
        "--trainer.logger false",
    ],
)
def test_trainer_options(line: str) -> None:
    assert run(f"fit {SHORT} {line} --run_dir r") == 0
    assert checkpoint("r")["global_step"] == (4 if "accumulate" in line else 8)


@pytest.mark.parametrize("task", ("vit", "bert"))
def test_no_test_leaves_the_test_split_unread(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    split = Source.split
    monkeypatch.setattr(Source, "split", lambda self, name: asked.append(name) or split(self, name))
    assert run(f"fit {SHORT} --trainer.limit_test_batches 0 --run_dir r", task) == 0
    assert set(asked) == {"train", "val"}
    summary, last = (
        json.loads(Path("r/summary.json").read_text()),
        [row for row in metrics("r") if "val/acc" in row][-1],
    )
    assert not [name for name in summary if name.startswith("test/")]
    assert summary["val/acc"] == pytest.approx(float(last["val/acc"])) and summary["steps"] == 8
    assert Path("r/curves.png").exists() and not Path("r/confusion.png").exists()


def test_more_callbacks() -> None:
    callback = "--trainer.callbacks+=pytorch_lightning.callbacks.EarlyStopping --trainer.callbacks.monitor=val/loss"
    assert run(f"fit {SHORT} {callback} --run_dir r") == 0
    assert any("EarlyStopping" in name for name in checkpoint("r")["callbacks"])


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tasks.base import Task

    def interrupt(self: Task, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Task, "training_step", interrupt)
    assert run(f"fit {SHORT} --run_dir r") == 130
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_run_is_not_overwritten(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run_copy / "config.yaml").read_text()
    assert run(f"fit {SHORT} --run_dir {run_copy}") == 2
    assert f"--resume {run_copy}" in capsys.readouterr().err
    assert (run_copy / "config.yaml").read_text() == before


def test_nothing_is_built_that_is_not_used(best: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(TaskCLI, "fit_callbacks", refuse)
    monkeypatch.setattr(TaskCLI, "loggers", refuse)
    assert run(f"test --ckpt_path {best} --trainer.limit_test_batches 1") == 0
    assert list(Path().iterdir()) == []


MONITORS = {
    "--checkpoint.monitor val/nope": "--checkpoint.monitor val/nope",
    "--checkpoint.monitor acc --checkpoint.save_top_k 2": "--checkpoint.monitor acc",
    "--checkpoint.monitor val/confusion": "--checkpoint.monitor val/confusion",
    "--checkpoint.monitor val/loss --trainer.limit_val_batches 0": "--checkpoint.monitor val/loss",
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=test/loss": "EarlyStopping "
    "monitors test/loss",
    "--trainer.callbacks+=ModelCheckpoint --trainer.callbacks.monitor=loss": "ModelCheckpoint "
    "monitors loss",
}


@pytest.mark.parametrize("options", MONITORS)
def test_what_is_not_logged_cannot_be_monitored(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"fit {SHORT} {options} --run_dir r") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and MONITORS[options] in said and "train/loss" in said
    assert not Path("r").exists()


def test_the_rest_can() -> None:
    line = f"fit {SHORT} --checkpoint.monitor train/loss --checkpoint.save_top_k 1 --checkpoint.filename least"
    assert run(f"{line} --run_dir r") == 0
    assert checkpoint("r", "least")["global_step"] in (4, 8)
    assert (
        run(f"fit {SHORT} --checkpoint.monitor step --checkpoint.save_top_k 1 --run_dir again") == 0
    )


TINY = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --data.max_length 32"
FEW = (
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0 "
    "--trainer.max_epochs 1 --trainer.log_every_n_steps 1"
)
LOGGED = {
    "vit": f"{FEW} --model.net.stack.depth 1 --model.optimizer.optimizer muon "
    f"--model.optimizer.muon_lr 0.1",
    "bert": f"{FEW} {TINY}",
    "mlm": f"{FEW} {TINY} --data.next_sentence true --model.net.segments 2 "
    f"--data.tokenizer.vocabulary 300",
    "lm": f"{FEW} {SMALL_LM} --data.source files --data.path texts --data.tokenizer.vocabulary 400",
    "seq2seq": f"{FEW} {SMALL_S2S} {PAIRS}",
}


@pytest.mark.parametrize("task", LOGGED)
def test_the_names_to_choose_from_are_those_that_are_logged(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "texts")
    write_pairs(tmp_path / "pairs")
    assert run(f"fit {LOGGED[task]} --checkpoint.monitor nope --run_dir refused", task) == 2
    listed = capsys.readouterr().err.strip().partition("there is ")[2].split(", ")
    assert run(f"fit {LOGGED[task]} --run_dir r", task) == 0
    header = Path("r/metrics.csv").read_text().splitlines()[0].split(",")
    assert sorted(listed) == sorted(header)


@pytest.mark.parametrize(
    "place", ["file", "file/run", "x" * 300, "new/" + "x" * 300 + "/run", "/proc/run", "/dev/null"]
)
def test_folders_that_cannot_be_made(
    place: str, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("images").mkdir()
    picture(8, "L").save("images/one.png")
    for line in (f"fit {SHORT}", f"predict --ckpt_path {best} --data.predict_path images"):
        assert run(f"{line} --run_dir {place}") == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "--run_dir" in said and "--debug" not in said
        assert {path.name for path in Path().iterdir()} == {"file", "images"}
