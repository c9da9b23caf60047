"""Classes of samples in tables: a column of words, of whole numbers, or as the hub describes it."""

import re
from functools import cached_property

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import shortened
from datamodules.sources.labelled import LabelledSource, S
from datamodules.sources.readers.formats import NOT_UTF8
from datamodules.sources.readers.tables import TableSource, described_columns, features_of
from datamodules.utils.errors import DataError, UsageError

MAX_CLASS = 10**6  # whole numbers below this are taken for classes
NUMBER = r"(?i)[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"


class LabelledTables(TableSource, LabelledSource[S]):
    """Base of sources that are tables with a column of classes.

    The classes are those of the hub's description (`ClassLabel` of `datasets`); else the values
    that the column holds in the training split, sorted. If these are words, the option
    `class_names` may list them in another order.
    """

    @property
    def class_names(self) -> list[str]:
        if not self.has("train"):
            if self.checkpoint_classes:  # of the model that is tested
                return self.checkpoint_classes
            splits = ", ".join(self.table_splits())
            raise UsageError(f"{self.origin} has no train split, only {splits}.")
        return self._described_classes("train") or self._class_values

    def label_candidates(self, schema: pa.Schema) -> list[str]:
        """Columns that may hold the classes if no option says which; the likeliest first."""
        return ["label", "labels", *described_columns(schema, "ClassLabel")]

    def label_column(self, schema: pa.Schema) -> str:
        """Name of the column of classes; raises as `find_column`."""
        given = self.options.label_column
        candidates = [given] if given else self.label_candidates(schema)
        content = "text or whole numbers"
        return self.find_column(schema, "label_column", candidates, may_be_classes, content)

    def labels(self, split: str) -> Tensor:
        """(S,) int64: the class of each row.

        Raises `DataError` if the split is empty, or a row has no label or one outside the classes.
        """
        table = self.table(split)
        indices = self.class_indices(split)
        if len(indices) == 0:
            raise DataError(f"the {split} split of {self.origin} has no rows.")
        values = self._class_values
        named = self.options.class_names or self._described_classes(split)
        # Classes that nobody has named are checked: the column may hold a measure or ids.
        checked = [] if named or not self.has("train") else values
        for index, value in enumerate(checked):
            if is_no_class(value) and index in indices:
                row = int((indices == index).nonzero()[0])
                raise DataError(
                    f"{table.name(row)} has the label {value[:40]}, but classes are words or whole "
                    f"numbers from 0 to {MAX_CLASS - 1:,}: fix or remove it, or name all classes "
                    "with --data.dataset.class_names."
                )
        unknown = (indices == len(values)).nonzero().flatten().tolist()
        if unknown:
            label = self._label_texts(split)[unknown[0]].as_py()
            fault = "has no label" if label is None else f"has the label {label}"
            names = self.class_names
            raise DataError(
                f"{table.name(unknown[0])} {fault}, but needs one of the {len(names)} classes: "
                f"{shortened(names)}."
            )
        return indices

    def class_indices(self, split: str) -> Tensor:
        """(S,) int64: the class of each row; the number of classes for an unknown label or none."""
        import pyarrow.compute as pc

        values = pa.array(self._class_values, pa.string())
        found = pc.index_in(self._label_texts(split), values).fill_null(len(values))
        return torch.from_numpy(found.to_numpy().astype("int64"))

    def _label_texts(self, split: str) -> pa.ChunkedArray:
        """(S,) strings: the labels without spaces around them; null if there is none.

        Raises `DataError` if one is not UTF-8.
        """
        import pyarrow.compute as pc

        table = self.table(split)
        labels = table.columns.column(self.label_column(table.columns.schema)).cast(pa.string())
        invalid = is_not_utf8(labels).nonzero().flatten().tolist()
        if invalid:
            fault = f"has a label that {NOT_UTF8}: fix or remove it."
            raise DataError(f"{table.name(invalid[0])} {fault}")
        labels = pc.utf8_trim_whitespace(labels)
        return pc.if_else(pc.equal(labels, ""), pa.scalar(None, pa.string()), labels)

    def _described_classes(self, split: str) -> list[str]:
        """The class names in the hub's description; none if it says nothing."""
        schema = self.table(split).columns.schema
        feature = features_of(schema).get(self.label_column(schema), {})
        return [str(name) for name in feature.get("names") or ()]

    @cached_property
    def _class_values(self) -> list[str]:
        """The value of class 0, 1, ... in the column, as text."""
        has_train = self.has("train")
        split = "train" if has_train else self.table_splits()[0]
        described = self._described_classes(split)
        if described:
            return [str(i) for i in range(len(described))]
        values = self._label_texts(split).drop_null().unique().to_pylist()
        are_numbers = all(re.fullmatch("-?[0-9]{1,18}", value) for value in values)
        known = self.options.class_names if has_train else self.checkpoint_classes
        if known and (not are_numbers or set(values) <= set(known)):
            return known
        if known and not has_train:
            return [str(i) for i in range(len(known))]
        return sorted(values, key=int) if are_numbers else sorted(values)


def is_no_class(value: str) -> bool:
    """Whether a label is a number that is no class: a measure or an id.

    >>> [value for value in ("good", "nan", "3", "-1", "1e9", "1000000") if is_no_class(value)]
    ['-1', '1e9', '1000000']
    """
    if not re.fullmatch(NUMBER, value):
        return False
    return not value.isdecimal() or float(value) >= MAX_CLASS


def may_be_classes(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of texts or whole numbers, or null (an empty column)."""
    return bool(is_text(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of texts."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(test(kind) for test in tests)


def is_not_utf8(column: pa.ChunkedArray) -> Tensor:
    """(S,) bool: which strings of a column are not UTF-8; Arrow files may hold such."""
    found = torch.zeros(len(column), dtype=torch.bool)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for i, cell in enumerate(column):
            try:
                cell.as_py()
            except UnicodeDecodeError:
                found[i] = True
    return found
