"""`tessera completion SHELL`: a script that completes tasks, commands, options and their choices.

The script knows all options, so that the shell completes them without starting Python.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from datamodules.utils.extras import requires_extra
from tasks.cli.app import App, load, program
from tasks.cli.help_screens import choices_of, first_sentence
from tasks.cli.lazy_imports import import_lightning
from tasks.cli.parsing import function_parser
from tasks.errors import UsageError, unknown_name
from tasks.lab.arguments import TITLE, add_commands

HELP = """Print a script with which a shell completes tasks, commands, options and their choices

usage: tessera completion SHELL

shells: {shells}

examples:
  source <(tessera completion bash)             in ~/.bashrc
  tessera completion zsh > FOLDER/_tessera      a folder of $fpath"""


def completion(arguments: Sequence[str], apps: Sequence[App]) -> str:
    """The script for a shell, "bash" or "zsh" for instance, the only one of `arguments`; or help.

    Raises:
        UsageError: There is no shell or another argument.
    """
    with requires_extra("completion"):
        import shtab
    shells = shtab.SUPPORTED_SHELLS
    if {"-h", "--help"} & set(arguments):
        return HELP.format(shells=", ".join(shells))
    if len(arguments) != 1:
        raise UsageError(f"completion needs a shell: choose from {', '.join(shells)}")
    if arguments[0] not in shells:
        raise UsageError(unknown_name(arguments[0], shells, "shell"))
    parser = argparse.ArgumentParser("tessera")
    parser.add_argument("--version", action="store_true")
    tasks = parser.add_subparsers()
    for app in apps:
        commands = tasks.add_parser(app.name, help=app.title).add_subparsers()
        for name, text in app.commands.items():
            add_options(commands.add_parser(name, help=text, add_help=False), app, name)
    lab = tasks.add_parser("lab", help=TITLE, add_help=False)
    for action in add_commands(lab):
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    own = tasks.add_parser("completion", help="a script for tab completion", add_help=False)
    own.add_argument("shell", choices=shells)
    return shtab.complete(parser, arguments[0])


def add_options(parser: argparse.ArgumentParser, app: App, command: str) -> None:
    """Add the options of a command with their choices; the others take the names of files."""
    import shtab

    for option in command_options(app, command):
        names = [name for name in option.option_strings if not name.endswith((".help", "+"))]
        if not names or option.help == argparse.SUPPRESS:
            continue
        help = first_sentence(option.help or "").replace("%", "%%")
        if option.nargs == 0 or "--print_config" in names:
            parser.add_argument(*names, action="store_true", help=help)
            continue
        # jsonargparse keeps the type of an option to itself.
        choices = choices_of(getattr(option, "_typehint", None))
        if "--preset" in names and app.presets:
            choices = list(load(app.presets))
        added = parser.add_argument(*names, choices=choices or None, help=help)
        if not choices:
            added.complete = shtab.FILE  # type: ignore[attr-defined]


def command_options(app: App, command: str) -> list[argparse.Action]:
    """The options of a command, without running it."""
    if command in app.extra_commands:
        function = load(app.extra_commands[command][1])
        return list(function_parser(f"{program(app.name)} {command}", function)._actions)
    import_lightning()
    from tasks.cli.lightning_cli import TaskCLI

    found: list[argparse.Action] = []

    class Listing(TaskCLI):
        """Ends when all options are there."""

        def parse_arguments(self, parser: Any, args: Any) -> None:
            found.extend(parser._actions)
            raise SystemExit

    with suppress(SystemExit):
        Listing(app, command, ["--help"])
    return found
