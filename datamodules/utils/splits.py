"""Which samples are for training, validation and test."""

import re
from pathlib import Path

import torch
from torch import Tensor

from datamodules.utils.errors import UsageError

SPLITS = {  # and their names in files and folders
    "train": ("train",),
    "val": ("validation", "valid", "val", "dev"),
    "test": ("test",),
    "unlabelled": ("unsupervised", "unsup", "unlabelled", "unlabeled"),
}


def split_of(path: Path) -> str | None:
    """The split of a file, by the first part of its path that begins with a name of one."""
    for part in path.parts:
        for split, names in SPLITS.items():
            if re.match(rf"({'|'.join(names)})([-_.]|$)", part.lower()):
                return split
    return None


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits samples at random, with the same fraction of each class in the second part.

    Of a class with two samples or more, each part gets at least one.

    Args:
        labels: (S,) int64, the class of each sample.
        fraction: Of the second part; `UsageError` if it is not between 0 and 1.
        seed: Of the random numbers.

    Returns:
        Indices of the first and of the second part, each sorted.
    """
    if not 0 < fraction < 1:
        raise UsageError(
            f"--data.dataset.val_fraction is {fraction}, but must lie between 0 and 1."
        )
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    held_out = []
    for members in by_class.split(labels.bincount().tolist()):
        most = max(len(members) - 1, 0)
        count = max(round(len(members) * fraction), 1)
        held_out.append(members[: min(count, most)])
    second = torch.cat(held_out).sort().values
    is_first = torch.ones(len(labels), dtype=torch.bool)
    is_first[second] = False
    return is_first.nonzero().flatten(), second
