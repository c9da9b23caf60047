"""Batches of similar length: each sample once, as many for every rank, and little padding."""

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor

from datamodules.sources import TEXT_SOURCES, TextDatasetOptions
from datamodules.utils.batching import (
    BucketBatchSampler,
    ResumableBatchSampler,
    count_tokens,
    round_up,
)

BATCHES = [(1, None), (2, None), (4, None), (50, None), (4, 40), (4, 97)]  # samples or tokens
CASES = list(product((3, 7, 40, 131), (1, 2, 3), BATCHES, (0, 1)))  # sizes, ranks, batches, seeds
Kind = tuple[int, int | None]


def lengths_of(size: int) -> Tensor:
    """Lengths from 1 to 40, many of them equal."""
    return round_up(
        torch.randint(1, 41, (size,), generator=torch.Generator().manual_seed(size)), 4, 38
    )


def padding_share(batches: Iterable[list[int]], lengths: Tensor, own: Tensor) -> float:
    filled, total = count_tokens(batches, lengths, own)
    return 1 - filled / total


def ranks(
    size: int, world: int, batch: Kind, seed: int, training: bool = True
) -> list[BucketBatchSampler]:
    return [
        BucketBatchSampler(lengths_of(size), *batch, seed, training, rank, world)
        for rank in range(world)
    ]


def steps(samplers: list[BucketBatchSampler], epoch: int) -> list[list[list[int]]]:
    """The batches of all ranks, step by step."""
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*samplers, strict=True)]


@pytest.mark.parametrize(("size", "world", "batch", "seed"), CASES)
def test_training_takes_every_sample_once_and_gives_each_rank_as_many_batches(
    size: int, world: int, batch: Kind, seed: int
) -> None:
    samplers, lengths, (most, tokens) = ranks(size, world, batch, seed), lengths_of(size), batch
    for epoch in range(5):
        epoch_steps = steps(samplers, epoch)  # refuses ranks with other numbers of batches
        assert {len(epoch_steps)} == {len(sampler) for sampler in samplers}
        assert sorted(index for step in epoch_steps for batch in step for index in batch) == list(
            range(size)
        )
        sizes = [sorted(map(len, step)) for step in epoch_steps]
        assert all(step[0] > 0 and step[-1] - step[0] <= 1 for step in sizes)
        if tokens is None:
            assert (
                sum(step != [most] * world for step in sizes) <= 2
            )  # the last, and the one that lends it samples
            over = [len(batch) for step in epoch_steps for batch in step if len(batch) > most]
        else:
            cost = [
                (len(batch), len(batch) * int(lengths[batch].max()))
                for step in epoch_steps
                for batch in step
            ]
            over = [count for count, cells in cost if cells > tokens]
        assert (
            set(over) <= {2} and len(over) <= size % world
        )  # joined, where single samples did not suffice


def test_a_rest_that_ranks_cannot_share_joins_the_last_single_samples() -> None:
    for batch in ((1, None), (8, 40)):
        samplers = [
            BucketBatchSampler(torch.full((7,), 30), *batch, 0, True, rank, 3) for rank in range(3)
        ]
        assert sorted(sorted(map(len, step)) for step in steps(samplers, 0)) == [
            [1, 1, 1],
            [1, 1, 2],
        ]


@pytest.mark.parametrize(("size", "world", "batch", "seed"), CASES)
def test_the_batches_of_a_step_are_alike_in_length(
    size: int, world: int, batch: Kind, seed: int
) -> None:
    lengths = lengths_of(size)
    ranges = sorted(
        (lengths[sum(step, [])].min().item(), lengths[sum(step, [])].max().item())
        for step in steps(ranks(size, world, batch, seed), 3)
    )
    assert all(
        longest <= shortest for (_, longest), (shortest, _) in zip(ranges, ranges[1:], strict=False)
    )


@pytest.mark.parametrize(("size", "world", "batch", "seed"), CASES)
def test_an_epoch_entered_at_any_batch_is_the_rest_of_the_whole(
    size: int, world: int, batch: Kind, seed: int
) -> None:
    sampler = ranks(size, world, batch, seed)[-1]
    sampler.set_epoch(5)
    whole = list(sampler)
    for number in range(len(whole) + 1):
        again = ranks(size, world, batch, seed)[-1]
        again.start(5, number)
        assert list(again) == whole[number:] and len(again) == len(whole)
    again.set_epoch(6)
    assert len(list(again)) == len(whole)


