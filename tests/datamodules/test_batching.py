"""The order of samples: complete, repeatable, shared evenly among ranks, resumed at no cost."""

import time

import pytest

from datamodules.utils.batching import EvalBatchSampler, ResumableBatchSampler, epoch_order

SHAPES = [
    (size, batch, world) for size in (1, 2, 7, 16, 33) for batch in (1, 2, 5) for world in (1, 2, 3)
]


def ranks(size: int, batch: int, world: int, **options: bool) -> list[ResumableBatchSampler]:
    return [
        ResumableBatchSampler(size, batch, 5, rank=rank, world_size=world, **options)
        for rank in range(world)
    ]


@pytest.mark.parametrize(("size", "batch", "world"), SHAPES)
def test_evaluation_takes_every_sample_once_over_all_ranks(
    size: int, batch: int, world: int
) -> None:
    samplers = ranks(size, batch, world)
    taken = [index for sampler in samplers for indices in sampler for index in indices]
    assert sorted(taken) == list(range(size))
    assert all(len(list(sampler)) == len(sampler) for sampler in samplers)
    assert all(0 < len(indices) <= batch for sampler in samplers for indices in sampler)
    if batch > 1 and size >= world:
        assert len({len(sampler) for sampler in samplers}) == 1


@pytest.mark.parametrize(("size", "batch", "world"), SHAPES)
def test_training_gives_every_rank_the_same_full_batches(size: int, batch: int, world: int) -> None:
    samplers = ranks(size, batch, world, shuffle=True, drop_last=True)
    assert {len(sampler) for sampler in samplers} == {size // (batch * world)}
    taken = [index for sampler in samplers for indices in sampler for index in indices]
    assert len(set(taken)) == len(taken)
    assert all(len(indices) == batch for sampler in samplers for indices in sampler)


def test_order_follows_from_seed_and_epoch_alone() -> None:
    assert epoch_order(50, 1, 2) == epoch_order(50, 1, 2)
    assert (
        len({tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16
    )
    assert sorted(epoch_order(50, 1, 2)) == list(range(50))


def test_start_cuts_the_epoch_and_no_other() -> None:
    sampler = ResumableBatchSampler(33, 4, seed=5, shuffle=True)
    epochs = {}
    for epoch in (2, 3):
        sampler.set_epoch(epoch)
        epochs[epoch] = list(sampler)
    sampler.start(2, 3)
    assert len(sampler) == 9
    assert list(sampler) == epochs[2][3:] == list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == epochs[3]


def test_start_deep_in_a_large_epoch_is_as_fast_as_at_its_beginning() -> None:
    sampler = ResumableBatchSampler(500_000, 8, shuffle=True)

    def seconds(batch: int) -> float:
        sampler.start(0, batch)
        start = time.perf_counter()
        next(iter(sampler))
        return time.perf_counter() - start

    seconds(0)
    assert min(seconds(60_000) for _ in range(3)) < 2 * min(seconds(0) for _ in range(3)) + 0.05


@pytest.mark.parametrize("options", [{"size": 0}, {"batch_size": 0}, {"rank": 2, "world_size": 2}])
def test_impossible_requests_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1|is not one of"):
        ResumableBatchSampler(**{"size": 5, "batch_size": 2, **options})


@pytest.mark.parametrize(("size", "batch", "world"), SHAPES)
def test_evaluation_deals_the_batches_of_one_process(size: int, batch: int, world: int) -> None:
    whole = ResumableBatchSampler(size, batch)
    samplers = [EvalBatchSampler(whole, rank, world) for rank in range(world)]
    assert {len(list(sampler)) for sampler in samplers} == {len(sampler) for sampler in samplers}
    rounds = enumerate(zip(*samplers, strict=True))
    dealt = [
        taken
        for number, row in rounds
        for s, taken in zip(samplers, row, strict=True)
        if s.counts(number)
    ]
    assert dealt == list(whole)
