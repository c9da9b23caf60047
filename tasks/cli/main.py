"""The command line of every task: `python -m tasks.<task> COMMAND [options]`.

This module answers `--help`, `--version` and mistyped commands by itself, so it imports nothing heavy; what a command
needs is imported when the command runs.
"""

import os
import sys
from collections.abc import Sequence

from tasks import __version__
from tasks.cli.app import SHARED, App, load, program
from tasks.cli.text_io import settle_streams
from tasks.errors import UsageError, guarded, nearest


def main(app: App, argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    settle_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    return guarded(lambda: _dispatch(app, arguments), debug, arguments)


def _dispatch(app: App, arguments: list[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(help_screen(app))
    elif command == "--version":
        print(f"tessera {__version__}")
    elif command not in app.commands:
        raise UsageError(nearest(command, app.commands, "command"))
    else:
        _run(app, command, arguments[1:])


def _run(app: App, command: str, arguments: list[str]) -> None:
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    if target := {**app.functions, **SHARED}.get(command):
        from tasks.cli.parsing import run_function

        run_function(f"{program(app)} {command}", load(target[1]), arguments)
        return
    from tasks.cli.lazy_imports import import_lightning

    import_lightning()
    from tasks.cli.lightning_cli import TaskCLI

    TaskCLI(app, command, arguments)


def help_screen(app: App) -> str:
    """The one-screen answer to `--help`."""
    width = max(map(len, app.commands)) + 2
    commands = "\n".join(f"  {name:<{width}}{text}" for name, text in app.commands.items())
    examples = "\n".join(f"  {program(app)} {example}" for example in app.examples)
    options = f"{program(app)} COMMAND --help"
    pad = len(options)
    configs = os.path.join("configs", app.name, "*.yaml")
    return f"""{app.title}

usage: {program(app)} COMMAND [options]

commands:
{commands}

examples:
{examples}

more:
  {options}   every option, what it does, its unit and its default
  {configs:<{pad}}   documented recipes for --config
  {"README.md":<{pad}}   your own data, figures, how to extend"""
