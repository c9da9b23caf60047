"""Which samples form which batch: a function of the seed, the epoch and the batch number only."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler


def epoch_permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Permutation (size,) of this seed and epoch, the same on every rank and machine."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator)


def balanced_sample(classes: Tensor, seed: int, epoch: int) -> Tensor:
    """(S,) indices drawn with replacement, each class equally likely, as epoch_permutation is.

    What torch's `WeightedRandomSampler` draws with the weights 1 / (samples of the class).

    Args:
        classes: (S,) int64, the class of each sample.
        seed, epoch: Of the random numbers.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    _, counts = classes.unique(return_counts=True)  # (K,) of the classes that occur
    starts = counts.cumsum(0) - counts  # (K,)
    drawn = torch.randint(len(counts), (len(classes),), generator=generator)  # (S,)
    random = torch.rand(len(classes), generator=generator, dtype=torch.float64)  # (S,)
    members = (random * counts[drawn]).long()  # (S,) of each drawn class
    return classes.argsort(stable=True)[starts[drawn] + members]


# A SequentialSampler by type only: with overfit_batches Lightning replaces every other sampler.
class ResumableBatchSampler(SequentialSampler):
    """Lists of sample indices, one per batch, for one rank of `world_size`.

    Each step takes the next `batch_size * world_size` samples of the epoch's order; of these, rank
    r takes every world_size-th, starting with the r-th. No sample is taken twice. The last step may
    be smaller; if it has fewer samples than ranks, it borrows from the one before. If that has none
    to lend, as with a `batch_size` of 1, the last step is left out if `shuffle` is on: in training
    all ranks have the same number of batches, if there are at least as many samples as ranks.
    `start(epoch, batch)` begins at that batch without reading earlier ones.

    Args:
        size: Number of samples of the data set.
        batch_size: Samples per batch and rank.
        seed: Of the order, if `shuffle` is on.
        shuffle: New order in each epoch (training), or that of the data set (evaluation).
        drop_last: Leave out the last batch if it is not full on every rank.
        rank, world_size: This process, and the number of processes.
        balanced: (S,) int64, the class of each sample: with `shuffle`, samples are drawn with
            replacement, each class equally likely; None: an epoch takes every sample once.

    Raises:
        ValueError: `batch_size`, `size` or `rank` is out of range.
    """

    joins_last = False  # a last step without a sample for every rank: join it, or leave it out

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        balanced: Tensor | None = None,
    ) -> None:
        if size < 1 or batch_size < 1:
            raise ValueError(f"size ({size}) and batch_size ({batch_size}) must be at least 1.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}.")
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.balanced = balanced
        self.rank = rank
        self.world_size = world_size
        self.boundaries = self._boundaries(drop_last)
        self.epoch = 0
        self._start = (0, 0)
        self._first_batch = 0
        self.overfit = False  # every epoch is the first again, for `--trainer.overfit_batches`

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from batch 0 unless `start` named another."""
        start_epoch, batch = self._start
        self._first_batch = batch if epoch == start_epoch else 0
        self.epoch = 0 if self.overfit else epoch

    def start(self, epoch: int, batch: int) -> None:
        """Continues in `epoch` before `batch`, both from 0; later epochs begin at batch 0."""
        self._start = (epoch, batch)
        self.set_epoch(epoch)

    def order(self, epoch: int) -> Tensor:
        """All sample indices (S,) in the order of this epoch."""
        if self.shuffle and self.balanced is not None:
            return balanced_sample(self.balanced, self.seed, epoch)
        if self.shuffle:
            return epoch_permutation(self.size, self.seed, epoch)
        return torch.arange(self.size)

    def steps(self, epoch: int, first: int = 0) -> Iterable[tuple[int, int]]:
        """Start and stop of each step in the order of this epoch, from step `first` on."""
        return zip(self.boundaries[first:-1], self.boundaries[first + 1 :], strict=True)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, wherever it starts, as schedules need it."""
        last_steps = pairwise(self.boundaries[-3:])  # no others can be too short
        missing = sum(self.rank >= stop - start for start, stop in last_steps)
        return len(self.boundaries) - 1 - missing

    def batches(self, epoch: int, first: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch on this rank, from number `first` on."""
        order = self.order(epoch)
        for start, stop in self.steps(epoch, first):
            batch = order[start + self.rank : stop : self.world_size].tolist()
            if batch:
                yield batch

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return self.batches(self.epoch, self._first_batch)

    def _boundaries(self, drop_last: bool) -> Sequence[int]:
        """Where the order is cut into steps: whole ones, then the rest."""
        boundaries = range(0, self.size + 1, self.batch_size * self.world_size)
        if boundaries[-1] == self.size or drop_last:
            return boundaries
        return self._fill_last([*boundaries, self.size])

    def _fill_last(self, boundaries: list[int]) -> list[int]:
        """Deals with a last step that has fewer samples than ranks, as the class says."""
        if len(boundaries) > 2 and self.size - boundaries[-2] < self.world_size:
            if boundaries[-2] - boundaries[-3] > self.world_size:
                boundaries[-2] = self.size - self.world_size
            elif self.shuffle:  # ranks that train wait for each other at every step
                del boundaries[-2 if self.joins_last else -1]
        return boundaries


class BucketBatchSampler(ResumableBatchSampler):
    """Batches of samples of similar length, so that there is little padding.

    The samples of an epoch are shuffled, sorted by length (stable, longest first) and cut into
    steps at the same boundaries in every epoch; then the steps are shuffled. Samples of equal
    length are grouped differently in every epoch; rounding the lengths up makes these groups
    larger. All ranks take from the same step: their batches are of similar length. Pairs of texts
    are sorted by the longer length, then by the difference, so that there is little padding on
    either side.

    Each batch has `batch_size` samples, or as many as `batch_tokens` allow: samples times the
    longest length, on each rank. An epoch takes every sample once. The step of the shortest samples
    may be smaller; if it has fewer samples than ranks, it borrows from the one before, or in
    training joins it if that has none to lend. A batch of a joined step may exceed `batch_size` or
    `batch_tokens`.

    Args:
        lengths: (S,) int64, tokens of each sample with padding; or (S, 2) for pairs.
        batch_tokens: Tokens per batch and rank, instead of `batch_size` samples.
        batch_size, seed, shuffle, rank, world_size, balanced: As in `ResumableBatchSampler`;
            `balanced` not with `batch_tokens`, as the steps depend on the lengths that are drawn.

    Raises:
        ValueError: As `ResumableBatchSampler`, `batch_tokens` is less than the longest sample, or
            given with `balanced`.
    """

    joins_last = True

    def __init__(
        self,
        lengths: Tensor,
        batch_size: int,
        batch_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = False,
        rank: int = 0,
        world_size: int = 1,
        balanced: Tensor | None = None,
    ) -> None:
        if len(lengths) == 0:
            raise ValueError("size is 0: there are no samples to batch.")
        if balanced is not None and batch_tokens is not None:
            raise ValueError("batch_tokens and balanced exclude each other.")
        self.lengths = lengths  # (S,)
        self.sort_keys = lengths  # (S,)
        if lengths.dim() == 2:
            self.lengths = lengths.amax(1)  # (S, 2) -> (S,)
            self.sort_keys = pair_sort_keys(lengths)
        longest = int(self.lengths.max())
        if batch_tokens is not None and batch_tokens < longest:
            raise ValueError(
                f"batch_tokens is {batch_tokens}, but the longest sample has {longest} tokens."
            )
        self.batch_tokens = batch_tokens
        super().__init__(
            len(lengths),
            batch_size,
            seed,
            shuffle,
            rank=rank,
            world_size=world_size,
            balanced=balanced,
        )

    def order(self, epoch: int) -> Tensor:
        """Sample indices (S,) of this epoch, longest first."""
        order = super().order(epoch)
        return order[self.sort_keys[order].argsort(descending=True, stable=True)]

    def steps(self, epoch: int, first: int = 0) -> Iterable[tuple[int, int]]:
        """Start and stop of each step in the order of this epoch, from step `first` on."""
        steps = list(super().steps(epoch))
        if self.shuffle:
            steps = [steps[i] for i in epoch_permutation(len(steps), self.seed, epoch).tolist()]
        return steps[first:]

    def _boundaries(self, drop_last: bool) -> Sequence[int]:
        if self.batch_tokens is None:
            return super()._boundaries(drop_last)
        return self._fill_last(self._token_boundaries(self.batch_tokens))

    def _token_boundaries(self, batch_tokens: int) -> list[int]:
        """Steps of batches of so many tokens at most; the last may be smaller."""
        lengths = self.lengths.sort(descending=True).values.tolist()
        boundaries = [0]
        while boundaries[-1] < self.size:
            longest = max(lengths[boundaries[-1]], 1)
            step = batch_tokens // longest * self.world_size
            boundaries.append(min(boundaries[-1] + step, self.size))
        return boundaries


class EvalBatchSampler(SequentialSampler):
    """All batches, distributed over the ranks in turn: metrics equal those of one process.

    All ranks have the same number of batches: a rank without one in the last round repeats the
    last batch, which does not count.

    Args:
        batches: Those of one process.
        rank, world_size: This process, and the number of processes.
        done: Numbers of batches to leave out.
        limit: Of batches on each rank, as Lightning's `limit_val_batches`: a number, or a fraction
            if it is a float. A limited evaluation takes samples from all parts of the order, always
            the same.
    """

    def __init__(
        self,
        batches: ResumableBatchSampler,
        rank: int = 0,
        world_size: int = 1,
        done: Collection[int] = (),
        limit: int | float = 1.0,
    ) -> None:
        self.batches = batches
        self.rank = rank
        self.world_size = world_size
        self.numbers = [number for number in range(len(batches)) if number not in done]
        self.limit = int(len(self) * limit) if isinstance(limit, float) else min(limit, len(self))

    def is_counted(self, number: int) -> bool:
        """Whether this rank's batch of that number, from 0 on, is not a repetition."""
        return number * self.world_size + self.rank < len(self.numbers)

    def batch_number(self, number: int) -> int:
        """The number among those of one process of this rank's counted batch of that number."""
        return self.numbers[number * self.world_size + self.rank]

    def __len__(self) -> int:
        return -(-len(self.numbers) // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        """The batches; `limit` of them are fewer than `len` says, as Lightning expects it."""
        if self.limit < len(self):
            batches = self._spread_samples().split(self.batches.batch_size)
            yield from (batch.tolist() for batch in batches[self.rank :: self.world_size])
            return
        batch: list[int] = []
        own = set(self.numbers[self.rank :: self.world_size])
        for number, batch in enumerate(self.batches):
            if number in own:
                yield batch
        if not self.is_counted(len(self) - 1):
            yield batch

    def _spread_samples(self) -> Tensor:
        """Samples of the limited batches of all ranks: one of each of as many parts of the order.

        Which one is drawn: every k-th sample could be of the same class.
        """
        order = self.batches.order(0)
        count = self.limit * self.world_size * self.batches.batch_size
        bounds = torch.arange(count + 1) * len(order) // count
        draws = torch.rand(count, generator=torch.Generator().manual_seed(0))
        return order[bounds[:-1] + (draws * bounds.diff()).long()]


def pair_sort_keys(lengths: Tensor) -> Tensor:
    """Sort keys (S,) of pairs of lengths (S, 2): the longer one, then the difference.

    Every second group of pairs with the same longer length is sorted in reverse (serpentine
    order), so that neighbours in different groups have similar differences, too.
    """
    longer = lengths.amax(1)  # (S, 2) -> (S,)
    difference = lengths[:, 0] - lengths[:, 1]  # (S,)
    group = longer.unique(return_inverse=True)[1]  # (S,)
    return longer * (2 * int(longer.max()) + 1) + difference * (1 - 2 * (group % 2))


def round_up(lengths: Tensor, multiple: int, maximum: int) -> Tensor:
    """Lengths of any shape rounded up to a multiple, but not above `maximum`."""
    rounded = (lengths + multiple - 1).div(multiple, rounding_mode="floor") * multiple
    return rounded.clamp(max=maximum)


def count_tokens(
    batches: Iterable[list[int]], lengths: Tensor, token_counts: Tensor
) -> tuple[int, int]:
    """How many tokens some batches hold, without padding and with it.

    `lengths` (S,), or (S, K) for samples of K texts, are with padding, `token_counts` without.
    """
    tokens = 0
    padded = 0
    for batch in batches:
        tokens += int(token_counts[batch].sum())
        padded += int(lengths[batch].amax(0).sum()) * len(batch)
    return tokens, padded
