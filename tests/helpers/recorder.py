"""Short runs of a tiny model that keeps every batch that it is given."""

from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn


class Recorder(LightningModule):
    """Learns one number from the means of its batches: its bits depend on all of them, in order."""

    def __init__(self, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.asks_for_steps = asks_for_steps  # before the fit, which sets its loader up early
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[dict[str, Any]] = []
        self.validated: list[dict[str, Any]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(as_lists(batch))
        means = [value.float().mean() for value in batch.values() if isinstance(value, Tensor)]
        return (self.weight * torch.stack(means).sum() - 1).square()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(as_lists(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def as_lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in batch.items()}


def tiny_trainer(*callbacks: Callback, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_epochs": 3, "num_sanity_val_steps": 0, **quiet, **options}
    return Trainer(callbacks=list(callbacks), use_distributed_sampler=False, **options)


def fit(
    data: LightningDataModule, folder: Path, ckpt: Path | None = None, **options: Any
) -> Recorder:
    """Trains for three epochs; leaves `step=N.ckpt` in the folder after each step."""
    save = {"every_n_train_steps": 1, "save_top_k": -1, **options.pop("save", {})}
    callbacks = [ModelCheckpoint(folder, "{step}", **save), *options.pop("callbacks", [])]
    torch.manual_seed(0)
    recorder = Recorder(options.pop("asks_for_steps", False))
    tiny_trainer(*callbacks, **options).fit(recorder, data, ckpt_path=ckpt)
    return recorder
