"""The command line of every task: `python -m tasks.<task> COMMAND [options]`.

This module answers `--help`, `--version` and mistyped commands without heavy imports; a command
imports what it needs when it runs.
"""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks import __version__
from tasks.cli.app import App, load, program
from tasks.cli.signals import SIGNALS, unblock
from tasks.cli.text_io import open_standard_streams
from tasks.errors import UsageError, exit_status, unknown_name


def main(app: App, argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    if argv is None:
        return run_process(app, sys.argv[1:])
    return run_command(app, argv)


def run_process(app: App, arguments: Sequence[str]) -> int:
    """Run the command line of this process, and return its exit code."""
    SIGNALS.install()  # before anything slow is imported
    gc.disable()  # until all is imported: a collection looks through every object
    return run_command(app, arguments, is_process=True)


def run_command(app: App, arguments: Sequence[str], is_process: bool = False) -> int:
    """Run a command line and return its exit code."""
    open_standard_streams()
    debug, rest = take_debug(arguments)
    command = rest.pop(0) if rest else "--help"
    with exit_status(debug, rest) as status:
        if SIGNALS.is_launched():
            unblock()
        if command in ("-h", "--help", "help"):
            print(help_screen(app))
        elif command == "--version":
            print(f"tessera {__version__}")
        elif command not in app.commands:
            raise UsageError(unknown_name(command, app.commands, "command"))
        else:
            run = build_command(app, command, rest)
            if is_process:
                gc.freeze()  # nothing that is imported is garbage
                gc.enable()
            with SIGNALS.raising():  # a signal raises an exception, so that files are cleaned up
                run()
    return status.code


def take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether to show tracebacks, and the other arguments.

    >>> take_debug(["fit", "--debug", "true", "--lr=1"]), take_debug(["fit", "--debug=false"])
    ((True, ['fit', '--lr=1']), (False, ['fit']))
    """
    debug = False
    rest = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if argument in ("--debug", "--debug=true", "--debug=false"):
            debug = argument != "--debug=false"
        elif before == "--debug" and argument in ("true", "false"):
            debug = argument == "true"
        else:
            rest.append(argument)
    return debug, rest


def build_command(app: App, command: str, arguments: list[str]) -> Callable[[], object]:
    """Parse and check the options of a command; return the function that runs it."""
    from tasks.training.allocator import tune_allocator

    tune_allocator()  # glibc's malloc
    if "torch" not in sys.modules:
        set_waiting_policy()
    if command in app.extra_commands:
        from tasks.cli.parsing import parse_function
        from tasks.distributed.environment import share_cores

        share_cores()
        return parse_function(
            f"{program(app.name)} {command}", load(app.extra_commands[command][1]), arguments
        )
    from tasks.cli.lazy_imports import import_lightning

    import_lightning()
    from tasks.cli.lightning_cli import TaskCLI

    method: Callable[[], object] = getattr(TaskCLI(app, command, arguments), command)
    return method


def set_waiting_policy() -> None:
    """Chooses how OpenMP's threads wait for work; it must come before torch is imported.

    Spinning answers faster, but takes time from other jobs that want the core, and so from the
    thread that is waited for. With all cores free, threads spin for a moment before they sleep.
    """
    from datamodules.utils.cores import free_cores, usable_cores

    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        is_busy = free_cores() < usable_cores() - 0.5
        os.environ["GOMP_SPINCOUNT"] = "0" if is_busy else "3000"


def help_screen(app: App) -> str:
    width = max(map(len, app.commands)) + 2
    commands = "\n".join(f"  {name:<{width}}{text}" for name, text in app.commands.items())
    examples = "".join(f"\n  {program(app.name)} {example}" for example in app.examples)
    examples = f"\n\nexamples:{examples}" * bool(examples)
    options = f"{program(app.name)} COMMAND --help"
    pad = len(options)
    has_configs = (Path(__file__).parents[2] / "configs" / app.name).is_dir()
    configs = os.path.join("configs", app.name, "*.yaml")
    configs = f"\n  {configs:<{pad}}   documented examples for --config" * has_configs
    return f"""{app.title}

usage: {program(app.name)} COMMAND [options]

commands:
{commands}{examples}

more:
  {options}   the main options and their values; `fit --help all`: every option{configs}
  {"tasks/README.md":<{pad}}   your own data, results, how to extend"""
