"""The CPU affinity of a training's threads, on cores that other jobs use, too."""

import os
import random
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

from datamodules.utils.cores import core_times, idle_shares, set_affinity

# Variables by which users bind OpenMP's threads to cores themselves.
BINDINGS = {"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"}
SECONDS = 2.0  # between two measurements


class CpuAffinity(Callback):
    """Keeps the threads on as many cores as other jobs leave to this process.

    Threads wait for each other in each operation. If two cores are busy and each has one of them,
    one thread waits until the other is given time; on the same core they follow each other at once.
    The number of threads stays the same, and so do the results.
    """

    def __init__(self) -> None:
        self.allowed: set[int] = set()  # empty: the affinity is left alone
        self.cores: set[int] = set()  # that the threads are bound to
        self.threads = 1
        self.random = random.Random()  # without a seed: runs side by side choose different cores

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.threads = torch.get_num_threads()
        is_free = hasattr(os, "sched_setaffinity") and not BINDINGS & os.environ.keys()
        if is_free and self.threads > 1 and trainer.strategy.root_device.type == "cpu":
            self.cores = self.allowed = os.sched_getaffinity(0)
            os.register_at_fork(after_in_child=self.release)  # workers of data may use all cores
            self.start()

    def start(self) -> None:
        """Starts a measurement."""
        self.time, self.own_time = time.monotonic(), time.process_time()
        self.times = core_times(self.allowed)

    def adjust(self, *args: Any, **kwargs: Any) -> None:
        """Every two seconds: moves the threads if other jobs came or went."""
        passed = time.monotonic() - self.time if self.allowed else 0
        if passed < SECONDS:
            return
        own, times = (time.process_time() - self.own_time) / passed, self.times
        self.start()
        idle = idle_shares(times, self.times)
        if not idle:  # the system does not tell
            return
        count = max(1, round(own + sum(idle.values())))
        if count >= min(self.threads, len(self.allowed)):
            self.bind(self.allowed)
        elif count != len(self.cores):
            order = sorted(idle, key=lambda core: (-round(idle[core], 1), self.random.random()))
            self.bind(set(order[:count]))

    on_train_batch_end = on_validation_batch_end = adjust

    def bind(self, cores: set[int]) -> None:
        """Binds all threads to these cores."""
        if cores != self.cores:
            set_affinity(cores)
            self.cores = cores

    def release(self, *args: Any, **kwargs: Any) -> None:
        """Gives all cores back."""
        self.bind(self.allowed)

    teardown = on_exception = release
