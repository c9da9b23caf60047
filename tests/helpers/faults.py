"""Faults for one process of a run, at kill points: signals, full disks, random numbers."""

import io
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytorch_lightning.plugins import MixedPrecision

from tasks.base import Task
from tasks.cli.lightning_cli import TaskCLI
from tasks.distributed import launch
from tasks.training import trainer_options

Act = Callable[..., Any]
KILL_POINTS: dict[str, tuple[Any, str, int]] = {  # a function, and which of its calls
    "step": (Task, "training_step", 8),  # most often while gradients accumulate
    "half-written checkpoint": (torch, "save", 2),
    "validation": (Task, "validation_step", 1),
    "test": (Task, "test_step", 1),
    "set-up": (Task, "configure_model", 1),
    "end": (Task, "on_train_end", 1),
    "before the test": (TaskCLI, "final_metrics", 1),
    "results": (TaskCLI, "finish", 1),
}


def call_at(point: str, act: Act) -> None:
    """Call `act` with the arguments of a function, before one of its calls."""
    owner, name, number = KILL_POINTS[point]
    real = getattr(owner, name)
    calls = 0

    def patched(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        if owner is torch:
            counts = isinstance(arguments[1], io.BufferedWriter)
        else:
            counts = not arguments[0].trainer.sanity_checking
        calls += counts
        if counts and calls == number:
            act(*arguments)
        return real(*arguments, **options)

    setattr(owner, name, patched)


def send_signal(point: str, number: int = signal.SIGKILL, times: int = 1) -> None:
    """Have this process send itself a signal; of a checkpoint, half is written by then."""
    write = torch.save

    def act(*arguments: Any) -> None:
        if point == "half-written checkpoint":
            buffer = io.BytesIO()
            write(arguments[0], buffer)
            arguments[1].write(buffer.getvalue()[: buffer.tell() // 2])
            arguments[1].flush()
        for _ in range(times):
            os.kill(os.getpid(), number)

    call_at(point, act)


def pause(point: str, seconds: float) -> None:
    call_at(point, lambda *_: time.sleep(seconds))


def fill_disk(point: str, size: int) -> None:
    """From then on no file can have more than `size` bytes."""
    call_at(point, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))


def sample_between_steps() -> None:
    """Add to gradients numbers that hooks sample from all global generators, on all ranks."""

    def patch(name: str) -> None:
        real = getattr(Task, name)

        def hook(self: Any, *arguments: Any) -> Any:
            self.sampled = torch.rand(()) + random.random() + np.random.rand()
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(self.sampled)
            return real(self, *arguments)

        setattr(Task, name, hook)

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        for parameter in self.net.parameters():
            parameter.grad += self.sampled

    for name in ("on_train_epoch_start", "on_train_batch_start", "on_validation_epoch_start"):
        patch(name)
    Task.on_before_optimizer_step = on_before_optimizer_step


def scale_gradients(put: Act = setattr, **options: float) -> None:
    """Compute in float16 with a gradient scaler, as 16-mixed does on a GPU; on a CPU Lightning has
    neither.

    Args:
        put: `setattr`, or that of a `MonkeyPatch`.
        options: of the scaler.
    """
    scaler: Any = torch.amp.GradScaler
    put(trainer_options, "default_precision", lambda _: None)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler("cpu", **options))]
    put(launch, "slurm_plugins", lambda: plugins)
