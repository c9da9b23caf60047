"""Batches: each sample once, as many for every rank, any position at once, and little padding."""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.utils.batching import (
    BucketBatchSampler,
    EvalBatchSampler,
    ResumableBatchSampler,
    balanced_sample,
    count_tokens,
    epoch_permutation,
    pair_sort_keys,
    round_up,
)

SHAPES = list(product((1, 2, 7, 16, 33), (1, 2, 5), (1, 2, 3)))  # samples, batch size, ranks
LIMITS = [(1, None), (2, None), (4, None), (50, None), (4, 40), (4, 97)]  # samples or tokens
BUCKETS = list(product((3, 7, 40, 131), (1, 2, 3), LIMITS, (0, 1)))  # samples, ranks, ..., seed
Limit = tuple[int, int | None]


def ranks(size: int, batch_size: int, world_size: int, **options: Any) -> list[Any]:
    return [
        ResumableBatchSampler(size, batch_size, 5, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def flat(samplers: Iterable[Iterable[list[int]]]) -> list[int]:
    return [index for sampler in samplers for batch in sampler for index in batch]


@pytest.mark.parametrize(("size", "batch_size", "world_size"), SHAPES)
def test_ranks_share_an_epoch(size: int, batch_size: int, world_size: int) -> None:
    """In evaluation each sample comes once, in training only full batches, as many on each rank."""
    samplers = ranks(size, batch_size, world_size)
    assert sorted(flat(samplers)) == list(range(size))
    for sampler in samplers:
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(0 < len(batch) <= batch_size for batch in batches)
    if batch_size > 1 and size >= world_size:
        assert len({len(sampler) for sampler in samplers}) == 1

    if size >= world_size:
        uneven = ranks(size, batch_size, world_size, shuffle=True)
        assert len({len(sampler) for sampler in uneven}) == 1
        for epoch in range(2):
            for sampler in uneven:
                sampler.set_epoch(epoch)
            assert {len(list(sampler)) for sampler in uneven} == {len(uneven[0])}
            taken = flat(uneven)
            left_out = size % world_size if batch_size == 1 else 0
            assert len(set(taken)) == len(taken) == size - left_out
        whole = list(uneven[-1].batches(1))
        for number in range(len(whole) + 1):
            uneven[-1].start(1, number)
            assert list(uneven[-1]) == whole[number:]

    training = ranks(size, batch_size, world_size, shuffle=True, drop_last=True)
    assert {len(sampler) for sampler in training} == {size // (batch_size * world_size)}
    taken = flat(training)
    assert len(set(taken)) == len(taken)
    assert all(len(batch) == batch_size for sampler in training for batch in sampler)


@pytest.mark.parametrize(("size", "batch_size", "world_size"), SHAPES)
def test_evaluation_deals_the_batches_of_one_process(
    size: int, batch_size: int, world_size: int
) -> None:
    whole = ResumableBatchSampler(size, batch_size)
    samplers = [EvalBatchSampler(whole, rank, world_size) for rank in range(world_size)]
    assert all(len(list(sampler)) == len(sampler) for sampler in samplers)
    dealt = []
    for number, batches in enumerate(zip(*samplers, strict=True)):
        for sampler, batch in zip(samplers, batches, strict=True):
            if sampler.is_counted(number):
                dealt.append(batch)
    assert dealt == list(whole)


@pytest.mark.parametrize("options", [{"size": 0}, {"batch_size": 0}, {"rank": 2, "world_size": 2}])
def test_impossible_requests_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ResumableBatchSampler(**{"size": 5, "batch_size": 2, **options})


@pytest.mark.parametrize("shape", [(0,), (0, 2)])
@pytest.mark.parametrize("batch_tokens", [None, 8])
def test_lengths_of_no_samples_are_refused(
    shape: tuple[int, ...], batch_tokens: int | None
) -> None:
    with pytest.raises(ValueError, match="size is 0"):
        BucketBatchSampler(torch.zeros(shape, dtype=torch.int64), 4, batch_tokens)


# Batches of similar length.


def lengths_of(size: int, pairs: bool = False) -> Tensor:
    """Lengths from 1 to 38, many of them equal: (S,), or for pairs (S, 2), similar in a pair."""
    generator = torch.Generator().manual_seed(size)
    if not pairs:
        return round_up(torch.randint(1, 41, (size,), generator=generator), 4, 38)
    one = torch.randint(1, 39, (size,), generator=generator)
    other = (one + torch.randint(-6, 7, (size,), generator=generator)).clamp(1, 38)
    return torch.stack([one, other], dim=1)


def buckets(lengths: Tensor, world_size: int, limit: Limit, seed: int) -> list[BucketBatchSampler]:
    return [
        BucketBatchSampler(lengths, *limit, seed, True, rank, world_size)
        for rank in range(world_size)
    ]


def steps(samplers: list[BucketBatchSampler], epoch: int) -> list[list[list[int]]]:
    """The batches of all ranks, step by step; ranks with other numbers of batches are an error."""
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*samplers, strict=True)]


@pytest.mark.plain_every(4)
@pytest.mark.parametrize(("size", "world_size", "limit", "seed"), BUCKETS)
def test_steps_of_similar_length_take_each_sample_once(
    size: int, world_size: int, limit: Limit, seed: int
) -> None:
    lengths = lengths_of(size)
    samplers = buckets(lengths, world_size, limit, seed)
    batch_size, batch_tokens = limit
    for epoch in range(4):
        epoch_steps = steps(samplers, epoch)
        assert {len(epoch_steps)} == {len(sampler) for sampler in samplers}
        assert sorted(flat(epoch_steps)) == list(range(size))
        sizes = [sorted(map(len, step)) for step in epoch_steps]
        assert all(step[0] > 0 and step[-1] - step[0] <= 1 for step in sizes)
        batches = [batch for step in epoch_steps for batch in step]
        if batch_tokens is None:
            # The last step is smaller, and may borrow from another.
            assert sum(step != [batch_size] * world_size for step in sizes) <= 2
            over = [len(batch) for batch in batches if len(batch) > batch_size]
        else:
            cost = [len(batch) * int(lengths[batch].max()) for batch in batches]
            over = [len(b) for b, c in zip(batches, cost, strict=True) if c > batch_tokens]
        assert set(over) <= {2}  # joined, if single samples did not suffice for all ranks
        assert len(over) <= size % world_size
        in_step = [lengths[sum(step, [])] for step in epoch_steps]
        ranges = sorted((int(some.min()), int(some.max())) for some in in_step)
        assert all(longest <= shortest for (_, longest), (shortest, _) in pairwise(ranges))

    sampler = samplers[-1]
    sampler.set_epoch(5)
    whole = list(sampler)
    for number in range(len(whole) + 1):
        sampler.start(5, number)
        assert list(sampler) == whole[number:]
        assert len(sampler) == len(whole)
    sampler.set_epoch(6)
    assert len(list(sampler)) == len(whole)

    evaluation = BucketBatchSampler(lengths, batch_size)
    assert sorted(flat([evaluation])) == list(range(size))
    longest = [int(lengths[batch].max()) for batch in evaluation]
    assert longest == sorted(longest, reverse=True)


@pytest.mark.plain_every(4)
@pytest.mark.parametrize(("size", "world_size", "limit", "seed"), BUCKETS[::2])
def test_pairs_are_batched_by_the_longer_side(
    size: int, world_size: int, limit: Limit, seed: int
) -> None:
    lengths = lengths_of(size, pairs=True)
    samplers = buckets(lengths, world_size, limit, seed)
    longer = buckets(lengths.amax(1), world_size, limit, seed)
    for epoch in range(3):
        epoch_steps = steps(samplers, epoch)
        assert sorted(flat(epoch_steps)) == list(range(size))
        expected = [list(map(len, step)) for step in steps(longer, epoch)]
        assert [list(map(len, step)) for step in epoch_steps] == expected
    samplers[0].start(2, 1)
    assert list(samplers[0]) == [step[0] for step in epoch_steps[1:]]


def test_each_epoch_mixes_samples_and_steps_anew() -> None:
    def epoch_batches(seed: int, epoch: int) -> list[frozenset[int]]:
        sampler = buckets(lengths_of(131), 1, (4, None), seed)[0]
        return [frozenset(batch) for batch in sampler.batches(epoch)]

    first = epoch_batches(0, 0)
    assert len(set(first) & set(epoch_batches(0, 1))) < 3
    assert first == epoch_batches(0, 0) != epoch_batches(1, 0)
    longest = [int(lengths_of(131)[list(batch)].max()) for batch in first]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_a_batch_that_cannot_hold_the_longest_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens is 39.* 40 tokens"):
        BucketBatchSampler(torch.tensor([1, 40]), 4, 39)


# Resuming.

SAMPLERS: dict[str, Callable[[int], ResumableBatchSampler]] = {
    "plain": lambda size: ResumableBatchSampler(size, 8, 3, shuffle=True),
    "buckets": lambda size: BucketBatchSampler(torch.arange(size) % 50 + 1, 8, None, 3, True),
    "tokens": lambda size: BucketBatchSampler(torch.arange(size) % 50 + 1, 8, 400, 3, True),
    "pairs": lambda size: BucketBatchSampler(
        torch.stack([torch.arange(size) % 50 + 1, torch.arange(size) % 30 + 1], 1), 8, None, 3, True
    ),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_any_batch_of_a_large_epoch_is_reached_as_fast_as_the_first(kind: str) -> None:
    large = SAMPLERS[kind](200_000)

    def seconds(batch: int) -> float:
        large.start(5, batch)
        begin = time.perf_counter()
        next(iter(large))
        return time.perf_counter() - begin

    early, late = (min(seconds(batch) for _ in range(3)) for batch in (0, len(large) - 2))
    assert late < 1.5 * early + 0.01


# Padding.


def padding_fraction(batches: Iterable[list[int]], lengths: Tensor, token_counts: Tensor) -> float:
    tokens, padded = count_tokens(batches, lengths, token_counts)
    return 1 - tokens / padded


def test_padding_is_counted() -> None:
    assert round_up(torch.tensor([1, 8, 9, 17, 30]), 8, 30).tolist() == [8, 8, 16, 24, 30]
    batches = [[0, 1], [3], [2]]
    token_counts = torch.tensor([3, 8, 5, 1])
    assert count_tokens(batches, torch.tensor([4, 8, 8, 4]), token_counts) == (17, 16 + 4 + 8)


def test_pairs_are_hardly_padded_on_either_side() -> None:
    lengths = lengths_of(5000, pairs=True)
    fractions = [
        padding_fraction(BucketBatchSampler(by, 8, 400, shuffle=True).batches(0), lengths, lengths)
        for by in (lengths, lengths.amax(1), lengths[:, 0])
    ]
    assert fractions[0] < 0.05 < 2 * fractions[0] < min(fractions[1:]), fractions


def test_every_seed_and_epoch_has_its_own_order() -> None:
    lengths = torch.arange(200)
    orders = {
        tuple(int(lengths[batch].max()) for batch in sampler.batches(epoch))
        for sampler in (BucketBatchSampler(lengths, 4, None, seed, True) for seed in (0, 1))
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert not torch.equal(epoch_permutation(50, 0, 1), epoch_permutation(50, 1, 0))
    classes = torch.arange(50) % 3
    assert not torch.equal(balanced_sample(classes, 0, 1), balanced_sample(classes, 1, 0))


def test_pairs_are_sorted_by_their_longer_side() -> None:
    pairs = torch.cartesian_prod(torch.arange(1, 21), torch.arange(1, 21))
    order = pair_sort_keys(pairs).argsort(stable=True)
    assert pairs.amax(1)[order].diff().min() >= 0
