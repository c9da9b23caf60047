"""Texts that a language model in training writes, in the run folder and in the loggers that can
show text.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from datamodules.utils.files import write_text
from tasks.tracking.media import Table, log_media

Sample = tuple[str, str]  # prompt, and how it goes on


class Samples(Callback):
    """Every so many steps write `samples/step_N.txt`, and show its texts in the loggers that can.

    The task's `sample_texts` makes them. Only the first rank does, or all of them where they hold
    sharded weights; the time is no training time.

    Args:
        every: number of optimizer steps.
    """

    def __init__(self, every: int) -> None:
        self.every, self.latest = every, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave alone the step that a continued run begins with."""
        self.latest = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Write after the steps whose turn it is."""
        step = trainer.global_step
        if step % self.every or step == self.latest or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self.latest = step
        whole = getattr(trainer.strategy, "whole", None)
        if not (trainer.is_global_zero or whole):
            return
        task: Any = pl_module
        start = time.perf_counter()
        with whole() if whole else nullcontext():
            found: list[Sample] = task.sample_texts()
        if not trainer.is_global_zero:
            return
        write_samples(Path(trainer.default_root_dir), f"step_{step:07}", found)
        log_media(
            trainer,
            {"samples": Table(("step", "prompt", "text"), [(step, *sample) for sample in found])},
        )
        task.untimed_seconds += time.perf_counter() - start


def write_samples(folder: Path, name: str, samples: list[Sample]) -> None:
    """Write `samples/NAME.txt` in a run folder: each text with its prompt, parted by lines."""
    (folder / "samples").mkdir(exist_ok=True)
    texts = [prompt + text for prompt, text in samples]
    write_text(folder / "samples" / f"{name}.txt", f"\n{'-' * 80}\n".join(texts) + "\n")
