"""Files that may be compressed."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from datamodules.utils.errors import DataError
from datamodules.utils.files import open_regular

CODECS = {".gz": "gzip", ".zst": "zstd"}  # by ending, in lower case
RATIO, FREE = 200, 2**26  # times its size that a file may expand to; bytes that any may
BLOCK = 2**18  # bytes that are decompressed at a time
LONGEST = 2**27  # characters of a line


class Expanded(io.RawIOBase):
    """What a compressed file expands to, as long as that is not out of all proportion.

    Args:
        stream: The content.
        most: Bytes that it may have.
    """

    def __init__(self, stream: Any, most: int) -> None:
        self.stream, self.left = stream, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer`; how many bytes there were.

        Raises:
            OSError: The content is damaged, or has more bytes than it may.
        """
        part = self.stream.read(len(buffer))
        self.left -= len(part)
        if self.left < 0:
            raise OSError(f"it expands to more than {RATIO} times its size, as no text does")
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self.stream.close()
        super().close()


def ending(path: Path) -> str:
    """The ending of a file's name in lower case, without .gz or .zst: .tsv for pairs.tsv.gz."""
    return Path(path.stem if path.suffix.lower() in CODECS else path.name).suffix.lower()


def opened(path: Path) -> IO[bytes]:
    """The content of a file to read, decompressed on the way where its name ends in .gz or .zst.

    Raises:
        DataError: It cannot be opened. Reading it raises OSError where it is damaged, or expands beyond measure.
    """
    try:
        file = open_regular(path)
        if codec := CODECS.get(path.suffix.lower()):
            import pyarrow as pa

            size = path.stat().st_size
            if not size:
                raise OSError("it is empty, which no compressed file is")
            stream = pa.CompressedInputStream(file, codec)
            return io.BufferedReader(Expanded(stream, max(FREE, RATIO * size)), BLOCK)
        return file
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from error


def bounded_lines(file: Any, where: object) -> Iterator[Any]:
    """The lines of an open file, texts or bytes, none of which is out of all proportion.

    Raises:
        DataError: A line is too long to be one, by its number; `where` names the file.
    """
    number = 0
    while line := file.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise DataError(
                f"line {number} of {where} has more than {LONGEST:,} characters: part it, or remove it."
            )
        yield line
