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
from tasks.cli.app import TASKS, App, load, program, remember_start
from tasks.cli.app import app as find_app
from tasks.cli.signals import SIGNALS, unblock
from tasks.cli.text_io import open_standard_streams
from tasks.distributed.variables import drop_unusable_variables
from tasks.errors import UsageError, exit_status, unknown_name

ANNOUNCED = ("fit", "validate", "test")
NAMES_DATA = (
    *("--resume", "--ckpt_path", "--data.path", "--data.dataset.name", "--data.source"),
    *("--config", "-c"),
)
NO_RUN = ("-h", "--help", "--print_config")
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # of torchrun, Lightning and SLURM


def main(app: App, argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    if argv is None:
        return run_process(app, sys.argv[1:])
    if not (Path(__file__).parents[1] / app.name).is_dir():  # a task of one's own
        remember_start(app.name)
    return run_command(app, argv)


def run_process(app: App, arguments: Sequence[str]) -> int:
    """Run the command line of this process, and return its exit code."""
    SIGNALS.install()  # before anything slow is imported
    open_standard_streams()
    drop_unusable_variables()
    remember_start(app.name)
    gc.disable()  # until all is imported: a collection looks through every object
    return run_command(app, arguments, is_process=True)


def run_command(app: App, arguments: Sequence[str], is_process: bool = False) -> int:
    """Run a command line and return its exit code."""
    open_standard_streams()
    debug, rest = take_debug(arguments)
    command = rest.pop(0) if rest else "--help"
    with exit_status(debug, rest, command) as status:
        if SIGNALS.is_launched():
            unblock()
        if command in ("-h", "--help", "help"):
            if rest:
                line = f"{rest[0]} --help" if rest[0] in app.commands else f"fit --help {rest[0]}"
                raise UsageError(
                    f"{command} {rest[0]}: give a command first, as in `{program(app.name)} {line}`"
                )
            print(help_screen(app))
        elif command == "--version":
            print(f"tessera {__version__}")
        elif command not in app.commands:
            raise UsageError(unknown_command(app, command))
        else:
            if is_process and (line := opening_line(app, command, rest)):
                print(line, flush=True)
            run = build_command(app, command, rest)
            if is_process:
                gc.freeze()  # nothing that is imported is garbage
                gc.enable()
            with SIGNALS.raising():  # a signal raises an exception, so that files are cleaned up
                run()
    return status.code


def unknown_command(app: App, command: str) -> str:
    """The message about a command that a task does not have, with the tasks that have it."""
    from tasks.cli.other_options import who

    owners = [f"tasks.{task}" for task in TASKS if command in find_app(task).commands]
    if not owners:
        return unknown_name(command, app.commands, "command")
    return f"unknown command '{command}': {who(owners)} it; choose from {', '.join(app.commands)}"


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


def opening_line(app: App, command: str, arguments: Sequence[str]) -> str:
    """What a command is about to do; the imports of PyTorch and Lightning take seconds.

    Empty for commands whose output is an answer, and in all processes of a run but the first.
    """
    is_first = all(os.environ.get(name, "0") == "0" for name in RANKS)
    names = {argument.partition("=")[0] for argument in arguments}
    if command not in ANNOUNCED or not is_first or names.intersection(NO_RUN):
        return ""
    given = dict(zip(arguments, [*arguments[1:], ""], strict=False))
    given |= dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    named = [f"{name} {given[name]}" for name in NAMES_DATA if name in given]
    source = named[0] if named else app.default_config
    title = app.title.rpartition(": ")[2]
    return f"task    {title}: {command}{f' with {source}' * bool(source)} ..."


def build_command(app: App, command: str, arguments: list[str]) -> Callable[[], object]:
    """Parse and check the options of a command; return the function that runs it."""
    from tasks.training.allocator import tune_allocator

    tune_allocator()  # glibc's malloc
    if "torch" not in sys.modules:
        from datamodules.utils.cores import request_short_slices

        set_waiting_policy()
        request_short_slices()
    from tasks.cli.lazy_imports import format_warnings, import_lightning

    if command in app.extra_commands:
        from tasks.cli.own_modules import import_own_modules
        from tasks.cli.parsing import parse_function
        from tasks.distributed.environment import share_cores

        share_cores()
        import_own_modules()
        function = load(app.extra_commands[command][1])
        format_warnings()
        return parse_function(f"{program(app.name)} {command}", function, arguments)
    import_lightning()
    from tasks.cli.lightning_cli import TaskCLI
    from tasks.cli.own_modules import import_own_modules

    import_own_modules()
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
    more = "documented examples for --config; `fit --help preset`: networks for --preset"
    configs = f"\n  {configs:<{pad}}   {more}" * has_configs
    return f"""{app.title}

usage: {program(app.name)} COMMAND [options]

commands:
{commands}{examples}

more:
  {options}   the main options and their values; `fit --help all`: every option{configs}
  {"tasks/README.md":<{pad}}   your own data, results, how to extend"""
