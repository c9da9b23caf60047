"""Several processes as one run: who starts them, how many they are, and what is said where one of them ends.

Lightning starts the processes of one machine by itself; `torchrun` and SLURM's `srun` start those of several machines.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.strategies.launchers import subprocess_script
from pytorch_lightning.utilities import rank_zero_only

from tasks.checkpoints import Checkpoint
from tasks.errors import RunError, UsageError, first_here
from tasks.launchers import by_slurm, by_torchrun, fresh_store, started
from tasks.parsing import given
from tasks.run_folder import run_folder
from tasks.signals import SAID
from tasks.trainer_parts import refuse_devices

STRATEGIES = ("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp")
SHARDED = {"fsdp", "Sharded"}  # they need GPUs
FOREIGN = {"FSDPStrategy": "fsdp", "ModelParallelStrategy": "fsdp", "DeepSpeedStrategy": "fsdp"}  # and what to give
LOST = r"(?i)connection (closed|reset|refused)|timed out|broken pipe|failed to recv|pair closure"  # what the others see
PATIENCE = 10.0  # seconds for a process to end by itself after another one has


def continued(task: str, command: str, arguments: list[str]) -> list[str]:
    """The command line that continues a `fit` which torchrun or SLURM starts again; any other as it is.

    Its run folder holds the options; where that has no checkpoint yet, the run begins anew.
    """
    resume, rest = given(arguments, "--resume")
    if command != "fit" or resume or started() is None:
        return arguments
    folder = run_folder(task, given(rest, "--run_dir")[0])
    if not (folder / "config.yaml").is_file():  # written once all processes have come this far
        return arguments
    rank_zero_only(print)(f"started again: continuing {folder}")
    return ["--resume", str(folder)]


def as_started(command: str) -> str:
    """A command line with `fit` as torchrun or srun has to start it for as many processes; any other as it is.

    Several machines meet at that of the first process, and at torchrun's usual port.
    """
    others = started()
    if others is None or " fit " not in command:
        return command
    if others.by == "srun":
        return f"srun --nodes {others.machines} --ntasks-per-node {others.here} --kill-on-bad-exit {command}"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    many = f"--nproc_per_node {others.here}" + (f" --max-restarts {restarts}" if restarts != "0" else "")
    module = command.removeprefix("python ")
    if others.machines == 1:
        return f"torchrun --standalone {many} {module}"
    meet = f"--rdzv_backend c10d --rdzv_endpoint {os.environ['MASTER_ADDR']}:29500"
    return f"torchrun --nnodes {others.machines} {many} {meet} {module} # on each machine"


class SameStart(Callback):
    """All processes of a run begin where the first does, or one that does not see the same checkpoint ends the run.

    Machines without a common disk would train as many networks at once.

    Args:
        path: what this process goes on from, None from the beginning.
        checkpoint: its content.
    """

    def __init__(self, path: Path | None, checkpoint: Checkpoint | None) -> None:
        self.place = f"{path}, step {checkpoint['global_step']}" if checkpoint else ""
        self.step = checkpoint["global_step"] if checkpoint else 0
        self.restored = checkpoint is None  # whether all of its state is in place

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare, now that the processes are connected.

        Raises:
            UsageError: this one does not see the checkpoint of the first.
        """
        first = trainer.strategy.broadcast(self.place) if stage == "fit" else self.place
        if first != self.place:
            raise UsageError(
                f"the first process of this run goes on from {first or 'the beginning'}, which {socket.gethostname()} "
                f"does not see (it has {self.place or 'no checkpoint'}): a run that is to continue needs a run folder "
                "on a disk that all machines share"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on an error is not about the checkpoint."""
        self.restored = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say so where nothing was left to do."""
        if self.step and trainer.global_step == self.step:
            options = {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
            limits = [f"--trainer.{name} {most}" for name, most in options.items() if most not in (None, -1)]
            stops = f", with {' and '.join(limits)}" if limits else ""
            rank_zero_only(print)(f"nothing was left to train after step {self.step}{stops}")


def settle(options: Any, command: str) -> None:
    """Settle a Trainer's devices and machines; refuse what cannot be.

    Numbers follow from what torchrun or srun started. On a machine without GPUs, a strategy for several processes has
    two of them where nobody says how many.

    Args:
        options: the Trainer's, which are changed.
        command: "fit", "validate", "test" or "predict".

    Raises:
        UsageError: a strategy that does not work here, or numbers that contradict torchrun or srun.
    """
    name = strategy_name(options.strategy)
    gpus = options.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if name in FOREIGN or (isinstance(options.strategy, str) and name not in STRATEGIES):
        better = FOREIGN.get(name) or " or ".join(STRATEGIES)
        raise UsageError(f"--trainer.strategy {name} has not been made to work here: give {better}")
    if name in SHARDED and not gpus:
        raise UsageError(f"--trainer.strategy {name} shards weights over GPUs, and there are none: give ddp")
    if by_torchrun():
        fresh_store()
    if others := started():
        if command == "predict" and (others.here, others.machines) != (1, 1):
            raise UsageError(f"predict runs in one process: start it without {others.by}")
        settle_number(options, "devices", others.here, f"{others.by} started {others.here} on this machine")
        settle_number(options, "num_nodes", others.machines, f"{others.by} started some on {others.machines}")
    elif options.num_nodes > 1 and "NODE_RANK" not in os.environ:
        raise UsageError(
            f"--trainer.num_nodes {options.num_nodes}: start one process for each device of each machine with torchrun "
            "or srun, which count the machines"
        )
    elif options.devices == "auto" and name not in ("auto", "SingleDeviceStrategy") and not gpus:
        options.devices = 2
    if not gpus:
        refuse_devices(options.devices)


def strategy_name(chosen: Any) -> str:
    """Name of a strategy as it was given: a word, or the last part of a class path."""
    return str(chosen) if isinstance(chosen, str) else str(getattr(chosen, "class_path", "")).rpartition(".")[2]


def settle_number(options: Any, name: str, value: int, why: str) -> None:
    """Set a number of devices or machines that was left open; refuse another one."""
    asked = options[name]
    counted = len(asked) if isinstance(asked, list | tuple) else asked
    if counted in ("auto", -1, "-1") or (name, counted) == ("num_nodes", 1):
        options[name] = value
    elif str(counted) != str(value):
        raise UsageError(f"--trainer.{name} {asked} contradicts the processes there are ({why}): leave it out")


def strategy(chosen: Any) -> Strategy | str:
    """The Trainer's strategy: as given, with our own class for "fsdp"."""
    if chosen != "fsdp":
        return chosen
    from tasks.sharding import Sharded

    return Sharded()


def environment() -> list[Any]:
    """Plugins for where the processes run: SLURM without Lightning's own way to queue a job again.

    That saves in a signal handler, at no step's end, into the current folder.
    """
    if not by_slurm():
        return []
    if each := os.environ.get("SLURM_CPUS_PER_TASK"):  # else Lightning parts the cores among the processes
        os.environ.setdefault("OMP_NUM_THREADS", each)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return [SLURMEnvironment(auto_requeue=False)]


# ------------------------------------------------------------------------------------------ where one of them ends


@contextmanager
def as_one(trainer: pl.Trainer) -> Iterator[None]:
    """Let all processes of a run end where one does, and say why once.

    The one that failed says so. Errors of the others, whose connection to it broke, become one line on each machine; an
    error that all of them have is said by one. A process that was killed says nothing: the one that launched it does.

    Raises:
        RunError: the processes could not be connected; in the first one of a machine, where another one ended.
        SystemExit: where another one has said it.
    """
    main = int(os.environ.get("TESSERA_MAIN", 0))
    if main and os.environ.get("LOCAL_RANK", "0") != "0" and not started():
        threading.Thread(target=end_with, args=(main,), daemon=True).start()
    else:
        os.environ["TESSERA_MAIN"] = str(os.getpid())
        subprocess_script._launch_process_observer = watch  # type: ignore[assignment]  # Lightning's kills in silence
    try:
        yield
    except Exception as error:
        if trainer.world_size > 1 and not torch.distributed.is_initialized() and of_torch(error):
            meet = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RunError(
                f"the processes of this run cannot be connected at {meet} ({cause(error)}): MASTER_ADDR has to be the "
                "machine of the first, and MASTER_PORT one of its ports that is free"
            ) from error
        if trainer.world_size > 1 and lost_another(error):
            if not first_here():
                raise SystemExit(1) from error
            raise RunError(f"{obituary(getattr(trainer.strategy.launcher, 'procs', []))} ({cause(error)})") from error
        if not first_to_say(str(error)):
            raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
        if isinstance(error, UsageError) and not first_here():  # which says nothing of options, as all have the same
            raise RunError(str(error)) from error
        raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads may abort a process that ends before them


def of_torch(error: Exception) -> bool:
    """Whether an error may be one of a connection."""
    return isinstance(error, torch.distributed.DistError) or type(error) is RuntimeError


def lost_another(error: Exception) -> bool:
    """Whether an error only says that another process cannot be reached any more."""
    return of_torch(error) and (type(error) is not RuntimeError or re.search(LOST, str(error)) is not None)


def cause(error: Exception) -> str:
    """What a connection's error says of why, without the place in torch's code and its advice; NCCL's comes last."""
    text = re.sub(r"^\[\S+\] ", "", str(error))
    return (text.partition("Last error:")[2] or text).strip().partition("\n")[0].partition(" This is typically")[0]


def obituary(children: list[subprocess.Popen]) -> str:
    """What became of the first process that ended, once it is known; torchrun and SLURM tell of theirs meanwhile."""
    patience = time.monotonic() + PATIENCE / 2
    while not any(child.poll() for child in children) and time.monotonic() < patience:
        time.sleep(0.05)
    for rank, child in enumerate(children, 1):
        if code := child.poll():
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"process {rank} of this run {how}, so this one ends, too"
    return "another process of this run ended, so this one ends, too"


def watch(children: list[subprocess.Popen]) -> None:
    """End this process where one that it launched failed, unless it does so by itself; in a thread."""

    def look() -> None:
        while not any(child.poll() for child in children):
            if all(child.poll() == 0 for child in children):
                return
            time.sleep(0.5)
        time.sleep(PATIENCE)
        if not children:  # forgotten meanwhile: all stop at a signal, this one with a checkpoint to write perhaps
            return
        code = next(filter(None, [child.poll() for child in children]), 1)
        signalled = SAID.get(code - 128)  # all of them, and this one waits for the others in C++
        sys.stderr.write(f"{signalled or f'error: {obituary(children)}'}\n")
        sys.stderr.flush()
        for child in children:
            child.kill()
        os._exit(code if signalled else 1)

    threading.Thread(target=look, daemon=True).start()


def end_with(main: int) -> None:
    """End this process once the one that launched it has, even if that was killed before both were connected."""
    while os.getppid() == main:
        time.sleep(0.5)
    time.sleep(PATIENCE)  # it may notice by itself
    os._exit(1)


def first_to_say(message: str) -> bool:
    """Whether no other process of this run has said this."""
    alone = not torch.distributed.is_initialized()
    if alone and not by_torchrun():
        return True
    try:
        store = fresh_store() if alone else torch.distributed.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=PATIENCE))
        return store.add(f"said {zlib.crc32(message.encode())}", 1) == 1
    except Exception:  # who kept the store has ended, and said why
        return first_here()
