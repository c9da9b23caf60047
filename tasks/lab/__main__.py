"""`python -m tasks.lab`: grids of runs, compared over seeds."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from tasks.cli.app import program
from tasks.cli.main import take_debug
from tasks.cli.signals import SIGNALS, Stopped
from tasks.cli.text_io import open_standard_streams
from tasks.distributed.variables import drop_unusable_variables
from tasks.errors import RunError, UsageError, exit_status, unknown_option
from tasks.lab.arguments import TITLE, add_commands


class Parser(argparse.ArgumentParser):
    """argparse's, with one-sentence errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: see {self.prog} --help")

    def format_help(self) -> str:
        if self.usage is None:  # it has commands
            return super().format_help()
        from tasks.cli.command_help import options_help

        return f"{options_help(self)}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    if argv is None:
        SIGNALS.install()
        open_standard_streams()
        drop_unusable_variables()
        argv = sys.argv[1:] if Path(sys.argv[0]).stem != "tessera" else sys.argv[2:]
    open_standard_streams()
    debug, rest = take_debug(argv)
    with exit_status(debug, rest) as status, SIGNALS.raising():
        parser = Parser(program("lab"), description=f"Tessera lab: {TITLE}", allow_abbrev=False)
        add_commands(parser)
        options, unknown = parser.parse_known_args(with_value(rest, "--dry_run") or ["--help"])
        if unknown:
            known = [f"--{name}" for name in vars(options)]
            raise UsageError(unknown_option(unknown[0], known))
        if options.command == "run":
            run_lab(options, f"{program('lab')} {shlex.join(rest)}")
        else:
            from tasks.lab.report import write_report

            print(write_report(Path(options.folder)))
    return status.code


def with_value(arguments: Sequence[str], switch: str) -> list[str]:
    """The arguments with `switch` as `switch=true`, unless its value follows it.

    >>> with_value(["run", "--fast", "lab.yaml"], "--fast")
    ['run', '--fast=true', 'lab.yaml']
    """
    return [
        f"{word}=true" if word == switch and following not in ("true", "false") else word
        for word, following in zip_longest(arguments, arguments[1:])
    ]


def run_lab(options: Any, command: str) -> None:
    """`lab run`: checks all, runs what is not finished, and writes the report."""
    from tasks.checkpoints.exporting import check_writable
    from tasks.cli.own_modules import import_own_modules
    from tasks.lab.plan import all_runs, make_plan
    from tasks.lab.report import write_report
    from tasks.lab.runner import Runner
    from tasks.lab.spec import default_folder, read_lab
    from tasks.lab.state import error_of, is_trained, log_file, save_plan
    from tasks.tracking.run_folder import lock, make_folder

    for name in ("jobs", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}, but must be at least 1")
    import_own_modules()
    lab = read_lab(options.file, options.steps, parse_seeds(options.seeds))
    folder = Path(options.output or default_folder(options.file)).resolve()
    check_writable(folder, "--output")
    print(f"{lab.title}: checking {len(lab.settings)} settings", flush=True)
    plan = make_plan(lab, folder, options.config)
    if options.dry_run == "true":
        for run in all_runs(plan):
            print(run.command, *run.test_commands, sep="\n")
        return
    for name in ("runs", "logs"):
        make_folder(folder / name, "--output")
    with lock(folder):
        save_plan(plan, folder)
        runner = Runner(lab.title, folder, options.jobs, command)
        if plan.before is not None:
            runner.run([plan.before])
            if not is_trained(folder, plan.before):
                log = log_file(folder, plan.before)
                raise RunError(f"the run before the grid failed: see {log}")
            plan = make_plan(lab, folder, options.config)  # with what needs that run
            save_plan(plan, folder)
        try:
            runner.run(plan.runs)
        except Stopped:
            with suppress(OSError, RunError):  # what was stopped matters more
                write_report(folder)
            raise
        print(write_report(folder), flush=True)
        if all(error_of(folder, run) for run in plan.runs):
            raise RunError(f"all {len(plan.runs)} runs failed: see {folder / 'report.md'}")


def parse_seeds(text: str | None) -> list[int] | None:
    try:
        return [int(seed) for seed in text.split(",")] if text else None
    except ValueError as error:
        raise UsageError(f"--seeds {text}: give whole numbers, as in 0,1,2") from error


if __name__ == "__main__":
    sys.exit(main())
