"""Environment variables that launchers set, checked before torch and Lightning read them."""

import os
import sys

MINIMUM = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID"), 0),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), 1),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"), 1),
}
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # beside its run id


def drop_unusable_variables() -> None:
    """Removes variables of torchrun and SLURM that are not the numbers they should be."""
    messages = []
    for name, minimum in MINIMUM.items():
        text = os.environ.get(name)
        if text is None or (text.strip().isdecimal() and int(text) >= minimum):
            continue
        del os.environ[name]
        if text:
            wanted = f"a whole number of at least {minimum}"
            messages.append(f"warning: {name} is {text[:50]!r}, not {wanted}: it is ignored")
    if not os.environ.keys() >= {*TORCHRUN}:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(*messages, sep="\n", end="\n" * bool(messages), file=sys.stderr)
