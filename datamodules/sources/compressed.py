"""Files that may be compressed."""

from pathlib import Path
from typing import IO, Any

from datamodules.errors import DataError

CODECS = {".gz": "gzip", ".zst": "zstd"}  # by ending, in lower case


def ending(path: Path) -> str:
    """The ending of a file's name in lower case, without .gz or .zst: .tsv for pairs.tsv.gz."""
    return Path(path.stem if path.suffix.lower() in CODECS else path.name).suffix.lower()


def opened(path: Path) -> IO[bytes]:
    """The content of a file to read, decompressed on the way where its name ends in .gz or .zst.

    Raises:
        DataError: It cannot be opened. Reading it raises OSError where it is damaged.
    """
    try:
        if codec := CODECS.get(path.suffix.lower()):
            import pyarrow as pa

            stream: Any = pa.input_stream(str(path), compression=codec)
            return stream
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from error
