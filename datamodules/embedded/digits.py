"""Handwritten digits: 1,797 grey images of 8 x 8 pixels.

They are the test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998, UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, CC BY 4.0), unchanged. A line of
`digits.csv.gz` has the 64 pixels of an image, from 0 to 16 and row by row, and its digit.
"""

from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("digits.csv.gz")


def load() -> tuple[Any, Any]:
    """Returns images, uint8 (S, 8, 8) with values from 0 to 16, and their digits, uint8 (S,)."""
    import numpy as np

    rows = np.loadtxt(FILE, np.uint8, delimiter=",")  # (S, 65)
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]  # (S, 64) -> (S, 8, 8)
