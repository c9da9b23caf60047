"""Reading a file, plain or compressed: lines, rows of CSV, JSON objects or an Arrow table.

CSV and JSON Lines are not read by pyarrow or `datasets`: both take some malformed lines, and do not
tell the number of a bad line.
"""

import codecs
import csv
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from datamodules.utils.errors import DataError
from datamodules.utils.files import open_regular, printable

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}  # by suffix, in lower case
MAX_EXPANSION = 200  # times its size that a compressed file may expand to
FREE_EXPANSION = 2**26  # bytes that any compressed file may expand to
MAX_CELL = 2**27  # characters of a cell of CSV
FIRST_LINES = 20  # that tell what is between the cells of CSV
BLOCK_SIZE = 2**18  # bytes that are decompressed at a time
NOT_UTF8 = "holds bytes that are not UTF-8"
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Reject = Callable[[str, str], None]  # called with a sample's name and what is wrong with it
Row = tuple[int, dict[str, Any]]  # number of its line, cells by column


class BoundedStream(io.RawIOBase):
    """A decompressed stream that fails after `limit` bytes."""

    def __init__(self, stream: Any, limit: int) -> None:
        self.stream = stream
        self.remaining = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        self.remaining -= len(data)
        if self.remaining < 0:
            raise OSError(f"it expands to more than {MAX_EXPANSION} times its size")
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
    """Opens a regular file; .gz and .zst files are decompressed while they are read.

    Raises:
        OSError: It cannot be opened; reading raises it, too, if it is damaged or expands too much.
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


def not_utf8(path: object) -> str:
    """What is wrong with bytes in a file that are not UTF-8, and the command that converts it."""
    file = Path(str(path))
    if file.suffix.lower() in COMPRESSION or not file.is_file():  # such as standard input
        return NOT_UTF8
    with file.open("rb") as start:
        is_utf16 = start.read(2) in UTF16_MARKS
    encoding, names = "WINDOWS-1252", "Latin-1 and Windows-1252 are"
    if is_utf16:
        encoding, names = "UTF-16", "it is UTF-16, which is"
    command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(printable(file))} > new{file.suffix}"
    return f"{NOT_UTF8} ({names} converted by `{command}`)"


def read_lines(file: IO[bytes], name: object, reject: Reject) -> Iterator[str | None]:
    """The lines of an open file without line ends; None for one that is not UTF-8.

    `reject` is called for such lines, with the file's `name`. Raises `DataError` if it is UTF-16.
    """
    for number, line in enumerate(file, 1):
        if number == 1 and line[:2] in UTF16_MARKS:
            raise DataError(f"{name} {not_utf8(name)}.")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            reject(f"line {number} of {name}", not_utf8(name))
            yield None
        else:
            yield text.rstrip("\r\n")


def find_delimiter(lines: list[str], usual: str, quoting: Any, header: bool) -> str:
    """What is between the cells of a table, told by its first lines.

    It is `usual`, a semicolon, a vertical bar or a tab: of those that the first row has, the one
    that divides the most rows into as many cells as the first, then the one with the most cells.
    Without a header, which texts are not, it must divide all rows so.
    """
    found: dict[tuple[int, int], str] = {}
    for mark in (usual, ";", "|", "\t"):
        sizes: list[int] = []
        with suppress(csv.Error):  # is reported when the file is read
            rows = csv.reader(lines, delimiter=mark, quoting=quoting)
            sizes += [len(cells) for cells in rows if cells]
        if sizes and sizes[0] > 1 and (header or len(set(sizes)) == 1):
            found.setdefault((sizes.count(sizes[0]), sizes[0]), mark)
    return found[max(found)] if found else usual


def read_csv(
    path: Path, reject: Reject, header: bool = True, quoted_tsv: bool = True
) -> Iterator[Row]:
    """The rows of a CSV file, or of a .tsv file, with the line each begins at.

    `find_delimiter` tells what is between cells; usually a comma (.tsv: a tab).

    Args:
        path: The file.
        reject: Called for rows that are not UTF-8 or have too many or too few cells.
        header: Whether the first row names the columns; else they are called 1, 2, ...
        quoted_tsv: Whether cells of TSV files are usually quoted; see `has_quoted_cells`.

    Raises:
        DataError: The file is damaged, quotes are not balanced, or a column is there twice.
    """
    csv.field_size_limit(MAX_CELL)  # the default is 128 kB
    is_tsv = uncompressed_suffix(path) == ".tsv"
    delimiter = "\t" if is_tsv else ","
    is_quoted = not is_tsv or has_quoted_cells(path, quoted_tsv)
    quoting: Any = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    names: list[str] = []
    with read_errors(path), open_decompressed(path) as file:
        start = cast(io.BufferedReader, file).peek(2)
        if start[:2] in UTF16_MARKS:
            raise DataError(f"{path} {not_utf8(path)}.")
        newline = "\n" if b"\n" in start else ""  # "": carriage returns may end the lines
        lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline=newline)
        first = list(islice(lines, FIRST_LINES))
        delimiter = find_delimiter(first, delimiter, quoting, header)
        reader = csv.reader(chain(first, lines), delimiter=delimiter, quoting=quoting, strict=True)
        next_line = 1
        try:
            for cells in reader:
                line = next_line
                next_line = reader.line_num + 1
                if not cells:  # an empty line
                    continue
                offset, fault = row_fault(cells, path)
                if fault is None and names and len(cells) != len(names):
                    fault = f"has {len(cells)} cells where the first line has {len(names)}"
                place = f"line {line + offset} of {path}"
                if not names and header:
                    names = [cell.strip() for cell in cells]
                    repeated = [name for name in names if name and names.count(name) > 1]
                    if repeated:
                        fault = f"names several columns {repeated[0]}"
                    if fault is not None:
                        raise DataError(f"{place} {fault}: fix the names of the columns.")
                    continue
                names = names or [str(i + 1) for i in range(len(cells))]
                if fault is None:
                    yield line, dict(zip(names, cells, strict=True))
                else:
                    reject(place, fault)
        except csv.Error as error:
            fault = csv_fault(error)
            raise DataError(f"line {reader.line_num} of {path} {fault}.") from error


def csv_fault(error: csv.Error) -> str:
    """What is wrong with a line, as the end of a message about it."""
    if str(error).startswith("new-line character"):  # then advises how Python opens files
        return "has a carriage return in a cell without quotes: remove it, or quote the cell"
    return f"is not valid CSV: {error}"


def has_quoted_cells(path: Path, usually: bool) -> bool:
    """Whether cells of a TSV file may be quoted; else quotation marks in it are text.

    They are text if a cell begins with one but is not quoted, while all lines have the same number
    of cells, two or more. If cells are not `usually` quoted, a quoted one must also have a doubled
    mark in it, as programs write a quotation mark.
    """
    quoted = re.compile(rb'"[^"]*(?:""[^"]*)*"')
    loose = False
    doubled = False
    columns = 0
    with read_errors(path), open_decompressed(path) as file:
        for line in file:
            line = line.rstrip(b"\r\n")
            count = line.count(b"\t") + 1
            columns = columns or count
            if b"\r" in line or (line and (count != columns or (usually and columns == 1))):
                return usually
            if b'"' in line:
                starts = [cell for cell in line.split(b"\t") if cell.startswith(b'"')]
                loose = loose or not all(map(quoted.fullmatch, starts))
                doubled = doubled or any(b'""' in cell[1:-1] for cell in starts)
    return not loose and (usually or doubled)


def row_fault(cells: list[str], path: Path) -> tuple[int, str | None]:
    """In which line of a row of a file, from 0, its text is wrong, and how."""
    text = ",".join(cells)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 were read as surrogates
        return text.count("\n", 0, error.start), not_utf8(path)
    return 0, "holds NUL bytes, as no text does" if "\0" in text else None


def read_json_lines(path: Path, reject: Reject) -> Iterator[Row]:
    """The objects of a JSON Lines file; lines that hold none are rejected.

    Raises `DataError` if the file is damaged.
    """
    with read_errors(path), open_decompressed(path) as file:
        for number, line in enumerate(read_lines(file, path, reject), 1):
            if not line or line.isspace():
                continue
            row = parse_line(line)
            if isinstance(row, str):
                reject(f"line {number} of {path}", row)
            else:
                yield number, row


def parse_line(line: str) -> dict[str, Any] | str:
    """The object on a line of JSON, or what is wrong with it."""
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
    except RecursionError:
        return "is nested too deeply"
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is not a character"
    except ValueError as error:
        if line.lstrip().startswith("["):
            return "begins a list; each line must be a JSON object such as {...}"
        reason = str(error).replace("line 1 ", "").partition(";")[0]
        return f"is not JSON that can be read ({reason})"
    return row if isinstance(row, dict) else "is not a JSON object such as {...}"


def read_table(path: Path) -> pa.Table:
    """An Arrow table from a Parquet or Arrow file; Arrow files are mapped into memory.

    Raises `DataError` if it is damaged, or no regular file.
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
