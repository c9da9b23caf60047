"""Rows of T tokens from a token file: windows of the text as a whole, or documents packed side by side."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.tokens.token_file import TokenFile
from datamodules.utils.batching import ResumableBatchSampler

IGNORED = -100  # the target of a place that counts for nothing


class RandomWindows:
    """Windows that lie side by side, from a place that is drawn for each epoch: every token is a target once an epoch,
    but for fewer than a window's at the beginning.

    Args:
        file: Of more than `length` tokens.
        length: Tokens T of a window.
        seed: Of the draws.
    """

    in_memory = True  # or mapped into it: no workers

    def __init__(self, file: TokenFile, length: int, seed: int) -> None:
        self.file, self.length, self.seed = file, length, seed
        self.last = len(file.tokens) - length - 1  # where the last window may begin
        self.sampler: ResumableBatchSampler | None = None  # whose epoch it is
        self._shift = (-1, 0)  # of which epoch

    def __len__(self) -> int:
        return (len(self.file.tokens) - 1) // self.length

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        """{"tokens": int64 (B, T), "targets": int64 (B, T), the same one token further, "bytes": int64 (B,)}."""
        starts = np.minimum(np.array(indices) * self.length + self.shift(), self.last)  # (B,)
        rows = self.file.windows(starts, self.length + 1)  # (B, T + 1)
        tokens, targets = (
            torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:])
        )
        first, last = self.file.byte_places(starts + [[1], [self.length + 1]])  # (2, B)
        return {"tokens": tokens, "targets": targets, "bytes": torch.from_numpy(last - first)}

    def shift(self) -> int:
        """Where the first window of this epoch begins."""
        epoch = self.sampler.epoch if self.sampler else 0
        if self._shift[0] != epoch:
            self._shift = (
                epoch,
                int(np.random.default_rng([self.seed, epoch]).integers(self.length)),
            )
        return self._shift[1]


class Spans(NamedTuple):
    """Stretches of a file, each with a target for each of its tokens: the token one further.

    Args:
        row: (P,) which row of a batch each is in; in order.
        start, size: (P,) where it begins, how many tokens it has.
    """

    row: np.ndarray
    start: np.ndarray
    size: np.ndarray


class Rows:
    """Base: rows of one or more spans each, filled up with padding.

    Args:
        file: The tokens.
        length: Tokens T of a row.
        padding: What fills a row up.
    """

    in_memory = True
    parted = False  # whether a row has more than one span, and says which is where

    def __init__(self, file: TokenFile, length: int, padding: int) -> None:
        self.file, self.length, self.padding = file, length, padding

    def __len__(self) -> int:
        raise NotImplementedError

    def spans(self, rows: np.ndarray) -> Spans:
        """What is in the rows (B,)."""
        raise NotImplementedError

    def padding_share(self) -> float:
        """Share of all cells that are padding."""
        raise NotImplementedError

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        """{"tokens": int64 (B, T), "targets": int64 (B, T), -100 at padding, "bytes": int64 (B,), of text that the
        targets stand for}; where rows are parted also "documents": int64 (B, T), -1 at padding, and "coords": int64
        (B, T), which begin anew in each."""
        row, start, size = self.spans(np.array(indices))
        coords = np.arange(size.sum()) - (size.cumsum() - size).repeat(
            size
        )  # (S,), S tokens in all
        places = start.repeat(size) + coords  # (S,)
        filled = np.bincount(row, size, len(indices))  # (B,)
        where = np.arange(self.length) < filled[:, None]  # (B, T), True at tokens

        def spread(values: np.ndarray, empty: int) -> Tensor:
            table = np.full(where.shape, empty)
            table[where] = values  # (S,) -> (B, T)
            return torch.from_numpy(table)

        batch = {
            "tokens": spread(self.file.at(places, len(row)), self.padding),
            "targets": spread(self.file.at(places + 1, len(row)), IGNORED),
        }
        if self.parted:
            number = np.arange(len(row)) - np.searchsorted(row, row)  # (P,) of each span in its row
            batch |= {"documents": spread(number.repeat(size), -1), "coords": spread(coords, 0)}
        bytes_ = self.file.byte_places(start + size + 1) - self.file.byte_places(start + 1)  # (P,)
        return batch | {
            "bytes": torch.from_numpy(np.bincount(row, bytes_, len(indices)).astype(np.int64))
        }


class Windows(Rows):
    """Windows side by side, the last one shorter: every token but the first is a target once."""

    def __len__(self) -> int:
        return -(-(len(self.file.tokens) - 1) // self.length)

    def spans(self, rows: np.ndarray) -> Spans:
        start = rows * self.length
        size = (len(self.file.tokens) - 1 - start).clip(max=self.length)
        return Spans(np.arange(len(rows)), start, size)

    def padding_share(self) -> float:
        return 1 - (len(self.file.tokens) - 1) / (len(self) * self.length)


class PackedDocuments(Rows):
    """Rows of whole documents, as full as may be; one longer than a row is parted first. Every token is a target once,
    but for the first of a document where no control token is before it.

    What shares a row is the same in each epoch. This takes about 40 bytes of memory for each document.
    """

    parted = True

    def __init__(self, file: TokenFile, length: int, padding: int) -> None:
        super().__init__(file, length, padding)
        self._lead = int(
            file.offsets[0] > 0
        )  # then the token before a document is the end of another
        sizes = (np.diff(file.offsets) - 1 + self._lead).clip(0)  # (D,) targets
        self._targets = int(sizes.sum())
        self._whole = sums(
            sizes // length
        )  # (D + 1,) rows that the documents before one fill alone
        rests = sizes % length
        rested = rests.nonzero()[0]  # (P,)
        row = best_fit(rests[rested], length)
        self._rested = rested[row.argsort(kind="stable")]  # (P,) whose rests share rows, row by row
        self._shared = sums(np.bincount(row))  # (R + 1,) rests in the rows before one

    def __len__(self) -> int:
        return int(self._whole[-1]) + len(self._shared) - 1

    def spans(self, rows: np.ndarray) -> Spans:
        alone = self._whole[-1]  # the first rows are a part of one document each
        shared = (rows - alone).clip(0)  # (B,)
        begin, end = (
            self._shared[shared],
            self._shared[(shared + 1).clip(max=len(self._shared) - 1)],
        )
        row = np.arange(len(rows)).repeat(np.where(rows < alone, 1, end - begin))  # (P,)
        rest = rows[row] >= alone
        document = np.searchsorted(self._whole, rows[row], side="right") - 1
        place = np.arange(len(row)) - np.searchsorted(row, row)  # of a span in its row
        document[rest] = self._rested[(begin[row] + place)[rest]]
        number = (
            np.where(rest, self._whole[document + 1], rows[row]) - self._whole[document]
        )  # of it in its document
        start = self.file.offsets[document] - self._lead + number * self.length
        size = (self.file.offsets[document + 1] - 1 - start).clip(max=self.length)
        return Spans(row, start, size)

    def padding_share(self) -> float:
        return 1 - self._targets / (len(self) * self.length)


def sums(counts: np.ndarray) -> np.ndarray:
    """Sums of all numbers before each, and of all: (N,) -> int64 (N + 1,)."""
    return np.concatenate([[0], counts.cumsum()])


def best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Which row each of some spans goes into: the fullest in which there is room for it, the longest span first.

    Done for all spans of a size at once (Krell 2021), hence in the time of `room`, not of their number.

    Args:
        sizes: (P,) integers from 1 to `room`.
        room: Of a row.

    Returns:
        (P,) int64: rows, numbered from 0.
    """
    order = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    open_rows: dict[int, np.ndarray] = {}  # by the room that is left
    place = total = 0
    for size, count in zip(
        *(part[::-1].tolist() for part in np.unique(sizes, return_counts=True)), strict=True
    ):
        end = place + count
        while place < end:
            left = min((left for left in open_rows if left >= size), default=None)
            if left is None:  # as many new rows as these spans fill
                left, new = room, -(-(end - place) // (room // size))
                open_rows[left], total = np.arange(total, total + new), total + new
            taken, rest = np.split(open_rows.pop(left), [end - place])
            rows[order[place : place + len(taken)]] = taken
            place += len(taken)
            for remains, some in ((left, rest), (left - size, taken)):
                if remains and len(some):
                    open_rows[remains] = np.concatenate([open_rows.get(remains, some[:0]), some])
    return rows
