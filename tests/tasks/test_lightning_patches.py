"""Each patch of Lightning is still needed: a test fails once Lightning does the same by itself.

Each patch does what it is for: a test fails without it, here if no other test of a run does.
"""

import signal
import subprocess
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, WandbLogger
from torch.utils.data import DataLoader

from tasks.cli.lazy_imports import _UNUSED
from tasks.lightning_patches import RunCheckpoint, use_exact_loops
from tests.helpers.command import process
from tests.helpers.results import logged, metrics


class Line(pl.LightningModule):
    """One weight; samples a number in each step."""

    def __init__(self, **optimizer: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **self.optimizer)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log_dict({"loss": loss, "sampled": torch.rand(())})
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        loss = self.layer(batch).square().mean()
        self.log_dict({"val_loss": loss, "val_sampled": torch.rand(())})


def fit(
    task: Line, folder: Path, path: Path | None = None, exact: bool = False, **options: Any
) -> pl.Trainer:
    """Trains on four batches an epoch, with our loops if `exact`; a checkpoint to resume from."""
    options = {"max_epochs": 1, "enable_checkpointing": False, "logger": False, **options}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, **options)
    if exact:
        use_exact_loops(trainer)
    data = DataLoader(torch.ones(4, 1), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(task, data, data, ckpt_path=path, weights_only=True)
    return trainer


# Lightning ----------------------------------------------------------------------------------------


def test_a_validation_that_was_due_is_left_out_by_lightning(tmp_path: Path) -> None:
    """`EpochLoop`: a run killed between a step and its validation, resumed from that step's
    checkpoint.
    """

    def save(trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    seen: list[int] = []
    watch = LambdaCallback(on_validation_start=lambda trainer, _: seen.append(trainer.global_step))
    options = {"val_check_interval": 2, "num_sanity_val_steps": 0}
    fit(Line(), tmp_path, callbacks=[LambdaCallback(on_train_batch_end=save)], **options)
    fit(Line(), tmp_path, tmp_path / "2.ckpt", callbacks=[watch], **options)
    assert seen and 2 not in seen


def test_the_patience_of_a_checkpoint_wins_in_lightning() -> None:
    """`FitLoop.patience`."""
    stopping = EarlyStopping("loss", patience=9)
    stopping.load_state_dict(EarlyStopping("loss", patience=2).state_dict())
    assert stopping.patience == 2


def test_lightning_saves_last_only_beside_another_checkpoint(tmp_path: Path) -> None:
    """`RunCheckpoint`: none at the end of an epoch that is not the last."""
    seen: list[bool] = []
    last = tmp_path / "own" / "last.ckpt"
    watch = LambdaCallback(on_train_epoch_start=lambda *_: seen.append(last.exists()))
    saver = ModelCheckpoint(tmp_path / "own", save_last=True, save_top_k=0)
    fit(Line(), tmp_path, callbacks=[saver, watch], max_epochs=2, enable_checkpointing=True)
    assert seen == [False, False]


@pytest.mark.parametrize("exact", [False, True])
def test_lightning_replaces_handlers_of_sigterm(exact: bool, tmp_path: Path) -> None:
    """`use_exact_loops` leaves them."""
    seen: list[Any] = []
    watch = lambda *_: seen.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
    before = signal.getsignal(signal.SIGTERM)
    fit(Line(), tmp_path, exact=exact, callbacks=[LambdaCallback(on_train_start=watch)])
    assert (seen == [before]) == exact


@pytest.mark.parametrize("exact", [False, True])
def test_lightning_launches_processes_that_signals_end(
    exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have SIGTERM blocked with our launcher."""
    blocked: list[bool] = []

    def popen(*_: Any, **__: Any) -> None:
        blocked.append(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
        raise ChildProcessError

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ChildProcessError):
        fit(Line(), tmp_path, exact=exact, devices=2, strategy="ddp")
    assert blocked == [exact]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_lightning_refuses_to_clip_with_fused_adamw(tmp_path: Path) -> None:
    """`clippable`."""
    with pytest.raises(RuntimeError):
        fit(Line(fused=True), tmp_path, precision="bf16-mixed", gradient_clip_val=1.0)


def test_the_logged_step_has_no_public_name(tmp_path: Path) -> None:
    """`logged_step`, `is_accumulating`: the loop's public names."""
    names = dir(fit(Line(), tmp_path).fit_loop.epoch_loop)
    public = [name for name in names if not name.startswith("_")]
    assert not [name for name in public if "stepped" in name or "accumulat" in name]


def test_lightning_gives_w_and_b_an_option_that_it_no_longer_has() -> None:
    """`without_anonymous`."""
    assert "anonymous" in WandbLogger(save_dir="r", project="p")._wandb_init


@pytest.mark.slow
def test_lightning_imports_what_it_does_not_use() -> None:
    """`import_lightning`."""
    done = process("--version", "import pytorch_lightning")
    assert _UNUSED & set(done.stdout.splitlines()[-1].split())


# Ours ---------------------------------------------------------------------------------------------


def test_ranks_do_not_wait_for_each_other_within_a_step(tmp_path: Path) -> None:
    """`EpochLoop._broadcast_sigterm_tensor`: the first rank is still in its first batch when the
    second rank begins its second.
    """
    begun = tmp_path / "begun"

    def begin(trainer: pl.Trainer, task: Any, batch: Any, number: int) -> None:
        if (trainer.global_rank, number) == (1, 1):
            begun.touch()

    def end(trainer: pl.Trainer, task: Any, outputs: Any, batch: Any, number: int) -> None:
        since = time.monotonic()
        while (trainer.global_rank, number) == (0, 0) and not begun.exists():
            assert time.monotonic() < since + 20, "the second rank waits for the first"
            time.sleep(0.01)

    watch = LambdaCallback(on_train_batch_start=begin, on_train_batch_end=end)
    options = {"devices": 2, "strategy": "ddp_fork", "accumulate_grad_batches": 2}
    fit(Line(), tmp_path, exact=True, callbacks=[watch], limit_val_batches=0, **options)
    assert begun.exists()


def test_a_resumed_run_logs_the_same(tmp_path: Path) -> None:
    """`EpochLoop.on_save_checkpoint`: steps, a validation that is due, and random numbers, from
    checkpoints after a step and in a validation.
    """

    def logs(name: str, path: Path | None = None, **more: Any) -> list[dict[str, str]]:
        options = {"max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 0}
        logger = CSVLogger(tmp_path, name, "")
        fit(Line(), tmp_path, path, True, logger=logger, log_every_n_steps=1, **options, **more)
        return metrics(tmp_path / name)

    def save(trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"validation={trainer.global_step}.ckpt")

    saver = RunCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [LambdaCallback(on_validation_batch_end=save), saver]
    uninterrupted = logs("uninterrupted", callbacks=callbacks, enable_checkpointing=True)
    for name in ("step=1", "step=2", "step=4", "step=5", "validation=2", "validation=4"):
        steps = [number for number, row in enumerate(uninterrupted) if "loss" in row]
        left = uninterrupted[steps[int(name[-1]) - 1] + 1 :]
        assert logs(name, tmp_path / f"{name}.ckpt") == left, name


def test_an_epoch_that_had_not_ended_ends_also_at_max_steps(tmp_path: Path) -> None:
    """`FitLoop.done`: a run killed after its last step, and resumed."""
    seen: list[str] = []
    watch = LambdaCallback(
        on_validation_end=lambda *_: seen.append("validation"),
        on_train_epoch_end=lambda *_: seen.append("epoch"),
    )
    options = {"exact": True, "max_steps": 4, "num_sanity_val_steps": 0}
    saver = RunCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    fit(Line(), tmp_path, callbacks=[saver], enable_checkpointing=True, **options)
    fit(Line(), tmp_path, tmp_path / "step=4.ckpt", callbacks=[watch], **options)
    assert seen == ["validation", "epoch"]


@pytest.mark.parametrize(
    "end, steps",
    [
        ({"max_epochs": 3}, [8, 12]),
        ({"max_epochs": -1, "max_steps": 12}, [8, 12]),
        ({"max_epochs": -1, "max_steps": 10}, [8, 10]),
        ({"max_epochs": 4}, [8, 16]),
        ({"max_epochs": 3, "limit_val_batches": 0}, []),
    ],
)
def test_training_ends_with_a_validation(
    end: dict[str, int], steps: list[int], tmp_path: Path
) -> None:
    """Also where only every second epoch of 4 steps does."""
    validated: list[int] = []
    spy = LambdaCallback(on_validation_end=lambda trainer, _: validated.append(trainer.global_step))
    options: dict[str, Any] = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    fit(Line(), tmp_path, exact=True, callbacks=[spy], **options, **end)
    assert validated == steps


def test_training_that_is_stopped_ends_with_a_validation(tmp_path: Path) -> None:
    """As `max_time` and early stopping do; the first epoch of 4 steps has none."""
    validated: list[int] = []

    def stop(trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 3

    spy = LambdaCallback(
        on_train_batch_end=stop,
        on_validation_end=lambda trainer, _: validated.append(trainer.global_step),
    )
    options: dict[str, Any] = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    fit(Line(), tmp_path, exact=True, callbacks=[spy], min_epochs=0, max_epochs=9, **options)
    assert validated == [3]


def test_a_validation_that_has_ended_is_not_repeated(tmp_path: Path) -> None:
    """`RunCheckpoint.on_validation_end`."""
    seen: list[int] = []
    watch = LambdaCallback(on_validation_start=lambda trainer, _: seen.append(trainer.global_step))
    options = {"exact": True, "val_check_interval": 2, "num_sanity_val_steps": 0}
    saver = RunCheckpoint(tmp_path, "{step}", save_top_k=-1)
    fit(Line(), tmp_path, callbacks=[saver], enable_checkpointing=True, **options)
    fit(Line(), tmp_path, tmp_path / "step=2.ckpt", callbacks=[watch], **options)
    assert seen == [4]


def test_the_end_has_what_a_validation_in_an_epoch_found(tmp_path: Path) -> None:
    """`RunCheckpoint.after_step`: `last` was also saved before the validation."""
    best = RunCheckpoint(tmp_path, "best", "val_loss", save_on_train_epoch_end=False)
    last = RunCheckpoint(tmp_path, save_last=True, save_top_k=0, every_n_train_steps=2)
    options = {"max_steps": 2, "val_check_interval": 2, "enable_checkpointing": True}
    fit(Line(), tmp_path, exact=True, callbacks=[best, last], **options)
    states = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"].values()
    assert [state["current_score"] for state in states] == [best.current_score, None]


def test_last_needs_no_metric(tmp_path: Path) -> None:
    """`RunCheckpoint.after_step`: the monitored metric is not known before a validation."""
    found: list[bool] = []
    look = LambdaCallback(
        on_train_batch_start=lambda *_: found.append((tmp_path / "last.ckpt").exists())
    )
    saver = RunCheckpoint(tmp_path, "{step}", "val_loss", save_last=True, every_n_train_steps=2)
    options = {"exact": True, "enable_checkpointing": True, "num_sanity_val_steps": 0}
    fit(Line(), tmp_path, callbacks=[look, saver], **options)
    assert found == [False, False, True, True]


def test_the_clock_is_asked_once_for_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an interval of validations in time; what is saved says whether one is due."""
    clock = count(step=0.3)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    due: list[int] = []
    validated: list[int] = []

    class Watch(pl.Callback):
        def after_step(self, trainer: Any, pl_module: Any) -> None:
            if trainer.fit_loop.epoch_loop.validation_due:
                due.append(trainer.global_step)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            validated.append(trainer.global_step)

    interval = timedelta(seconds=1)
    options: dict[str, Any] = {"max_epochs": 9, "num_sanity_val_steps": 0}
    fit(Line(), tmp_path, exact=True, callbacks=[Watch()], val_check_interval=interval, **options)
    assert due == validated and 1 < len(due) < 30


def test_an_epoch_is_logged_when_it_is_saved(tmp_path: Path) -> None:
    """`RunCheckpoint.on_train_epoch_end`."""
    seen: list[list[float]] = []
    watch = LambdaCallback(
        on_train_epoch_end=lambda _, task: task.log("ended", 1.0),
        on_save_checkpoint=lambda *_: seen.append(logged(tmp_path / "logs", "ended")),
    )
    saver = RunCheckpoint(tmp_path, save_last=True, save_top_k=0)
    options = {"logger": CSVLogger(tmp_path, "logs", ""), "log_every_n_steps": 1}
    callbacks = [watch, saver]
    fit(Line(), tmp_path, exact=True, callbacks=callbacks, enable_checkpointing=True, **options)
    assert seen == [[1.0]]


def test_every_second_epoch_is_the_second(tmp_path: Path) -> None:
    """`FitLoop.on_advance_end`."""
    saver = RunCheckpoint(tmp_path / "own", "{epoch}", every_n_epochs=2, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_epochs": 3}
    fit(Line(), tmp_path, exact=True, callbacks=[saver], **options)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["epoch=1.ckpt"]


@pytest.mark.parametrize("kind, step", [(ModelCheckpoint, 4), (RunCheckpoint, 8)])
def test_the_latest_of_equal_scores_is_the_best(kind: Any, step: int, tmp_path: Path) -> None:
    """`RunCheckpoint.check_monitor_top_k`; Lightning keeps the first."""
    saver = kind(tmp_path / "own", monitor="val_loss", save_on_train_epoch_end=False)
    options = {"enable_checkpointing": True, "max_epochs": 2}
    fit(Line(lr=0.0), tmp_path, exact=True, callbacks=[saver], **options)
    assert torch.load(saver.best_model_path, weights_only=True)["global_step"] == step
