"""Samples of a language model during training, in the run folder and in the loggers."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from datamodules.utils.files import write_text
from tasks.tracking.media import Table, log_media

Sample = tuple[str, str]  # prompt, continuation


class Samples(Callback):
    """Writes `samples/step_N.txt` every `every` optimizer steps, and logs the texts.

    The task's `sample_texts` generates them on the first rank, or on all ranks if weights are
    sharded. The time does not count as training time.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.latest = 0  # step whose samples were written last

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.latest = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
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
        if not (found and trainer.is_global_zero):
            return
        write_samples(Path(trainer.default_root_dir), f"step_{step:07}", found)
        table = Table(("step", "prompt", "text"), [(step, *sample) for sample in found])
        log_media(trainer, {"samples": table})
        task.untimed_seconds += time.perf_counter() - start


def write_samples(folder: Path, name: str, samples: list[Sample]) -> None:
    """Write `samples/NAME.txt` in a run folder: each prompt with its text, dashes in between."""
    (folder / "samples").mkdir(exist_ok=True)
    texts = [prompt + text for prompt, text in samples]
    write_text(folder / "samples" / f"{name}.txt", f"\n{'-' * 80}\n".join(texts) + "\n")
