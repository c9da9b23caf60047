"""The program that started the processes of a run (torchrun, SLURM's srun or Lightning), and the
cores of each.
"""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import Store, TCPStore

from datamodules.utils.cores import usable_cores
from tasks.cli.app import trust_prefix
from tasks.errors import RunError


class Launcher(NamedTuple):
    """torchrun or srun, and how many processes it started."""

    name: str
    processes: int  # on this machine
    machines: int


def external_launcher() -> Launcher | None:
    """torchrun or srun if one of them started this process, else None."""
    if by_torchrun():
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        return Launcher("torchrun", processes, int(os.environ["WORLD_SIZE"]) // processes)
    if by_slurm():
        machines = int(os.environ.get("SLURM_NNODES", 1))
        return Launcher("srun", int(os.environ["SLURM_NTASKS"]) // machines, machines)
    return None


def by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def by_slurm() -> bool:
    """Whether srun started this process and not torchrun; Lightning looks at the same variables."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in os.environ and not interactive and not by_torchrun()


def share_cores(processes: int = 1) -> None:
    """Gives each of the processes on this machine an equal part of the usable cores as threads.

    `OMP_NUM_THREADS` takes precedence, then the number of cores that SLURM gives to each process;
    without that number, srun has bound each process to its own cores.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if torchrun_chose_one_thread():
        torch.set_num_threads(os.cpu_count() or 1)  # logical cores: torch knows no others now
    elif chosen.isdecimal() and int(chosen) > 0:
        return
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    threads = min(torch.get_num_threads(), usable_cores())  # by default torch counts real cores
    if by_slurm():
        threads = int(given) if given.isdecimal() else threads
    else:
        threads = max(1, threads // processes)
    torch.set_num_threads(threads)
    if processes > 1:  # for the processes that Lightning starts; it would count all cores
        os.environ["OMP_NUM_THREADS"] = str(threads)


def torchrun_chose_one_thread() -> bool:
    """Whether torchrun, and not the user, set `OMP_NUM_THREADS` to 1."""
    if not by_torchrun() or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(variable.startswith(b"OMP_NUM_THREADS=") for variable in variables)


def with_launcher(command: str) -> str:
    """A `fit` command as torchrun or srun starts it with as many processes; others unchanged.

    Several machines meet at the machine of the first process, at torchrun's default port.
    """
    launcher = external_launcher()
    if launcher is None or " fit " not in command:
        return command
    _, processes, machines = launcher
    variable = trust_prefix()
    command = command.removeprefix(variable)
    if launcher.name == "srun":
        options = f"--nodes {machines} --ntasks-per-node {processes} --kill-on-bad-exit"
        return f"{variable}srun {options} {command}"
    options = f"--nproc_per_node {processes}"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0":
        options += f" --max-restarts {restarts}"
    if not command.startswith("python "):  # the script `tessera`
        options += " --no-python"
    module = command.removeprefix("python ")
    if machines == 1:
        return f"{variable}torchrun --standalone {options} {module}"
    endpoint = f"--rdzv_backend c10d --rdzv_endpoint {os.environ['MASTER_ADDR']}:29500"
    start = f"{variable}torchrun --nnodes {machines} {options} {endpoint}"
    return f"{start} {module} # on each machine"


@cache
def torchrun_store() -> tuple[Store, int]:
    """The store of torchrun, which also outlives restarts, and the rank of this process."""
    store, rank, _ = next(torch.distributed.rendezvous("env://"))
    return store, rank


@cache
def fresh_store() -> Store:
    """A store for this start of torchrun's processes only, served by the first of them.

    Processes that torchrun starts again would find the addresses of those before them in the store
    that torchrun keeps. From now on `env://` finds this one.
    """
    kept, rank = torchrun_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return kept
    host = os.environ["MASTER_ADDR"]
    size = int(os.environ["WORLD_SIZE"])
    patience = timedelta(minutes=30)
    if rank == 0:
        fresh = TCPStore(host, 0, size, True, patience, wait_for_workers=False, multi_tenant=True)
        kept.set("port of the first", str(fresh.port))
    else:
        fresh = TCPStore(host, _port_of_first(kept, host), size, False, patience)
    os.environ |= {"MASTER_PORT": str(fresh.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return fresh


def _port_of_first(kept: Store, host: str) -> int:
    """The port of the first process's store; one of an earlier start does not answer."""
    for _ in range(3600):
        port = int(kept.get("port of the first"))
        with suppress(OSError), socket.create_connection((host, port), 2):
            return port
        time.sleep(0.5)
    raise RunError(f"the first process of this run, on {host}, cannot be reached")
