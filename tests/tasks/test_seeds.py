"""What a training step draws follows from the seed and from where the step is, and from nothing
else.
"""

import os
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

from tasks.base import Task


def test_each_seed_epoch_batch_and_rank_draws_its_own() -> None:
    def draws(seed: int, epoch: int, batch: int, rank: int) -> float:
        os.environ["PL_GLOBAL_SEED"] = str(seed)
        task: Any = SimpleNamespace(current_epoch=epoch, global_rank=rank)
        Task.on_train_batch_start(task, {}, batch)
        return float(torch.rand((), dtype=torch.float64))

    places = list(product((1, 2), (0, 1, 2), (0, 1, 2), (0, 1)))
    found = [draws(*place) for place in places]
    assert len(set(found)) == len(places)
    assert [draws(*place) for place in reversed(places)] == found[::-1]
