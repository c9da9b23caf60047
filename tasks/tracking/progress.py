"""Progress on a terminal as a bar, elsewhere as plain lines, and how long training will take."""

import math
import shutil
import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ProgressBar

from tasks.base import Task

SECONDS_BETWEEN_LINES = 30.0  # after which a line is due, if the output is not a terminal


def progress_callbacks(wanted: bool | None, max_time: Any) -> list[Callback]:
    """The progress display: none if `wanted` is false, with a bar on a terminal, else lines.

    With an estimate of the time, if none was given as the limit.
    """
    if wanted is False:
        return []
    estimates: list[Callback] = [TimeEstimate()] if max_time is None else []
    display: Callback = Bar() if sys.stdout.isatty() else ProgressLines()
    return [display, MeanLossRestart(), *estimates]


def progress_line(trainer: pl.Trainer, task: pl.LightningModule, width: float = math.inf) -> str:
    """Epoch, step, losses, and metrics of the latest validation, the task's monitor first.

    The training loss is the mean over the steps since the validation before, or since the start of
    the epoch if that was later. What does not fit into `width` columns is left out.
    """
    assert isinstance(task, Task)
    loss = task.loss_weighting.mean_loss()
    metrics = trainer.callback_metrics | ({} if loss is None else {"train/loss": loss})
    validated = sorted(name for name in metrics if name.startswith("val/"))
    steps = f"/{task.total_steps():.0f}" if trainer.max_steps > 0 else ""
    line = f"{epoch_of(trainer)}  step {trainer.global_step}{steps}"
    for name in dict.fromkeys(("train/loss", "val/loss", task.monitor, *validated)):
        value = f"  {name} {float(metrics[name]):.4f}" if name in metrics else ""
        if len(line) + len(value) > width:
            break
        line += value
    return line


def epoch_of(trainer: pl.Trainer) -> str:
    """The present epoch, from 1, of how many; - if there is no limit."""
    last = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else "-"
    return f"epoch {trainer.current_epoch + 1}/{last}"


def evaluation_of(trainer: pl.Trainer) -> tuple[str, int | float]:
    """The present evaluation's name, and its batches on each process."""
    if trainer.testing:
        return "test", sum(trainer.num_test_batches)
    if trainer.predicting:
        return "predict", sum(trainer.num_predict_batches)
    if trainer.sanity_checking:
        return "sanity check", sum(trainer.num_sanity_val_batches)
    return "validation", sum(trainer.num_val_batches)


def is_fit(trainer: pl.Trainer) -> bool:
    """Whether this is a step or a validation of `fit`, on the process that prints."""
    is_training = trainer.state.fn == "fit" and not trainer.sanity_checking
    return is_training and trainer.is_global_zero


