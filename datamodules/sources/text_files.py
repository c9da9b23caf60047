"""Texts in tables of the hub, in CSV and JSON Lines files, and in folders of .txt files."""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import Source
from datamodules.sources.readers.folders import ClassFolders, files_below
from datamodules.sources.readers.formats import NOT_UTF8
from datamodules.sources.readers.labels import LabelledTables, is_text, may_be_classes
from datamodules.sources.readers.tables import CSV, JSON_LINES, CellTypes
from datamodules.sources.texts import TextSamples, TextSource, text_samples
from datamodules.utils.errors import UsageError
from datamodules.utils.files import printable, read_bytes
from datamodules.utils.splits import SPLITS


def text_column_candidates(options: Any) -> tuple[str, ...]:
    """The columns that may hold the texts."""
    if options.text_column:
        return (options.text_column,)
    return ("text", "review", "sentence", "content", "document")


def text_column(source: Source, schema: pa.Schema) -> str:
    """Name of the column of texts of a source; raises as `find_column`."""
    candidates = text_column_candidates(source.options)
    return source.find_column(schema, "text_column", candidates, is_text, "text")


class TextHub(LabelledTables[TextSamples], TextSource):
    """Texts in a column of a data set of the hub or a local copy, their classes in another."""

    def read(self, split: str) -> TextSamples:
        table = self.table(split)
        texts = table.columns.column(text_column(self, table.columns.schema))
        labels = None if split == "unlabelled" else self.labels(split)
        return text_samples(texts, table.rows, where=table.where, labels=labels)

    def labels(self, split: str) -> Tensor:
        """(S,) int64; for pretraining they are not checked, and 0 without a column of classes."""
        if self.labelled:
            return super().labels(split)
        columns = self.table(split).columns
        names = [field.name for field in columns.schema if may_be_classes(field.type)]
        if self.options.label_column or set(names) & set(self.label_candidates(columns.schema)):
            return self.class_indices(split)
        return torch.zeros(columns.num_rows, dtype=torch.int64)


class TextTables(TextHub):
    """Base of texts in a column of files; a single file, or one for each split."""

    unused_options = {"name", "subset", "local"}

    @property
    def cell_types(self) -> CellTypes:
        """Types of the cells that are read, by the names that their column may have."""
        label = self.options.label_column
        found: CellTypes = {text_column_candidates(self.options): (str,)}
        if self.labelled:
            found[(label,) if label else ("label", "labels")] = (str, int)
        return found


class CsvTexts(TextTables):
    """Texts in CSV or TSV files."""

    suffixes = CSV
    kind = "CSV"


class JsonTexts(TextTables):
    """Texts in JSON Lines files."""

    suffixes = JSON_LINES
    kind = "JSON Lines"


class TextFolder(ClassFolders[TextSamples], TextSource):
    """A text in each file, a folder for each class: `train/CLASS/*.txt`; likewise val/ and test/.

    Texts without a class may lie in `unsupervised/` (or unsup/, unlabelled/, unlabeled/), beside
    train/ or in it.
    """

    suffixes = (".txt",)
    example = "*.txt"
    no_classes = SPLITS["unlabelled"]  # names of folders

    def split_folder(self, split: str) -> Path | None:
        folder = super().split_folder(split)
        train = super().split_folder("train")
        if folder is None and split == "unlabelled" and train is not None:
            return next((train / name for name in self.no_classes if (train / name).is_dir()), None)
        return folder

    def read(self, split: str) -> TextSamples:
        folder = self.split_folder(split)
        assert folder is not None
        if split == "unlabelled":
            return self.read_files(files_below(folder, self.suffixes, self.reject))
        return self.read_files(*self.labelled_files(folder))

    def read_files(self, paths: list[Path], labels: Tensor | None = None) -> TextSamples:
        """The texts in some files; what is not UTF-8 is skipped with `skip_bad`, else refused."""
        texts = []
        numbers = []
        for number, path in enumerate(paths):
            text = self.read_file(path)
            if text is not None:
                texts.append(text)
                numbers.append(number)
        index = torch.tensor(numbers, dtype=torch.int64)
        labels = None if labels is None else labels[index]
        return text_samples(texts, index, where=paths, labels=labels)

    def read_file(self, path: Path) -> str | None:
        """The text of a file; None if it is skipped."""
        try:
            return read_bytes(path).decode("utf-8-sig")
        except OSError as error:
            self.reject(printable(path), f"cannot be read ({error.strerror})")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            self.reject(printable(path), f"{NOT_UTF8} in line {line}")
        return None


class PlainTexts(TextFolder):
    """Texts to pretrain on: a file of documents between empty lines, or a folder of documents.

    A folder with `train/CLASS/` is read as `TextFolder` reads it, so that pretraining and
    classification hold out the same validation texts.
    """

    @cached_property
    def _unsplit(self) -> Path | None:
        """The file or folder of documents; None: a folder of splits and classes."""
        path = self.require_path("a .txt file, or a folder of such files")
        return path if path.is_file() or super().split_folder("train") is None else None

    def has(self, split: str) -> bool:
        return split == "train" if self._unsplit else super().has(split)

    def read(self, split: str) -> TextSamples:
        path = self._unsplit
        if path is None:
            return super().read(split)
        if path.is_dir():
            paths = files_below(path, self.suffixes, self.reject)
            if not paths:
                raise UsageError(f"{path} holds no {', '.join(self.suffixes)} files.")
            return self.read_files(paths)
        texts = re.split(r"\n\s*\n", (self.read_file(path) or "").strip())
        where = f"document {{}} of {path}"  # {}: its number
        return text_samples(texts, torch.arange(1, len(texts) + 1), where=where)
