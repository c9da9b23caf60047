"""Environment variables that launchers set, checked before torch and Lightning read them."""

import os
import sys

LEAST = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"), 0),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), 1),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"), 1),
}


def drop_unusable_variables() -> None:
    """Removes variables of torchrun and SLURM that are not the numbers they should be."""
    for name, least in LEAST.items():
        text = os.environ.get(name)
        if text is None or (text.strip().isdecimal() and int(text) >= least):
            continue
        del os.environ[name]
        if text:
            message = f"{name} is {text[:50]!r}, not a whole number from {least} on: it is ignored"
            print(f"warning: {message}", file=sys.stderr)
