"""Targets of samples in tables: a column of classes, of sets of labels, or of numbers."""

import ast
import json
import math
import re
from contextlib import suppress
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import shortened
from datamodules.sources.labelled import LabelledSource, S
from datamodules.sources.readers.cells import (
    BOOLEANS,
    MAX_CLASS,
    NUMBER,
    WHOLE_DECIMAL,
    are_numbers,
    as_strings,
    is_no_class,
    is_not_utf8,
    may_be_labels,
    trimmed_labels,
)
from datamodules.sources.readers.formats import NOT_UTF8
from datamodules.sources.readers.tables import TableSource, described_columns, features_of
from datamodules.utils.errors import DataError, UsageError

MANY_ROWS = 50  # of which more than half have not classes of their own
MAX_NUMBER = 1e30  # far below the largest of float32


class LabelColumn:
    """Base: a column of a table with the targets of its samples.

    Args:
        source: Of the table.
    """

    content: str  # what the column holds, for messages
    cell_types: tuple[type, ...]  # of JSON

    def __init__(self, source: "LabelledTables[Any]") -> None:
        self.source = source

    def fits(self, kind: pa.DataType) -> bool:
        """Whether the column may have an Arrow type."""
        return may_be_labels(kind)

    @property
    def names(self) -> list[str]:
        """Names of the K outputs of a network.

        Raises `UsageError` if there is no training split, and no model is tested.
        """
        tested = self.source.tested_classes
        if not tested and not self.source.has("train"):
            splits = ", ".join(self.source.table_splits())
            raise UsageError(f"{self.source.origin} has no train split, only {splits}.")
        if described := self.described_names(self.first_split):
            return described
        if tested and (not self.source.has("train") or self.labels_of(tested)):
            return tested
        return self.values

    def read(self, split: str) -> Tensor:
        """The targets of a split, as `Split.labels` describes; `DataError` if a cell is bad."""
        raise NotImplementedError

    def find(self, schema: pa.Schema) -> str:
        """Name of the column; raises as `find_column`, first for the column of the samples."""
        self.source.sample_column(schema)
        candidates = self.source.label_candidates(schema)
        return self.source.find_column(schema, "label_column", candidates, self.fits, self.content)

    def column(self, split: str) -> pa.ChunkedArray:
        """(S,) cells. Raises `DataError` if there are none."""
        schema = self.source.table(split).columns.schema
        names = self.source.label_candidates(schema)
        if split != self.first_split and {*names}.isdisjoint(schema.names):
            named = self.find(self.source.table(self.first_split).columns.schema)
            self.source.require_column(split, schema.names, [named, *names])
        column = self.source.table(split).columns.column(self.find(schema))
        if len(column) == 0:
            raise DataError(f"the {split} split of {self.source.origin} has no rows.")
        return column

    def texts(self, split: str) -> pa.ChunkedArray:
        """(S,) strings: the cells without spaces around them; null if there is none.

        2.0 is 2, unless `class_names` has 2.0. Raises `DataError` if one is not UTF-8.
        """
        labels = as_strings(self.column(split))
        invalid = is_not_utf8(labels).nonzero().flatten().tolist()
        if invalid:
            fault = f"has a label that {NOT_UTF8}: fix or remove it."
            raise DataError(f"{self.source.table(split).name(invalid[0])} {fault}")
        return trimmed_labels(labels, self.source.options.class_names or [])

    def add_or_remove(self) -> str:
        """What helps if a label is in no sample of the training split."""
        return f"add training {self.source.noun} with this label, or remove such rows"

    @property
    def first_split(self) -> str:
        """The training split, or without one the first of the others."""
        return "train" if self.source.has("train") else self.source.table_splits()[0]

    def described_names(self, split: str) -> list[str]:
        """The class names in the hub's description; none if it says nothing."""
        schema = self.source.table(split).columns.schema
        feature = features_of(schema).get(self.find(schema), {})
        feature = feature.get("feature", feature)  # a list: its entries'
        return [str(name) for name in feature.get("names") or ()]

    def distinct(self, split: str) -> list[str]:
        """All labels in the column, as text."""
        return list(self.texts(split).drop_null().unique().to_pylist())

    @cached_property
    def values(self) -> list[str]:
        """The label of class 0, 1, ... in the column, as text."""
        if described := self.described_names(self.first_split):
            return [str(i) for i in range(len(described))]
        values = self.distinct(self.first_split)
        tested = self.source.tested_classes
        if tested and (labels := self.labels_of(tested)):
            return labels
        if tested and (are_numbers(values) or not self.source.has("train")):
            return self.source.checkpoint_labels or tested  # the row of another will be named
        known = self.source.options.class_names
        if known and (not are_numbers(values) or set(values) <= set(known)):
            return known
        return sorted(values, key=int) if are_numbers(values) else sorted(values)

    def labels_of(self, names: list[str]) -> list[str] | None:
        """The labels of classes with these names; None if the column has others.

        They are the labels of the model's training data, or the names themselves. Positions, from
        0, are accepted too if the training labels, or where unknown the names, are words.
        """
        labels = self.source.checkpoint_labels or names
        positions = [] if are_numbers(labels) else [str(i) for i in range(len(names))]
        possible = [labels, names, [BOOLEANS.get(label, label) for label in labels], positions]
        values = set(self.distinct(self.first_split))
        found = next((found for found in possible if values <= set(found)), None)
        if found is positions and labels != positions:
            meaning = f"0 is read as {names[0]}, {len(names) - 1} as {names[-1]}"
            self.source.warn_once(f"{self.source.origin} has numbers in place of words: {meaning}.")
        return found


