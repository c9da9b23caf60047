"""Documents in files, and in data sets of the Hugging Face hub."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.base import Source, shortened
from datamodules.sources.documents import (
    CorpusOptions,
    DocumentSource,
    Piece,
    ReferenceDocuments,
    split_pieces,
)
from datamodules.sources.readers.folders import files_below
from datamodules.sources.readers.formats import (
    COMPRESSION,
    NOT_UTF8,
    open_decompressed,
    read_errors,
    read_json_lines,
    read_table,
    uncompressed_suffix,
)
from datamodules.sources.readers.tables import CellType, HubTables
from datamodules.sources.text_files import TEXT_COLUMNS, text_column
from datamodules.utils.cache import content_key
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import open_regular, path_fault
from datamodules.utils.splits import split_of

TEXT_BLOCK = 2**20  # bytes that are read at once
TABLE_ROWS = 256  # that are read at once
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
S = TypeVar("S")

Parts = Iterator[tuple[str, bool]]  # text, and whether a document ends with it


def read_plain(source: Source[Any], path: Path) -> Parts:
    """Plain text: one document, or several between blank lines."""
    blocks = read_blocks(source, path)
    if source.options.blank_lines:
        yield from split_at_blank_lines(blocks)
    else:
        yield from ((block, False) for block in blocks)
        yield "", True


def read_objects(source: Source[Any], path: Path) -> Parts:
    """A JSON object with a text on each line."""
    column = source.options.text_column
    cells = CellType((column,) if column else TEXT_COLUMNS)
    name = None
    for line, row in read_json_lines(path, source.reject):
        if name is None:
            candidates = [name for name in cells.names if name in row]
            name = source.find_column(list(row), "text_column", candidates)
        fault = cells.fault(row)
        if name not in row:
            fault = f"has no {name}"
        if fault is not None:
            source.reject(f"line {line} of {path}", fault)
        else:
            yield row[name] or "", True


def read_rows(source: Source[Any], path: Path) -> Parts:
    """A table with a column of texts."""

    from pyarrow import parquet

    if path.suffix.lower() == ".arrow":
        yield from read_column(source, read_table(path), f"row {{}} of {path}")
        return
    open_regular(path).close()
    file = parquet.ParquetFile(path, buffer_size=TEXT_BLOCK, pre_buffer=False)
    name = text_column(source, file.schema_arrow.empty_table())
    batches = file.iter_batches(TABLE_ROWS, columns=[name], use_threads=False)
    yield from read_cells(source, batches, f"row {{}} of {path}")


def read_column(source: Source[Any], table: pa.Table, where: str) -> Parts:
    """The column of texts of a table in memory, or mapped into it."""
    column = table.select([text_column(source, table)])
    yield from read_cells(source, column.to_batches(TABLE_ROWS), where)


def read_cells(source: Source[Any], batches: Iterable[pa.RecordBatch], where: str) -> Parts:
    """The texts in batches of one column, each a document, without those that are not UTF-8."""
    row = 0
    for batch in batches:
        for cell in batch.column(0):
            try:
                yield cell.as_py() or "", True
            except UnicodeDecodeError:
                source.reject(where.format(row), NOT_UTF8)
            row += 1


def read_blocks(source: Source[Any], path: Path) -> Iterator[str]:
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
                source.reject(str(path), f"{NOT_UTF8} in line {line}")
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


READERS: dict[str, Callable[[Source[Any], Path], Parts]] = {
    ".txt": read_plain,
    ".md": read_plain,
    ".jsonl": read_objects,
    ".ndjson": read_objects,
    ".parquet": read_rows,
    ".arrow": read_rows,
}
FORMATS = ", ".join(READERS)


def reader_of(path: Path) -> Callable[[Source[Any], Path], Parts] | None:
    """What reads a file of this name, which may be compressed unless it is a table."""
    reader = READERS.get(uncompressed_suffix(path))
    if reader is read_rows and path.suffix.lower() in COMPRESSION:
        return None
    return reader


class DocumentFiles(DocumentSource):
    """Documents in a file, or in all files of a folder in the order of their names, at any depth.

    .txt and .md: one document each, or split at blank lines (`blank_lines`). .jsonl: an object
    with a text on each line. All these also as .gz or .zst. .parquet, .arrow: a column of texts.
    Documents without text are skipped.

    The first part of a path that is called train, validation (valid, val, dev) or test, with or
    without more after a dash or a dot, says which split a file is of, if there are any called
    train; files of no split are then left out, with a warning. Else all is training text.
    """

    noun = "files"
    unused_options = {"name", "subset", "local"}

    def __init__(self, path: str | None, options: CorpusOptions, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self._is_text: dict[Path, bool] = {}

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split.

        Raises:
            UsageError: There are none.
            DataError: Some are of another kind, and bad ones are not to be skipped.
        """
        wanted = f"a file or a folder of {FORMATS} (text also as {' or '.join(COMPRESSION)})"
        if self.path is None:
            raise UsageError(f"the source files needs --data.path: {wanted}.")
        root = Path(self.path)
        if root.is_dir():
            files = self._files_below(root)
            if files:
                return self._by_split(root, files)
            raise UsageError(f"{root} holds no files: --data.path takes {wanted}.")
        fault = path_fault(root)
        if fault is None and reader_of(root) is None:
            fault = "is of another kind"
        if fault is not None:
            raise UsageError(f"{root} {fault}: --data.path takes {wanted}.")
        return {"train": [root]}

    def _files_below(self, root: Path) -> list[Path]:
        files = []
        for path in files_below(root, (*READERS, *COMPRESSION), self.reject):
            if reader_of(path):
                files.append(path)
            else:
                self.reject(str(path), f"is not one of the kinds {FORMATS}")
        return files

    def _by_split(self, root: Path, files: list[Path]) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        others = []
        for path in files:
            split = split_of(path.relative_to(root))
            if split is None:
                others.append(path)
            else:
                found.setdefault(split, []).append(path)
        if "train" not in found:
            return {"train": files}
        if others:
            names = shortened([str(path) for path in others])
            rank_zero_warn(
                f"{len(others)} of the files in {root} are of no split and left out: {names}."
            )
        return join_unlabelled(found)

    def prepare(self) -> None:
        """Nothing to download, but checks whether there are files."""
        _ = self.files

    def has(self, split: str) -> bool:
        return split in self.files

    def fingerprint(self, split: str) -> str | None:
        parts = []
        for path in self.files[split]:
            status = path.stat()
            parts.append(f"{path.absolute()} {status.st_size} {status.st_mtime_ns}")
        return content_key(*parts)

    def size(self, split: str) -> int:
        return sum(path.stat().st_size for path in self.files.get(split, []))

    def read(self, split: str) -> Iterator[Piece]:
        """The documents of a split.

        Raises:
            DataError: A file is damaged; or see `reject`.
        """
        for path in self.files[split]:
            reader = reader_of(path)
            assert reader is not None
            with read_errors(path):
                if reader is not read_plain or not self.skip_bad or self._check_text(path):
                    yield from split_pieces(reader(self, path))

    def _check_text(self, path: Path) -> bool:
        """Whether all of a file is UTF-8; else it is skipped as a whole."""
        if path not in self._is_text:
            before = len(self.skipped)
            for _ in read_blocks(self, path):
                pass
            self._is_text[path] = len(self.skipped) == before
        return self._is_text[path]


