"""Random numbers of samples that do not depend on their batch."""

from collections.abc import Iterable

import torch
from torch import Generator, Tensor


def rand_of_seeds(seeds: Iterable[int], *shape: int) -> Tensor:
    """Uniform random numbers of B samples, each from its own seed: (B, *shape), on the CPU.

    They are float32, since with another type the same seeds give other numbers.
    """
    generators = (Generator().manual_seed(seed) for seed in seeds)
    rows = [torch.rand(*shape, dtype=torch.float32, generator=one) for one in generators]
    return torch.stack(rows)
