"""Several processes as one run: how many there are, and how all end if one fails.

Lightning starts the processes of one machine; `torchrun` and SLURM's `srun` start those of several.
"""

import logging
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities import rank_zero_only
from torch.distributed import DistError, TCPStore

from tasks.checkpoints.reading import Checkpoint
from tasks.cli.parsing import take_option
from tasks.distributed.environment import (
    by_slurm,
    by_torchrun,
    external_launcher,
    fresh_store,
    share_cores,
)
from tasks.errors import RunError, UsageError, is_local_rank_zero, is_usage_error
from tasks.lightning_patches import stopped_early
from tasks.tracking.run_folder import choose_run_folder
from tasks.training.averaging import refuse_lost_average
from tasks.training.trainer_options import ending_option

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp")
GPU_STRATEGIES = {"fsdp", "Sharded"}
REPLACED_BY_FSDP = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
LOST_CONNECTION = r"(?i)connection|timed out|broken pipe|failed to recv|pair closure"
GRACE_SECONDS = 5.0  # until another process has ended, or answers


def resume_if_restarted(task: str, arguments: list[str]) -> list[str]:
    """The command line that continues a `fit` which torchrun or SLURM restarted; others unchanged.

    The run folder holds the options; without a checkpoint in it, the run starts from the beginning.
    """
    resume, rest = take_option(arguments, "--resume")
    if resume or external_launcher() is None:
        return arguments
    folder = choose_run_folder(task, take_option(rest, "--run_dir")[0])
    if not (folder / "config.yaml").is_file():  # written after all processes were here
        return arguments
    rank_zero_only(print)(f"started again: continuing {folder}")
    return [f"--resume={folder}"]


# How many processes, and how they work together ---------------------------------------------------


def resolve_devices(options: Any) -> None:
    """Set a Trainer's numbers of devices and machines; refuse what cannot work.

    They follow from what torchrun or srun started. On a machine without GPUs, a strategy for
    several processes has two by default. Processes that Lightning starts share the cores.

    Args:
        options: The Trainer's, which are changed.
    """
    name = options.strategy
    if not isinstance(name, str):
        name = str(getattr(name, "class_path", "")).rpartition(".")[2]
    has_gpus = options.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if name in REPLACED_BY_FSDP or (isinstance(options.strategy, str) and name not in STRATEGIES):
        supported = "fsdp" if name in REPLACED_BY_FSDP else " or ".join(STRATEGIES)
        raise UsageError(f"--trainer.strategy {name} is not supported: give {supported}")
    if name in GPU_STRATEGIES and not has_gpus:
        raise UsageError(f"--trainer.strategy {name} needs GPUs, and there are none: give ddp")
    if options.accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise UsageError(
            f"--trainer.accelerator {options.accelerator}: there is no GPU that PyTorch can use; "
            "give auto or cpu"
        )
    if by_torchrun():
        fresh_store()
    if launcher := external_launcher():
        started = f"{launcher.name} started {launcher.processes} processes on this machine"
        _resolve_number(options, "devices", launcher.processes, started)
        started = f"{launcher.name} started processes on {launcher.machines} machines"
        _resolve_number(options, "num_nodes", launcher.machines, started)
    elif options.num_nodes > 1 and "NODE_RANK" not in os.environ:
        raise UsageError(
            f"--trainer.num_nodes {options.num_nodes}: start the processes with torchrun or srun, "
            "which count the machines"
        )
    if not has_gpus:
        is_parallel = name not in ("auto", "SingleDeviceStrategy")
        if options.devices == "auto" and is_parallel and not launcher:
            options.devices = 2
        maximum = max(16, os.cpu_count() or 1)
        if str(options.devices) not in ("auto", *map(str, range(1, maximum + 1))):
            raise UsageError(
                f"--trainer.devices {options.devices}: on CPUs it is from 1 to {maximum}"
            )
    share_cores(_processes(options.devices, has_gpus))


def _processes(devices: Any, has_gpus: bool) -> int:
    """Processes on this machine: one for each device, such as 2, "2", "0,1", [0, 1] or "auto"."""
    number = len(devices) if isinstance(devices, list) else devices
    if isinstance(number, str) and "," in number:
        number = number.count(",") + 1
    if str(number) in ("auto", "-1"):
        number = torch.cuda.device_count() if has_gpus else 1
    return max(1, int(number)) if str(number).isdecimal() else 1


def _resolve_number(options: Any, name: str, value: int, why: str) -> None:
    """Set a number of devices or machines that was left open; refuse a different one."""
    given = options[name]
    number = len(given) if isinstance(given, list | tuple) else given
    if number in ("auto", -1, "-1") or (name, number) == ("num_nodes", 1):
        options[name] = value
    elif str(number) != str(value):
        raise UsageError(f"--trainer.{name} {given} contradicts the launcher ({why}): leave it out")


def strategy(chosen: Any) -> Strategy | str:
    """The Trainer's strategy: as given, with our own class for "fsdp"."""
    if chosen != "fsdp":
        return chosen
    from tasks.distributed.sharding import Sharded

    return Sharded()


def slurm_plugins() -> list[Any]:
    """Under SLURM its environment, without Lightning's requeueing of jobs.

    Lightning would save in a signal handler, in the middle of a step, into the current folder.
    """
    if not by_slurm():
        return []
    return [SLURMEnvironment(auto_requeue=False)]


