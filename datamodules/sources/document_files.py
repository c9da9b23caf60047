"""Documents in files, and in data sets of the Hugging Face hub."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from datamodules.sources.base import Source
from datamodules.sources.documents import (
    CorpusOptions,
    DocumentSource,
    Piece,
    split_pieces,
)
from datamodules.sources.readers.folders import files_by_split
from datamodules.sources.readers.formats import (
    COMPRESSION,
    NOT_UTF8,
    not_utf8,
    open_decompressed,
    read_csv,
    read_errors,
    read_json_lines,
    read_table,
    uncompressed_suffix,
)
from datamodules.sources.readers.tables import ARROW, CSV, TableSource, flattened, type_fault
from datamodules.sources.text_files import text_column, text_column_candidates
from datamodules.utils.cache import content_key
from datamodules.utils.files import open_regular
from datamodules.utils.splits import join_unlabelled

TEXT_BLOCK = 2**20  # bytes that are read at once
TABLE_ROWS = 256  # that are read at once
BLANK_LINES = re.compile(r"\r?\n[^\S\n]*\n\s*")

Parts = Iterator[tuple[str, bool]]  # text, and whether a document ends with it
Reader = Callable[[Source, Path], Parts]


def read_plain(source: Source, path: Path) -> Parts:
    """Plain text: one document, or several between blank lines."""
    blocks = read_blocks(source, path)
    if source.options.blank_lines:
        yield from split_at_blank_lines(blocks)
    else:
        yield from ((block, False) for block in blocks)
        yield "", True


def read_rows(source: Source, path: Path) -> Parts:
    """A text in each row of CSV, or in a JSON object on each line."""
    read = read_csv if uncompressed_suffix(path) in CSV else read_json_lines
    rows = ((line, flattened(row)) for line, row in read(path, source.reject))
    first = list(islice(rows, TABLE_ROWS))  # objects of JSON need not have the same names
    if not first:
        return
    candidates = text_column_candidates(source.options)
    name = text_column(source, cell_types([row for _, row in first], candidates))
    for line, row in chain(first, rows):
        fault = type_fault(row, [name]) if name in row else f"has no {name}"
        if fault is None:
            yield row[name] or "", True
        else:
            source.reject(f"line {line} of {path}", fault)


def cell_types(rows: Sequence[Mapping[str, Any]], candidates: Sequence[str]) -> pa.Schema:
    """Columns of some rows; those with a string, and the candidates, are of type string."""
    texts = {name for row in rows for name, cell in row.items() if isinstance(cell, str)}
    texts.update(candidates)
    names = dict.fromkeys(chain.from_iterable(rows))
    return pa.schema((name, pa.string() if name in texts else pa.null()) for name in names)


def read_parquet_or_arrow(source: Source, path: Path) -> Parts:
    """A table with a column of texts."""
    from pyarrow import parquet

    where = f"row {{}} of {path}"
    if path.suffix.lower() == ".arrow":
        yield from read_column(source, read_table(path), where)
        return
    open_regular(path).close()
    file = parquet.ParquetFile(path, buffer_size=TEXT_BLOCK, pre_buffer=False)
    name = text_column(source, file.schema_arrow)
    batches = file.iter_batches(TABLE_ROWS, columns=[name], use_threads=False)
    yield from read_cells(source, batches, where)


def read_column(source: Source, table: pa.Table, where: str) -> Parts:
    """The column of texts of a table in memory, or mapped into it."""
    column = table.select([text_column(source, table.schema)])
    yield from read_cells(source, column.to_batches(TABLE_ROWS), where)


def read_cells(source: Source, batches: Iterable[pa.RecordBatch], where: str) -> Parts:
    """The texts in batches of one column, each a document, without those that are not UTF-8."""
    row = 0
    for batch in batches:
        for cell in batch.column(0):
            try:
                yield cell.as_py() or "", True
            except UnicodeDecodeError:
                source.reject(where.replace("{}", str(row), 1), NOT_UTF8)
            row += 1


def read_blocks(source: Source, path: Path) -> Iterator[str]:
    """The text of a file, in blocks, up to the first bytes that are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    line = 1
    with open_decompressed(path) as file:
        block = None
        while block != b"":
            block = file.read(TEXT_BLOCK)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                source.reject(str(path), f"in line {line} {not_utf8(path)}")
                return
            yield text
            line += text.count("\n")


def split_at_blank_lines(blocks: Iterable[str]) -> Parts:
    """One text in blocks, split at blank lines, wherever the blocks begin and end."""
    rest = ""
    for block in blocks:
        rest += block
        body = rest.rstrip()
        *complete, begun = BLANK_LINES.split(body)
        yield from ((text, True) for text in complete)
        yield begun, False
        rest = rest[len(body) :]  # space may be the beginning of a blank line
    yield "", True