class MeanLossRestart(Callback):
    """Restarts the mean loss of `progress_line` with each epoch, and after each validation."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        pl_module.loss_weighting.restart()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_epoch_start(trainer, pl_module)


class ProgressLines(Callback):
    """A line after each validation, and after a batch if the last line was 30 s ago or more.

    The latter also within validations, tests and predictions.
    """

    def __init__(self) -> None:
        self.last = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if is_fit(trainer) and self._is_due():
            self._print(progress_line(trainer, pl_module))

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.is_global_zero and self._is_due():
            title, total = evaluation_of(trainer)
            self._print(f"{title}  batch {batch_idx + 1}/{total}")

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if is_fit(trainer):
            self._print(progress_line(trainer, pl_module))

    def _is_due(self) -> bool:
        return time.monotonic() - self.last >= SECONDS_BETWEEN_LINES

    def _print(self, line: str) -> None:
        self.last = time.monotonic()
        print(line, flush=True)


class Bar(ProgressBar):
    """A bar of one line, at most 80 columns, for the present epoch or evaluation.

    Above it stay the lines of `ProgressLines`, one for each validation, as far as
    they fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True
        self.bar: Any = None
        self.task_id: Any = None
        self.epoch_total = 0.0  # batches of the epoch
        self.loss_shown = 0.0  # when

    def disable(self) -> None:
        """Called on all processes but the first."""
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the bar."""
        if self.bar is not None:
            self.bar.console.print(*args, highlight=False, **kwargs)
        else:
            print(*args, **kwargs)

    def show(self, title: str, total: float) -> None:
        """Starts the bar of an epoch or an evaluation, in place of that before it."""
        self.hide()
        if not self.is_enabled:
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console()
        console.width = min(console.width, 80)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[more]}"),
        )
        self.bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
        self.task_id = self.bar.add_task(title, total=None if total == math.inf else total, more="")
        self.bar.start()

    def hide(self) -> None:
        """Removes the bar."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def move(self, completed: int, more: str | None = None) -> None:
        """Shows how many batches are done; `more` replaces the text after the bar."""
        if self.bar is not None:
            fields = {} if more is None else {"more": more}
            self.bar.update(self.task_id, completed=completed, **fields)

    # Hooks ----------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch_total = self.total_train_batches
        self.show(epoch_of(trainer), self.epoch_total)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.move(batch_idx + 1)
        now = time.monotonic()
        loss = trainer.progress_bar_metrics.get("train/loss")
        is_due = now - self.loss_shown > 0.5 or batch_idx + 1 >= self.epoch_total
        if loss is not None and is_due:  # reading it waits for a GPU
            self.loss_shown = now
            self.move(batch_idx + 1, f"loss {float(loss):.4f}")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.show(*evaluation_of(trainer))

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.move(batch_idx + 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.hide()
        if not is_fit(trainer):
            return
        width = shutil.get_terminal_size().columns
        print(progress_line(trainer, pl_module, width), flush=True)
        batch = trainer.fit_loop.batch_idx + 1
        if batch < self.epoch_total:  # within an epoch
            self.show(epoch_of(trainer), self.epoch_total)
            self.move(batch)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.hide()

    on_test_end = on_train_end
    on_predict_end = on_train_end

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.hide()


class TimeEstimate(Callback):
    """Prints how long training will take, and prints it again if that changes by a quarter.

    The speed is that of windows of 4, 8, 16, ... s of training steps, and of the first validation.
    Prints nothing if training has no end, or ends before another window would.

    Args:
        seconds: Of the first window.
    """

    def __init__(self, seconds: float = 4.0) -> None:
        self.seconds = seconds
        self.window = seconds
        self.seconds_per_batch = 0.0  # as last measured
        self.batches = -1  # of training, in `train_seconds`; the first one only warms up
        self.train_seconds = 0.0
        self.validations = 0
        self.validation_seconds = 0.0
        self.clock = 0.0
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
        if self.batches > 0 and self.train_seconds >= self.window:
            self.seconds_per_batch = self.train_seconds / self.batches
            self.window *= 2
            self.train_seconds = 0.0
            self.batches = 0
            self._say(trainer, pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        passed = self._passed()
        if self.batches > 0:
            self.train_seconds += passed

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
        """Prints the estimate, unless training ends soon or the last one was about the same."""
        if not trainer.is_global_zero:
            return
        left = self.seconds_left(trainer, pl_module)
        now = time.monotonic()
        if not 2 * self.seconds <= left < math.inf:
            return
        if self.end and abs(now + left - self.end) < 0.25 * left:
            return
        self.end = now + left
        text = f"about {duration(left)} of training left"
        bar = trainer.progress_bar_callback
        if bar:
            bar.print(text)
        else:
            print(text, flush=True)

    def seconds_left(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        """At the speed of the last steps and validations; infinity without an end.

        Until there was a validation, its batches are taken to cost a third of those of training.
        """
        assert isinstance(pl_module, Task)
        per_batch = self.seconds_per_batch
        left = pl_module.total_steps() - trainer.global_step
        if left == math.inf:
            return left
        per_step: float = trainer.accumulate_grad_batches
        batches = trainer.num_training_batches
        if batches < math.inf:  # the last step of an epoch may have fewer
            per_step = batches / math.ceil(batches / per_step)
        left_batches = round(left * per_step)
        if self.validations:
            per_validation = self.validation_seconds / self.validations
        else:
            data = pl_module.datamodule
            size = data.eval_batch_size / data.batch_size
            per_validation = sum(trainer.num_val_batches) * size * per_batch / 3
        every = (trainer.val_check_batch or math.inf) * (trainer.check_val_every_n_epoch or 1)
        return left_batches * per_batch + math.ceil(left_batches / every) * per_validation


def duration(seconds: float) -> str:
    """45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
