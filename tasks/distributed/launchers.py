"""Programs, other than Lightning, that start the processes of a run: torchrun and SLURM's srun."""

import os
from typing import NamedTuple


class Launcher(NamedTuple):
    """The program, other than Lightning, that started the processes of this run."""

    name: str
    processes: int  # on this machine
    machines: int


def external_launcher() -> Launcher | None:
    """torchrun or srun where one of them started this process, else None."""
    if by_torchrun():
        processes = int(os.environ["LOCAL_WORLD_SIZE"])
        return Launcher("torchrun", processes, int(os.environ["WORLD_SIZE"]) // processes)
    if by_slurm():
        machines = int(os.environ.get("SLURM_NNODES", 1))
        return Launcher("srun", int(os.environ["SLURM_NTASKS"]) // machines, machines)
    return None


def by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def by_slurm() -> bool:
    """Whether srun started this process and not torchrun; Lightning looks at the same variables."""
    interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in os.environ and not interactive and not by_torchrun()


def with_launcher(command: str) -> str:
    """A command line with `fit` as torchrun or srun has to start it for as many processes; any other as it is.

    Several machines meet at that of the first process, and at torchrun's usual port.
    """
    launcher = external_launcher()
    if launcher is None or " fit " not in command:
        return command
    _, processes, machines = launcher
    if launcher.name == "srun":
        return f"srun --nodes {machines} --ntasks-per-node {processes} --kill-on-bad-exit {command}"
    options = f"--nproc_per_node {processes}"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0":
        options += f" --max-restarts {restarts}"
    module = command.removeprefix("python ")
    if machines == 1:
        return f"torchrun --standalone {options} {module}"
    endpoint = f"--rdzv_backend c10d --rdzv_endpoint {os.environ['MASTER_ADDR']}:29500"
    return f"torchrun --nnodes {machines} {options} {endpoint} {module} # on each machine"
