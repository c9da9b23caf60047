"""The help of a command that is a function, such as `generate --help`.

generate --help         a line for each option
generate --help all     every option: what it does, its type, its choices
generate --help top_p   the same of one option, or of a section
"""

import argparse
from collections.abc import Callable
from inspect import signature
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from tasks.cli.help_screens import (
    COLUMN,
    begins,
    choices_of,
    first_sentence,
    format_columns,
    format_value,
    name_of,
    options_of,
    show_only,
    wrap,
)

MORE = ("", "more:", "  --help all    every option: what it does, its type, its choices")


def show_help(parser: ArgumentParser, function: Callable[..., object], topic: str) -> NoReturn:
    """Print the help of the parser of a function, and exit; `topic` as in `take_help`."""
    models = " MODEL ..." * ("models" in signature(function).parameters)
    parser.usage = f"{parser.prog}{models} [options]"
    if topic not in ("", "all"):
        show_only(parser, [one for one in parser._actions if begins(one, topic)], topic, ["all"])
    print(parser.format_help() if topic else "\n".join([options_help(parser), *MORE]))
    raise SystemExit(0)


def options_help(parser: argparse.ArgumentParser) -> str:
    """A line for each option: its name, its default, and the first sentence of its help."""
    options = list(options_of(parser))
    names = [name_of(option) for option in options]
    # argparse has no public list of a parser's arguments.
    rows = [
        (f"  {argument.metavar}", argument.help or "")
        for argument in parser._actions
        if not argument.option_strings
    ]
    for option, name in zip(options, names, strict=True):
        if not any(other.startswith(f"{name}.") for other in names):  # the head of a section
            rows.append(option_row(option, name))
    column = min(COLUMN, max(len(left) for left, _ in rows) + 2)
    lines = [format_columns(left, text, column) for left, text in rows]
    about = wrap(parser.description or "")
    return "\n".join([f"usage: {parser.usage}", "", *about, "", "options:", *lines])


def option_row(option: Any, name: str) -> tuple[str, str]:
    """`--name value`, and what the option does, with the choices if there are any."""
    value = format_value(option.default)
    text = first_sentence(option.help or "")
    if option.required:
        value = name.rpartition(".")[2].upper()
        text = f"Required: {text[:1].lower()}{text[1:]}"
    choices = choices_of(getattr(option, "_typehint", None))  # jsonargparse's own attribute
    if choices not in ([], ["true", "false"]):
        text += f" ({', '.join(choices)})"
    return f"  --{name} {value}", text
