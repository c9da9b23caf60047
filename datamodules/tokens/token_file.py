"""Token ids of many documents in one file: written once, and memory-mapped."""

import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.utils.errors import DataError
from datamodules.utils.files import open_regular, replacing

MAGIC = b"tessera-tokens-4"  # names the layout
HEADER = struct.Struct("<16s5Q8x")  # magic; bytes a token, tokens, documents, unknowns; checksum
# Per document: index of its first token; text bytes before it; text bytes of its first token.
COLUMNS = 3
SHORT_IDS = 2**16  # vocabularies up to this size take 16 bits a token
# Bytes; the checksum of a larger file is never verified, and its pages are released now and then.
LARGE = 2**28
READ_AROUND = 2**21  # upper bound on the bytes that one page fault makes resident


class TokenChunk(NamedTuple):
    """P pieces of documents, in their order."""

    tokens: np.ndarray  # (N,) integers of any type
    sizes: np.ndarray  # (P,) int64, tokens of each piece
    bytes: np.ndarray  # (P,) int64, UTF-8 bytes of each piece's text
    opens: np.ndarray  # (P,) bool, whether a document begins with the piece
    # (P,) int64, UTF-8 bytes of the piece's first token; 0 if that is a special token.
    first_token_bytes: np.ndarray


class TokenFile:
    """Token ids of D documents, written by `write_tokens`.

    `file[i]` holds those of document i, as a view of the file. Of a large file little stays
    resident: pages that were read are released now and then.

    Attributes:
        tokens: uint16 or uint32 (N,), read-only: all documents, one after the other.
        offsets: int64 (D + 1,): document i has the tokens from `offsets[i]` to `offsets[i + 1]`.
            Tokens before `offsets[0]` belong to none.
        bytes: int64 (D + 1,): UTF-8 bytes of the text of all documents before document i.
        first_token_bytes: int64 (D + 1,): UTF-8 bytes of document i's first token; 0 if that is a
            special token.
        unknown: How many of the tokens are [UNK].

    Raises:
        DataError: The file is incomplete or, if it is at most `LARGE` bytes, its checksum does not
            match.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                header = HEADER.unpack(file.read(HEADER.size))
                magic, width, count, documents, self.unknown, checksum = header
                table_start = _aligned(HEADER.size + count * width)
                size = table_start + (documents + 1) * COLUMNS * 8
                if magic != MAGIC or width not in (2, 4) or file.seek(0, os.SEEK_END) != size:
                    raise ValueError("it is not complete")
                if size <= LARGE and checksum != _checksum(file, *header[1:-1]):
                    raise ValueError("it was changed")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, struct.error) as error:
            raise DataError(f"{path} is damaged ({error}): delete it.") from error
        self.tokens = np.frombuffer(self._map, np.dtype(f"<u{width}"), count, HEADER.size)
        table = np.frombuffer(self._map, "<i8", offset=table_start)
        columns = table.reshape(-1, COLUMNS).T  # (3, D + 1)
        self.offsets, self.bytes, self.first_token_bytes = columns
        self._is_large = size > LARGE
        self._resident = 0  # bytes, at most

    @cached_property
    def lengths(self) -> Tensor:
        """(D,) int64, tokens of each document."""
        return torch.from_numpy(np.diff(self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Any:
        """Tokens of document i: uint16 or uint32 (length,), read-only."""
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.path,)

    def gather(self, index: np.ndarray, runs: int) -> np.ndarray:
        """The tokens at some positions, of any shape.

        Args:
            index: Numbers of the tokens in the file.
            runs: Number of contiguous runs in the index; from it the resident bytes are estimated.
        """
        tokens = self.tokens[index]
        self._resident += runs * READ_AROUND
        if self._is_large and self._resident > LARGE and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)  # the pages stay in the system's page cache
            self._resident = 0
        return tokens

    def bytes_before(self, index: np.ndarray) -> np.ndarray:
        """How many bytes of text are before the tokens at `index` (any shape), int64.

        The bytes of a document's first token are known; its other bytes are divided evenly among
        its other tokens.
        """
        document = np.searchsorted(self.offsets, index, "right") - 1
        document = document.clip(0, len(self) - 1)
        position = index - self.offsets[document]  # of the token in its document
        others = self.offsets[document + 1] - self.offsets[document] - 1  # tokens after the first
        # The part of the others that is before `index`; without others, all or nothing.
        is_past = (position > 0) | (others < 0)
        fraction = np.where(others > 0, (position - 1).clip(0) / others.clip(1), is_past)
        before = self.bytes[document]
        first = self.first_token_bytes[document] * (position > 0)
        rest = self.bytes[document + 1] - before - first
        return before + first + np.rint(rest * fraction).astype(np.int64)


def write_tokens(
    path: Path, chunks: Iterable[TokenChunk], vocab_size: int, unknown: int | None = None
) -> None:
    """Writes a file for `TokenFile`, whole or not at all, with one chunk in memory at a time.

    Args:
        path: Of the file; `OSError` if it cannot be written.
        chunks: The documents. Tokens before the first that opens one belong to none.
        vocab_size: Number of different tokens, which decides how many bytes one takes.
        unknown: Id of [UNK], which is counted; None if there is none.
    """
    dtype = np.dtype("<u2" if vocab_size <= SHORT_IDS else "<u4")
    num_tokens = num_documents = num_bytes = num_unknown = 0
    with (
        replacing(path) as partial,
        open(partial, "w+b") as file,
        tempfile.TemporaryFile(dir=path.parent) as table,
    ):
        file.write(bytes(HEADER.size))
        for chunk in chunks:
            tokens = chunk.tokens.astype(dtype)
            starts = num_tokens + chunk.sizes.cumsum() - chunk.sizes
            bytes_before = num_bytes + chunk.bytes.cumsum() - chunk.bytes
            columns = [starts, bytes_before, chunk.first_token_bytes]
            rows = np.stack(columns, axis=1)[chunk.opens]  # (D, 3)
            file.write(tokens.data)
            table.write(np.ascontiguousarray(rows, "<i8").data)
            num_tokens += len(tokens)
            num_documents += len(rows)
            num_bytes += int(chunk.bytes.sum())
            if unknown is not None:
                num_unknown += int(np.count_nonzero(tokens == unknown))
        table.write(np.array([num_tokens, num_bytes, 0], "<i8").data)
        table.seek(0)
        size = HEADER.size + num_tokens * dtype.itemsize
        file.write(bytes(_aligned(size) - size))
        shutil.copyfileobj(table, file)
        counts = (dtype.itemsize, num_tokens, num_documents, num_unknown)
        checksum = _checksum(file, *counts)
        file.seek(0)
        file.write(HEADER.pack(MAGIC, *counts, checksum))
        file.flush()
        os.fsync(file.fileno())


def _checksum(file: BinaryIO, *counts: int) -> int:
    """CRC-32 of the counts and of all that follows the header."""
    checksum = zlib.crc32(repr(counts).encode())
    file.seek(HEADER.size)
    for block in iter(lambda: file.read(2**20), b""):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _aligned(size: int) -> int:
    """The next multiple of 8, where numbers of 8 bytes may begin."""
    return -(-size // 8) * 8
