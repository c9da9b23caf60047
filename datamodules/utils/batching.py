"""Which samples form which batch: a function of the seed, the epoch and the batch number, and of nothing else."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler


def epoch_permutation(size: int, seed: int, epoch: int) -> Tensor:
    """Permutation (size,) that belongs to this seed and epoch, the same on every rank and machine."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator)


def epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    """`epoch_permutation` as a list."""
    return epoch_permutation(size, seed, epoch).tolist()


class Shuffled:
    """The numbers below `size` in an order that belongs to this seed and epoch, without a list of them.

    A part of it costs as much as it is long, wherever it lies: a number is enciphered until it falls below `size`
    again (Black & Rogaway 2002), by four rounds of a Feistel network over twice as many bits as half of `size` has.

    Args:
        size: How many numbers there are.
        seed, epoch: What the order follows from.
    """

    ROUNDS, AHEAD = 4, 2048  # so many numbers at least are computed at once

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))  # bits
        self._mask = np.uint64(2 ** int(self._half) - 1)
        keys = np.random.SeedSequence([seed % 2**64, epoch]).generate_state(self.ROUNDS, np.uint64)
        self._keys = [np.uint64(key) for key in keys]
        self._first, self._known = 0, list[int]()  # the numbers computed last

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice) -> list[int]:
        """The numbers at these places of the order, which lie side by side."""
        start, stop, _ = places.indices(self.size)
        if not self._first <= start <= stop <= self._first + len(self._known):
            self._first, last = start, min(self.size, max(stop, start + self.AHEAD))
            found = self._ciphered(np.arange(start, last, dtype=np.uint64))
            while len(outside := np.flatnonzero(found >= self.size)):  # less than three of four
                found[outside] = self._ciphered(found[outside])
            self._known = found.tolist()
        return self._known[start - self._first : stop - self._first]

    def _ciphered(self, numbers: np.ndarray) -> np.ndarray:
        """A permutation of all numbers of twice `_half` bits."""
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            mixed = (right ^ key) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64's constants
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> np.uint64(32)) & self._mask
        return left << self._half | right


Order = list[int] | range | Shuffled


