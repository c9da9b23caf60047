"""What the cells of a column hold: texts, numbers or classes."""

import re

import pyarrow as pa
import torch
from torch import Tensor

MAX_CLASS = 10**6  # whole numbers below this are taken for classes
NUMBER = r"(?i)[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
WHOLE_DECIMAL = r"^(-?[0-9]+)\.0*$"  # a whole number as pandas writes it if a column has gaps
BOOLEANS = {"true": "True", "false": "False", "True": "true", "False": "false"}  # Arrow's, pandas'


def are_numbers(values: list[str]) -> bool:
    """Whether all labels are whole numbers."""
    return all(re.fullmatch("-?[0-9]{1,18}", value) for value in values)


def is_no_class(value: str) -> bool:
    """Whether a label is a number that is not a class: a measure or an id.

    >>> [value for value in ("good", "nan", "3", "-1", "1e9", "1000000") if is_no_class(value)]
    ['-1', '1e9', '1000000']
    """
    if not re.fullmatch(NUMBER, value):
        return False
    return not value.isdecimal() or float(value) >= MAX_CLASS


def may_be_labels(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of texts, numbers or booleans, or null (an empty column)."""
    tests = (is_text, pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(test(kind) for test in (*tests, pa.types.is_boolean, pa.types.is_null))


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


def as_strings(labels: pa.ChunkedArray) -> pa.ChunkedArray:
    """Labels (S,) as strings; NaN, which is what pandas calls missing, is null."""
    import pyarrow.compute as pc

    if pa.types.is_floating(labels.type):
        labels = pc.if_else(pc.is_nan(labels), None, labels)
    return labels.cast(pa.string())


def trimmed_labels(labels: pa.ChunkedArray, names: list[str]) -> pa.ChunkedArray:
    """Strings (S,) without spaces around them; "" is null, and 2.0 is 2, unless `names` has 2.0."""
    import pyarrow.compute as pc

    labels = pc.utf8_trim_whitespace(labels)
    whole = pc.replace_substring_regex(labels, WHOLE_DECIMAL, r"\1")
    labels = pc.if_else(pc.is_in(labels, pa.array(names, pa.string())), labels, whole)
    return pc.if_else(pc.equal(labels, ""), pa.scalar(None, pa.string()), labels)
