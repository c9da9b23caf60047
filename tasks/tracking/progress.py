"""Progress on a terminal as a bar, elsewhere as plain lines."""

import sys
import time

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, RichProgressBar


def progress_bar_callbacks(wanted: bool | None) -> list[Callback]:
    """The progress display: none if `wanted` is false, a rich bar on a terminal, else lines."""
    if wanted is False:
        return []
    if sys.stdout.isatty():
        return [RichProgressBar(leave=False, refresh_rate=10)]
    return [ProgressLines()]


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
