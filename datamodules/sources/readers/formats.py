"""Reading a file, plain or compressed: lines, rows of CSV, JSON objects or an Arrow table."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from datamodules.utils.errors import DataError
from datamodules.utils.files import open_regular

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}  # by suffix, in lower case
MAX_EXPANSION = 200  # times its size that a compressed file may expand to
FREE_EXPANSION = 2**26  # bytes that any compressed file may expand to
MAX_LINE = 2**27  # bytes of a line
BLOCK_SIZE = 2**18  # bytes that are decompressed at a time
NOT_UTF8 = "holds bytes that are not UTF-8"

Reject = Callable[[str, str], None]  # takes the name of a sample and what is wrong with it
Row = tuple[int, dict[str, Any]]  # number of its line, cells by column


class BoundedStream(io.RawIOBase):
    """A decompressed stream that ends with an error where it is out of all proportion.

    Args:
        stream: The decompressed content.
        limit: Bytes that it may have.
    """

    def __init__(self, stream: Any, limit: int) -> None:
        self.stream = stream
        self.remaining = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        self.remaining -= len(data)
        if self.remaining < 0:
            raise OSError(
                f"it expands to more than {MAX_EXPANSION} times its size, as no text does"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self.stream.close()
        super().close()


def uncompressed_suffix(path: Path) -> str:
    """The suffix in lower case without .gz or .zst: .tsv for pairs.tsv.gz."""
    if path.suffix.lower() in COMPRESSION:
        path = path.with_suffix("")
    return path.suffix.lower()


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turns errors while `path` is read into a DataError that names it."""
    try:
        yield
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = str(getattr(error, "strerror", None) or error).splitlines()[0][:99]
        raise DataError(f"{path} cannot be read ({reason}): fetch or write it again.") from error


def open_decompressed(path: Path) -> IO[bytes]:
    """Opens a regular file, decompressed while it is read where its name ends in .gz or .zst.

    Raises:
        OSError: It cannot be opened; so does reading it where it is damaged or expands too much.
    """
    file = open_regular(path)
    codec = COMPRESSION.get(path.suffix.lower())
    if codec is None:
        return file
    size = path.stat().st_size
    if size == 0:
        raise OSError("it is empty, which no compressed file is")
    stream = pa.CompressedInputStream(file, codec)
    limit = max(FREE_EXPANSION, MAX_EXPANSION * size)
    return io.BufferedReader(BoundedStream(stream, limit), BLOCK_SIZE)


def decode_lines(file: IO[bytes], name: object, not_utf8: list[int]) -> Iterator[str]:
    """The lines of an open file as text, with their line ends.

    Args:
        file: What is read.
        name: Of the file, for messages.
        not_utf8: Takes the numbers of the lines that are not UTF-8, before they are returned.

    Raises:
        DataError: A line is out of all proportion.
    """
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            advice = "split or remove it"
            raise DataError(
                f"line {number} of {name} has more than {MAX_LINE:,} characters: {advice}."
            )
        try:
            text = line.decode()
        except UnicodeDecodeError:
            not_utf8.append(number)
            text = line.decode(errors="replace")
        yield text.removeprefix("\ufeff") if number == 1 else text


def read_lines(path: Path, not_utf8: list[int]) -> Iterator[str]:
    """The lines of a file; see `decode_lines`.

    Raises:
        DataError: It is damaged.
    """
    with read_errors(path), open_decompressed(path) as file:
        yield from decode_lines(file, path, not_utf8)


def read_csv(
    path: Path, reject: Reject, header: bool = True, quoted_tsv: bool = True
) -> Iterator[Row]:
    """The rows of a CSV file, or of a .tsv file, with the line each begins at.

    Args:
        path: The file.
        reject: Told of rows that are not UTF-8 or have too many or too few cells.
        header: Whether the first row names the columns; else they are called 1, 2, ...
        quoted_tsv: Whether quotes have a meaning in TSV files.

    Raises:
        DataError: The file is damaged, quotes are not balanced, or a column is there twice.
    """
    csv.field_size_limit(MAX_LINE)  # the default is 128 kB
    is_tsv = uncompressed_suffix(path) == ".tsv"
    not_utf8: list[int] = []
    lines = read_lines(path, not_utf8)
    if not is_tsv:
        reader = csv.reader(lines, strict=True)
    elif quoted_tsv:
        reader = csv.reader(lines, csv.excel_tab, strict=True)
    else:
        reader = csv.reader(lines, csv.excel_tab, quoting=csv.QUOTE_NONE)
    try:
        first = next(reader, [])
        if not header:
            names = [str(i + 1) for i in range(len(first))]
            rows = chain([first], reader)
            end = 0
        elif not_utf8:
            raise DataError(f"line 1 of {path} {NOT_UTF8}: save the file as UTF-8.")
        else:
            names = column_names(first, path)
            rows = chain(reader)
            end = reader.line_num
        for cells in rows:
            line = end + 1
            end = reader.line_num
            if not_utf8:
                reject(f"line {not_utf8[0]} of {path}", NOT_UTF8)
                not_utf8.clear()
            elif any("\0" in cell for cell in cells):
                reject(f"line {line} of {path}", "holds NUL bytes, as no text does")
            elif len(cells) == len(names):
                yield line, dict(zip(names, cells, strict=True))
            elif cells:  # else an empty line
                fault = f"has {len(cells)} cells where the first line has {len(names)}"
                reject(f"line {line} of {path}", fault)
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of {path} is not valid CSV: {error}.") from error


def column_names(cells: list[str], path: Path) -> list[str]:
    """The names in the first line of a CSV file.

    Raises:
        DataError: One is there twice.
    """
    names = [cell.strip() for cell in cells]
    for name, count in Counter(names).items():
        if name and count > 1:
            raise DataError(f"line 1 of {path} has several columns {name}: rename or remove one.")
    return names


def read_json_lines(path: Path, reject: Reject) -> Iterator[Row]:
    """The objects of a JSON Lines file; lines that hold none are rejected.

    Raises:
        DataError: The file is damaged.
    """
    not_utf8: list[int] = []
    for number, line in enumerate(read_lines(path, not_utf8), 1):
        if not_utf8:
            reject(f"line {number} of {path}", NOT_UTF8)
            not_utf8.clear()
        elif line.strip():
            row = parse_json_row(line.rstrip())
            if isinstance(row, str):
                reject(f"line {number} of {path}", row)
            else:
                yield number, row


def parse_json_row(line: str) -> dict[str, Any] | str:
    """The object on a line of JSON, or what is wrong with it."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"is not JSON ({error.msg} at character {error.colno})"
    except ValueError as error:  # a number of thousands of digits
        return f"is not JSON that can be read ({str(error).partition(';')[0]})"
    except RecursionError:
        return "is not JSON that can be read (nested too deeply)"
    if not isinstance(row, dict):
        return "is not a JSON object such as {...}"
    if "\\ud" in line.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is no character"
    return row


def read_table(path: Path) -> pa.Table:
    """An Arrow table from a Parquet or Arrow file; Arrow files are mapped into memory.

    Raises:
        DataError: It is damaged, or no regular file.
    """

    from pyarrow import parquet

    with read_errors(path):
        open_regular(path).close()
        if path.suffix.lower() == ".parquet":
            return parquet.read_table(path)
        with pa.memory_map(str(path)) as file:
            try:
                return pa.ipc.open_stream(file).read_all()
            except pa.ArrowInvalid:
                return pa.ipc.open_file(file).read_all()
