"""Random numbers of samples that do not depend on their batch."""

from collections.abc import Iterable

import torch
from torch import Generator, Tensor


def rand_of_seeds(seeds: Iterable[int], *shape: int) -> Tensor:
    """Uniform random numbers of B samples, each from its own seed: (B, *shape), on the CPU."""
    rows = [torch.rand(*shape, generator=Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)
