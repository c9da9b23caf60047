"""Texts in tables of the hub, in CSV and JSON Lines files, and in folders of .txt files."""

import re
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import Source
from datamodules.sources.readers.cells import is_no_class, is_text, may_be_labels
from datamodules.sources.readers.folders import ClassFolders, files_below, files_by_split
from datamodules.sources.readers.formats import not_utf8
from datamodules.sources.readers.labels import ClassColumn, LabelledTables
from datamodules.sources.readers.tables import CSV, JSON_LINES, CellTypes
from datamodules.sources.texts import TextSamples, TextSource, text_samples
from datamodules.utils.files import printable, read_bytes
from datamodules.utils.splits import SPLITS


def text_column_candidates(options: Any) -> tuple[str, ...]:
    """The columns that may hold the texts."""
    if options.text_column:
        return (options.text_column,)
    return ("text", "review", "sentence", "content", "document")


def text_column(source: Source, schema: pa.Schema, advice: str = "") -> str:
    """Name of the column of texts of a source; raises as `find_column`, with `advice`."""
    candidates = text_column_candidates(source.options)
    return source.find_column(schema, "text_column", candidates, is_text, "text", advice)


class TextHub(LabelledTables[TextSamples], TextSource):
    """Texts in a column of a data set of the hub or a local copy, their classes in another."""

    def read(self, split: str) -> TextSamples:
        table = self.table(split)
        texts = table.columns.column(self.sample_column(table.columns.schema))
        labels = None if split == "unlabelled" else self.labels(split)
        return text_samples(texts, table.rows, where=table.where, labels=labels)

    def sample_column(self, schema: pa.Schema) -> str:
        return text_column(self, schema, self.no_labels(schema))

    def labels(self, split: str) -> Tensor:
        """(S,) int64; for pretraining they are not checked, and 0 without a column of classes.

        A column that fine-tuning refuses, of measures or ids, is not one of classes.
        """
        if self.labelled:
            return super().labels(split)
        columns = self.table(split).columns
        names = [field.name for field in columns.schema if may_be_labels(field.type)]
        one_each = self.options.problem_type == "single_label_classification"
        candidates = set(names) & set(self.label_candidates(columns.schema))
        if one_each and (self.options.label_column or candidates):
            column = ClassColumn(self)
            repeated = len(column.values) < columns.num_rows or self.has("val")
            measured = any(is_no_class(value) for value in column.values)
            if self.options.class_names or (repeated and not measured):
                return column.class_indices(split)
        return torch.zeros(columns.num_rows, dtype=torch.int64)


class TextTables(TextHub):
    """Base of texts in a column of files; a single file, or one for each split."""

    unused_options = {"name", "subset"}

    @property
    def cell_types(self) -> CellTypes:
        """Types of the cells that are read, by the names that their column may have."""
        found: CellTypes = {text_column_candidates(self.options): (str,)}
        return {**found, **self.label_cells} if self.labelled else found


class CsvTexts(TextTables):
    """Texts in CSV or TSV files."""

    suffixes = CSV
    example = "train.csv"
    kind = "CSV"


class JsonTexts(TextTables):
    """Texts in JSON Lines files."""

    suffixes = JSON_LINES
    example = "train.jsonl"
    kind = "JSON Lines"


class TextFolder(ClassFolders[TextSamples], TextSource):
    """A text in each file, a folder for each class: `train/CLASS/*.txt`, or only `CLASS/*.txt`.

    Texts without a class may lie in `unsupervised/` (or unsup/, unlabelled/, unlabeled/), beside
    train/ or in it.
    """

    suffixes = (".txt",)
    example = "CLASS/*.txt or train/CLASS/*.txt"
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
            self.reject(printable(path), f"in line {line} {not_utf8(path)}")
        return None


class CorpusFolder(TextFolder):
    """Texts to pretrain on in `train/CLASS/*.txt`; in other folders they are `PlainTexts`."""

    example = "train/CLASS/*.txt"
    needs_train = True


class PlainTexts(CorpusFolder):
    """Texts to pretrain on: a file of documents between empty lines, or a folder of documents.

    A single training text of several lines is cut at line ends, so that a part can be held out.
    In a folder, the first part of a path that is called train, validation (valid, val, dev) or test
    says which split a file is of, if there are any called train; else all is training text.
    """

    example = "*.txt"

    @classmethod
    def reads(cls, file: Path) -> bool:
        return file.suffix.lower() in cls.suffixes and not super().reads(file)

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split. Raises `UsageError` if there are none."""
        path = self.require_path("a .txt file, or a folder of such files")
        return files_by_split(path, self.suffixes, self.reject)

    def prepare(self) -> None:
        """Checks that there are files; nothing is downloaded."""
        _ = self.files

    def has(self, split: str) -> bool:
        return split in self.files

    def read(self, split: str) -> TextSamples:
        path = self.require_path(self.example)
        if path.is_dir():
            samples = self.read_files(self.files[split])
        else:
            texts = re.split(r"\r?\n\s*\n", (self.read_file(path) or "").strip())
            where = f"document {{}} of {path}"  # {}: its number
            samples = text_samples(texts, torch.arange(1, len(texts) + 1), where=where)
        if split == "train" and len(samples) == 1 and not self.has("val"):
            return self.cut(samples)
        return samples

    def cut(self, samples: TextSamples) -> TextSamples:
        """A single text of several lines in parts, one of which can be held out."""
        lines = samples.column[0].as_py().splitlines(keepends=True)
        if not 0 < self.options.val_fraction < 1 or len(lines) < 2:
            return samples
        parts = min(max(2, round(1 / self.options.val_fraction)), len(lines))
        ends = [len(lines) * i // parts for i in range(parts + 1)]
        texts = ["".join(lines[start:end]) for start, end in pairwise(ends)]
        texts = [text for text in texts if not text.isspace()]
        return text_samples(texts, samples.rows.expand(len(texts)), samples.where)
