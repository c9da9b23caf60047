"""Seeds that follow from the run's seed and the position in training; states of generators."""

import os
import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

States = dict[str, Any]


def run_seed() -> int:
    """The run's seed, as `--seed_everything` set it; 0 outside of a run."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def position_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """A seed for one rank's batch; nearby positions get unrelated ones."""
    return zlib.crc32(f"{seed}/{epoch}/{batch}/{rank}".encode())


def evaluation_seeds(index: Tensor) -> list[int]:
    """A seed for each sample, given its place in the data (B,): the same in each evaluation."""
    # No epoch of training is -1.
    return [position_seed(run_seed(), epoch=-1, batch=i, rank=0) for i in index.tolist()]


def random_states(device: torch.device) -> States:
    """The states of Python's, NumPy's and PyTorch's global generators, and of the run's GPU."""
    state: Any = np.random.get_state()
    kind, numbers, *rest = state
    states = {
        "python": random.getstate(),
        "numpy": (kind, numbers.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: States, device: torch.device) -> None:
    """Let the generators continue from such states; raises `ValueError` if they are none."""
    try:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"its random states cannot be set ({error!r})") from error
