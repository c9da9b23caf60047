"""Marks of single cases of a parametrized test."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(plain: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases with ids; those whose ids are not in `plain` are slow."""
    return [
        pytest.param(case, id=str(case), marks=[] if case in plain else pytest.mark.slow)
        for case in cases
    ]
