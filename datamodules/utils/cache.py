"""A cache on disk of what is computed from texts; its files are named by hashes of content."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from datamodules.utils.errors import DataError
from datamodules.utils.files import write_text

CHUNK = 1024  # texts that are read from Arrow, or hashed, at once


class Texts(Protocol):
    """Many texts: a list, or a string column of Arrow."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Any: ...


def cache_folder(kind: str) -> Path:
    """`$TESSERA_CACHE/KIND`, by default in ~/.cache/tessera. Raises `DataError` if it fails."""
    try:
        root = os.environ.get("TESSERA_CACHE") or Path("~/.cache/tessera").expanduser()
    except RuntimeError as error:  # the user has no home
        raise DataError(
            f"there is no folder for the cache ({error}): set TESSERA_CACHE."
        ) from error
    folder = Path(root, kind)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def unwritable(path: Path, error: OSError) -> DataError:
    """The error for a cache that cannot be written."""
    advice = "set TESSERA_CACHE to a folder with space for it"
    return DataError(f"{path} cannot be written ({error.strerror}): {advice}.")


def write_cached(path: Path, text: str) -> None:
    """Writes a small file of the cache. Raises `DataError` if that fails."""
    try:
        write_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


def chunks(texts: Texts, size: int = CHUNK) -> Iterator[list[str]]:
    """The texts in order, `size` at a time."""
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        yield part.to_pylist() if hasattr(part, "to_pylist") else list(part)


def content_key(*parts: str) -> str:
    """Hash of some strings in order: 32 hexadecimal digits."""
    lengths = ",".join(str(len(part)) for part in parts)
    content = "\n".join((lengths, *parts)).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def text_digest(texts: Texts) -> str:
    """Hash of texts in order, the same for a list and an Arrow column: 32 hexadecimal digits."""
    import numpy as np
    import pyarrow as pa

    content = hashlib.blake2b()
    lengths = hashlib.blake2b()
    for start in range(0, len(texts), CHUNK):
        part = texts[start : start + CHUNK]
        if isinstance(part, pa.ChunkedArray):
            part = part.combine_chunks()
        array = part if isinstance(part, pa.Array) else pa.array(part, pa.large_string())
        array = array.cast(pa.large_string())
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        lengths.update(np.diff(ends).tobytes())
        if data is not None:
            content.update(memoryview(data)[ends[0] : ends[-1]])
    return content_key(content.hexdigest(), lengths.hexdigest())
