"""Rows of T tokens from a token file: windows of the stream, or packed documents."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.tokens.token_file import TokenFile
from datamodules.utils.batching import ResumableBatchSampler

IGNORE_INDEX = -100  # the target of a position without a loss


class Spans(NamedTuple):
    """P spans of a file, whose targets are the tokens one later."""

    row: np.ndarray  # (P,) of the batch; ascending
    start: np.ndarray  # (P,) first token
    size: np.ndarray  # (P,) number of tokens


class Rows:
    """Base: rows of one or more spans each, padded to T = `length` tokens at the end."""

    in_memory = True
    separates_documents = False  # whether a batch has the document of each token

    def __init__(self, file: TokenFile, length: int, pad_id: int) -> None:
        self.file = file
        self.length = length
        self.pad_id = pad_id

    def __len__(self) -> int:
        raise NotImplementedError

    def spans(self, rows: np.ndarray) -> Spans:
        """The spans in the rows (B,)."""
        raise NotImplementedError

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        """A batch of `CorpusData`; "documents" and "positions" only of packed documents."""
        row, start, size = self.spans(np.array(indices))
        first = np.repeat(exclusive_cumsum(size)[:-1], size)  # (S,), S tokens in all
        positions = np.arange(size.sum()) - first  # (S,)
        index = start.repeat(size) + positions  # (S,) in the file
        used = np.bincount(row, size, len(indices))  # (B,) tokens of each row
        is_token = np.arange(self.length) < used[:, None]  # (B, T)

        def padded(values: np.ndarray, fill: int) -> Tensor:
            table = np.full(is_token.shape, fill)
            table[is_token] = values  # (S,) -> (B, T)
            return torch.from_numpy(table)

        ends = self.file.bytes_before(np.stack([start + 1, start + size + 1]))  # (2, P)
        row_bytes = np.bincount(row, ends[1] - ends[0], len(indices))  # (B,)
        batch = {
            "tokens": padded(self.file.gather(index, len(row)), self.pad_id),
            "targets": padded(self.file.gather(index + 1, len(row)), IGNORE_INDEX),
            "bytes": torch.from_numpy(row_bytes.astype(np.int64)),
        }
        if self.separates_documents:
            number = np.arange(len(row)) - np.searchsorted(row, row)  # (P,) of a span in its row
            batch["documents"] = padded(number.repeat(size), -1)
            batch["positions"] = padded(positions, 0)
        return batch


class Windows(Rows):
    """Adjacent windows, the last one shorter: every token but the first is a target once."""

    def __len__(self) -> int:
        return -(-(len(self.file.tokens) - 1) // self.length)

    def spans(self, rows: np.ndarray) -> Spans:
        start = rows * self.length
        size = (len(self.file.tokens) - 1 - start).clip(max=self.length)
        return Spans(np.arange(len(rows)), start, size)


class RandomWindows(Rows):
    """Adjacent windows from a random offset in each epoch; the last is moved back to fit.

    The file has more than `length` tokens.
    """

    def __init__(self, file: TokenFile, length: int, seed: int) -> None:
        super().__init__(file, length, pad_id=0)  # not used: all rows are full
        self.seed = seed
        self.sampler: ResumableBatchSampler | None = None  # has the epoch; None: evaluation

    def __len__(self) -> int:
        return (len(self.file.tokens) - 1) // self.length

    def spans(self, rows: np.ndarray) -> Spans:
        last_start = len(self.file.tokens) - self.length - 1
        start = (rows * self.length + self.offset()).clip(max=last_start)
        return Spans(np.arange(len(rows)), start, np.full(len(rows), self.length))

    def offset(self) -> int:
        """Where the first window of this epoch begins."""
        epoch = self.sampler.epoch if self.sampler else 0
        return int(np.random.default_rng([self.seed % 2**63, epoch]).integers(self.length))


class PackedDocuments(Rows):
    """Rows of whole documents with little padding; those longer than a row are split first.

    Every token is a target once, except the first of a document that has no special token before
    it. The full rows of split documents come first, then rows that remainders share, the same in
    each epoch. This takes about 40 bytes of memory for each document.
    """

    separates_documents = True

    def __init__(self, file: TokenFile, length: int, pad_id: int) -> None:
        super().__init__(file, length, pad_id)
        # A separator before the first document, as in GPT-2: the first token of a document is a
        # target, too, as the token before it is that separator or the end of another document.
        self._has_prefix = int(file.offsets[0] > 0)
        sizes = (np.diff(file.offsets) - 1 + self._has_prefix).clip(0)  # (D,) targets
        self.num_targets = int(sizes.sum())
        self._full_rows_before = exclusive_cumsum(sizes // length)  # (D + 1,)
        remainders = sizes % length
        with_remainder = remainders.nonzero()[0]  # (P,) documents
        row = best_fit_decreasing(remainders[with_remainder], length)
        self._shared = with_remainder[row.argsort(kind="stable")]  # (P,) documents, row by row
        self._shared_before = exclusive_cumsum(
            np.bincount(row)
        )  # (R + 1,) documents in earlier rows

    def __len__(self) -> int:
        return int(self._full_rows_before[-1]) + len(self._shared_before) - 1

    def spans(self, rows: np.ndarray) -> Spans:
        num_full = self._full_rows_before[-1]
        shared = (rows - num_full).clip(0)  # (B,)
        begin = self._shared_before[shared]
        end = self._shared_before[(shared + 1).clip(max=len(self._shared_before) - 1)]
        row = np.arange(len(rows)).repeat(np.where(rows < num_full, 1, end - begin))  # (P,)
        is_remainder = rows[row] >= num_full
        document = np.searchsorted(self._full_rows_before, rows[row], side="right") - 1
        index = begin[row] + np.arange(len(row)) - np.searchsorted(row, row)  # in `_shared`
        document[is_remainder] = self._shared[index[is_remainder]]
        first_row = self._full_rows_before[document]
        full_row = np.where(is_remainder, self._full_rows_before[document + 1], rows[row])
        start = (
            self.file.offsets[document] - self._has_prefix + (full_row - first_row) * self.length
        )
        size = (self.file.offsets[document + 1] - 1 - start).clip(max=self.length)
        return Spans(row, start, size)


def exclusive_cumsum(counts: np.ndarray) -> np.ndarray:
    """Sums of all numbers before each, and of all: (N,) -> int64 (N + 1,)."""
    return np.concatenate([[0], counts.cumsum()])


def best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing bin packing: the longest span first, into the fullest row with room.

    All spans of a size are placed at once (Krell 2021): the time grows with `capacity`, not with
    their number. Sizes (P,) from 1 to `capacity` -> the row of each, int64 (P,), from 0.
    """
    order = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    open_rows: dict[int, np.ndarray] = {}  # by the room that is left
    position = 0
    num_rows = 0
    values, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = position + count
        while position < end:
            room = min((room for room in open_rows if room >= size), default=None)
            if room is None:  # as many new rows as these spans fill
                room = capacity
                new = -(-(end - position) // (capacity // size))
                open_rows[room] = np.arange(num_rows, num_rows + new)
                num_rows += new
            filled, untouched = np.split(open_rows.pop(room), [end - position])
            rows[order[position : position + len(filled)]] = filled
            position += len(filled)
            for left, some in ((room, untouched), (room - size, filled)):
                if left and len(some):
                    open_rows[left] = np.concatenate([open_rows.get(left, some[:0]), some])
    return rows
