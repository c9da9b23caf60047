"""The seed decides every bit; a killed run that is resumed ends with those of one that was not."""

import gc
import os
import shutil
import signal
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tasks.base import Task
from tasks.checkpoints.writing import AtomicCheckpointIO
from tasks.training.optim import OptimConfig
from tasks.vit.task import ViTTask
from tests.helpers.cases import RANDOM, assert_same
from tests.helpers.command import Console, Patch, process, run
from tests.helpers.results import checkpoint, logged, metrics, same, summary
from tests.helpers.tiny import FEW_STEPS, SHORT, SMALL_S2S, write_images

EVERYTHING = (
    f"{RANDOM} --trainer.max_epochs 2 --trainer.limit_train_batches 8 --seed_everything 7 "
    "--trainer.limit_val_batches 1 --trainer.limit_test_batches 1 --trainer.log_every_n_steps 1 "
    "--checkpoint.every_n_train_steps 3"
)
KILL = """
from tasks.cli.lazy_imports import import_lightning
import_lightning()
from tasks.base import Task
from tests.helpers import faults
faults.KILL_POINTS["step"] = (Task, "training_step", 14)
faults.send_signal("step")
"""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything random switched on, never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run(f"fit {EVERYTHING} --run_dir {folder}") == 0
    return folder


@pytest.fixture
def seen(monkeypatch: Patch) -> list[list[int]]:
    """Which samples each step of training sees from now on."""
    found: list[list[int]] = []
    step = ViTTask.step

    def watched(self: ViTTask, batch: Any, training: bool) -> Any:
        if training:
            found.append(batch["index"].tolist())
        return step(self, batch, training)

    monkeypatch.setattr(ViTTask, "step", watched)
    return found


# The seed -----------------------------------------------------------------------------------------


def test_each_seed_epoch_batch_and_rank_has_its_own_numbers() -> None:
    def sample(seed: int, epoch: int, batch: int, rank: int) -> float:
        os.environ["PL_GLOBAL_SEED"] = str(seed)
        task: Any = SimpleNamespace(
            current_epoch=epoch, global_rank=rank, optimizer_config=OptimConfig()
        )
        Task.on_train_batch_start(task, {}, batch)
        return float(torch.rand((), dtype=torch.float64))

    positions = list(product((1, 2), (0, 1, 2), (0, 1, 2), (0, 1)))
    found = [sample(*position) for position in positions]
    assert len(set(found)) == len(positions)
    assert [sample(*position) for position in reversed(positions)] == found[::-1]


def test_same_seed_same_bits(uninterrupted: Path, seen: list[list[int]]) -> None:
    assert run(f"fit {EVERYTHING} --run_dir a") == 0
    assert_same(Path("a"), uninterrupted)
    assert run(f"fit {EVERYTHING} --seed_everything 8 --run_dir b") == 0
    assert len(seen) == 32
    assert all(one != other for one, other in zip(seen[:16], seen[16:], strict=True))
    ours, theirs = checkpoint("b")["state_dict"], checkpoint(uninterrupted)["state_dict"]
    assert not any(torch.equal(ours[n], theirs[n]) for n in theirs if n.endswith("qkv.weight"))


def test_workers_do_not_change_the_bits(tmp_path: Path) -> None:
    data = write_images(tmp_path / "images", count=12)
    line = f"fit --preset digits {EVERYTHING} --model.net.image_size 12 --data.source folder"
    line += f" --data.path {data} --data.batch_size 4 --data.loading.memory_limit_mb 0"
    line += " --trainer.max_epochs 1"
    for workers in (0, 2):
        assert run(f"{line} --data.loading.num_workers {workers} --run_dir r{workers}") == 0
    assert same(checkpoint("r0")["state_dict"], checkpoint("r2")["state_dict"])


def test_overfitting_repeats_the_same_batches(seen: list[list[int]]) -> None:
    assert run(f"fit {SHORT} --trainer.overfit_batches 2 --trainer.max_epochs 3 --run_dir r") == 0
    assert len(seen) == 6 and seen[0:2] == seen[2:4] == seen[4:6] and seen[0] != seen[1]