@pytest.mark.parametrize(("size", "world", "batch", "seed"), CASES)
def test_evaluation_takes_every_sample_once_longest_first(
    size: int, world: int, batch: Kind, seed: int
) -> None:
    samplers = ranks(size, world, (batch[0], None), seed, training=False)
    taken = [index for sampler in samplers for indices in sampler for index in indices]
    assert sorted(taken) == list(range(size))
    first = [int(lengths_of(size)[indices].max()) for indices in samplers[0]]
    assert first == sorted(first, reverse=True)


def test_epochs_mix_samples_anew_and_shuffle_the_steps() -> None:
    sampler = ranks(131, 1, (4, None), 0)[0]
    one, two = ([frozenset(batch) for batch in sampler.batches(epoch)] for epoch in (0, 1))
    assert len(set(one) & set(two)) < 3
    longest = [int(lengths_of(131)[list(batch)].max()) for batch in one]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)
    assert one == [frozenset(batch) for batch in ranks(131, 1, (4, None), 0)[0].batches(0)]
    assert one != [frozenset(batch) for batch in ranks(131, 1, (4, None), 1)[0].batches(0)]


def test_a_batch_that_cannot_hold_the_longest_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_tokens is 39, but the longest sample has 40"):
        BucketBatchSampler(torch.tensor([1, 40]), 4, 39)


def test_rounding_up_stops_at_the_most() -> None:
    assert round_up(torch.tensor([1, 8, 9, 17, 30]), 8, 30).tolist() == [8, 8, 16, 24, 30]


def test_padding_is_counted_cell_by_cell() -> None:
    own, lengths = torch.tensor([3, 8, 5, 1]), torch.tensor([4, 8, 8, 4])
    assert padding_share([[0, 1], [3], [2]], lengths, own) == pytest.approx(1 - 17 / (16 + 4 + 8))


def test_real_reviews_are_hardly_padded(real_data: object) -> None:
    import pyarrow.compute as pc

    texts = TEXT_SOURCES["hub"](f"{real_data}/imdb", TextDatasetOptions()).split("val").column
    own = (
        torch.tensor(pc.list_value_length(pc.utf8_split_whitespace(texts)).to_pylist()).clamp(
            max=510
        )
        + 2
    )
    lengths = round_up(own, 8, 512)
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


def both_of(size: int) -> Tensor:
    """Two lengths of each sample (S, 2), alike but not equal."""
    draw = torch.Generator().manual_seed(size)
    one = torch.randint(1, 39, (size,), generator=draw)
    return torch.stack(
        [one, (one + torch.randint(-6, 7, (size,), generator=draw)).clamp(1, 38)], dim=1
    )


@pytest.mark.parametrize(("size", "world", "batch", "seed"), CASES)
def test_samples_of_two_lengths_keep_all_of_that(
    size: int, world: int, batch: Kind, seed: int
) -> None:
    lengths = both_of(size)
    samplers = [
        BucketBatchSampler(lengths, *batch, seed, True, rank, world) for rank in range(world)
    ]
    alone = [
        BucketBatchSampler(lengths.amax(1), *batch, seed, True, rank, world)
        for rank in range(world)
    ]
    for epoch in range(3):
        epoch_steps = steps(samplers, epoch)
        assert sorted(index for step in epoch_steps for batch in step for index in batch) == list(
            range(size)
        )
        assert [list(map(len, step)) for step in epoch_steps] == [
            list(map(len, step)) for step in steps(alone, epoch)
        ]
    samplers[0].start(2, 1)
    assert list(samplers[0]) == [step[0] for step in epoch_steps[1:]]


def test_samples_are_alike_in_both_lengths() -> None:
    lengths = both_of(5000)
    shares = [
        padding_share(BucketBatchSampler(by, 8, 400, training=True).batches(0), lengths, lengths)
        for by in (lengths, lengths.amax(1), lengths[:, 0])
    ]
    assert shares[0] < 0.05 < 2 * shares[0] < min(shares[1:]), shares
