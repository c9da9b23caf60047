"""Tables as CSV files."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.utils.files import write_text

Columns = Mapping[str, Sequence[Any]]  # by name


def write_csv(
    path: Path,
    header: Sequence[str],
    columns: Sequence[Sequence[Any]],
    others: Mapping[str, Sequence[Any]] = {},
) -> None:
    """Writes columns of equal length below their names; floats get six decimals.

    `others` stand last, numbers with all digits, lists and objects as JSON; what is named like one
    of the columns is left out.
    """
    for name, cells in without_names(others, header).items():
        header = [*header, name]
        is_json = (float, bool, list, dict)
        columns = [*columns, [text_cell(c) if type(c) in is_json else c for c in cells]]
    lines = [csv_line(header)]
    for row in zip(*columns, strict=True):
        lines.append(csv_line([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row]))
    write_text(path, "".join(lines))


def csv_line(cells: Sequence[Any]) -> str:
    """A row of a CSV file; cells with any kind of line break are quoted."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(cells)  # quotes both of its characters
    return line.getvalue().removesuffix("\r\n") + "\n"


def text_cell(cell: Any) -> str:
    """A text as it is, anything else as JSON; dates and the like as text in it."""
    return cell if isinstance(cell, str) else json.dumps(cell, default=str)


def without_names(columns: Columns, names: Sequence[str]) -> Columns:
    """The columns that have none of some names."""
    return {name: cells for name, cells in columns.items() if name not in names}


def unique_names(header: Sequence[str]) -> list[str]:
    """Column names, those that occur twice told apart: a class may be named like a column.

    >>> unique_names(["text", "label", "text", "other"])
    ['text', 'label', 'probability_text', 'other']
    """
    found: dict[str, None] = {}  # a set that keeps the order
    for name in header:
        while name in found:
            name = f"probability_{name}"
        found[name] = None
    return list(found)


def last_row(path: Path) -> dict[str, str]:
    """The last complete row of a CSV file by column; empty if there is none."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    lines = text[: text.rfind("\n") + 1].splitlines()
    if len(lines) < 2:
        return {}
    return dict(zip(*csv.reader([lines[0], lines[-1]]), strict=False))
