"""The commands of `python -m tasks.lab` and their options."""

import argparse
from typing import Any

TITLE = "experiments of many runs, compared over seeds"


def add_commands(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the commands with their options; returns the options that take a file or folder."""
    commands = parser.add_subparsers(
        prog=parser.prog, dest="command", metavar="COMMAND", required=True
    )
    about = "Run what FILE describes; the same command resumes it after a stop."
    run = add_command(commands, "run FILE", about)
    file = run.add_argument("file", metavar="FILE", help="Such as configs/lab/depth_or_width.yaml")
    output = run.add_argument(
        "--output", help="Folder of all runs, by default runs/lab/<name of the file>"
    )
    run.add_argument("--jobs", type=int, default=1, help="Runs at once, which share the cores")
    run.add_argument("--steps", type=int, help="Optimizer steps, in place of the file's budget")
    run.add_argument("--seeds", help="Seeds in place of the file's, as in 0,1,2")
    config = run.add_argument(
        "--config",
        action="append",
        default=[],
        help="For each run, such as configs/logger/wandb.yaml",
    )
    run.add_argument(
        "--dry_run",
        choices=("true", "false"),
        default="false",
        help="Check all, print the commands, run none",
    )
    about = "Write the report again, also of an unfinished lab."
    report = add_command(commands, "report FOLDER", about)
    folder = report.add_argument("folder", metavar="FOLDER", help="Folder that `lab run` wrote")
    return [file, output, config, folder]


def add_command(commands: Any, line: str, about: str) -> argparse.ArgumentParser:
    """Adds a command; `line` is its name and its argument."""
    parser: argparse.ArgumentParser = commands.add_parser(
        line.split()[0], help=about, description=about, allow_abbrev=False
    )
    parser.usage = f"{parser.prog} {line.split()[1]} [options]"
    return parser
