"""A limited evaluation sees samples of the whole split, each once over all ranks."""

from bisect import bisect_right
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.images import ImageData
from datamodules.reviews import ReviewData
from datamodules.text import TextLoading
from datamodules.utils.batching import BucketBatchSampler, EvalBatchSampler, ResumableBatchSampler
from tests.helpers.data_modules import MODULES, WORDS, as_rank
from tests.helpers.tables import write
from tests.helpers.tiny import write_images

SHAPES = list(product((7, 33, 100), (1, 4, 5), (1, 2, 3), (1, 2, 5, 0.5)))


def dealt(whole: ResumableBatchSampler, world_size: int, limit: int | float) -> list[list[int]]:
    """The batches of all ranks."""
    samplers = [
        EvalBatchSampler(whole, rank, world_size, limit=limit) for rank in range(world_size)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert [list(sampler) for sampler in samplers] == batches  # always the same
    steps = list(zip(*batches, strict=True))  # as many on each rank
    assert len(steps) == samplers[0].limit
    return [batch for step in steps for batch in step]


@pytest.mark.parametrize(("size", "batch_size", "world_size", "limit"), SHAPES)
def test_samples_of_all_parts(
    size: int, batch_size: int, world_size: int, limit: int | float
) -> None:
    whole = ResumableBatchSampler(size, batch_size)
    full = len(EvalBatchSampler(whole, 0, world_size))
    count = min(limit, full) if isinstance(limit, int) else int(full * limit)
    if count == 0:  # which Lightning refuses
        return
    found = dealt(whole, world_size, limit)
    if count == full:
        assert found[: len(whole)] == list(whole)
        return
    assert [len(batch) for batch in found] == [batch_size] * (count * world_size)
    samples = sum(found, [])
    assert samples == sorted(set(samples))
    parts = [bisect_right(samples, size * i // len(samples) - 1) for i in range(len(samples))]
    assert parts == list(range(len(samples)))  # one of each
    assert found == dealt(whole, 1, count * world_size)  # those of one process


def test_every_kth_sample_may_be_of_one_class() -> None:
    """Classes in turn, 10 of them, and a tenth of the samples."""
    (batch,) = dealt(ResumableBatchSampler(1000, 100), 1, 1)
    counts = torch.tensor(batch).remainder(10).bincount(minlength=10)
    assert counts.min() > 3 and counts.max() < 20


def test_lengths_are_spread_and_alike_in_a_batch() -> None:
    lengths = torch.arange(400).remainder(100)
    whole = BucketBatchSampler(lengths, 10)
    batches = [lengths[batch] for batch in dealt(whole, 2, 2)]
    assert all(int(batch.max() - batch.min()) < 40 for batch in batches)
    assert abs(float(torch.cat(batches).float().mean()) - 49.5) < 3


@pytest.mark.parametrize("kind", MODULES)
def test_every_module(kind: str, tmp_path: Path) -> None:
    samplers = []
    for rank in (0, 1):
        data = as_rank(MODULES[kind](tmp_path), rank, 2, limit=1)
        data.eval_batch_size = 2
        data.setup("fit")
        samplers.append([data.val_dataloader().sampler, data.test_dataloader().sampler])
    for one, other in zip(*samplers, strict=True):
        samples = [index for sampler in (one, other) for batch in sampler for index in batch]
        assert len(set(samples)) == len(samples) == 4
        assert len(one) > 1


def labels_of(data: Any, limit: int) -> list[int]:
    as_rank(data, 0, 1, limit).setup("test")
    batches = list(data.test_dataloader())
    assert len(batches) == limit
    return torch.cat([batch["label"] for batch in batches]).tolist()


def test_folders_sorted_by_class(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in "abcd":
            for i in range(30):
                write(tmp_path / f"texts/{split}/{name}/{i}.txt", "word " * (1 + i % 7))
    loading = TextLoading(eval_batch_size=4)
    texts = ReviewData(path=str(tmp_path / "texts"), tokenizer=WORDS, loading=loading)
    assert set(labels_of(texts, 3)) == {0, 1, 2, 3}
    images = write_images(tmp_path / "images", count=40)
    (images / "train").rename(images / "test")
    write_images(images, count=40)
    data = ImageData(path=str(images), image_size=8)
    data.eval_batch_size = 4
    found = labels_of(data, 3)
    assert len(found) == 12 and set(found) == set(range(len(data.metadata()["class_names"])))


def test_limited_training_is_shuffled() -> None:
    """The first batches are of the whole split, and others in each epoch."""
    samplers: list[Any] = [ResumableBatchSampler(1000, 10, shuffle=True)]
    samplers.append(BucketBatchSampler(torch.arange(1000), 10, shuffle=True))
    for sampler in samplers:
        epochs = []
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            epochs.append(sum(islice(sampler, 5), []))
        assert epochs[0] != epochs[1]
        assert min(epochs[0]) < 250 and max(epochs[0]) > 750
