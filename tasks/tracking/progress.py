"""Progress on a terminal as a bar, elsewhere as plain lines, and how long training will take."""

import math
import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, RichProgressBar

from tasks.base import Task


def progress_callbacks(wanted: bool | None, max_time: Any) -> list[Callback]:
    """The progress display: none if `wanted` is false, a rich bar on a terminal, else lines.

    With an estimate of the time, if none was given as the limit.
    """
    if wanted is False:
        return []
    estimates: list[Callback] = [TimeEstimate()] if max_time is None else []
    if sys.stdout.isatty():
        return [RichProgressBar(leave=False, refresh_rate=10), *estimates]
    return [ProgressLines(), *estimates]


class ProgressLines(Callback):
    """One line after each validation, at most one every `seconds`, for logs and pipes."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self.last = 0.0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        is_last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
        is_final = is_last_epoch or trainer.global_step == trainer.max_steps
        if time.monotonic() - self.last < self.seconds and not is_final:
            return
        self.last = time.monotonic()
        metrics = sorted(trainer.callback_metrics.items())
        values = "  ".join(
            f"{name} {float(value):.4f}"
            for name, value in metrics
            if name == "train/loss" or name.startswith("val/")
        )
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        steps = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        print(
            f"epoch {trainer.current_epoch + 1}{epochs}  step {trainer.global_step}{steps}  "
            f"{values}",
            flush=True,
        )


class TimeEstimate(Callback):
    """Says how long training will take: after some seconds, and again after the first validation.

    The second time only if it changes by more than 10 %. Says nothing if training has no end.

    Args:
        seconds: Of training steps before the first estimate.
    """

    def __init__(self, seconds: float = 4.0) -> None:
        self.seconds = seconds
        self.batches = -1  # of training, in `train_seconds`; the first one only warms up
        self.train_seconds = 0.0
        self.validations = 0
        self.validation_seconds = 0.0
        self.clock = 0.0
        self.is_due = True
        self.end = 0.0  # expected, as last said

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        passed = self._passed()
        if self.batches >= 0:
            self.train_seconds += passed
        self.batches += 1
        if self.is_due and self.train_seconds >= self.seconds:
            self.is_due = False
            self._say(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.batches > 0:
            self.train_seconds += self._passed()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self.validation_seconds += self._passed()
        self.validations += 1
        if self.end and self.validations == 1:
            self._say(trainer, pl_module)

    def _passed(self) -> float:
        """Seconds since it was last asked."""
        now = time.monotonic()
        passed = now - self.clock
        self.clock = now
        return passed

    def _say(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the estimate, if it is not within 10 % of what was said."""
        if not trainer.is_global_zero or self.batches < 1:
            return
        left = self.seconds_left(trainer, pl_module)
        now = time.monotonic()
        if not 0 < left < math.inf:
            return
        if self.end and abs(now + left - self.end) < 0.1 * left:
            return
        self.end = now + left
        text = f"training takes about {duration(left)} more"
        bar = trainer.progress_bar_callback
        if bar:
            bar.print(text)
        else:
            print(text, flush=True)

    def seconds_left(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        """Of training steps and validations, at their speed until now; infinity without an end.

        Until there was a validation, its batches are taken to cost a third of those of training.
        """
        assert isinstance(pl_module, Task)
        per_batch = self.train_seconds / max(1, self.batches)
        left = pl_module.total_steps() - trainer.global_step
        if left == math.inf:
            return left
        left_batches = left * trainer.accumulate_grad_batches
        if self.validations:
            per_validation = self.validation_seconds / self.validations
        else:
            data = pl_module.datamodule
            size = data.eval_batch_size / data.batch_size
            per_validation = sum(trainer.num_val_batches) * size * per_batch / 3
        every = (trainer.val_check_batch or math.inf) * (trainer.check_val_every_n_epoch or 1)
        return left_batches * per_batch + left_batches / every * per_validation


def duration(seconds: float) -> str:
    """45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
