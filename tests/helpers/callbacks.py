"""Callbacks that say what each process of a run saw, and end some of them; sharding on CPUs."""

import atexit
import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from tasks.cli.signals import SIGNALS
from tasks.distributed.sharding import Sharded

faulthandler.register(signal.SIGUSR1)  # prints the stack, also in data workers


class OnCPU(Sharded):
    """Not refused where there are no GPUs."""


class SlowToEnd(pl.Callback):
    """Its process takes a while to end after an exception."""

    def on_exception(
        self, trainer: pl.Trainer, task: pl.LightningModule, error: BaseException
    ) -> None:
        time.sleep(3)


class Spy(pl.Callback):
    """Writes `rank0.json`, ...; ends a process as END says: its rank, step, how, the receiver."""

    slow = False

    def on_train_start(self, trainer: pl.Trainer, task: pl.LightningModule) -> None:
        self.path = Path(f"rank{trainer.global_rank}.json")
        self.seen: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "first": trainer.global_step,
            "pid": os.getpid(),
            "samples": [],
        }
        self.write()
        atexit.register(self.at_exit)

    def write(self) -> None:
        self.path.write_text(json.dumps(self.seen))

    def at_exit(self) -> None:
        self.seen["connected_at_exit"] = torch.distributed.is_initialized()
        self.write()

    def on_train_batch_start(
        self, trainer: pl.Trainer, task: pl.LightningModule, batch: Any, number: int
    ) -> None:
        self.seen["samples"].append(batch["index"].tolist() if "index" in batch else [])
        rank, step, how, *to = os.environ.get("END", "-1 0 no").split()
        here = (trainer.global_rank, trainer.global_step) == (int(rank), int(step))
        if not here or Path("ended").exists():
            return
        Path("ended").touch()
        if how == "ValueError":
            raise ValueError("a bad sample")
        self.slow = to == ["slow"]
        launcher = os.getppid()
        pids = {"launcher": launcher, "terminal": -os.getpgid(launcher)}
        os.kill(pids.get("".join(to), os.getpid()), getattr(signal, how))
        while not SIGNALS.received:
            time.sleep(0.01)
        time.sleep(2.5 * self.slow)

    def on_exception(
        self, trainer: pl.Trainer, task: pl.LightningModule, error: BaseException
    ) -> None:
        if self.slow:
            time.sleep(4)
            Path("cleaned_up").touch()
