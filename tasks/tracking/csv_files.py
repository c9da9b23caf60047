"""Tables as CSV files."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datamodules.utils.files import write_text


def write_csv(path: Path, heads: Sequence[str], columns: Sequence[Sequence[Any]]) -> None:
    """Writes columns of equal length below their heads; floats get six decimals."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heads)
    for row in zip(*columns, strict=True):
        table.writerow(f"{cell:.6f}" if isinstance(cell, float) else cell for cell in row)
    write_text(path, text.getvalue())


def unique_heads(heads: Sequence[str]) -> list[str]:
    """Heads of which each that occurs before is told apart: a class may be named like a column.

    >>> unique_heads(["text", "label", "text", "other"])
    ['text', 'label', 'probability_text', 'other']
    """
    found: dict[str, None] = {}  # a set that keeps the order
    for head in heads:
        while head in found:
            head = f"probability_{head}"
        found[head] = None
    return list(found)