class ResumableBatchSampler(SequentialSampler):  # to Lightning: one whose order it need not change
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
        self.overfit = False  # every epoch is the first again, for `--trainer.overfit_batches`

    @property
    def sampler(self) -> "ResumableBatchSampler":
        """Itself: Lightning calls `set_epoch` on a loader's `batch_sampler.sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; from its first batch, unless `start` named another."""
        self.epoch = 0 if self.overfit else epoch

    def start(self, epoch: int, batch: int) -> None:
        """Continue in `epoch` before `batch` (both from 0). Later epochs begin at their first batch."""
        self.epoch, self._start = epoch, (epoch, batch)

    def order(self, epoch: int) -> Order:
        """All sample indices in the order of this epoch."""
        return epoch_order(self.size, self.seed, epoch) if self.shuffle else range(self.size)

    def spans(self, epoch: int, first: int = 0) -> Iterable[tuple[int, int]]:
        """Where in the order each step of this epoch starts and stops, from step `first` on; as many in every epoch."""
        return zip(self.cuts[first:-1], self.cuts[first + 1 :], strict=True)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank, the same after `start`: schedules and progress count with it."""
        short = sum(
            self.rank >= stop - start for start, stop in pairwise(self.cuts[-3:])
        )  # no others can be
        return len(self.cuts) - 1 - short

    def batches(self, epoch: int, first: int = 0) -> Iterator[list[int]]:
        """The batches of an epoch on this rank, from number `first` on."""
        order = self.order(epoch)
        for start, stop in self.spans(epoch, first):
            if batch := list(order[start:stop][self.rank :: self.world_size]):
                yield batch

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        return self.batches(self.epoch, self._start[1] if self.epoch == self._start[0] else 0)

    def _cuts(self, drop_last: bool) -> Sequence[int]:
        """Where the order is cut into steps: whole ones, then the rest."""
        step = self.batch_size * self.world_size
        cuts = range(0, self.size + 1, step)
        return cuts if cuts[-1] == self.size or drop_last else self._shared([*cuts, self.size])

    def _shared(self, cuts: list[int]) -> list[int]:
        """A last step of fewer samples than ranks would leave some without a batch: it borrows from the one before."""
        if len(cuts) > 2 and self.size - cuts[-2] < self.world_size < cuts[-2] - cuts[-3]:
            cuts[-2] = self.size - self.world_size
        return cuts


class StreamBatchSampler(ResumableBatchSampler):
    """The same for any number of samples: no list of them is made, and beginning an epoch takes no time."""

    def order(self, epoch: int) -> Order:
        """All sample indices in the order of this epoch, computed where they are asked for."""
        return Shuffled(self.size, self.seed, epoch) if self.shuffle else range(self.size)


class BucketBatchSampler(ResumableBatchSampler):
    """Batches of samples of like length, so that little is padded.

    The samples of an epoch are shuffled as in the base class, sorted by length (stable, longest first), cut into steps
    at places that are the same in every epoch, and the steps are shuffled. Samples of one length meet others in each
    epoch; round lengths up (`padded`) to widen these buckets. All ranks take from the same stretch of the order:
    batches of one step are alike in length.

    Samples with two lengths, such as pairs of texts, go by the longer one; those alike in it by the difference, so that
    little is padded on either side.

    Either each batch has `batch_size` samples, or as many as `batch_tokens` hold: the number of samples times the
    longest length, on each rank. An epoch takes every sample once, and gives every rank as many batches: the step of
    the shortest samples, which may have fewer than the others, borrows as in the base class; where the step before it
    has a single sample for each rank, training joins the two, and some ranks have one sample more than they should.
    (Only fewer samples than ranks leave ranks without a batch.)

    Args:
        lengths: (S,) int64, what each sample costs, such as its padded number of tokens; or (S, 2), of both its texts.
        batch_size: Samples per batch and rank.
        batch_tokens: Tokens per batch and rank instead; None: by `batch_size`.
        seed: Of the draws.
        training: Shuffle; else the order is the same in each epoch.
        rank, world_size: This process, of how many.

    Raises:
        ValueError: `batch_tokens` holds not even the longest sample, or see `ResumableBatchSampler`.
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
        lengths, self.ranking = (
            (lengths, lengths) if lengths.dim() == 1 else _by_both(lengths)
        )  # (S,) each
        longest = int(lengths.max()) if len(lengths) else 0
        if batch_tokens is not None and batch_tokens < longest:
            raise ValueError(
                f"batch_tokens is {batch_tokens}, but the longest sample alone has {longest} tokens."
            )
        self.lengths, self.batch_tokens = lengths, batch_tokens
        super().__init__(len(lengths), batch_size, seed, training, rank=rank, world_size=world_size)

    def order(self, epoch: int) -> list[int]:
        """Sample indices of this epoch, longest first."""
        drawn = (
            epoch_permutation(self.size, self.seed, epoch)
            if self.shuffle
            else torch.arange(self.size)
        )
        return drawn[self.ranking[drawn].argsort(descending=True, stable=True)].tolist()

    def spans(self, epoch: int, first: int = 0) -> Iterable[tuple[int, int]]:
        """The steps of this epoch, in its order."""
        spans = list(super().spans(epoch))
        return (
            [spans[i] for i in epoch_order(len(spans), self.seed, epoch)[first:]]
            if self.shuffle
            else spans[first:]
        )

    def _cuts(self, drop_last: bool) -> Sequence[int]:
        most = self.batch_tokens
        cuts = (
            list(super()._cuts(drop_last)) if most is None else self._shared(self._token_cuts(most))
        )
        if self.shuffle and len(cuts) > 2 and self.size - cuts[-2] < self.world_size:
            del cuts[-2]  # ranks that train wait for each other at every step
        return cuts

    def _token_cuts(self, most: int) -> list[int]:
        """Steps of batches of so many tokens at most; the last may be smaller."""
        ordered = self.lengths.sort(descending=True).values.tolist()
        cuts = [0]
        while cuts[-1] < self.size:
            step = most // max(ordered[cuts[-1]], 1) * self.world_size
            cuts.append(min(cuts[-1] + step, self.size))
        return cuts


class DealtBatches(SequentialSampler):
    """The batches of evaluation, dealt to the ranks in turn: each comes out as with one process, to the bit.

    All ranks have as many: who would have none in the last round gets its last batch, too, which does not count.

    Args:
        whole: All batches.
        rank, world_size: This process, of how many.
    """

    def __init__(self, whole: ResumableBatchSampler, rank: int = 0, world_size: int = 1) -> None:
        self.whole, self.rank, self.world_size = whole, rank, world_size

    def counts(self, number: int) -> bool:
        """Whether this rank's batch of that number, from 0 on, is its own."""
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


def _by_both(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of two lengths (S, 2) the longer (S,), and what samples are sorted by (S,): that, then the difference.

    The differences rise and fall in turn, so that neighbours are alike also where the longer length changes.
    """
    longer, difference = lengths.amax(1), lengths[:, 0] - lengths[:, 1]
    places = longer.unique(return_inverse=True)[1]  # (S,)
    return longer, longer * (2 * int(longer.max()) + 1) + difference * (1 - 2 * (places % 2))


def padded(lengths: Tensor, multiple: int, most: int) -> Tensor:
    """Lengths of any shape rounded up to a multiple, but not above `most`."""
    return (
        lengths.add(multiple - 1).div(multiple, rounding_mode="floor").mul(multiple).clamp(max=most)
    )


def cells(batches: Iterable[list[int]], lengths: Tensor, own: Tensor) -> tuple[int, int]:
    """How many cells of some batches hold a token, and how many there are: a batch is as long as its longest sample.

    Args:
        batches: Sample indices of each.
        lengths, own: (S,) or (S, K) what each sample would be padded to alone, in each of its K texts; its tokens.
    """
    counts = [
        (int(own[batch].sum()), int(lengths[batch].amax(0).sum()) * len(batch)) for batch in batches
    ]
    return sum(filled for filled, _ in counts), sum(total for _, total in counts)
