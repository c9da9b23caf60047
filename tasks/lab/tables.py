"""Tables in Markdown."""

import math
from typing import Any


def markdown(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def format_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