class SameCheckpoint(Callback):
    """All processes of a run start from the checkpoint of the first, or the run ends.

    Machines without a common disk would train one network each.
    """

    def __init__(self, path: Path | None, checkpoint: Checkpoint | None) -> None:
        self.start_step = checkpoint["global_step"] if checkpoint else 0
        self.start = f"{path}, step {self.start_step}" if checkpoint else ""
        self.restored = checkpoint is None  # whether all of its state is in place
        self.callbacks = list(checkpoint.get("callbacks", {})) if checkpoint else []
        # `ending_option`: a test loads the callbacks' states of the best checkpoint.
        self.ended_by = ""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        first = trainer.strategy.broadcast(self.start) if stage == "fit" else self.start
        if first != self.start:
            raise UsageError(
                f"the first process of this run resumes from {first or 'the beginning'}, which "
                f"{socket.gethostname()} does not see (it has {self.start or 'no checkpoint'}): "
                "put the run folder on a disk that all machines share"
            )

        if stage == "fit":
            refuse_lost_average(self.callbacks, trainer.callbacks)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restored = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say so if the run stopped early, or no training steps were left."""
        self.restored = True
        self.ended_by = ending_option(trainer)
        if stopping := stopped_early(trainer):
            by_patience = stopping.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED
            advice = ": give it more patience to go on" if by_patience else ""
            line = f"stopped early by EarlyStopping on {stopping.monitor}{advice}"
            rank_zero_only(print)(line)
        elif self.start_step and trainer.global_step == self.start_step:
            limits = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
            given = [f"--trainer.{name} {n}" for name, n in limits.items() if n not in (None, -1)]
            why = f", with {' and '.join(given)}" if given else ""
            if self.ended_by == "max_time":
                why = ", as the time of --trainer.max_time is over"
            rank_zero_only(print)(f"nothing was left to train after step {self.start_step}{why}")


# If one of them fails -----------------------------------------------------------------------------


@contextmanager
def fail_together(trainer: pl.Trainer) -> Iterator[None]:
    """End all processes of a run if one fails, with one message.

    The process that failed prints it. The others lose their connection to it and exit; local rank
    0, if it is one of them, names it. If all fail with the same error, one prints it. Lightning
    kills processes that hang.

    Raises:
        RunError: The processes could not connect; or, on local rank 0, another process ended.
        SystemExit: Another process prints the message.
    """
    watch_parent()
    try:
        yield
    except Exception as error:
        if trainer.world_size > 1:
            _raise_once(error, trainer)
        raise
    if torch.distributed.is_initialized():
        # Or the threads of the group may abort this process while it exits.
        torch.distributed.destroy_process_group()


def _raise_once(error: Exception, trainer: pl.Trainer) -> None:
    """Raise what this process has to say about an error, or `SystemExit` if another one says it."""
    text = re.sub(r"^\[\S+\] ", "", str(error))  # without torch's [file:line]
    reason = (text.partition("Last error:\n")[2] or text).partition("\n")[0]  # NCCL's comes last
    of_torch = isinstance(error, DistError) or type(error) is RuntimeError
    if of_torch and not torch.distributed.is_initialized():
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RunError(
            f"the processes of this run cannot be connected at {address} ({reason}): set "
            "MASTER_ADDR to the machine of the first, and MASTER_PORT to a free port of it"
        ) from error
    if isinstance(error, DistError) or (of_torch and re.search(LOST_CONNECTION, reason)):
        if not is_local_rank_zero():
            raise SystemExit(1) from error
        who = _ended_process(getattr(trainer.strategy.launcher, "procs", []))
        raise RunError(f"{who}, so this one ends, too ({reason})") from error
    if not _is_first_to_report(str(error)):
        raise SystemExit(2 if is_usage_error(error) else 1) from error
    if is_usage_error(error) and not is_local_rank_zero():
        raise RunError(str(error)) from error  # a UsageError is printed on local rank 0 only


def _ended_process(children: list[subprocess.Popen]) -> str:
    """Which of the launched processes ended, and how; torchrun and SLURM print it themselves."""
    deadline = time.monotonic() + GRACE_SECONDS
    while children and not any(child.poll() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank, child in enumerate(children, 1):
        if code := child.poll():
            how = f"ended with exit code {code}"
            if code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
            return f"process {rank} of this run {how}"
    return "another process of this run ended"


def _is_first_to_report(message: str) -> bool:
    """Whether no other process has reported this; asks the store that connects them."""
    try:
        host = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=GRACE_SECONDS))
        return store.add(f"reported {message}", 1) == 1
    except (DistError, KeyError):  # the process that keeps the store has ended, and said why
        return is_local_rank_zero()


def watch_parent() -> None:
    """Start a thread that ends this process if the one that launched it is killed.

    Otherwise its collectives could wait forever. Lightning's message says which process failed.
    """
    logging.getLogger("lightning_fabric.strategies.launchers.subprocess_script").setLevel("INFO")
    if os.environ.get("LOCAL_RANK", "0") == "0" or external_launcher():
        os.environ["TESSERA_MAIN"] = str(os.getpid())
        return
    launcher = int(os.environ.get("TESSERA_MAIN", os.getppid()))

    def wait() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        time.sleep(GRACE_SECONDS)  # it may notice by itself
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
