"""Who starts the processes of a run beside Lightning: torchrun and SLURM's srun, and what their processes share."""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed import Store, TCPStore

from tasks.errors import RunError


class Started(NamedTuple):
    """Processes that somebody else started."""

    by: str
    here: int  # on this machine
    machines: int


def started() -> Started | None:
    """The processes of this run where torchrun or srun started them, else None."""
    if by_torchrun():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return Started("torchrun", here, int(os.environ["WORLD_SIZE"]) // here)
    if by_slurm():
        machines = int(os.environ.get("SLURM_NNODES", 1))
        return Started("srun", int(os.environ["SLURM_NTASKS"]) // machines, machines)
    return None


def by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def by_slurm() -> bool:
    """Whether srun started this process and not torchrun; Lightning looks at the same variables."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in os.environ and not interactive and not by_torchrun()


@cache
def kept_store() -> tuple[Store, int]:
    """What torchrun's processes share, and the rank of this one; it outlives processes that are started again.

    Kept open, since the first process has to serve it where torchrun was told not to.
    """
    store, rank, _ = next(torch.distributed.rendezvous("env://"))
    return store, rank


@cache
def fresh_store() -> Store:
    """What torchrun's processes share for this start only, served by the first of them.

    Left alone, torch connects processes that are started again through the store that torchrun keeps, and there they
    find the addresses of those before them. From now on `env://` finds this one.
    """
    kept, rank = kept_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return kept
    host, size = os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])
    if rank == 0:
        fresh = TCPStore(
            host, 0, size, True, timedelta(minutes=30), wait_for_workers=False, multi_tenant=True
        )
        kept.set("port of the first", str(fresh.port))
    else:
        fresh = store_of_the_first(kept, host, size)
    os.environ |= {"MASTER_PORT": str(fresh.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return fresh


def store_of_the_first(kept: Store, host: str, size: int) -> TCPStore:
    """The store that the first process serves, once it does; that of an earlier start does not answer any more."""
    for _ in range(3600):
        port = int(kept.get("port of the first"))
        with suppress(OSError), socket.create_connection((host, port), 2):
            return TCPStore(host, port, size, False, timedelta(minutes=30))
        time.sleep(0.5)
    raise RunError(f"the first process of this run, on {host}, cannot be reached")