class DocumentHub(DocumentFiles):
    """A data set of the Hugging Face hub with a column of texts.

    That is its files below the folder that TESSERA_DATA names, or those of a download, which are
    mapped into memory. Texts without labels (a split called unsupervised) are training text, too.
    """

    noun = "data set"
    unused_options = set[str]()

    @property
    def local_path(self) -> Path | None:
        """The folder with these data below TESSERA_DATA; a path that the user named is a hub id."""
        return Source(None, self.options).local_path

    @cached_property
    def tables(self) -> HubTables:
        """The data set by split.

        Raises:
            UsageError: It has no name.
            DataError: The hub cannot be reached.
        """
        tables = HubTables(self)
        try:
            tables.splits()
        except DataError as error:
            if self.path is None:
                raise
            raise DataError(
                f"{self.path} is no file or folder here, and as a data set: {error}"
            ) from error
        return tables

    @cached_property
    def splits(self) -> dict[str, list[str]]:
        """Of each split, the names of those of the hub that are a part of it."""
        return join_unlabelled({name: [name] for name in self.tables.splits()})

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The local files of each split; none where the data set was downloaded."""
        return join_unlabelled(self.tables.files) if self.tables.folder else {}

    @property
    def origin(self) -> str:
        return self.tables.origin

    def prepare(self) -> None:
        _ = self.tables

    def has(self, split: str) -> bool:
        return split in self.splits

    def fingerprint(self, split: str) -> str | None:
        return super().fingerprint(split) if self.files else None

    def read(self, split: str) -> Iterator[Piece]:
        if self.files:
            yield from super().read(split)
            return
        for name in self.splits[split]:
            table = self.tables.load(name)
            yield from split_pieces(read_column(self, table.columns, table.where))


DOCUMENTS: dict[str, type[DocumentSource]] = {
    "reference": ReferenceDocuments,
    "files": DocumentFiles,
    "hub": DocumentHub,
}


def document_source(
    source: str, path: str | None, options: CorpusOptions, skip_bad: bool = False
) -> DocumentSource:
    """The source of this name. Instead of files, `path` may name a data set of the hub, and
    instead of one of the hub the files of a copy.

    Raises:
        UsageError: There is no such source.
    """
    if source not in DOCUMENTS:
        raise UsageError(f"source is {source}, but must be one of {', '.join(DOCUMENTS)}.")
    kind = source
    if path is not None and source in ("files", "hub"):
        kind = "files"
        is_here = Path(path).parent.is_dir() or reader_of(Path(path)) is not None
        if HUB_ID.fullmatch(path) and not is_here:
            kind = "hub"
            options = replace(options, name=path)
    found = DOCUMENTS[kind](path, options, skip_bad)
    found.unused_options = found.unused_options & DOCUMENTS[source].unused_options
    return found


def join_unlabelled(splits: Mapping[str, list[S]]) -> dict[str, list[S]]:
    """The splits as language models know them: texts without labels are training text."""
    found: dict[str, list[S]] = {}
    for split, items in splits.items():
        found.setdefault("train" if split == "unlabelled" else split, []).extend(items)
    return found
