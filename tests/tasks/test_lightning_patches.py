"""Each patch of Lightning is still needed: a test fails once Lightning does the same by itself."""

import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger
from torch.utils.data import DataLoader

from tasks.cli.lazy_imports import _UNUSED
from tests.helpers.command import process


class Line(pl.LightningModule):
    """One weight."""

    def __init__(self, **optimizer: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), **self.optimizer)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())


def fit(task: Line, folder: Path, path: Path | None = None, **options: Any) -> pl.Trainer:
    options = {"max_epochs": 1, "enable_checkpointing": False, **options}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(accelerator="cpu", default_root_dir=folder, **options)
    data = DataLoader(torch.ones(4, 1), batch_size=1)  # type: ignore[arg-type]
    trainer.fit(task, data, data, ckpt_path=path, weights_only=True)
    return trainer


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


def test_lightning_replaces_handlers_of_sigterm(tmp_path: Path) -> None:
    """`use_exact_loops`."""
    seen: list[Any] = []
    watch = lambda *_: seen.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
    before = signal.getsignal(signal.SIGTERM)
    fit(Line(), tmp_path, callbacks=[LambdaCallback(on_train_start=watch)])
    assert seen != [before]


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
