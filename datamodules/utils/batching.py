"""Which samples form which batch: a function of the seed, the epoch and the batch number only."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler


def epoch_permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Permutation (size,) of this seed and epoch, the same on every rank and machine."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator)


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """`epoch_permutation` as a list."""
    return epoch_permutation(size, seed, epoch).tolist()


class LazyPermutation:
    """A permutation of the numbers below `size` that is never a list.

    Any part of it costs as much as it is long. A number is encrypted until it is below `size`
    again (Black & Rogaway 2002), with a Feistel network of four rounds over twice as many bits as
    half of `size` has.

    Args:
        size: How many numbers there are.
        seed: Of the permutation.
        epoch: Likewise.
    """

    ROUNDS = 4
    READ_AHEAD = 2048  # numbers that are computed at once, at least

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._half_bits = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
        self._mask = np.uint64(2 ** int(self._half_bits) - 1)
        keys = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(self.ROUNDS, np.uint64)
        self._keys = [np.uint64(key) for key in keys]
        self._first = 0  # position of the numbers computed last
        self._numbers = list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: slice) -> list[int]:
        """The numbers at neighbouring positions."""
        start, stop, _ = positions.indices(self.size)
        if not self._first <= start <= stop <= self._first + len(self._numbers):
            last = min(self.size, max(stop, start + self.READ_AHEAD))
            numbers = self._encrypt(np.arange(start, last, dtype=np.uint64))
            while len(outside := np.flatnonzero(numbers >= self.size)):  # fewer than 3 of 4
                numbers[outside] = self._encrypt(numbers[outside])
            self._first = start
            self._numbers = numbers.tolist()
        return self._numbers[start - self._first : stop - self._first]

    def _encrypt(self, numbers: np.ndarray) -> np.ndarray:
        """A permutation of all numbers of twice `_half_bits` bits."""
        left = numbers >> self._half_bits
        right = numbers & self._mask
        for key in self._keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64's constants
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32)) & self._mask
        return left << self._half_bits | right


Order = list[int] | range | LazyPermutation


class ResumableBatchSampler(SequentialSampler):  # Lightning leaves the order of such alone
    """Lists of sample indices, one per batch, for one rank of `world_size`.

    Each step takes the next `batch_size * world_size` samples of the epoch's order, and rank r
    every world_size-th of them from r on. All ranks see the same number of batches and no sample
    twice; the last batch is smaller unless it is dropped. (Ranks may differ by one batch only where
    fewer samples than ranks remain and `batch_size` is 1.)

    Resuming costs nothing: `start(epoch, batch)` begins at that batch, and skips no earlier sample.

    Args:
        size: Number of samples of the data set.
        batch_size: Samples per batch and rank.
        seed: Of the order; used where `shuffle` is on.
        shuffle: New order in each epoch (training), or that of the data set (evaluation).
        drop_last: Leave out the last batch where it is not full on every rank.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: `batch_size`, `size` or `rank` is out of range.
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
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.boundaries = self._boundaries(drop_last)
        self.epoch = 0
        self._start = (0, 0)
        self.overfit = False  # every epoch is the first again, for `--trainer.overfit_batches`

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; from batch 0, unless `start` named another."""
        self.epoch = 0 if self.overfit else epoch

    def start(self, epoch: int, batch: int) -> None:
        """Continues in `epoch` before `batch`, both from 0; later epochs begin at batch 0."""
        self.epoch = epoch
        self._start = (epoch, batch)

    def order(self, epoch: int) -> Order:
        """All sample indices in the order of this epoch."""
        return epoch_order(self.size, self.seed, epoch) if self.shuffle else range(self.size)

    def spans(self, epoch: int, first: int = 0) -> Iterable[tuple[int, int]]:
        """Start and stop of each step in the order of this epoch, from step `first` on."""
        return zip(self.boundaries[first:-1], self.boundaries[first + 1 :], strict=True)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, whatever `start` says: schedules count with it."""
        last_spans = pairwise(self.boundaries[-3:])  # no others can be too short
        missing = sum(self.rank >= stop - start for start, stop in last_spans)
        return len(self.boundaries) - 1 - missing

    def batches(self, epoch: int, first: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch on this rank, from number `first` on."""
        order = self.order(epoch)
        for start, stop in self.spans(epoch, first):
            batch = list(order[start:stop][self.rank :: self.world_size])
            if batch:
                yield batch

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        epoch, batch = self._start
        return self.batches(self.epoch, batch if self.epoch == epoch else 0)

    def _boundaries(self, drop_last: bool) -> Sequence[int]:
        """Where the order is cut into steps: whole ones, then the rest."""
        boundaries = range(0, self.size + 1, self.batch_size * self.world_size)
        if boundaries[-1] == self.size or drop_last:
            return boundaries
        return self._fill_last([*boundaries, self.size])

    def _fill_last(self, boundaries: list[int]) -> list[int]:
        """Lets a last step with fewer samples than ranks borrow from the one before."""
        if len(boundaries) > 2:
            last = self.size - boundaries[-2]
            if last < self.world_size < boundaries[-2] - boundaries[-3]:
                boundaries[-2] = self.size - self.world_size
        return boundaries


class StreamBatchSampler(ResumableBatchSampler):
    """The same for any number of samples: an epoch begins at once and takes no memory."""

    def order(self, epoch: int) -> Order:
        """All sample indices in the order of this epoch, computed as they are needed."""
        return LazyPermutation(self.size, self.seed, epoch) if self.shuffle else range(self.size)


class BucketBatchSampler(ResumableBatchSampler):
    """Batches of samples of similar length, so that there is little padding.

    The samples of an epoch are shuffled as in the base class, sorted by length (stable, longest
    first) and cut into steps at the same boundaries in every epoch; then the steps are shuffled.
    Samples of one length meet others in each epoch; round lengths up to widen these buckets. All
    ranks take from the same step: their batches are of similar length.

    Pairs of texts go by the longer length; those alike in it by the difference, so that there is
    little padding on either side.

    Each batch has `batch_size` samples, or as many as `batch_tokens` allow: the number of samples
    times the longest length, on each rank. An epoch takes every sample once, and gives every rank
    as many batches: the step of the shortest samples, which may have fewer than the others, borrows
    as in the base class; where the step before it has one sample per rank, training joins the two.
    (Only fewer samples than ranks leave ranks without a batch.)

    Args:
        lengths: (S,) int64, what each sample costs, such as its padded tokens; or (S, 2) for pairs.
        batch_size: Samples per batch and rank.
        batch_tokens: Tokens per batch and rank instead; None: by `batch_size`.
        seed: Of the order.
        training: Shuffle; else the order is the same in each epoch.
        rank: This process.
        world_size: Number of processes.

    Raises:
        ValueError: `batch_tokens` is less than the longest sample, or see `ResumableBatchSampler`.
    """

    def __init__(
        self,
        lengths: Tensor,
        batch_size: int,
        batch_tokens: int | None = None,
        seed: int = 0,
        training: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.lengths = lengths  # (S,)
        self.sort_keys = lengths  # (S,)
        if lengths.dim() == 2:
            self.lengths = lengths.amax(1)  # (S, 2) -> (S,)
            self.sort_keys = pair_sort_keys(lengths)
        longest = int(self.lengths.max()) if len(lengths) else 0
        if batch_tokens is not None and batch_tokens < longest:
            raise ValueError(
                f"batch_tokens is {batch_tokens}, but the longest sample has {longest} tokens."
            )
        self.batch_tokens = batch_tokens
        super().__init__(len(lengths), batch_size, seed, training, rank=rank, world_size=world_size)

    def order(self, epoch: int) -> list[int]:
        """Sample indices of this epoch, longest first."""
        order = torch.arange(self.size)
        if self.shuffle:
            order = epoch_permutation(self.size, self.seed, epoch)
        return order[self.sort_keys[order].argsort(descending=True, stable=True)].tolist()

    def spans(self, epoch: int, first: int = 0) -> Iterable[tuple[int, int]]:
        """The steps of this epoch, in its order."""
        spans = list(super().spans(epoch))
        if self.shuffle:
            spans = [spans[i] for i in epoch_order(len(spans), self.seed, epoch)]
        return spans[first:]

    def _boundaries(self, drop_last: bool) -> Sequence[int]:
        if self.batch_tokens is None:
            boundaries = list(super()._boundaries(drop_last))
        else:
            boundaries = self._fill_last(self._token_boundaries(self.batch_tokens))
        last = self.size - boundaries[-2]
        if self.shuffle and len(boundaries) > 2 and last < self.world_size:
            del boundaries[-2]  # ranks that train wait for each other at every step
        return boundaries

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
    """The batches of one process, dealt to the ranks in turn, so that metrics are equal to the bit.

    All ranks have as many: a rank without one in the last round repeats the last batch, which does
    not count.

    Args:
        whole: All batches.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(self, whole: ResumableBatchSampler, rank: int = 0, world_size: int = 1) -> None:
        self.whole = whole
        self.rank = rank
        self.world_size = world_size

    def counts(self, number: int) -> bool:
        """Whether this rank's batch of that number, from 0 on, is no repetition."""
        return number * self.world_size + self.rank < len(self.whole)

    def __len__(self) -> int:
        return -(-len(self.whole) // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        batch: list[int] = []
        for number, batch in enumerate(self.whole):
            if number % self.world_size == self.rank:
                yield batch
        if not self.counts(len(self) - 1):
            yield batch


def pair_sort_keys(lengths: Tensor) -> Tensor:
    """What pairs of lengths (S, 2) are sorted by (S,): the longer one, then the difference.

    The differences rise and fall in turn, so that neighbours are similar also where the longer
    length changes.
    """
    longer = lengths.amax(1)  # (S, 2) -> (S,)
    difference = lengths[:, 0] - lengths[:, 1]  # (S,)
    rank = longer.unique(return_inverse=True)[1]  # (S,)
    return longer * (2 * int(longer.max()) + 1) + difference * (1 - 2 * (rank % 2))


def round_up(lengths: Tensor, multiple: int, maximum: int) -> Tensor:
    """Lengths of any shape rounded up to a multiple, but not above `maximum`."""
    rounded = (lengths + multiple - 1).div(multiple, rounding_mode="floor") * multiple
    return rounded.clamp(max=maximum)


def count_tokens(
    batches: Iterable[list[int]], lengths: Tensor, token_counts: Tensor
) -> tuple[int, int]:
    """How many tokens some batches hold, without padding and with it.

    Args:
        batches: Sample indices of each.
        lengths: (S,) or (S, K): what each sample is padded to alone, in each of its K texts.
        token_counts: (S,) or (S, K): tokens of each sample.
    """
    tokens = 0
    padded = 0
    for batch in batches:
        tokens += int(token_counts[batch].sum())
        padded += int(lengths[batch].amax(0).sum()) * len(batch)
    return tokens, padded
