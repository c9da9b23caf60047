"""The kinds of files that documents are read from: a function for each, and an entry in `READERS`."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datamodules.sources.base import Source
from datamodules.sources.compressed import CODECS, opened
from datamodules.sources.tables import read_table
from datamodules.sources.text_tables import NOT_TEXT, JsonTables, text_column, text_names, unlike
from datamodules.utils.files import open_regular

BLOCK = 2**20  # bytes that are read at once
ROWS = 256  # of a table that are read at once
BLANK = re.compile(r"\n[^\S\n]*\n\s*")  # one or more blank lines

Parts = Iterator[tuple[str, bool]]  # text, and whether a document ends with it
Reader = Callable[
    [Source[Any], Path], Parts
]  # the source tells its options, and is told what cannot be used


def plain(source: Source[Any], path: Path) -> Parts:
    """Plain text: one document, or several parted at blank lines."""
    if source.options.blank_lines:
        yield from parted(blocks(source, path))
    else:
        yield from ((block, False) for block in blocks(source, path))
        yield "", True


def lines(source: Source[Any], path: Path) -> Parts:
    """A JSON object with a text on each line."""
    name = None
    names = text_names(source.options)
    rows = JsonTables(
        str(path), source.options, source.bad, lambda row: unlike(row, names, (str,), "text")
    )
    for line, row in rows.good(path):
        found = [n for n in names if n in row]
        name = name or source.column(SimpleNamespace(column_names=list(row)), "text_column", found)
        if name in row:
            yield row[name] or "", True
        else:
            source.bad(f"line {line} of {path}", f"has no {name}")


def table(source: Source[Any], path: Path) -> Parts:
    """A table with a column of texts."""
    if path.suffix.lower() == ".arrow":
        yield from column(source, read_table(path), str(path))
        return
    from pyarrow import parquet

    with open_regular(path):
        pass
    file = parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False)
    name = text_column(source, file.schema_arrow.empty_table())
    batches = file.iter_batches(ROWS, columns=[name], use_threads=False)
    yield from cells(source, (batch.column(0) for batch in batches), str(path))


READERS: dict[str, Reader] = {
    ".txt": plain,
    ".md": plain,
    ".jsonl": lines,
    ".ndjson": lines,
    ".parquet": table,
    ".arrow": table,
}


def reader_of(path: Path) -> Reader | None:
    """What reads a file of this name, which may be compressed unless it is a table; None where nothing does."""
    endings = [ending.lower() for ending in path.suffixes]
    packed = len(endings) > 1 and endings[-1] in CODECS
    reader = READERS.get(endings[-2] if packed else endings[-1] if endings else "")
    return None if packed and reader is table else reader


def column(source: Source[Any], mapped: Any, where: str) -> Parts:
    """The texts in an Arrow table, each a document, in the column that the options name."""
    batches = mapped.select([text_column(source, mapped)]).to_batches(ROWS)
    yield from cells(source, (batch.column(0) for batch in batches), where)


def cells(source: Source[Any], columns: Iterable[Any], where: str) -> Parts:
    """The texts in Arrow columns, each a document; one that is not UTF-8 is bad."""
    for row, cell in enumerate(chain.from_iterable(columns)):
        try:
            yield cell.as_py() or "", True
        except UnicodeDecodeError:
            source.bad(f"row {row} of {where}", NOT_TEXT)


def blocks(source: Source[Any], path: Path) -> Iterator[str]:
    """The text of a file, in blocks; nothing more after bytes that are not UTF-8, which are bad."""
    decoder, line = codecs.getincrementaldecoder("utf-8-sig")(), 1
    with opened(path) as file:
        block = file.read(BLOCK)
        while True:
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                source.bad(
                    str(path), f"{NOT_TEXT} in line {line + error.object.count(10, 0, error.start)}"
                )
                return
            yield text
            if not block:
                return
            line, block = line + text.count("\n"), file.read(BLOCK)


def parted(texts: Iterable[str]) -> Parts:
    """One text in blocks, parted at blank lines, wherever the blocks begin and end."""
    rest = ""
    for text in texts:
        rest += text
        body = rest.rstrip()
        *whole, begun = BLANK.split(body)
        yield from ((part, True) for part in whole)
        yield begun, False
        rest = rest[len(body) :]  # space may be the beginning of a blank line
    yield "", True
