"""Classes of samples in tables: a column of words, of whole numbers, or as the hub describes it."""

import re
from functools import cached_property
from typing import NoReturn

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import S, Source, shortened
from datamodules.sources.readers.formats import NOT_UTF8
from datamodules.sources.readers.tables import HubTables, Table, Tables, features_of
from datamodules.utils.errors import DataError, UsageError

MAX_CLASS = 10**6  # whole numbers from here on are no classes
NUMBER = re.compile(r"[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


class LabelledTables(Source[S]):
    """Base of sources that are tables with a column of classes.

    The classes are those of the hub's description; else the values that the column holds in the
    training split, sorted. Where these are words, `class_names` may name them in another order.
    """

    @cached_property
    def tables(self) -> Tables:
        """Where the tables come from."""
        return HubTables(self)

    @property
    def origin(self) -> str:
        return self.tables.origin

    def prepare(self) -> None:
        self.tables.splits()

    def has(self, split: str) -> bool:
        return split in self.tables.splits()

    @property
    def class_names(self) -> list[str]:
        if not self.has("train"):
            if self.checkpoint_classes:
                return self.checkpoint_classes
            splits = ", ".join(self.tables.splits())
            raise UsageError(f"{self.origin} has no train split, only {splits}.")
        return self._described_classes("train") or self._class_values

    def label_candidates(self, columns: pa.Table) -> list[str]:
        """Columns that may hold the classes where no option says which; the likeliest first."""
        names = columns.column_names
        found = [name for name in ("label", "labels") if name in names]
        if found:
            return found
        features = features_of(columns)
        return [name for name in names if features.get(name, {}).get("_type") == "ClassLabel"]

    def label_column(self, columns: pa.Table) -> str:
        """Name of the column of classes.

        Raises:
            UsageError: There is none, or it holds neither text nor whole numbers.
        """
        candidates = self.label_candidates(columns)
        name = self.find_column(columns.column_names, "label_column", candidates)
        kind = columns.schema.field(name).type
        if not may_be_classes(kind):
            others = [
                field.name
                for field in columns.schema
                if may_be_classes(field.type) and field.name != name
            ]
            raise UsageError(
                f"column {name} of {self.origin} holds {kind}, not classes: set "
                "--data.dataset.label_column to one that holds text or whole numbers "
                f"({', '.join(others) or 'there are none'})."
            )
        return name

    def labels(self, split: str) -> Tensor:
        """(S,) int64: the class of each row.

        Raises:
            DataError: The split is empty, or a row has no label or one outside the classes.
        """
        table = self.tables.load(split)
        indices = self.class_indices(split)
        if len(indices) == 0:
            raise DataError(f"the {split} split of {self.origin} is empty.")
        given = self.options.class_names or self._described_classes(split)
        if not given and self.has("train"):
            for index, value in enumerate(self._class_values):
                rows = (indices == index).nonzero().flatten().tolist()
                if is_no_class(value) and rows:
                    refuse(
                        table,
                        rows[0],
                        f"has the label {value[:40]}, but classes are words or whole numbers from "
                        f"0 to {MAX_CLASS - 1:,}: mend or remove it, or name all classes with "
                        "--data.dataset.class_names.",
                    )
        unknown = (indices == len(self._class_values)).nonzero().flatten().tolist()
        if unknown:
            label = self._label_texts(split)[unknown[0]].as_py()
            fault = f"has the label {label}, which is none"
            if label is None:
                fault = "has no label, but needs one"
            names = self.class_names
            classes = f"of the {len(names)} classes: {shortened(names)}"
            refuse(table, unknown[0], f"{fault} {classes}.")
        return indices

    def class_indices(self, split: str) -> Tensor:
        """(S,) int64: the class of each row; the number of classes for a label that is none."""

        import pyarrow.compute as pc

        values = pa.array(self._class_values, pa.string())
        found = pc.index_in(self._label_texts(split), values).fill_null(len(values))
        return torch.from_numpy(found.to_numpy().astype("int64"))

    def _label_texts(self, split: str) -> pa.ChunkedArray:
        """(S,) strings: the labels without spaces around them; null where there is none.

        Raises:
            DataError: One is not UTF-8.
        """

        import pyarrow.compute as pc

        table = self.tables.load(split)
        labels = table.columns.column(self.label_column(table.columns)).cast(pa.string())
        invalid = (~is_utf8(labels)).nonzero().flatten().tolist()
        if invalid:
            refuse(table, invalid[0], f"has a label that {NOT_UTF8}: mend or remove it.")
        labels = pc.utf8_trim_whitespace(labels)
        return pc.if_else(pc.equal(labels, ""), pa.scalar(None, pa.string()), labels)

    def _described_classes(self, split: str) -> list[str]:
        """The class names in the hub's description; none where it says nothing."""
        columns = self.tables.load(split).columns
        feature = features_of(columns).get(self.label_column(columns), {})
        return [str(name) for name in feature.get("names") or ()]

    @cached_property
    def _class_values(self) -> list[str]:
        """What the column holds for class 0, 1, ..., as text."""
        has_train = self.has("train")
        split = "train" if has_train else self.tables.splits()[0]
        described = self._described_classes(split)
        if described:
            return [str(i) for i in range(len(described))]
        values = self._label_texts(split).drop_null().unique().to_pylist()
        are_numbers = all(re.fullmatch("-?[0-9]{1,18}", value) for value in values)
        known = self.options.class_names if has_train else self.checkpoint_classes
        if known and (not are_numbers or has_train and set(values) <= set(known)):
            return known
        if known and not has_train:
            return [str(i) for i in range(len(known))]
        return sorted(values, key=int) if are_numbers else sorted(values)


def refuse(table: Table, i: int, fault: str) -> NoReturn:
    """Says what is wrong with row i, whose label is needed."""
    raise DataError(f"{table.name(i)} {fault}")


def is_no_class(value: str) -> bool:
    """Whether a label is a number that is no class: a measure or an id.

    >>> [value for value in ("good", "3", "-1", "0.5", "1000000000000") if is_no_class(value)]
    ['-1', '0.5', '1000000000000']
    """
    if NUMBER.fullmatch(value) is None:
        return False
    return not value.isdecimal() or len(value.lstrip("0")) >= len(str(MAX_CLASS))


def may_be_classes(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of texts or whole numbers, or of nothing at all."""
    return bool(is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def is_utf8(column: pa.ChunkedArray) -> Tensor:
    """(S,) bool: which of some Arrow strings are UTF-8, which tables do not guarantee."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return torch.tensor([is_decodable(cell) for cell in column])
    return torch.ones(len(column), dtype=torch.bool)


def is_decodable(cell: pa.Scalar) -> bool:
    """Whether an Arrow string is UTF-8."""
    try:
        cell.as_py()
    except UnicodeDecodeError:
        return False
    return True
