"""The record of a run: its config, throughput, summary and pictures."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, Timer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_warn

from datamodules.utils.files import write_text
from modules.kernels.cpu import NAME, kernels
from tasks import __version__
from tasks.base import Task
from tasks.cli.config_files import dump_yaml
from tasks.lightning_patches import is_accumulating
from tasks.options import flat
from tasks.tracking.metrics_csv import MetricsCSV, read_rows
from tasks.tracking.report import DIGITS, draw_curves, evaluated_samples, format_count
from tasks.tracking.run_folder import create_run_folder, git_commit, lock, versions
from tasks.training.trainer_options import (
    check_evaluation_limits,
    check_monitors,
    check_validation_interval,
    epoch_batches,
)

FEW_STEPS = 100  # below which a run learns little
LINE_WIDTH = 100  # up to which the line on the data names the classes
PRECISIONS = {  # Lightning's names of them, in words
    "32-true": "float32",
    "64-true": "float64",
    "16-true": "float16",
    "bf16-true": "bfloat16",
    "16-mixed": "float16 mixed precision",
    "bf16-mixed": "bfloat16 mixed precision",
}


def device_name(device: torch.device) -> str:
    """Such as "cpu", or "cuda (NVIDIA H100)"."""
    if device.type != "cuda":
        return device.type
    return f"cuda ({torch.cuda.get_device_name(device)})"


def best_validation(rows: Sequence[Mapping[str, str]], task: Task) -> dict[str, Any]:
    """The best value of the task's monitor in `metrics.csv`, and its epoch, from 1.

    Of equal values the latest, as in `best.ckpt`. Values that are not finite count only if there
    are no others.
    """
    found = [(float(row[task.monitor]), int(row["epoch"])) for row in rows if task.monitor in row]
    found = [pair for pair in found if math.isfinite(pair[0])] or found
    if not found:
        return {}
    best = max if task.monitor_mode == "max" else min
    value, epoch = best(reversed(found), key=lambda pair: pair[0])
    return {f"best {task.monitor}": value, "best epoch": epoch}


def round_floats(value: Any) -> Any:
    """Floats in nested dicts with `DIGITS` significant digits; None, not NaN or infinity.

    JSON has neither of them.
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: round_floats(item) for key, item in value.items()}
    return value


