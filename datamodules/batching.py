"""Which samples form which batch: a function of the seed, the epoch and the batch number, and of nothing else."""

from collections.abc import Iterator

import torch


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """Permutation of `range(size)` that belongs to this seed and epoch, the same on every rank and machine."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator).tolist()


class ResumableBatchSampler:
    """Lists of sample indices, one per batch, for one rank of `world_size`.

    Each step takes the next `batch_size * world_size` samples of the epoch's order, and rank r every world_size-th of
    them from r on. Hence all ranks see the same number of batches and no sample twice; the last batch is smaller unless
    it is dropped. (Ranks may differ by one batch only where fewer samples than ranks remain and `batch_size` is 1.)

    Resuming costs nothing: `start(epoch, batch)` cuts the order at the batch, no earlier sample is touched.

    Args:
        size: Number of samples of the data set.
        batch_size: Samples per batch and rank.
        seed: Of the order; used where `shuffle` is on.
        shuffle: New order in each epoch (training), or the order of the data set (evaluation).
        drop_last: Leave out the last batch where it is not full on every rank.
        rank, world_size: This process, of how many.

    Raises:
        ValueError: `batch_size`, `size` or `rank` out of range.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if size < 1 or batch_size < 1:
            raise ValueError(f"size ({size}) and batch_size ({batch_size}) must be at least 1.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}.")
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.rank, self.world_size = rank, world_size
        self.cuts = self._cuts(drop_last)
        self.epoch = 0
        self._start = (0, 0)

    @property
    def sampler(self) -> "ResumableBatchSampler":
        """Itself: Lightning calls `set_epoch` on a loader's `batch_sampler.sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; from its first batch, unless `start` named another."""
        self.epoch = epoch

    def start(self, epoch: int, batch: int) -> None:
        """Continue in `epoch` before `batch` (both from 0). Later epochs begin at their first batch."""
        self.epoch, self._start = epoch, (epoch, batch)

    def order(self, epoch: int) -> list[int]:
        """All sample indices in the order of this epoch; what a sampler with length buckets overrides."""
        return epoch_order(self.size, self.seed, epoch) if self.shuffle else list(range(self.size))

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, the same after `start`: schedules and progress count with it."""
        return sum(self.rank < stop - start for start, stop in self._spans())

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order(self.epoch)
        first = self._start[1] if self.epoch == self._start[0] else 0
        for start, stop in self._spans()[first:]:
            if batch := order[start:stop][self.rank :: self.world_size]:
                yield batch

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.cuts[:-1], self.cuts[1:], strict=True))

    def _cuts(self, drop_last: bool) -> list[int]:
        """Where the order is cut into steps: whole ones, then the rest."""
        step = self.batch_size * self.world_size
        cuts = list(range(0, self.size + 1, step))
        if cuts[-1] == self.size or drop_last:
            return cuts
        # A rest smaller than the number of ranks would leave some without a batch: it borrows from the step before.
        if len(cuts) > 1 and self.batch_size > 1:
            cuts[-1] = min(cuts[-1], self.size - self.world_size)
        return [*cuts, self.size]
