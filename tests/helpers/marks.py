"""Marks of single cases of a parametrized test."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def slow_except(plain: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases with ids; those whose ids are not in `plain` are slow."""
    return [
        pytest.param(case, id=str(case), marks=[] if case in plain else pytest.mark.slow)
        for case in cases
    ]


def every(step: int, cases: Iterable[Sequence[Any]], plain: Collection[Any] = ()) -> list[Any]:
    """Cases of several values; all but every `step`-th are slow if no value of theirs is plain."""
    return [
        pytest.param(*case, marks=[] if is_plain else pytest.mark.slow)
        for number, case in enumerate(cases)
        for is_plain in [number % step == 0 or any(value in plain for value in case)]
    ]
