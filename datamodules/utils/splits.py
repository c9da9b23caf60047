"""Which samples are for training, validation and test."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from datamodules.utils.errors import UsageError

T = TypeVar("T")

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


def join_unlabelled(splits: Mapping[str, list[T]]) -> dict[str, list[T]]:
    """The splits without labels: what is called unlabelled is training data."""
    found: dict[str, list[T]] = {}
    for split, items in splits.items():
        found.setdefault("train" if split == "unlabelled" else split, []).extend(items)
    return found


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
    held_out = []
    for members in shuffled_classes(labels, seed):
        most = max(len(members) - 1, 0)
        count = max(round(len(members) * fraction), 1)
        held_out.append(members[: min(count, most)])
    second = torch.cat(held_out).sort().values
    is_first = torch.ones(len(labels), dtype=torch.bool)
    is_first[second] = False
    return is_first.nonzero().flatten(), second


def stratified_subset(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Draws samples at random, the same fraction of each class and at least one.

    With the same seed, a smaller fraction gives a part of what a larger one gives.

    Args:
        labels: (S,) int64, the class of each sample.
        fraction: Above 0, up to 1.
        seed: Of the random numbers.

    Returns:
        Indices of the samples, sorted.
    """
    kept = [
        members[: max(round(len(members) * fraction), 1)]
        for members in shuffled_classes(labels, seed)
    ]
    return torch.cat(kept).sort().values


def first_of_each_label(labels: Tensor, seed: int) -> Tensor:
    """The first sample with each label, in the random order of `stratified_subset`.

    Args:
        labels: (S, K), 1 for each label of a sample, else 0.
        seed: Of the random numbers.

    Returns:
        Indices of at most K samples; a label that no sample has is left out.
    """
    order = torch.cat(shuffled_classes(labels.new_zeros(len(labels), dtype=torch.int64), seed))
    is_first = labels[order].cumsum(0).eq(1) & labels[order].bool()  # (S, K), in that order
    return order[is_first.any(1)]


def shuffled_classes(labels: Tensor, seed: int) -> tuple[Tensor, ...]:
    """The indices of the samples of each class, in random order; `labels` are (S,) int64."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return by_class.split(labels.bincount().tolist())