READERS: dict[str, Reader] = {  # by suffix, in lower case
    ".txt": read_plain,
    ".md": read_plain,
    ".jsonl": read_rows,
    ".ndjson": read_rows,
    **dict.fromkeys(CSV, read_rows),
    **dict.fromkeys(ARROW, read_parquet_or_arrow),
}


def with_compression(*suffixes: str) -> tuple[str, ...]:
    """Suffixes of files, plain and compressed."""
    return (*suffixes, *(f"{suffix}{end}" for suffix in suffixes for end in COMPRESSION))


class DocumentFiles(DocumentSource):
    """Base of the documents in a file, or in all files of a folder in the order of their names.

    Documents without text are skipped; `files_by_split` says which files are of which split.
    """

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split.

        Raises `UsageError` if there are none; `DataError` if some are of another kind, and bad ones
        are not to be skipped.
        """
        return join_unlabelled(self.local_files())

    def local_files(self) -> dict[str, list[Path]]:
        """The files of each split, those without labels apart."""
        root = self.require_path(f"a file or a folder of {', '.join(self.suffixes)}")
        return files_by_split(root, self.suffixes, self.reject)

    def prepare(self) -> None:
        """Checks that there are files; nothing is downloaded."""
        _ = self.files

    def has(self, split: str) -> bool:
        return split in self.files

    def fingerprint(self, split: str) -> str | None:
        parts = []
        for path in self.files[split]:
            status = path.stat()
            # Programs that copy files may keep the time of their last change, but not `st_ctime`.
            times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
            parts.append(f"{path.absolute()} {status.st_size} {times}")
        return content_key(*parts)

    def size(self, split: str) -> int:
        return sum(path.stat().st_size for path in self.files.get(split, []))

    def read(self, split: str) -> Iterator[Piece]:
        """The documents of a split. Raises `DataError` if a file is damaged; or see `reject`."""
        for path in self.files[split]:
            with read_errors(path):
                yield from self.read_file(path)

    def chosen_columns(self) -> str:
        next(self.read("train"), None)  # all else may come from the cache
        return super().chosen_columns()

    def read_file(self, path: Path) -> Iterator[Piece]:
        """The documents of a file."""
        yield from split_pieces(READERS[uncompressed_suffix(path)](self, path))


class PlainDocuments(DocumentFiles):
    """Files of text: one document each, or split at blank lines (`blank_lines`)."""

    suffixes = with_compression(".txt", ".md")
    example = "*.txt"
    unused_options = {"name", "subset", "text_column"}

    def __init__(self, path: str | None, options: CorpusOptions, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self._is_utf8: dict[Path, bool] = {}

    def read_file(self, path: Path) -> Iterator[Piece]:
        if not self.skip_bad or self._check_utf8(path):
            yield from super().read_file(path)

    def _check_utf8(self, path: Path) -> bool:
        """Whether all of a file is UTF-8; else it is skipped as a whole."""
        if path not in self._is_utf8:
            before = len(self.skipped)
            for _ in read_blocks(self, path):
                pass
            self._is_utf8[path] = len(self.skipped) == before
        return self._is_utf8[path]


class JsonDocuments(DocumentFiles):
    """JSON Lines: an object with a text on each line."""

    suffixes = with_compression(".jsonl", ".ndjson")
    example = "*.jsonl"
    unused_options = {"name", "subset", "blank_lines"}


class CsvDocuments(DocumentFiles):
    """CSV or TSV with a column of texts; the other columns are not read."""

    suffixes = with_compression(*CSV)
    example = "*.csv"
    unused_options = {"name", "subset", "blank_lines"}


class DocumentHub(TableSource, DocumentFiles):
    """A data set of the Hugging Face hub with a column of texts, or Parquet and Arrow files.

    A download is mapped into memory. Texts without labels (a split called unsupervised) are
    training text, too.
    """

    example = "*.parquet"
    unused_options = {"blank_lines"}

    @cached_property
    def table_files(self) -> dict[str, list[Path]]:
        """The local files of each split, by any names; none if the data set is downloaded."""
        return super().table_files if self.local_path is None else self.local_files()

    @cached_property
    def splits(self) -> dict[str, list[str]]:
        """The hub's splits that are part of each split."""
        return join_unlabelled({name: [name] for name in self.table_splits()})

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The local files of each split; none if the data set was downloaded."""
        return join_unlabelled(self.table_files)

    def prepare(self) -> None:
        _ = self.splits

    def has(self, split: str) -> bool:
        return split in self.splits

    def fingerprint(self, split: str) -> str | None:
        return super().fingerprint(split) if self.files else None

    def read(self, split: str) -> Iterator[Piece]:
        if self.files:
            yield from super().read(split)
            return
        for name in self.splits[split]:
            table = self.table(name)
            yield from split_pieces(read_column(self, table.columns, table.where))
