"""Which samples are for training, validation and test."""

import re
from pathlib import Path

import torch
from torch import Tensor

from datamodules.utils.errors import UsageError

SPLITS = {  # what files and folders call them
    "train": ("train",),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test",),
    "unlabelled": ("unsupervised", "unsup", "unlabelled", "unlabeled"),
}


def split_of(path: Path) -> str | None:
    """Which split a file belongs to, by the first part of its path named after one."""
    for part in path.parts:
        for split, names in SPLITS.items():
            if re.match(rf"({'|'.join(names)})([-_.]|$)", part.lower()):
                return split
    return None


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits sample indices by the same fraction in each class.

    Args:
        labels: (S,) int64.
        fraction: Size of the second part; from two samples of a class on, each part gets at least
            one.
        seed: Of the random split.

    Returns:
        Indices of the first and of the second part, each sorted.

    Raises:
        UsageError: The fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"val_fraction is {fraction}, but must lie between 0 and 1.")
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    held_out = []
    for members in by_class.split(labels.bincount().tolist()):
        count = max(round(len(members) * fraction), 1)
        held_out.append(members[: max(min(count, len(members) - 1), 0)])
    second = torch.cat(held_out).sort().values
    is_first = torch.ones(len(labels), dtype=torch.bool)
    is_first[second] = False
    return is_first.nonzero().flatten(), second
