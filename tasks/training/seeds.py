"""Seeds that follow from the run's own, and from where training stands; and what others drew their
numbers from.
"""

import os
import random
import zlib
from typing import Any

import numpy as np
import torch

States = dict[str, Any]


def run_seed() -> int:
    """The run's seed, as `--seed_everything` set it; 0 outside of a run."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def position_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """A seed for one rank's batch; nearby positions get unrelated ones."""
    return zlib.crc32(f"{seed}/{epoch}/{batch}/{rank}".encode())


def random_states(device: torch.device) -> States:
    """The states of this process's generators, primitives and tensors: Python's, NumPy's, PyTorch's
    on CPU and GPU.
    """
    state: Any = np.random.get_state()
    kind, numbers, *rest = state
    states = {
        "python": random.getstate(),
        "numpy": (kind, numbers.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_states(states: States, device: torch.device) -> None:
    """Have the generators go on from such states."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def check_random_states(states: Any, device: torch.device) -> None:
    """Raises `ValueError` unless generators can go on from such states, read from a file; theirs
    stay as they are.
    """
    own = random_states(device)
    try:
        set_random_states(states, device)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"The states of its random generators cannot be set ({error!r})."
        ) from error
    finally:
        set_random_states(own, device)
