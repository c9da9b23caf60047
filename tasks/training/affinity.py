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
ENOUGH = 0.75  # of the cores that the threads are bound to: with less, others may be better


class CpuAffinity(Callback):
    """Binds the threads to fewer cores while other jobs leave at most half of the cores to them.

    Threads wait for each other in each operation. If each is on a busy core of its own, one often
    waits while another job has the other's core; on one core they run in turn. The number of
    threads stays the same, and so do the results.
    """

    def __init__(self) -> None:
        self.allowed: set[int] = set()  # empty: the affinity is left alone
        self.cores: set[int] = set()  # that the threads are bound to
        self.threads = 1
        self.random = random.Random()  # without a seed: runs side by side choose different cores

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Data workers would inherit the affinity, and their time is not in the process's."""
        self.threads = torch.get_num_threads()
        if (
            hasattr(os, "sched_setaffinity")
            and not BINDINGS & os.environ.keys()
            and trainer.strategy.root_device.type == "cpu"
            and not getattr(trainer.train_dataloader, "num_workers", 0)
        ):
            self.cores = self.allowed = os.sched_getaffinity(0)
            self.start()

    def start(self) -> None:
        """Starts a measurement."""
        self.time, self.own_time = time.monotonic(), time.process_time()
        self.times = core_times(self.allowed)

    def adjust(self, *args: Any, **kwargs: Any) -> None:
        """Every two seconds: binds the threads anew if other jobs came or went."""
        passed = time.monotonic() - self.time if self.allowed else 0
        if passed < SECONDS:
            return
        own, times = (time.process_time() - self.own_time) / passed, self.times
        self.start()
        idle = idle_shares(times, self.times)
        if len(idle) < len(self.allowed):  # the system does not tell
            return
        count = max(1, round(own + sum(idle.values())))
        if 2 * count > min(self.threads, len(self.allowed)):
            self.bind(self.allowed)
        elif count != len(self.cores) or own < ENOUGH * count:
            self.bind(set(self.random.sample(sorted(self.allowed), count)))

    on_train_batch_end = on_validation_batch_end = adjust

    def bind(self, cores: set[int]) -> None:
        """Binds all threads to these cores."""
        if cores != self.cores:
            set_affinity(cores)
            self.cores = cores

    def release(self, *args: Any, **kwargs: Any) -> None:
        """Lets the threads use all cores again."""
        self.bind(self.allowed)

    teardown = on_exception = release
