"""Progress on a terminal as a bar, elsewhere as plain lines."""

import sys
import time

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, RichProgressBar


def progress_bar(wanted: bool | None) -> list[Callback]:
    """The progress display: none where it is switched off, a rich bar on a terminal, else lines."""
    if wanted is False:
        return []
    return (
        [RichProgressBar(leave=False, refresh_rate=10)]
        if sys.stdout.isatty()
        else [ProgressLines()]
    )


class ProgressLines(Callback):
    """One line after each validation, at most one every `seconds`, for logs and pipes.

    Args:
        seconds: shortest time between two lines of one stage.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds, self.last = seconds, 0.0

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the epoch, the step and the latest scalar metrics."""
        final = (
            trainer.current_epoch + 1 == trainer.max_epochs
            or trainer.global_step == trainer.max_steps
        )
        if trainer.sanity_checking or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        if time.monotonic() - self.last < self.seconds and not final:
            return
        self.last = time.monotonic()
        shown = {
            n: float(v)
            for n, v in trainer.callback_metrics.items()
            if n in ("train/loss", "val/loss") or n.startswith("val/")
        }
        values = "  ".join(f"{name} {value:.4f}" for name, value in sorted(shown.items()))
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        steps = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        print(
            f"epoch {trainer.current_epoch + 1}{epochs}  step {trainer.global_step}{steps}  "
            f"{values}",
            flush=True,
        )
