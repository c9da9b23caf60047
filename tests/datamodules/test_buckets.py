"""Batches of like length: each sample once, the same work for every rank, entered anywhere, and little padding."""

from itertools import product

import pytest
import torch
from torch import Tensor

from datamodules.batching import BucketBatchSampler, ResumableBatchSampler, padded, padding_share
from datamodules.sources import TEXT_SOURCES, TextDatasetOptions

CASES = list(product((3, 7, 40, 131), (1, 2, 3), (None, 40, 97), (0, 1)))  # sizes, ranks, tokens a batch, seeds


def lengths_of(size: int) -> Tensor:
    """Lengths from 1 to 40, many of them equal."""
    return padded(torch.randint(1, 41, (size,), generator=torch.Generator().manual_seed(size)), 4, 38)


def ranks(size: int, world: int, tokens: int | None, seed: int, training: bool = True) -> list[BucketBatchSampler]:
    return [BucketBatchSampler(lengths_of(size), 4, tokens, seed, training, rank, world) for rank in range(world)]


def steps(samplers: list[BucketBatchSampler], epoch: int) -> list[list[list[int]]]:
    """The batches of all ranks, step by step."""
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*samplers, strict=True)]


@pytest.mark.parametrize(("size", "world", "tokens", "seed"), CASES)
def test_training_gives_each_rank_as_much_and_no_sample_twice(
    size: int, world: int, tokens: int | None, seed: int
) -> None:
    samplers, lengths = ranks(size, world, tokens, seed), lengths_of(size)
    seen = set()
    for epoch in range(12):
        epoch_steps = steps(samplers, epoch)
        assert {len(epoch_steps)} == {len(sampler) for sampler in samplers}
        taken = [index for step in epoch_steps for batch in step for index in batch]
        assert len(set(taken)) == len(taken)
        if tokens is None and size >= 4 * world:
            assert len(taken) == size - size % (4 * world)
            assert all(len(batch) == 4 for step in epoch_steps for batch in step)
        elif tokens is not None:
            assert len(taken) == size - size % world
            assert all(len({len(batch) for batch in step}) == 1 for step in epoch_steps)
            assert all(int(lengths[batch].max()) * len(batch) <= tokens for step in epoch_steps for batch in step)
        seen.update(taken)
    assert seen == set(range(size))  # what is left out is another sample in each epoch


@pytest.mark.parametrize(("size", "world", "tokens", "seed"), CASES)
def test_the_batches_of_a_step_are_alike_in_length(size: int, world: int, tokens: int | None, seed: int) -> None:
    lengths = lengths_of(size)
    ranges = sorted(
        (lengths[sum(step, [])].min().item(), lengths[sum(step, [])].max().item())
        for step in steps(ranks(size, world, tokens, seed), 3)
    )
    assert all(longest <= shortest for (_, longest), (shortest, _) in zip(ranges, ranges[1:], strict=False))


@pytest.mark.parametrize(("size", "world", "tokens", "seed"), CASES)
def test_an_epoch_entered_at_any_batch_is_the_rest_of_the_whole(
    size: int, world: int, tokens: int | None, seed: int
) -> None:
    sampler = ranks(size, world, tokens, seed)[-1]
    sampler.set_epoch(5)
    whole = list(sampler)
    for batch in range(len(whole) + 1):
        again = ranks(size, world, tokens, seed)[-1]
        again.start(5, batch)
        assert list(again) == whole[batch:] and len(again) == len(whole)
    again.set_epoch(6)
    assert len(list(again)) == len(whole)


@pytest.mark.parametrize(("size", "world", "tokens", "seed"), CASES)
def test_evaluation_takes_every_sample_once_longest_first(size: int, world: int, tokens: int | None, seed: int) -> None:
    samplers = ranks(size, world, None, seed, training=False)
    taken = [index for sampler in samplers for batch in sampler for index in batch]
    assert sorted(taken) == list(range(size))
    first = [int(lengths_of(size)[batch].max()) for batch in samplers[0]]
    assert first == sorted(first, reverse=True)


def test_epochs_mix_samples_anew_and_shuffle_the_steps() -> None:
    sampler = ranks(131, 1, None, 0)[0]
    one, two = ([frozenset(batch) for batch in sampler.batches(epoch)] for epoch in (0, 1))
    assert len(set(one) & set(two)) < 3
    longest = [int(lengths_of(131)[list(batch)].max()) for batch in one]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)
    assert one == [frozenset(batch) for batch in ranks(131, 1, None, 0)[0].batches(0)]
    assert one != [frozenset(batch) for batch in ranks(131, 1, None, 1)[0].batches(0)]


def test_a_batch_that_cannot_hold_the_longest_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens is 39, but the longest sample alone has 40"):
        BucketBatchSampler(torch.tensor([1, 40]), 4, 39)


def test_rounding_up_stops_at_the_most() -> None:
    assert padded(torch.tensor([1, 8, 9, 17, 30]), 8, 30).tolist() == [8, 8, 16, 24, 30]


def test_padding_is_counted_cell_by_cell() -> None:
    own, lengths = torch.tensor([3, 8, 5, 1]), torch.tensor([4, 8, 8, 4])
    assert padding_share([[0, 1], [3], [2]], lengths, own) == pytest.approx(1 - 17 / (16 + 4 + 8))


def test_real_reviews_are_hardly_padded(real_data: object) -> None:
    import pyarrow.compute as pc

    texts = TEXT_SOURCES["hub"](f"{real_data}/imdb", TextDatasetOptions()).split("val").column
    own = torch.tensor(pc.list_value_length(pc.utf8_split_whitespace(texts)).to_pylist()).clamp(max=510) + 2
    lengths = padded(own, 8, 512)
    random = ResumableBatchSampler(len(own), 32, shuffle=True, drop_last=True)
    shares = [
        padding_share(sampler.batches(0), lengths, own)
        for sampler in (
            random,
            BucketBatchSampler(lengths, 32, training=True),
            BucketBatchSampler(lengths, 32, 16_384, training=True),
        )
    ]
    assert shares[0] > 0.5 and max(shares[1:]) < 0.05, shares