def opening_lines(trainer: pl.Trainer, task: Task, folder: Path) -> list[str]:
    """What a run is about to do: its data, model, device, length and folder."""
    data = task.datamodule
    fraction = getattr(data.source, "label_fraction", 1.0)
    kept = f" ({100 * fraction:.3g} % of the labels)" if fraction < 1 else ""
    splits = {f"training{kept}": "train"}
    if trainer.enable_validation:
        splits["validation"] = "val"
    sizes = {name: len(data.dataset(split)) for name, split in splits.items()}
    test_size = data.test_size() if trainer.limit_test_batches else None
    if test_size is not None:
        sizes["test"] = test_size
    *first, last = [f"{size:,} {name}" for name, size in sizes.items()]
    counts = f"{', '.join(first)} and {last}" if first else last
    weights = sum(parameter.numel() for parameter in task.net.parameters())
    teacher = getattr(task, "teacher_config", None)
    taught = f", taught by {teacher.path}" if teacher and teacher.path else ""
    where = device_name(task.device)
    if task.device.type == "cpu":
        threads = torch.get_num_threads()
        where += f", {format_count(threads, 'thread')}"
    processes = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    steps = task.total_steps()
    length = "without end" if steps == math.inf else format_count(int(steps), "optimizer step")
    if trainer.global_step >= steps:
        length = f"nothing left of {length}"
    elif any(isinstance(callback, Timer) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        length = f"until --trainer.max_time, {length}"
    if 0 < trainer.global_step < steps:
        length += f", {trainer.global_step:,} of them done"
    return [
        data_line(task, f"{counts} {data.noun}"),
        f"model   {type(task.net).__name__}, {weights:,} parameters{taught}",
        f"device  {where}{processes}, {PRECISIONS.get(trainer.precision or '', trainer.precision)}",
        f"run     {length}, in {folder}",
    ]


def data_line(task: Task, samples: str) -> str:
    """The data, how many samples are used for what, the targets, and the columns of tables."""
    data = task.datamodule
    columns = data.source.chosen_columns()
    ending = f"; {columns}" if columns else ""
    line = f"data    {data.origin}: {samples}"
    return line + task.describe_targets(LINE_WIDTH - len(line)) + ending


class EvaluatedData(Callback):
    """Prints what `validate` or `test` evaluates."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        if not trainer.is_global_zero:
            return
        data = pl_module.datamodule
        split = pl_module.split
        size = f"{len(data.dataset(split)):,} {data.noun}"
        goal = {"val": "validate", "test": "test"}[split]
        samples = f"{size} to {goal}"
        if data.source.is_evaluated_whole(split) and len(data.dataset(split)) > 1:
            samples = f"all {samples}"
        elif data.source.is_held_out(split):
            samples += ", held out of the training split"
        print(data_line(pl_module, samples), flush=True)

    on_test_start = on_validation_start


class RunRecord(Callback):
    """Writes `config.yaml` and `summary.json`, and logs samples/s.

    Args:
        folder: Run folder.
        options: The command's options, primitives only.
        changes: Descriptions of options that a resumed run changes.
        command: The command line.
        names_length: Whether an option says how long to train.
    """

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        changes: Sequence[str] = (),
        command: str = "",
        names_length: bool = True,
    ) -> None:
        self.folder = folder
        self.names_length = names_length
        self.command = command
        self.options = options
        self.changes = changes
        self.samples = 0  # of training, before the clock was started
        self.seconds = 0.0  # that they took
        self.clock_start = 0.0
        self.new_samples = 0  # since the clock was started
        self.step_samples = 0  # of the incomplete optimizer step
        self.code: dict[str, str | None] = {}  # version and commit at the start
        self.finished = False
        self.lock: BinaryIO | None = None
        self.open_wandb = getattr(sys.modules.get("wandb"), "run", None)  # the caller's own
        self.earlier_seconds = 0.0  # of earlier processes of a resumed run
        self.process_start = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """Samples and seconds, for the `summary.json` of a resumed run."""
        now = time.perf_counter()
        new_seconds = 0.0
        if self.new_samples:
            new_seconds = now - self.clock_start - self.task.untimed_seconds
        return {
            "samples": self.samples + self.new_samples - self.step_samples,
            "seconds": self.seconds + new_seconds,
            "elapsed": self.earlier_seconds + now - self.process_start,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the counts of a resumed run; the test after a fit loads a checkpoint, too."""
        if self.finished:
            return
        self.samples = state_dict["samples"]
        self.seconds = state_dict["seconds"]
        self.earlier_seconds = state_dict["elapsed"]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the options to the task, which stores them in its checkpoints."""
        assert isinstance(pl_module, Task)
        pl_module.given_options = self.options
        if trainer.is_global_zero and not self.code:
            self.code = {"tessera": __version__, "git_commit": git_commit()}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        batches = epoch_batches(trainer, pl_module.datamodule.train_batches())
        check_validation_interval(trainer, batches)
        check_evaluation_limits(trainer, pl_module.datamodule)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write `config.yaml`, now that the data are known and the checkpoint is restored."""
        assert isinstance(pl_module, Task)
        check_monitors(trainer, pl_module.logged_metrics())
        self.start_clock(pl_module)  # a resumed run may start within an epoch
        # So that a run of few steps logs its last one.
        every = min(trainer.log_every_n_steps, pl_module.total_steps())  # type: ignore[attr-defined]
        trainer.log_every_n_steps = every  # type: ignore[attr-defined]
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        create_run_folder(self.folder, pl_module.name)
        self.lock = lock(self.folder)
        print(*opening_lines(trainer, pl_module, self.folder), sep="\n", flush=True)
        if not self.names_length and pl_module.total_steps() < FEW_STEPS:
            rank_zero_warn(
                f"{int(pl_module.total_steps())} optimizer steps are few: raise "
                "--trainer.max_epochs, or lower --data.batch_size."
            )
        for change in self.changes:
            print(f"changed for the rest of the run: {change}")
        options = pl_module.resolved_options()
        text = dump_yaml(options, sort_keys=False, width=120)
        write_text(self.folder / "config.yaml", text)
        pl_module.save_files(self.folder)
        others = [logger for logger in trainer.loggers if not isinstance(logger, MetricsCSV)]
        hyperparameters = flat(options) | pl_module.notes() | self.code if others else {}
        for logger in others:
            logger.log_hyperparams(hyperparameters)
            if isinstance(logger, pl.loggers.WandbLogger):
                write_text(self.folder / "wandb_id", str(logger.version))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finished = True

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start_clock(pl_module)

    def start_clock(self, task: Any) -> None:
        self.task = task
        self.clock_start = time.perf_counter()
        self.new_samples = 0
        task.untimed_seconds = 0.0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Log the learning rate of each parameter group, if their peaks differ."""
        rates = {f"train/lr_{group['name']}": group["lr"] for group in optimizer.param_groups}
        if len({group["initial_lr"] for group in optimizer.param_groups}) > 1:
            device = pl_module.device  # Python numbers would wait for the GPU
            tensors = {name: torch.full((), rate, device=device) for name, rate in rates.items()}
            pl_module.log_dict(tensors)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        assert isinstance(pl_module, Task)
        samples = pl_module.num_samples(batch) * trainer.world_size
        self.new_samples += samples
        self.step_samples = self.step_samples + samples if is_accumulating(trainer) else 0
        every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_last or trainer.global_step % every == 0:
            rate = self.add_up(pl_module)
            pl_module.log_dict({"train/samples_per_s": rate} | pl_module.rates(rate))

    def add_up(self, task: Task) -> float:
        """Add the counts to the totals, start the clock again, and return samples/s."""
        samples = self.new_samples
        seconds = time.perf_counter() - self.clock_start - task.untimed_seconds
        self.samples += samples
        self.seconds += seconds
        self.start_clock(task)
        return samples / seconds

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Task)
        if self.new_samples:
            self.add_up(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start_clock(pl_module)

    def finish(
        self, trainer: pl.Trainer, task: Task, metrics: Mapping[str, Any], seconds: float
    ) -> dict[str, str]:
        """Write `summary.json` and the pictures, and unlock the run folder.

        Args:
            trainer: After its test, or after training if there was none.
            task: The trained task.
            metrics: Final metrics by name, and notes on them.
            seconds: Since this process began.

        Returns:
            The task's closing texts, by name.
        """
        rate = self.samples / self.seconds if self.seconds else 0.0
        for logger in trainer.loggers:
            logger.save()
        rows = read_rows(self.folder / "metrics.csv")
        draw_curves(rows, self.folder / "curves.png", task.monitor)
        if trainer.state.fn == TrainerFn.TESTING:
            task.save_results(self.folder, "test")
        texts = task.closing_texts(self.folder)
        rates = task.rates(rate) if rate else {}
        summary: dict[str, Any] = {
            "task": task.name,
            "command": self.command,
            **metrics,
            **best_validation(rows, task),
            **texts,
            "git_commit": self.code.get("git_commit"),
            "parameters": sum(p.numel() for p in task.net.parameters()),
            "samples_per_s": round(rate, 1) or None,
        }
        for name, value in rates.items():
            summary[name.removeprefix("train/")] = float(f"{value:.4g}")
        summary |= {
            "seconds": round(self.earlier_seconds + seconds, 1),
            "epochs": trainer.current_epoch,
            "data": task.datamodule.origin,
            "steps": trainer.global_step,
        }
        if trainer.state.fn == TrainerFn.TESTING:
            summary["test_samples"], _ = evaluated_samples(trainer, task.datamodule, "test")
        summary["device"] = device_name(trainer.strategy.root_device)
        summary["versions"] = versions()
        summary["processor"] = {"name": NAME, "threads": torch.get_num_threads(), **kernels()}
        write_text(self.folder / "summary.json", json.dumps(round_floats(summary), indent=2) + "\n")
        if self.lock:
            self.lock.close()
        for logger in trainer.loggers:
            run = isinstance(logger, pl.loggers.WandbLogger) and logger.experiment
            if run and run is not self.open_wandb:
                run.finish()  # else the next run of this process would go into it
        return texts


def save_evaluation(
    folder: Path,
    split: str,
    trainer: pl.Trainer,
    task: Task,
    command: str,
    metrics: Mapping[str, Any],
) -> None:
    """Write `test.json` or `val.json` of an evaluation of the split "test" or "val"."""
    seen, _ = evaluated_samples(trainer, task.datamodule, split)
    record = {
        "task": task.name,
        "command": command,
        "device": device_name(trainer.strategy.root_device),
        f"{split}_samples": seen,
        **metrics,
    }
    write_text(folder / f"{split}.json", json.dumps(round_floats(record), indent=2) + "\n")
