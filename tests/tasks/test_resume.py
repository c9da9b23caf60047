"""The seed decides every bit, and a killed run that is continued ends with those of one that was not."""

import gc
import json
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tasks.checkpoints.writing import AtomicCheckpointIO
from tasks.vit.task import ViTTask
from tests.tasks.command import SHORT, checkpoint, metrics, process, run, same, write_images

EVERYTHING = (
    "--trainer.max_epochs 2 --trainer.limit_train_batches 8 --trainer.limit_val_batches 1 --seed_everything 7 "
    "--trainer.limit_test_batches 1 --trainer.log_every_n_steps 1 --checkpoint.every_n_train_steps 3 --model.ema 0.9 "
    "--model.net.stack.depth 2 --model.net.stack.dropout 0.1 --model.net.stack.drop_path 0.2 "
    "--model.augment.mixup 0.5 --model.augment.cutmix 0.5 --model.augment.crop_padding 1 --model.augment.flip 0.5 "
    "--model.augment.erase 0.5 --model.augment.rand_augment_ops 1 --model.optimizer.optimizer muon"
)
KILL = """
import os, signal
from tasks.cli.lazy_imports import import_lightning
import_lightning()
from tasks.base import Task
step = Task.training_step
def killed(self, batch, number):
    if self.global_step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, number)
Task.training_step = killed
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything random switched on, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(f"fit {EVERYTHING} --run_dir {folder}") == 0
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Which samples each step of training sees from now on."""
    found: list[list[int]] = []
    step = ViTTask.step

    def watched(self: ViTTask, batch: Any, training: bool) -> Any:
        if training:
            found.append(batch["index"].tolist())
        return step(self, batch, training)

    monkeypatch.setattr(ViTTask, "step", watched)
    return found


def assert_same_run(folder: str | Path, whole: Path) -> None:
    ours, theirs = checkpoint(folder), checkpoint(whole)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(ours[part], theirs[part]), part
    ema = next(key for key in theirs["callbacks"] if key.startswith("EMA"))
    assert same(ours["callbacks"][ema], theirs["callbacks"][ema])
    assert same(checkpoint(folder, "best")["state_dict"], checkpoint(whole, "best")["state_dict"])


