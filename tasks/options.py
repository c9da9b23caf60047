"""Nested options, as in config files."""

from collections.abc import Iterable
from typing import Any

Options = dict[str, Any]


def merged(base: Options, over: Options) -> Options:
    """Options of `base`, replaced by those of `over` where it has them."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def flat(options: Options, prefix: str = "") -> dict[str, Any]:
    """Nested options by their full names.

    >>> flat({"model": {"net": {"depth": 9}}, "data": {}})
    {'model.net.depth': 9, 'data': {}}
    """
    result: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            result |= flat(value, f"{name}.")
        else:
            result[name] = value
    return result


def as_list(value: Any) -> list[Any]:
    """[] of None, [value] of a single value, all of several."""
    if value is None:
        return []
    if isinstance(value, Iterable) and not isinstance(value, str | dict):
        return list(value)
    return [value]
