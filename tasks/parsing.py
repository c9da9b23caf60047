"""Options and config files: what a command line means before any class is built.

Whatever stands later wins. A config file, a preset, `--resume` and `--ckpt_path` are each a set of options that takes
effect where it stands, so an option typed after one of them wins over it and nothing is overridden in silence.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml

from tasks.errors import UsageError

Options = dict[str, Any]


class PlainErrors(jsonargparse.ArgumentParser):
    """A parser whose complaints are one sentence, raised as `UsageError`."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `message`, made readable, with the nearest option where one is unknown."""
        raise UsageError(readable(message, list(self.options()))) from ex

    def options(self) -> Iterator[str]:
        """All option names, of the command's parser where there is one."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):
                for parser in action.choices.values():
                    yield from parser.options()
            yield from (name for name in action.option_strings if name.startswith("--"))


def readable(message: str, options: list[str]) -> str:
    """One sentence from jsonargparse's message, with the nearest of `options` for an unknown one."""
    message = re.sub(r"\s*\n\s*-?\s*", " ", message.strip())
    unknown = re.search(
        r"[Uu]nrecognized arguments?:? '?(--[\w.+-]+)|(?:Key|Option|key) '([\w.]+)' is not (?:expected|accepted)"
        r"|Unsupported nested key '?([\w.]+)",
        message,
    )
    if unknown:
        name = "--" + next(filter(None, unknown.groups())).removeprefix("--")
        close = difflib.get_close_matches(name, options, 1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else "`fit --help` lists the options"
        return f"unknown option {name}: {hint}"
    message = re.sub(r"Parser key [\"']([\w.]+)[\"']:", r"--\1:", message)
    message = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", message)
    message = re.sub(
        r"Problem with given class_path.*?: |Failed to instantiate.*?: |Does not validate .*?: ", "", message
    )
    return message


def expand(arguments: list[str], macros: Mapping[str, Callable[[str], Options]], flags: Mapping[str, str]) -> list[str]:
    """Replace each macro option by the options it stands for, in place.

    Args:
        arguments: command line, without program and command.
        macros: option name to a function from its value to nested options; `--config` is one of them.
        flags: option without value to the option it abbreviates.

    Returns:
        The command line with every macro as `--config=<JSON>`.

    Raises:
        UsageError: a macro without its value.
    """
    result, rest = [], iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in flags:
            result.append(flags[name])
        elif name in macros:
            value = value if equals else next(rest, "")
            if not value:
                raise UsageError(f"{name} needs a value")
            result.append(f"--config={json.dumps(macros[name](value))}")
        else:
            result.append(argument)
    return result


def given(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """Take the last value of option `name` out of a command line: (value or None, what remains)."""
    value, rest, source = None, [], iter(arguments)
    for argument in source:
        option, equals, text = argument.partition("=")
        if option == name:
            value = text if equals else next(source, "")
            if not value:
                raise UsageError(f"{name} needs a value")
        else:
            rest.append(argument)
    return value, rest


def read_config(value: str) -> Options:
    """Options of a YAML or JSON file, given by path or as a name under `configs/` of the installed package.

    Raises:
        UsageError: no such file, not readable as YAML, or not a mapping.
    """
    path = Path(value)
    if not path.is_file():
        installed = find_spec("configs")
        roots = [Path(root).parent for root in installed.submodule_search_locations or []] if installed else []
        path = next((root / value for root in roots if (root / value).is_file()), path)
    if not path.is_file():
        raise UsageError(f"no config file '{value}': give the path of a YAML file, as in configs/vit/cifar10.yaml")
    try:
        options = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"config file '{value}' is not valid YAML: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"config file '{value}' must hold options by name, as in `trainer: {{max_epochs: 10}}`")
    return options


def merged(base: Options, over: Options) -> Options:
    """Nested options of `base` with those of `over` on top."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def flat(options: Options, prefix: str = "") -> dict[str, Any]:
    """Nested options as {"model.net.depth": 9, ...}."""
    result: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return result


def run_function(program: str, function: Callable[..., object], arguments: list[str]) -> None:
    """Run a command that is a function of its options."""
    parser = PlainErrors(prog=program, description=(function.__doc__ or "").split("\n\n")[0])
    parser.add_function_arguments(function)
    function(**parser.parse_args(arguments).as_dict())
