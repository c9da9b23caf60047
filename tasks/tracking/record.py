"""The record of a run: its configuration at the start, throughput on the way, summary and pictures
at the end.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn

from datamodules.utils.files import write_text
from modules.schema import checked
from tasks.base import Task
from tasks.checkpoints.contents import read_count
from tasks.cli.parsing import flat
from tasks.lightning_patches import is_accumulating
from tasks.tracking.metrics_csv import MetricsCSV, read_rows
from tasks.tracking.report import draw_curves
from tasks.tracking.run_folder import (
    code_version,
    lock,
    make_run_folder,
    unlock,
    write_config,
    write_summary,
)
from tasks.training.trainer_options import check_monitors


class RunRecord(Callback):
    """Write `config.yaml` once the data have decided what they decide, log samples/s, write
    `summary.json`.

    Args:
        folder: run folder.
        options: the command's options, primitives only.
        changes: of them, in a run that goes on.
    """

    def __init__(self, folder: Path, options: dict[str, Any], changes: Sequence[str] = ()) -> None:
        self.folder = folder
        self.options = options
        self.changes = changes
        self.samples = 0  # of training
        self.seconds = 0.0  # that they took
        self.clock_start = 0.0
        self.new_samples = 0  # since the clock was started
        self.step_samples = 0  # of an optimizer step that is not complete
        self.code: dict[str, str | None] = {}  # version and commit that train
        self.finished = False
        self.lock: BinaryIO | None = None
        self.earlier_seconds = 0.0  # of earlier processes of a continued run
        self.process_start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """What `summary.json` counts, so that a continued run counts on."""
        now = time.perf_counter()
        new_seconds = now - self.clock_start if self.new_samples else 0.0
        return {
            "samples": self.samples + self.new_samples - self.step_samples,
            "seconds": self.seconds + new_seconds,
            "elapsed": self.earlier_seconds + now - self.process_start,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on, unless it is the tested checkpoint of the fit that was just counted."""
        if self.finished:
            return
        own = f"callbacks.{self.state_key}"
        self.samples = read_count(state_dict, own, "samples")
        self.seconds = checked(float, state_dict.get("seconds"), own)
        self.earlier_seconds = checked(float, state_dict.get("elapsed"), own)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hand the options to the task, which keeps them in its checkpoints."""
        assert isinstance(pl_module, Task)
        pl_module.run_config = self.options
        if trainer.is_global_zero and not self.code:
            self.code = code_version()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `config.yaml`; the data are known now, and what a continued run changed fits its
        checkpoint.
        """
        assert isinstance(pl_module, Task)
        check_monitors(trainer, pl_module.logged())
        self.start_clock(pl_module)  # a run that goes on begins no epoch
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        make_run_folder(self.folder, pl_module.name)
        self.lock = lock(self.folder)
        for change in self.changes:
            print(f"changed for the rest of the run: {change}")
        config = pl_module.resolved()
        write_config(self.folder, config)
        pl_module.keep_files(self.folder)
        others = [logger for logger in trainer.loggers if not isinstance(logger, MetricsCSV)]
        hyperparameters = flat(config) | pl_module.notes() | self.code if others else {}
        for logger in others:
            logger.log_hyperparams(hyperparameters)
            if isinstance(logger, pl.loggers.WandbLogger):
                write_text(self.folder / "wandb_id", str(logger.version))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop counting, and let others have the folder."""
        self.finished = True
        if self.lock:
            unlock(self.folder, self.lock)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock; validation in between is not counted."""
        self.start_clock(pl_module)

    def start_clock(self, task: Any) -> None:
        """Log samples/s of what comes from now on."""
        self.clock_start = time.perf_counter()
        self.new_samples = 0
        task.untimed_seconds = 0.0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the learning rate of each role of parameters, where they differ; `train/lr` is the
        largest.
        """
        rates = dict[str, float]()
        for group in optimizer.param_groups:
            rates[group["name"]] = max(group["lr"], rates.get(group["name"], 0.0))
        if len(set(rates.values())) > 1:
            pl_module.log_dict({f"train/lr_{name}": rate for name, rate in rates.items()})

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count samples; log samples/s wherever the loggers log."""
        assert isinstance(pl_module, Task)
        samples = pl_module.num_samples(batch) * trainer.world_size
        self.new_samples += samples
        self.step_samples = self.step_samples + samples if is_accumulating(trainer) else 0
        every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if (
            trainer.global_step % every == 0
            or trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        ):
            rate = self.add_up(pl_module)
            pl_module.log_dict({"train/samples_per_s": rate} | pl_module.rates(rate))

    def add_up(self, task: Task) -> float:
        """Count samples and seconds since the clock was started, and start it again; samples/s."""
        rate_samples = self.new_samples
        seconds = time.perf_counter() - self.clock_start - task.untimed_seconds
        self.samples += rate_samples
        self.seconds += seconds
        self.start_clock(task)
        return rate_samples / seconds

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count what came before."""
        assert isinstance(pl_module, Task)
        if self.new_samples:
            self.add_up(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock again."""
        self.start_clock(pl_module)

    def finish(
        self, trainer: pl.Trainer, task: Task, metrics: Mapping[str, Any], seconds: float
    ) -> dict[str, str]:
        """Write `summary.json` and the pictures.

        Args:
            trainer: after its test, or where there was none, after training.
            task: the task it trained.
            metrics: final metrics by their logged names, and what there is to say beside them.
            seconds: from the start of this process's work to now.

        Returns:
            The task's closing texts, by name.
        """
        rate = self.samples / self.seconds if self.seconds else 0.0
        for logger in trainer.loggers:
            logger.save()
        draw_curves(read_rows(self.folder / "metrics.csv"), self.folder / "curves.png")
        if trainer.state.fn == TrainerFn.TESTING:
            task.draw_results(self.folder)
        texts = task.closing_texts(self.folder)
        rates = task.rates(rate) if rate else {}
        write_summary(
            self.folder,
            {
                **metrics,
                **texts,
                "git_commit": self.code.get("git_commit"),
                "parameters": sum(p.numel() for p in task.net.parameters()),
                "samples_per_s": round(rate, 1) or None,
                **{
                    name.removeprefix("train/"): float(f"{value:.4g}")
                    for name, value in rates.items()
                },
                "seconds": round(self.earlier_seconds + seconds, 1),
                "epochs": trainer.current_epoch,
                "data": task.datamodule.origin,
                "steps": trainer.global_step,
            },
        )
        return texts
