"""Ends training at SIGTERM or Ctrl-C, to any of its processes, with a checkpoint to resume from."""

from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback

from tasks.cli.signals import SIGNALS, Stopped
from tasks.lightning_patches import RunCheckpoint


class Interruption(Callback):
    """Stops all ranks after an optimizer step or a validation batch if one of them got a signal.

    All save the latest optimizer step; a validation that has not ended is done again.
    """

    def __init__(self, last: RunCheckpoint) -> None:
        self.last = last
        self.group: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let ranks on GPUs exchange signals over CPUs, without waiting for the GPUs."""
        if trainer.world_size > 1 and dist.get_backend() != "gloo":
            self.group = dist.new_group(backend="gloo")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        SIGNALS.mode = "defer"

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        SIGNALS.mode = "raise"
        number = self.agreed_signal(trainer)
        SIGNALS.received = 0
        if number:
            raise Stopped(number)

    def agreed_signal(self, trainer: pl.Trainer) -> int:
        """The signal that a rank got, the same number on all of them; 0 for none."""
        if trainer.world_size == 1:
            return SIGNALS.received
        number = torch.tensor(SIGNALS.received)
        dist.all_reduce(number, dist.ReduceOp.MAX, self.group)
        if number:
            # Lightning would kill the first process if another ends before it.
            SIGNALS.launched.clear()
        return int(number)

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and raise `Stopped` on every rank if one got a signal."""
        if number := self.agreed_signal(trainer):
            SIGNALS.received = number  # torchrun sends SIGTERM to the ranks that end later
            self.last.save_now(trainer)
            raise Stopped(number)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """All ranks have equally many validation batches."""
        self.after_step(trainer, pl_module)
