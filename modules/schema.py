"""Primitives from files checked against a dataclass."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from modules.config import require

Config = TypeVar("Config")
TYPES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def from_dict(kind: type[Config], options: Any, prefix: str = "") -> Config:
    """A config from nested primitives, the reverse of `dataclasses.asdict`, types checked.

    Args:
        kind: A dataclass whose fields are primitives, lists, tuples, dicts and such dataclasses.
        options: Its fields by name; those left out have their defaults.
        prefix: Put before the names of entries in messages, such as "stack.".

    Raises:
        ValueError: An entry is unknown, missing, of another type or not a finite number, by name.
    """
    require(
        isinstance(options, Mapping),
        f"{prefix.rstrip('.') or 'The config'} is {format_value(options)}, not a dict.",
    )
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(f"{prefix}{name}" for name in options.keys() - known.keys())
    require(not unknown, f"{', '.join(unknown)}: this version has no such entry.")
    needed = [
        f"{prefix}{name}"
        for name, field in known.items()
        if name not in options and field.default is MISSING and field.default_factory is MISSING
    ]
    require(not needed, f"{', '.join(needed)} is missing.")
    types = get_type_hints(kind)
    return kind(
        **{
            name: check_value(types[name], value, f"{prefix}{name}")
            for name, value in options.items()
        }
    )


def check_value(annotation: Any, value: Any, name: str) -> Any:
    """A value of JSON or of a checkpoint, if it is of the annotated type.

    Lists become tuples if that is the type.

    Args:
        annotation: Such as `int | None`, `list[str]`, `Literal["a", "b"]`, or a dataclass, which
            `value` is a dict for.
        value: To be checked. Whole numbers are also floats; booleans are not numbers.
        name: Of the entry, for messages.

    Raises:
        ValueError: It is of another type, or not a finite number, by name.
    """
    is_union = get_origin(annotation) in (Union, UnionType)
    choices = get_args(annotation) if is_union else (annotation,)
    if annotation is Any or (value is None and NoneType in choices):
        return value
    for choice in choices:
        origin = get_origin(choice)
        items = get_args(choice)
        if is_dataclass(choice) and isinstance(value, Mapping):
            return from_dict(choice, value, f"{name}.")  # type: ignore[arg-type]
        if origin is Literal and value.__hash__ and value in items:
            return value
        if origin is dict and isinstance(value, Mapping):
            return {
                check_value(items[0], key, name): check_value(items[1], one, f"{name}.{key}")
                for key, one in value.items()
            }
        if origin in (list, tuple) and isinstance(value, list | tuple):
            return origin(check_value(items[0], one, f"{name}[{i}]") for i, one in enumerate(value))
        if choice is float and type(value) in (int, float) and math.isfinite(value):
            return value
        if isinstance(choice, type) and type(value) is choice and choice is not float:
            return value
    raise ValueError(
        f"{name} is {format_value(value)}, but must be {' or '.join(map(describe_type, choices))}."
    )


def describe_type(annotation: Any) -> str:
    """What a value of a type is, in words."""
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if annotation in TYPES:
        return TYPES[annotation]
    container = get_origin(annotation) or annotation
    if container in (list, tuple):
        return "a list"
    if container is dict or is_dataclass(container):
        return "a dict"
    return f"a {container.__name__}"


def format_value(value: Any) -> str:
    """A value in a message, cut if it is long."""
    kind = type(value).__name__
    if not isinstance(value, str | int | float | bool | NoneType):
        return f"a {kind}"
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
