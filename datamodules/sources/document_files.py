"""Documents in files, and in data sets of the Hugging Face hub."""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.base import Source, find_source, shortened
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
)
from datamodules.sources.readers.tables import ARROW, TableSource, type_fault
from datamodules.sources.text_files import text_column
from datamodules.utils.cache import content_key
from datamodules.utils.errors import UsageError
from datamodules.utils.files import open_regular
from datamodules.utils.splits import split_of

TEXT_BLOCK = 2**20  # bytes that are read at once
TABLE_ROWS = 256  # that are read at once
BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
T = TypeVar("T")

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


def read_objects(source: Source, path: Path) -> Parts:
    """A JSON object with a text on each line."""
    name = None
    for line, row in read_json_lines(path, source.reject):
        if name is None:
            name = text_column(source, pa.schema([(name, pa.string()) for name in row]))
        fault = type_fault(row, [name]) if name in row else f"has no {name}"
        if fault is None:
            yield row[name] or "", True
        else:
            source.reject(f"line {line} of {path}", fault)


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


TEXT_READERS: dict[str, Reader] = {
    ".txt": read_plain,
    ".md": read_plain,
    ".jsonl": read_objects,
    ".ndjson": read_objects,
}
READERS: dict[str, Reader] = {  # by the end of the name, in lower case
    **TEXT_READERS,
    **dict.fromkeys(ARROW, read_parquet_or_arrow),
    **{f"{suffix}{end}": TEXT_READERS[suffix] for suffix in TEXT_READERS for end in COMPRESSION},
}
KNOWN_SUFFIXES = ", ".join((*TEXT_READERS, *ARROW))


def reader_of(path: Path) -> Reader | None:
    """The reader of files of this name; None: there is none."""
    name = path.name.lower()
    return next((READERS[end] for end in READERS if name.endswith(end)), None)


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
    suffixes = tuple(READERS)
    unused_options = {"name", "subset", "local"}

    def __init__(self, path: str | None, options: CorpusOptions, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self._is_utf8: dict[Path, bool] = {}

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split.

        Raises `UsageError` if there are none; `DataError` if some are of another kind, and bad ones
        are not to be skipped.
        """
        wanted = f"a file or a folder of {KNOWN_SUFFIXES} (text also as {' or '.join(COMPRESSION)})"
        root = self.require_path(wanted)
        files = [root] if reader_of(root) else []
        if root.is_dir():
            files = files_below(root, self.suffixes, self.reject)
        if not files:
            verb = "holds no files" if root.is_dir() else "is of another kind"
            raise UsageError(f"{root} {verb}: --data.path takes {wanted}.")
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
        """Checks that there are files; nothing is downloaded."""
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
        """The documents of a split. Raises `DataError` if a file is damaged; or see `reject`."""
        for path in self.files[split]:
            reader = reader_of(path)
            assert reader is not None
            with read_errors(path):
                if reader is not read_plain or not self.skip_bad or self._check_utf8(path):
                    yield from split_pieces(reader(self, path))

    def _check_utf8(self, path: Path) -> bool:
        """Whether all of a file is UTF-8; else it is skipped as a whole."""
        if path not in self._is_utf8:
            before = len(self.skipped)
            for _ in read_blocks(self, path):
                pass
            self._is_utf8[path] = len(self.skipped) == before
        return self._is_utf8[path]


class DocumentHub(TableSource, DocumentFiles):
    """A data set of the Hugging Face hub with a column of texts.

    That is its files below the folder that TESSERA_DATA names, or those of a download, which are
    mapped into memory. Texts without labels (a split called unsupervised) are training text, too.
    """

    noun = "data set"
    unused_options = set[str]()

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


DOCUMENTS: dict[str, type[DocumentSource]] = {
    "reference": ReferenceDocuments,
    "files": DocumentFiles,
    "hub": DocumentHub,
}


def document_source(
    source: str, path: str | None, options: CorpusOptions, skip_bad: bool = False
) -> DocumentSource:
    """The source of this name; `UsageError` if there is none.

    For both "files" and "hub", `path` may be files or a data set of the hub.
    """
    unused_options = find_source(DOCUMENTS, source).unused_options
    if path is not None and source in ("files", "hub"):
        source = "files"
        is_here = Path(path).parent.is_dir() or reader_of(Path(path)) is not None
        if HUB_ID.fullmatch(path) and not is_here:
            source = "hub"
            options = replace(options, name=path)
            path = None
    found = DOCUMENTS[source](path, options, skip_bad)
    found.unused_options = found.unused_options & unused_options
    return found


def join_unlabelled(splits: Mapping[str, list[T]]) -> dict[str, list[T]]:
    """The splits as language models know them: texts without labels are training text."""
    found: dict[str, list[T]] = {}
    for split, items in splits.items():
        found.setdefault("train" if split == "unlabelled" else split, []).extend(items)
    return found
