"""Token numbers of many documents in one file, which is written once, checked when opened, and mapped into memory."""

import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.utils.errors import DataError
from datamodules.utils.files import open_regular, replacing

SMALL = 2**16  # vocabularies up to this size are kept in 16 bits a token
HEADER = struct.Struct(
    "<16s4QQ8x"
)  # mark, bytes a token, tokens, documents, unknown tokens; checksum
COLUMNS = (
    3  # of the table of documents: where each begins, bytes before it, bytes of its first token
)
COUNTS = 48  # bytes of the header before the checksum
MARK = b"tessera-tokens-2"  # of the layout
LARGE = (
    2**28
)  # files of more bytes are not compared with their checksum when opened, nor stay resident
AROUND = 2**21  # bytes that become resident, at most, where one is read


class Part(NamedTuple):
    """Some pieces of documents, in their order.

    Args:
        tokens: (N,) integers of any type.
        sizes: (P,) int64, tokens of each piece.
        bytes: (P,) int64, UTF-8 bytes of each piece's text.
        opens: (P,) bool, whether a document begins with the piece; else it goes on from the one before.
        first: (P,) int64, how many of those bytes are the first token's where a document begins; 0 for a control token.
    """

    tokens: np.ndarray
    sizes: np.ndarray
    bytes: np.ndarray
    opens: np.ndarray
    first: np.ndarray


class TokenFile:
    """Token numbers of D documents: `file[i]` is those of document i, as a view of the file.

    Of a large file little stays resident: pages that were read are given back now and then.

    Args:
        path: A file that `write_tokens` wrote.

    Attributes:
        tokens: uint16 or uint32 (N,), read-only: all documents, one after the other.
        offsets: int64 (D + 1,): document i has the tokens from `offsets[i]` to `offsets[i + 1]`. Tokens before
            `offsets[0]` are of none.
        bytes: int64 (D + 1,): UTF-8 bytes of the text of all documents before document i.
        first: int64 (D + 1,): how many of document i's are its first token's.
        unknown: How many of the tokens stand for what the vocabulary lacks.
        checksum: Of all that is in the file.

    Raises:
        DataError: The file is not whole, or not as it was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                head = file.read(HEADER.size)
                mark, width, count, documents, self.unknown, self.checksum = HEADER.unpack(head)
                start = _whole(HEADER.size + count * width)
                size = start + (documents + 1) * COLUMNS * 8
                if mark != MARK or width not in (2, 4) or file.seek(0, os.SEEK_END) != size:
                    raise ValueError("it is not whole")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            body = np.frombuffer(self._map, np.uint8, offset=HEADER.size)
            if size <= LARGE and self.checksum != zlib.crc32(head[:COUNTS], zlib.crc32(body.data)):
                raise ValueError("its checksum is wrong")
        except (OSError, ValueError, struct.error) as error:
            raise DataError(f"{path} is damaged ({error}): delete it.") from error
        self.tokens = np.frombuffer(self._map, np.dtype(f"<u{width}"), count, HEADER.size)
        table = np.frombuffer(self._map, "<i8", offset=start).reshape(-1, COLUMNS)  # (D + 1, 3)
        self.offsets, self.bytes, self.first = table.T
        self._views: dict[int, np.ndarray] = {}
        self._large, self._read = size > LARGE, 0

    @cached_property
    def lengths(self) -> Tensor:
        """(D,) int64, tokens of each document."""
        return torch.from_numpy(np.diff(self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Any:
        """Tokens of document i: numpy, uint16 or uint32 (length,), read-only.

        Raises:
            IndexError: There is no such document.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path,)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(B, length), of the type of `tokens`: those from each of the places `starts` (B,) on."""
        if length not in self._views:
            self._views[length] = np.lib.stride_tricks.sliding_window_view(
                self.tokens, length
            )  # (N - length + 1, length)
        self._count(len(starts))
        return self._views[length][starts]

    def at(self, places: np.ndarray, runs: int) -> np.ndarray:
        """The tokens at these places, of any shape, which lie in so many stretches."""
        self._count(runs)
        return self.tokens[places]

    def byte_places(self, places: np.ndarray) -> np.ndarray:
        """How many bytes of text lie before these tokens (any shape), int64.

        Those of a document's first token are known, the others are shared out evenly among the rest.
        """
        document = (np.searchsorted(self.offsets, places, "right") - 1).clip(0, len(self) - 1)
        number = places - self.offsets[document]  # of a token in its document
        rest = self.offsets[document + 1] - self.offsets[document] - 1  # tokens behind the first
        share = np.where(rest > 0, (number - 1).clip(0) / rest.clip(1), (number > 0) | (rest < 0))
        before, first = self.bytes[document], self.first[document] * (number > 0)
        return (
            before
            + first
            + np.rint((self.bytes[document + 1] - before - first) * share).astype(np.int64)
        )

    def _count(self, runs: int) -> None:
        """Told how many places are read: gives pages back before they are too many; the system still caches them."""
        self._read += runs * AROUND
        if self._large and self._read > LARGE and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
            self._read = 0


def write_tokens(
    path: Path, parts: Iterable[Part], vocabulary: int, unknown: int | None = None
) -> None:
    """Writes a file for `TokenFile`, whole or not at all; never more than a part of it is in memory.

    Args:
        path: Where it will be.
        parts: The documents. Tokens before the first that opens one belong to none.
        vocabulary: Number of tokens that there are, which decides how many bytes one takes.
        unknown: Number of the token for what the vocabulary lacks, None if there is none; they are counted.

    Raises:
        OSError: It cannot be written.
    """
    kind = np.dtype("<u2" if vocabulary <= SMALL else "<u4")
    with (
        replacing(path) as partial,
        open(partial, "wb") as file,
        tempfile.TemporaryFile(dir=path.parent) as starts,
    ):
        file.write(bytes(HEADER.size))
        tokens = documents = text = missing = checksum = 0
        for part in parts:
            numbers = part.tokens.astype(kind)
            ends, bytes_ = tokens + part.sizes.cumsum(), text + part.bytes.cumsum()
            table = np.stack([ends - part.sizes, bytes_ - part.bytes, part.first], axis=1)[
                part.opens
            ]  # (D, 3)
            file.write(numbers.data)
            starts.write(np.ascontiguousarray(table, "<i8").data)
            checksum = zlib.crc32(numbers.data, checksum)
            tokens, documents, text = (
                tokens + len(numbers),
                documents + len(table),
                text + int(part.bytes.sum()),
            )
            missing += 0 if unknown is None else int(np.count_nonzero(numbers == unknown))
        starts.write(np.array([tokens, text, 0], "<i8").data)
        starts.seek(0)
        size = HEADER.size + tokens * kind.itemsize
        for block in chain([bytes(_whole(size) - size)], iter(lambda: starts.read(2**20), b"")):
            file.write(block)
            checksum = zlib.crc32(block, checksum)
        counts = HEADER.pack(MARK, kind.itemsize, tokens, documents, missing, 0)[:COUNTS]
        file.seek(0)
        file.write(counts + struct.pack("<Q", zlib.crc32(counts, checksum)))
        file.flush()
        os.fsync(file.fileno())


def _whole(size: int) -> int:
    """The next multiple of 8, where numbers of 8 bytes may begin."""
    return -(-size // 8) * 8