def test_overfitting_resumes_in_mid_epoch(seen: list[list[int]]) -> None:
    assert run(f"fit {SHORT} --trainer.overfit_batches 2 --trainer.max_steps 3 --run_dir r") == 0
    assert run("fit --resume r --trainer.max_steps 4") == 0
    assert len(seen) == 4 and seen[0:2] == seen[2:4] and seen[0] != seen[1]


# Kills --------------------------------------------------------------------------------------------


def test_killed_in_mid_epoch(uninterrupted: Path, tmp_path: Path) -> None:
    done = process(f"fit {EVERYTHING} --run_dir r", KILL, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint("r")["global_step"] == 12  # the epoch has 8 steps
    assert run("fit --resume r") == 0
    assert_same(Path("r"), uninterrupted)


class Killed(BaseException):
    """Stands for a kill."""


SLOW = pytest.mark.slow
STOPPING = "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss"
STOPPING += " --trainer.callbacks.patience 9 --trainer.callbacks.min_delta 9"


@pytest.mark.parametrize("options, step, epochs", [
    pytest.param("--trainer.val_check_interval 2", 2, 2, marks=SLOW),  # in an epoch
    ("--trainer.val_check_interval 3 --checkpoint.every_n_train_steps 2", 8, 2),
    pytest.param("--trainer.val_check_interval 4 --trainer.max_steps 4", 4, 1, marks=SLOW),
    pytest.param("--trainer.max_steps 7 --checkpoint.every_n_train_steps 1", 7, 2, marks=SLOW),
    pytest.param("", 8, 2, marks=SLOW),  # after the end of the last epoch
    pytest.param(STOPPING, 4, 2, marks=SLOW),
])  # fmt: skip
def test_killed_after_a_checkpoint(
    options: str, step: int, epochs: int, monkeypatch: Patch
) -> None:
    """Nothing is done twice nor left out: a validation, the end of an epoch, that of the run."""
    save = AtomicCheckpointIO.save_checkpoint

    def killed(self: AtomicCheckpointIO, content: dict[str, Any], path: Path, **more: Any) -> None:
        save(self, content, path, **more)
        if Path(path).name == "last.ckpt" and content["global_step"] == step:
            raise Killed

    line = f"fit {SHORT} {options}"
    assert run(f"{line} --run_dir uninterrupted") == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(AtomicCheckpointIO, "save_checkpoint", killed)
        run(f"{line} --run_dir r")
    assert run("fit --resume r") == 0
    assert metrics("r") == metrics("uninterrupted")
    ours, theirs = checkpoint("r"), checkpoint("uninterrupted")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch"):
        assert same(ours[part], theirs[part]), part
    for name in theirs["callbacks"]:
        if name.startswith("EarlyStopping"):
            assert same(ours["callbacks"][name], theirs["callbacks"][name])
            assert theirs["callbacks"][name]["wait_count"] == 1
    assert summary("r")["epochs"] == summary("uninterrupted")["epochs"] == epochs


# What a resumed run may change --------------------------------------------------------------------


def test_options_on_the_command_line_win_and_are_printed(run_copy: Path, console: Console) -> None:
    assert checkpoint(run_copy)["lr_schedulers"][0]["base_lrs"][0] == pytest.approx(3e-3)
    line = f"fit --resume {run_copy} --trainer.max_epochs 3 --model.optimizer.lr 0.01"
    out, _ = console.printed(line)
    assert "trainer.max_epochs 2 -> 3" in out and "model.optimizer.lr 0.003 -> 0.01" in out
    assert out.count(" -> ") == 2
    after = checkpoint(run_copy)
    assert after["global_step"] == 12
    assert after["lr_schedulers"][0]["base_lrs"][0] == pytest.approx(0.01)
    assert max(logged(run_copy, "train/lr")[8:]) > 1e-3  # 0.44e-3 with the old peak
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    assert config["model"]["optimizer"]["lr"] == 0.01 and config["trainer"]["max_epochs"] == 3


def test_a_moved_run_keeps_its_best(run_copy: Path) -> None:
    """A best checkpoint that cannot be beaten stays, and is found in the new folder."""
    path = run_copy / "checkpoints" / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    for state in saved["callbacks"].values():
        if state.get("monitor") == "val/acc":
            state["best_model_score"] = state["kth_value"] = torch.tensor(2.0)
            state["best_k_models"] = {name: torch.tensor(2.0) for name in state["best_k_models"]}
    torch.save(saved, path)
    before = (run_copy / "checkpoints" / "best.ckpt").read_bytes()
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    assert checkpoint(run_copy)["global_step"] > saved["global_step"]
    assert (run_copy / "checkpoints" / "best.ckpt").read_bytes() == before


def test_a_continued_run_counts_on(run_copy: Path) -> None:
    before = summary(run_copy)
    saved = checkpoint(run_copy)
    (record,) = (state for state in saved["callbacks"].values() if "elapsed" in state)
    assert record["samples"] == 8 * 64 and record["seconds"] > 0
    record["elapsed"] += 1000.0
    record["samples"] += 10**9
    last = run_copy / "checkpoints" / "last.ckpt"
    torch.save(saved, last)
    assert run(f"fit --resume {last} --trainer.max_epochs 3") == 0  # names its run folder
    after = summary(run_copy)
    assert after["seconds"] > record["elapsed"] - 0.1  # rounded to tenths
    assert after["steps"] > before["steps"] and after["samples_per_s"] > 1e6


def test_the_end_is_saved_and_can_be_continued() -> None:
    """One epoch and then one more see the samples that two epochs see."""
    line = f"fit {EVERYTHING} --model.optimizer.schedule constant --model.optimizer.warmup 0"
    line += " --trainer.limit_train_batches 4"
    assert run(f"{line} --run_dir two") == 0
    assert run(f"{line} --trainer.max_epochs 1 --run_dir one") == 0
    assert checkpoint("one")["global_step"] == 4
    assert run("fit --resume one --trainer.max_epochs 2") == 0
    ours, theirs = checkpoint("one"), checkpoint("two")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(ours[part], theirs[part]), part


def test_the_end_is_saved_with_what_the_last_validation_found() -> None:
    assert run(f"fit {SHORT} --checkpoint.every_n_train_steps 2 --run_dir r") == 0
    states = checkpoint("r")["callbacks"].values()
    (best,) = (state for state in states if state.get("monitor") == "val/acc")
    scores = logged("r", "val/acc")
    assert len(scores) == 2 and float(best["current_score"]) == pytest.approx(scores[-1])


def test_stopped_early_is_stopped(console: Console) -> None:
    """A run that its EarlyStopping stopped stays so, until there is more patience."""
    line = f"fit {SHORT} --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor val/loss"
    line += " --trainer.callbacks.min_delta 9 --trainer.callbacks.patience 1"
    out, _ = console.printed(f"{line} --trainer.max_epochs 8 --run_dir r")
    before = Path("r/metrics.csv").read_bytes()
    assert checkpoint("r")["global_step"] == 8
    assert "stopped early by EarlyStopping on val/loss: give it more patience" in out
    assert "predict --ckpt_path" in out and "fit --resume" not in out
    out, _ = console.printed("fit --resume r --trainer.limit_test_batches 0")
    assert checkpoint("r")["global_step"] == 8 and Path("r/metrics.csv").read_bytes() == before
    assert out.count("stopped early by EarlyStopping on val/loss") == 1
    assert "nothing was left" not in out
    out, _ = console.printed("fit --resume r --trainer.callbacks.patience 2")
    assert checkpoint("r")["global_step"] == 12 and "stopped early" in out
    out, _ = console.printed(f"{line} --trainer.max_epochs 2 --run_dir s")  # both end it
    assert "stopped early" in out and "fit --resume" in out


def test_nothing_is_left_to_train(run_copy: Path, console: Console) -> None:
    out, _ = console.printed(f"fit --resume {run_copy}")
    assert "step 8, with --trainer.max_epochs 2\n" in out
    assert summary(run_copy)["device"] == "cpu"


@pytest.mark.slow
def test_the_checkpoint_does_not_stay_in_memory(run_copy: Path, monkeypatch: Patch) -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    restore = ViTTask.restore
    step = ViTTask.step

    def restored(self: ViTTask, checkpoint: dict[str, Any]) -> None:
        tensors.extend(map(weakref.ref, checkpoint["state_dict"].values()))
        restore(self, checkpoint)

    def stepped(self: ViTTask, batch: Any, training: bool) -> Any:
        gc.collect()
        assert tensors and not any(tensor() is not None for tensor in tensors)
        return step(self, batch, training)

    monkeypatch.setattr(ViTTask, "restore", restored)
    monkeypatch.setattr(ViTTask, "step", stepped)
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    best = run_copy / "checkpoints" / "best.ckpt"
    assert run(f"validate --ckpt_path {best} --trainer.limit_val_batches 1") == 0


def test_checkpoints_elsewhere_are_found_again() -> None:
    assert run(f"fit {SHORT} --run_dir r --checkpoint.dirpath elsewhere") == 0
    assert Path("elsewhere/last.ckpt").exists() and not Path("r/checkpoints/last.ckpt").exists()
    assert run("fit --resume r --trainer.max_epochs 3") == 0
    assert torch.load("elsewhere/last.ckpt", weights_only=True)["global_step"] == 12


def test_checkpoints_before_those_in_another_folder_are_not_skipped(console: Console) -> None:
    """Of a run that was killed before the first checkpoint there."""
    assert run(f"fit {SHORT} --run_dir r") == 0
    config = Path("r/config.yaml")  # as written at the start of a resumed run
    options = yaml.safe_load(config.read_text())
    options["checkpoint"]["dirpath"] = "elsewhere"
    config.write_text(yaml.safe_dump(options))
    Path("r/summary.json").unlink()
    line = "fit --resume r --trainer.max_epochs 3"
    console.refused(line, "elsewhere", "r/checkpoints/last.ckpt, copy it there")
    Path("elsewhere").mkdir()
    shutil.copy("r/checkpoints/last.ckpt", "elsewhere")
    assert run(line) == 0
    assert torch.load("elsewhere/last.ckpt", weights_only=True)["global_step"] == 12


def test_batches_of_a_step_do_not_change_while_epochs_end_the_run(console: Console) -> None:
    """The schedule counts steps: it would end too early or too late."""
    assert run(f"fit {SHORT} --run_dir r") == 0
    line = "fit --resume r --trainer.max_epochs 3 --trainer.accumulate_grad_batches 2"
    console.refused(line, "accumulate_grad_batches 1, this run has 2", "resume with the former")
    line = "fit --resume r --trainer.max_epochs 3 --trainer.limit_train_batches 1.0"
    console.refused(line, "limit_train_batches 4, this run has 1.0", "resume with the former")
    line = "fit --resume r --trainer.accumulate_grad_batches 2 --trainer.max_epochs -1"
    assert run(f"{line} --trainer.max_steps 10") == 0
    assert checkpoint("r")["global_step"] == 10


@pytest.mark.parametrize("given", ["ema 0.9", "average 2"])
def test_a_run_with_an_average_needs_it_to_resume(given: str, console: Console) -> None:
    """The checkpoint's own weights are the average, which training must not go on from."""
    task = "vit" if given.startswith("ema") else "seq2seq"
    short = SHORT if task == "vit" else f"{SMALL_S2S} --data.source dates {FEW_STEPS}"
    name = given.split()[0]
    assert run(f"fit {short} --model.{given} --run_dir r", task) == 0
    line = f"fit --resume r --trainer.max_epochs 3 --model.{name} null"
    console.refused(line, f"resume it with --model.{name}", task=task)
    if task == "seq2seq":
        line = "fit --resume r --trainer.max_epochs 3 --model.average null --model.ema 0.9"
        console.refused(line, f"resume it with --model.{name}", task=task)


def test_the_best_by_the_metric_of_the_task_can_be_kept_several_times() -> None:
    line = (
        f"fit {SHORT} --checkpoint.monitor val/acc --checkpoint.mode max --checkpoint.save_top_k 2"
    )
    assert run(f"{line} --trainer.max_epochs 3 --run_dir r") == 0
    assert len([*Path("r/checkpoints").glob("epoch=*.ckpt")]) == 2
    assert run("fit --resume r --trainer.max_epochs 4") == 0
    assert len([*Path("r/checkpoints").glob("epoch=*.ckpt")]) == 2


@pytest.mark.parametrize("name", ["best", "last", "previous"])
def test_names_of_the_checkpoints_of_every_run_are_taken(name: str, console: Console) -> None:
    console.refused(f"fit {SHORT} --checkpoint.filename {name} --run_dir r", f"filename {name}")
