"""Documents in files, and in data sets of the Hugging Face hub."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from re import fullmatch
from typing import TypeVar

from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.base import listed
from datamodules.sources.compressed import CODECS
from datamodules.sources.document_kinds import READERS, blocks, column, plain, reader_of
from datamodules.sources.documents import (
    CorpusOptions,
    DocumentSource,
    Piece,
    ReferenceDocuments,
    pieces,
)
from datamodules.sources.folder import files_below
from datamodules.sources.tables import HubTables
from datamodules.utils.cache import content_key
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import problem
from datamodules.utils.splits import split_of

KINDS = ", ".join(READERS)
HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
S = TypeVar("S")


class DocumentFiles(DocumentSource):
    """Documents in a file, or in all files of a folder in the order of their names, at any depth.

    .txt and .md: one document each, or parted at blank lines (`blank_lines`). .jsonl: an object with a text on each
    line. All these also as .gz or .zst. .parquet, .arrow: a column of texts. Documents without text are passed over.

    The first part of a path that is called train, validation (valid, val, dev) or test, with or without more behind a
    dash or a dot, says which split a file is of, if there are any called train; files of no split then are left out,
    with a warning. Else all is training text.
    """

    noun = "files"
    unused = {"name", "subset", "local"}

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split.

        Raises:
            UsageError: There are none. DataError: Some are of another kind, and bad ones are not to be skipped.
        """
        want = f"a file or a folder of {KINDS} (text also as {' or '.join(CODECS)})"
        if self.path is None:
            raise UsageError(f"the source files needs --data.path: {want}.")
        root = Path(self.path)
        if not root.is_dir():
            if fault := problem(root):
                raise UsageError(f"{root} {fault}: --data.path takes {want}.")
            if reader_of(root) is None:
                raise UsageError(f"{root} is of another kind: --data.path takes {want}.")
            return {"train": [root]}
        paths = []
        for path in files_below(root, (*READERS, *CODECS), self.bad):
            if reader_of(path):
                paths.append(path)
            else:
                self.bad(str(path), f"is not one of the kinds {KINDS}")
        if not paths:
            raise UsageError(f"{root} holds no files: --data.path takes {want}.")
        return self._by_split(root, paths)

    def _by_split(self, root: Path, paths: list[Path]) -> dict[str, list[Path]]:
        found: dict[str | None, list[Path]] = {}
        for path in paths:
            found.setdefault(split_of(path.relative_to(root)), []).append(path)
        if "train" not in found:
            return {"train": paths}
        if unnamed := found.pop(None, []):
            names = listed([str(path) for path in unnamed])
            rank_zero_warn(
                f"{len(unnamed)} of the files in {root} are of no split and left out: {names}."
            )
        return _merged({split: some for split, some in found.items() if split})

    def prepare(self) -> None:
        """Nothing to download, but to look whether there are files."""
        _ = self.files

    def has(self, split: str) -> bool:
        return split in self.files

    def stamp(self, split: str) -> str | None:
        status = [(path.absolute(), path.stat()) for path in self.files[split]]
        return content_key(*(f"{path} {s.st_size} {s.st_mtime_ns}" for path, s in status))

    def size(self, split: str) -> int:
        return sum(path.stat().st_size for path in self.files.get(split, []))

    def read(self, split: str) -> Iterator[Piece]:
        """The documents of a split.

        Raises:
            DataError: A file is damaged; or see `bad`.
        """
        import pyarrow as pa

        for path in self.files[split]:
            reader = reader_of(path)
            if reader is None or reader is plain and self.skip_bad and not self._is_text(path):
                continue
            try:
                yield from pieces(reader(self, path))
            except (OSError, EOFError, pa.ArrowException) as error:
                reason = str(error).splitlines()[0][:99]
                raise DataError(
                    f"{path} cannot be read ({reason}): fetch or write it again."
                ) from error

    def _is_text(self, path: Path) -> bool:
        """Whether all of a file is UTF-8; else it is left out as a whole."""
        if path not in self._read_before:
            before = len(self.skipped)
            for _ in blocks(self, path):
                pass
            self._read_before[path] = len(self.skipped) == before
        return self._read_before[path]

    @cached_property
    def _read_before(self) -> dict[Path, bool]:
        return {}


class DocumentHub(DocumentFiles):
    """A data set of the Hugging Face hub with a column of texts: its files below the folder that TESSERA_DATA names, or
    downloaded once, as Arrow files that are mapped. Texts without labels (a split called unsupervised) are training
    text, too.
    """

    noun = "data set"
    unused = set[str]()

    @cached_property
    def tables(self) -> HubTables:
        """The data set by split.

        Raises:
            UsageError: It has no name. DataError: The hub cannot be reached.
        """
        tables = HubTables(None, self.options, self.bad)
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
        return _merged({name: [name] for name in self.tables.splits()})

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The local files of each split; none where the data set was downloaded."""
        return _merged(self.tables.files) if self.tables.folder else {}

    @property
    def origin(self) -> str:
        return self.tables.origin

    def prepare(self) -> None:
        _ = self.tables

    def has(self, split: str) -> bool:
        return split in self.splits

    def stamp(self, split: str) -> str | None:
        return super().stamp(split) if self.files else None

    def read(self, split: str) -> Iterator[Piece]:
        if self.files:
            yield from super().read(split)
            return
        for name in self.splits[split]:
            yield from pieces(column(self, self.tables.table(name), self.tables.where(name)))


# Text for language models, read as a stream.
DOCUMENTS: dict[str, type[DocumentSource]] = {
    "reference": ReferenceDocuments,
    "files": DocumentFiles,
    "hub": DocumentHub,
}


def document_source(
    source: str, path: str | None, options: CorpusOptions, skip_bad: bool = False
) -> DocumentSource:
    """The source of this name. Instead of files, `path` may name a data set of the hub; files may be a copy of one.

    Raises:
        UsageError: There is no such source.
    """
    if source not in DOCUMENTS:
        raise UsageError(f"source is {source}, but must be one of {', '.join(DOCUMENTS)}.")
    asked = source
    if path is not None and source in ("files", "hub"):
        where = Path(path)
        named = (
            bool(fullmatch(HUB_ID, path)) and not where.parent.is_dir() and reader_of(where) is None
        )
        source, options = ("hub", replace(options, name=path)) if named else ("files", options)
    found = DOCUMENTS[source](path, options, skip_bad)
    found.unused = (
        found.unused & DOCUMENTS[asked].unused
    )  # such as those that say which data set this is a copy of
    return found


def _merged(splits: Mapping[str, list[S]]) -> dict[str, list[S]]:
    """The splits as language models know them: texts without labels are training text."""
    found: dict[str, list[S]] = {}
    for split, some in splits.items():
        found.setdefault("train" if split == "unlabelled" else split, []).extend(some)
    return found