class ClassColumn(LabelColumn):
    """A class for each sample: a word, a whole number, or as the hub describes it.

    The classes are those of the hub's description (`ClassLabel` of `datasets`); else the values
    that the column holds in the training split, sorted. If these are words, the option
    `class_names` may list them in another order.
    """

    content = "text or whole numbers"
    cell_types = (str, int, bool)

    def read(self, split: str) -> Tensor:
        """(S,) int64.

        Raises `DataError` if the split is empty, or a row has no label or one outside the classes;
        `UsageError` if each training row has another class, so that none can be held out.
        """
        table = self.source.table(split)
        indices = self.class_indices(split)
        values = self.values
        named = self.source.options.class_names or self.described_names(split)
        # Classes that nobody has named are checked: the column may hold a measure or ids.
        checked = [] if named or not self.source.has("train") else values
        wrong = [index for index, value in enumerate(checked) if is_no_class(value)]
        rows = torch.isin(indices, torch.tensor(wrong, dtype=indices.dtype)).nonzero().flatten()
        if len(rows):
            row = int(rows[0])
            label = values[indices[row]][:40]
            raise DataError(
                f"{table.name(row)} has the label {label}, but classes are words or whole numbers "
                f"from 0 to {MAX_CLASS - 1:,}: to learn numbers add {self.source.problem_option} "
                "regression; else fix or remove it, or name all classes with "
                "--data.dataset.class_names."
            )
        unknown = (indices == len(values)).nonzero().flatten().tolist()
        if unknown:
            raise DataError(self._without_class(split, unknown))
        if checked and split == "train" and MANY_ROWS <= len(indices) < 2 * len(values):
            message = (
                f"Column {self.find(table.columns.schema)} of {self.source.origin} has "
                f"{len(values):,} classes in {len(indices):,} rows: it is probably an id or a "
                "text. Name the column of labels with --data.dataset.label_column."
            )
            if len(values) == len(indices) and not self.source.has("val"):
                raise UsageError(message)  # no row of a class could be held out
            self.source.warn_once(message)
        return indices

    def _without_class(self, split: str, rows: list[int]) -> str:
        """What is wrong with some rows whose label is missing, or that of no class."""
        table = self.source.table(split)
        names = self.source.class_names
        labels = self.texts(split)
        label = labels[rows[0]].as_py()
        wanted = f"but needs one of the {len(names)} classes: {shortened(names)}"
        if label is not None:
            advice = "" if split == "train" else f"; {self.add_or_remove()}"
            return f"{table.name(rows[0])} has the label {label}, {wanted}{advice}."
        missing = [row for row in rows if not labels[row].is_valid]
        advice = "; fill it in, or remove such rows"
        if any((self.source.options.label_separator or ",") in name for name in names):
            advice += f"; if a sample may have several, set {self.source.problem_option} "
            advice += "multi_label_classification"
        return f"{table.name(rows[0])} has no label{table.count(missing)}, {wanted}{advice}."

    def class_indices(self, split: str) -> Tensor:
        """(S,) int64: the class of each row; K if the label is unknown or missing."""
        import pyarrow.compute as pc

        values = pa.array(self.values, pa.string())
        found = pc.index_in(self.texts(split), values).fill_null(len(values))
        return torch.from_numpy(found.to_numpy().astype("int64"))


