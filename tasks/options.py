"""Nested options, as in config files."""

from collections.abc import Iterable
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

from datamodules.utils.errors import UsageError
from modules.config import require
from modules.schema import check_value

Options = dict[str, Any]
Built = TypeVar("Built")


def merge_options(base: Options, over: Options) -> Options:
    """Options of `base`, replaced by those of `over` where it has them."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge_options(result[key], value) if nested else value
    return result


def option_types(kind: type) -> dict[str, Any]:
    """Types of the arguments of a class by name, also of those that `**kwargs` passes to a base."""
    types: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        hints = get_type_hints(vars(base)["__init__"])
        parameters = list(signature(vars(base)["__init__"]).parameters.values())[1:]  # after self
        types = {p.name: hints.get(p.name, Any) for p in parameters} | types
        if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters):
            break
    return types


def accepted_options(kind: type, **options: Any) -> Options:
    """Those options that a class takes: a task need not take the config of its network."""
    types = option_types(kind)
    return {name: value for name, value in options.items() if name in types}


def build_from_options(
    kind: type[Built], saved: Options, given: Options, prefix: str = ""
) -> Built:
    """Builds a class from the options of a checkpoint, replaced by those given in Python.

    Only primitives and dataclasses of them are built, so that a checkpoint can run no code. Raises
    `UsageError` if an option is unknown or of another type. With `prefix` it names options as the
    command line does.
    """
    types = option_types(kind)
    options = merge_options(saved, given)
    try:
        unknown = sorted(options.keys() - types.keys())
        require(not unknown, f"there is no option {prefix}{', '.join(unknown)}.")
        return kind(
            **{
                name: check_value(types[name], value, f"{prefix}{name}")
                for name, value in options.items()
            }
        )
    except ValueError as error:
        what = "" if prefix else f"{kind.__name__} cannot be built: "
        raise UsageError(f"{what}{error}") from error


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


def names_data(given: Options) -> bool:
    """Whether options `--data` name data: their path, source or name on the hub."""
    dataset = given.get("dataset")
    return bool({"path", "source"} & given.keys()) or (
        isinstance(dataset, dict) and "name" in dataset
    )
