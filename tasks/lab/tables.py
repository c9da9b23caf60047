"""Tables in Markdown."""

import math
from typing import Any


def markdown(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(as_cell, line))} |" for line in lines) + "\n"


def as_cell(value: Any) -> str:
    """A value as text without line breaks, with | escaped."""
    return " ".join(str(value).splitlines()).replace("|", "\\|")


def format_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