class LabelSets(LabelColumn):
    """Any number of labels for each sample: a list, or text with a separator between the labels.

    The classes are named as those of `ClassColumn`.
    """

    content = "lists of labels, text or whole numbers"
    cell_types = (str, int, list)

    def fits(self, kind: pa.DataType) -> bool:
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return may_be_labels(kind.value_type if is_list else kind)

    def read(self, split: str) -> Tensor:
        """(S, K) float32: 1 for each label of a sample, else 0."""
        index = {value: i for i, value in enumerate(self.values)}
        sets = self.label_sets(split)
        labels = torch.zeros(len(sets), len(index))
        for row, found in enumerate(sets):
            for label in found:
                if label not in index:
                    names = self.source.class_names
                    advice = "" if split == "train" else f"; {self.add_or_remove()}"
                    raise DataError(
                        f"{self.source.table(split).name(row)} has the label {label[:40]}, which "
                        f"is none of the {len(names)} labels: {shortened(names)}{advice}."
                    )
                labels[row, index[label]] = 1
        return labels

    def distinct(self, split: str) -> list[str]:
        return list({label for labels in self.label_sets(split) for label in labels})

    def label_sets(self, split: str) -> list[list[str]]:
        """The labels of each row; raises `DataError` if a row names one twice."""
        column = self.column(split)
        is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        cells = column.to_pylist() if is_list else self.texts(split).to_pylist()
        named = self.source.options.class_names or ()
        found = []
        for row, cell in enumerate(cells):
            entries = self._entries(cell) if isinstance(cell, str) else cell or ()
            labels = [str(entry).strip() for entry in entries if entry is not None]
            labels = [
                label if label in named else re.sub(WHOLE_DECIMAL, r"\1", label)
                for label in labels
                if label
            ]
            if len(set(labels)) < len(labels):
                raise DataError(
                    f"{self.source.table(split).name(row)} names a label twice: list the labels of "
                    "a sample, not a 0 or 1 for each."
                )
            found.append(labels)
        return found

    def _entries(self, cell: str) -> list[Any]:
        """The labels in a cell of text: a list in JSON or Python, or with separators."""
        if cell.startswith("[") and cell.endswith("]"):
            with suppress(ValueError):  # of text in brackets
                return list(json.loads(cell))
            with suppress(ValueError, SyntaxError, TypeError):
                entries = list(ast.literal_eval(cell))  # pandas writes lists as Python does
                if repr(entries).replace(" ", "") == cell.replace(" ", ""):
                    return entries
        return cell.split(self.source.options.label_separator)


class NumberColumn(LabelColumn):
    """A number for each sample."""

    content = "numbers"
    cell_types = (str, int, float)

    def fits(self, kind: pa.DataType) -> bool:
        return may_be_labels(kind) and not pa.types.is_boolean(kind)

    @property
    def values(self) -> list[str]:
        """The name of the column: there are no classes."""
        return self.names

    @property
    def names(self) -> list[str]:
        """The name of the column, or without a training split that of the model that is tested."""
        if not self.source.has("train") and self.source.checkpoint_classes:
            return self.source.checkpoint_classes
        return [self.find(self.source.table(self.first_split).columns.schema)]

    def read(self, split: str) -> Tensor:
        """(S, 1) float32."""
        table = self.source.table(split)
        cells = self.texts(split).to_pylist()
        numbers = []
        for row, cell in enumerate(cells):
            number = float(cell) if cell and re.fullmatch(NUMBER, cell) else math.inf
            if abs(number) > MAX_NUMBER:
                fault = f"has the label {cell[:40]}" if cell else "has no number"
                count = "" if cell else table.count([i for i, c in enumerate(cells) if not c])
                raise DataError(
                    f"{table.name(row)} {fault}{count}, but regression needs a number, "
                    f"such as 4.5, up to 1e30, in column {self.names[0]}: fix or remove it."
                )
            numbers.append(number)
        return torch.tensor(numbers)[:, None]  # (S,) -> (S, 1)


LABEL_COLUMNS: dict[str, type[LabelColumn]] = {
    "single_label_classification": ClassColumn,
    "multi_label_classification": LabelSets,
    "regression": NumberColumn,
}


class LabelledTables(TableSource, LabelledSource[S]):
    """Base of sources that are tables with a column of targets."""

    problem_types = tuple(LABEL_COLUMNS)

    @cached_property
    def targets(self) -> LabelColumn:
        """The column of targets."""
        return LABEL_COLUMNS[self.options.problem_type](self)

    @property
    def class_names(self) -> list[str]:
        return self.targets.names

    @property
    def class_labels(self) -> list[str]:
        return self.targets.values

    def sample_column(self, schema: pa.Schema) -> str:
        """Name of the column of samples; raises as `find_column`."""
        raise NotImplementedError

    def other_columns(self, split: str, positions: Tensor) -> dict[str, list[Any]]:
        """Cells of the rows (S,) of a split, by column, without samples and targets."""
        table = self.table(split)
        schema = table.columns.schema
        without = [self.sample_column(schema)]
        if self.labelled:
            without.append(self.targets.find(schema))
        return table.cells(positions, without)

    def label_candidates(self, schema: pa.Schema) -> list[str]:
        """Columns that may hold the targets; the most likely first."""
        if self.options.label_column:
            return [self.options.label_column]
        return ["label", "labels", *described_columns(schema, "ClassLabel")]

    def no_labels(self, schema: pa.Schema) -> str:
        """End of a message about the column of samples, if that of targets is missing, too."""
        candidates = self.label_candidates(schema)
        if not self.labelled or not {*candidates}.isdisjoint(schema.names):
            return ""
        return f"; nor is there a column {candidates[0]}, which --data.dataset.label_column names"

    def labels(self, split: str) -> Tensor:
        """The targets of a split, as `Split.labels` describes."""
        return self.targets.read(split)

    @property
    def label_cells(self) -> dict[tuple[str, ...], tuple[type, ...]]:
        """Types of the cells of the column of targets in JSON, by the names it may have."""
        given = self.options.label_column
        return {(given,) if given else ("label", "labels"): self.targets.cell_types}