def test_killed_in_mid_epoch(whole: Path, tmp_path: Path) -> None:
    done = process(f"fit {EVERYTHING} --run_dir r", KILL.format(step=13), cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint("r")["global_step"] == 12  # the epoch has 8 steps
    assert run("fit --resume r") == 0
    assert_same_run("r", whole)
    assert metrics("r") == metrics(whole)


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("end", ["", "--trainer.max_steps 4"], ids=["in an epoch", "at the end"])
def test_killed_after_the_checkpoint_of_a_validation(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not done again; the end of its epoch is done, also where there are no more steps."""
    line, save = (
        f"fit {SHORT} --trainer.val_check_interval {4 if end else 2} {end}",
        AtomicCheckpointIO.save_checkpoint,
    )

    def killed(self: AtomicCheckpointIO, content: dict[str, Any], path: Path, **more: Any) -> None:
        save(self, content, path, **more)
        if Path(path).name == "last.ckpt":
            raise Killed

    assert run(f"{line} --run_dir whole") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", killed)
        run(f"{line} --run_dir r")
    assert run("fit --resume r") == 0
    assert metrics("r") == metrics("whole")
    ours, theirs = (
        json.loads(Path(folder, "summary.json").read_text()) for folder in ("r", "whole")
    )
    assert ours["epochs"] == theirs["epochs"] == (1 if end else 2)
    assert same(checkpoint("r")["state_dict"], checkpoint("whole")["state_dict"])


def test_same_seed_same_bits(whole: Path, seen: list[list[int]]) -> None:
    assert run(f"fit {EVERYTHING} --run_dir a") == 0
    assert_same_run("a", whole)
    assert run(f"fit {EVERYTHING} --seed_everything 8 --run_dir b") == 0
    assert len(seen) == 32 and not [
        first for first, other in zip(seen, seen[16:], strict=False) if first == other
    ]
    ours, theirs = checkpoint("b")["state_dict"], checkpoint(whole)["state_dict"]
    assert not any(torch.equal(ours[n], theirs[n]) for n in theirs if n.endswith("qkv.weight"))


def test_workers_do_not_change_the_bits(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images", count=12)
    line = f"fit --preset digits {EVERYTHING} --model.net.image_size 12 --data.source folder --data.path {data}"
    line += " --data.batch_size 4 --data.loading.memory_limit_mb 0"
    for workers in (0, 2):
        assert run(f"{line} --data.loading.num_workers {workers} --run_dir r{workers}") == 0
    assert same(checkpoint("r0")["state_dict"], checkpoint("r2")["state_dict"])


def test_typed_options_win_and_are_printed(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoint(run_copy)["lr_schedulers"][0]["base_lrs"][0] == pytest.approx(3e-3)
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3 --model.optimizer.lr 0.01") == 0
    out = capsys.readouterr().out
    assert "trainer.max_epochs 2 -> 3" in out and "model.optimizer.lr 0.003 -> 0.01" in out
    assert out.count(" -> ") == 2
    after = checkpoint(run_copy)
    assert after["global_step"] == 12
    assert after["lr_schedulers"][0]["base_lrs"][0] == pytest.approx(0.01)
    rates = {
        int(row["step"]): float(row["train/lr"]) for row in metrics(run_copy) if "train/lr" in row
    }
    assert (
        max(rate for step, rate in rates.items() if step >= 8) > 1e-3
    )  # with the old peak 0.44e-3
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    assert config["model"]["optimizer"]["lr"] == 0.01 and config["trainer"]["max_epochs"] == 3


@pytest.mark.parametrize(
    "option, named",
    [
        ("--model.net.stack.depth 3", "--model.net.stack.depth 3 (checkpoint: 1)"),
        ("--model.net.stack.width 128", "--model.net.stack.width 128 (checkpoint: 64)"),
        ("--data.batch_size 32", "batch size 64"),
        ("--model.optimizer.optimizer muon", "optimizer"),
        ("--model.net.num_classes 3", "--model.net.num_classes 3"),
        ("--run_dir elsewhere", "--run_dir cannot go with --resume"),
        (
            "--model.pretrained timm/vit_tiny_patch16_224",
            "--model.pretrained cannot go with --resume",
        ),
    ],
)
def test_what_cannot_be_combined(
    option: str, named: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()}
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3 {option}") == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in run_copy.rglob("*") if path.is_file()} == before


def test_a_moved_run_keeps_its_best(run_copy: Path, tmp_path: Path) -> None:
    """A best checkpoint that cannot be beaten stays, and is found in the new place."""
    path = run_copy / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    for state in saved["callbacks"].values():
        if state.get("monitor") == "val/acc":
            state["best_model_score"] = torch.tensor(2.0)
            state["best_k_models"] = {name: torch.tensor(2.0) for name in state["best_k_models"]}
            state["kth_value"] = torch.tensor(2.0)
    torch.save(saved, path)
    before = (run_copy / "checkpoints" / "best.ckpt").read_bytes()
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    assert checkpoint(run_copy)["global_step"] > saved["global_step"]
    assert (run_copy / "checkpoints" / "best.ckpt").read_bytes() == before


def test_a_continued_run_counts_on(run_copy: Path) -> None:
    before = json.loads((run_copy / "summary.json").read_text())
    saved = checkpoint(run_copy)
    (record,) = (state for state in saved["callbacks"].values() if "elapsed" in state)
    assert record["samples"] == 8 * 64 and record["seconds"] > 0
    record["elapsed"] += 1000.0
    record["samples"] += 10**9
    torch.save(saved, run_copy / "checkpoints" / "last.ckpt")
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    after = json.loads((run_copy / "summary.json").read_text())
    assert (
        after["seconds"] > record["elapsed"] - 0.1 and after["steps"] > before["steps"]
    )  # rounded to tenths
    assert after["samples_per_s"] > 1e6


@pytest.mark.slow
def test_a_continued_run_says_nothing_else(tmp_path: Path) -> None:
    assert run(f"fit {SHORT} --run_dir r") == 0
    done = process("fit --resume r --trainer.max_epochs 3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    steps = [(row["step"], *row) for row in metrics("r")]
    assert len(steps) == len(set(steps))


def test_the_end_is_saved_and_can_be_continued(whole: Path, tmp_path: Path) -> None:
    """`last.ckpt` is the end of the run; two epochs and then two more see the samples that four epochs see."""
    assert checkpoint(whole)["global_step"] == 16
    constant = "--model.optimizer.schedule constant --model.optimizer.warmup 0"
    assert run(f"fit {EVERYTHING} {constant} --run_dir four --trainer.max_epochs 4") == 0
    assert run(f"fit {EVERYTHING} {constant} --run_dir two") == 0
    assert run("fit --resume two --trainer.max_epochs 4") == 0
    assert_same_run("two", Path("four"))


def test_the_end_is_saved_with_what_the_last_validation_found() -> None:
    assert run(f"fit {SHORT} --checkpoint.every_n_train_steps 2 --run_dir r") == 0
    (best,) = (
        state
        for state in checkpoint("r")["callbacks"].values()
        if state.get("monitor") == "val/acc"
    )
    scores = [float(row["val/acc"]) for row in metrics("r") if "val/acc" in row]
    assert len(scores) == 2 and float(best["current_score"]) == pytest.approx(scores[-1])
    assert not checkpoint("r")["loops"]["fit_loop"]["epoch_loop.state_dict"]["validates"]


def test_stopped_early_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is continued after its EarlyStopping stopped it stays so, until there is more patience."""
    stopping = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss --trainer.callbacks.min_delta 9"
    assert (
        run(
            f"fit {SHORT} {stopping} --trainer.callbacks.patience 1 --trainer.max_epochs 8 --run_dir r"
        )
        == 0
    )
    before = Path("r/metrics.csv").read_bytes()
    assert checkpoint("r")["global_step"] == 8 and "stopped early" not in capsys.readouterr().out
    assert run("fit --resume r --trainer.limit_test_batches 0") == 0
    assert checkpoint("r")["global_step"] == 8 and Path("r/metrics.csv").read_bytes() == before
    assert "stopped early by EarlyStopping on val/loss" in capsys.readouterr().out
    assert run("fit --resume r --trainer.callbacks.patience 2") == 0
    assert checkpoint("r")["global_step"] == 12


def test_the_checkpoint_does_not_stay_in_memory(
    run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    restore, step = ViTTask.restore, ViTTask.step

    def restored(self: ViTTask, checkpoint: dict[str, Any]) -> None:
        seen.extend(map(weakref.ref, checkpoint["state_dict"].values()))
        restore(self, checkpoint)

    def stepped(self: ViTTask, batch: Any, training: bool) -> Any:
        gc.collect()
        assert seen and not any(tensor() is not None for tensor in seen)
        return step(self, batch, training)

    monkeypatch.setattr(ViTTask, "restore", restored)
    monkeypatch.setattr(ViTTask, "step", stepped)
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    assert (
        run(f"validate --ckpt_path {run_copy}/checkpoints/best.ckpt --trainer.limit_val_batches 1")
        == 0
    )


def test_checkpoints_elsewhere_are_found_again() -> None:
    assert run(f"fit {SHORT} --run_dir r --checkpoint.dirpath elsewhere") == 0
    assert Path("elsewhere/last.ckpt").exists() and not Path("r/checkpoints/last.ckpt").exists()
    assert run("fit --resume r --trainer.max_epochs 3") == 0
    assert torch.load("elsewhere/last.ckpt", weights_only=True)["global_step"] == 12


def test_overfitting_repeats_the_same_batches(seen: list[list[int]]) -> None:
    assert run(f"fit {SHORT} --trainer.overfit_batches 2 --trainer.max_epochs 3 --run_dir r") == 0
    assert len(seen) == 6 and seen[0:2] == seen[2:4] == seen[4:6] and seen[0] != seen[1]


def test_nothing_is_left_to_train(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"fit --resume {run_copy}") == 0
    assert (
        "nothing was left to train after step 8, with --trainer.max_epochs 2\n"
        in capsys.readouterr().out
    )
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 1") == 2
    out, said = capsys.readouterr()
    assert (
        "the run has done 2 epochs, and --trainer.max_epochs 1 is less" in said
        and "changed" not in out
    )


@pytest.mark.parametrize(
    "options",
    [
        "--checkpoint.every_n_train_steps 1 --trainer.max_steps 7",
        "--checkpoint.every_n_train_steps 2 --trainer.val_check_interval 3",
        "",
    ],
    ids=["in an epoch", "before the end of an epoch", "after it"],
)
def test_killed_behind_the_last_step(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch in the checkpoint, and all that the loops count, are those of a run that was not."""
    save, steps = AtomicCheckpointIO.save_checkpoint, 7 if "7" in options else 8

    def killed(self: AtomicCheckpointIO, content: dict[str, Any], path: Path, **more: Any) -> None:
        save(self, content, path, **more)
        if Path(path).name == "last.ckpt" and content["global_step"] == steps:
            raise Killed

    line = f"fit {SHORT} --trainer.limit_test_batches 0 {options}"
    assert run(f"{line} --run_dir whole") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", killed)
        run(f"{line} --run_dir r")
    assert run("fit --resume r") == 0
    ours, theirs = checkpoint("r"), checkpoint("whole")
    assert ours["epoch"] == theirs["epoch"] == (1 if steps == 7 else 2)
    assert same(ours["loops"], theirs["loops"])
    assert json.loads(Path("r/summary.json").read_text())["epochs"] == 2
