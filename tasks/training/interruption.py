"""Ends a training run at SIGTERM or Ctrl-C, to any of its processes, with a checkpoint to go on from."""

import math
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback

from tasks.cli.signals import SIGNALS, Stopped
from tasks.training.trainer_options import FolderCheckpoint


class Interruption(Callback):
    """All ranks agree after each optimizer step, and after each batch of a validation, whether one of them was asked.

    They save the latest optimizer step and stop. In a validation that is the step before it; it will be done again.

    Args:
        last: saves the checkpoint.
    """

    def __init__(self, last: FolderCheckpoint) -> None:
        self.last = last
        self.group: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let ranks that compute on GPUs agree without waiting for those."""
        if trainer.world_size > 1 and dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From now on a signal waits for the end of a step."""
        SIGNALS.waiting = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop where a signal came after the last step."""
        SIGNALS.waiting = False  # one that comes after this is raised
        number = self.agreed(trainer)
        SIGNALS.noted = 0
        if number:
            raise Stopped(number)

    def agreed(self, trainer: pl.Trainer) -> int:
        """The signal that a rank got, the same number on all of them; 0 for none."""
        if trainer.world_size == 1:
            return SIGNALS.noted
        number = torch.tensor(SIGNALS.noted)
        dist.all_reduce(number, dist.ReduceOp.MAX, self.group)
        if number:
            launcher: Any = trainer.strategy.launcher
            getattr(
                launcher, "procs", []
            ).clear()  # else the first is ended where another ends before it
        return int(number)

    def stop_if_asked(self, trainer: pl.Trainer) -> None:
        """Save and stop where a rank got a signal.

        Raises:
            Stopped: on every rank.
        """
        if number := self.agreed(trainer):
            self.last.save_now(trainer)
            SIGNALS.since = (
                math.inf
            )  # torchrun sends SIGTERM to those that have not ended when the first one has
            raise Stopped(number)

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After an optimizer step."""
        self.stop_if_asked(trainer)

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """After a batch of a validation, of which all ranks have as many."""
        self.stop_if_asked(trainer)
