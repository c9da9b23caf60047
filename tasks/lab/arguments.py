"""The commands of `python -m tasks.lab` and their options."""

import argparse

TITLE = "experiments of many runs, compared over seeds"


def add_commands(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Adds the commands with their options; returns the options that take a file or folder."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    about = "Run what FILE describes; the same command resumes it after a stop."
    run = commands.add_parser("run", help=about, description=about, allow_abbrev=False)
    file = run.add_argument("file", metavar="FILE", help="such as configs/lab/depth_or_width.yaml")
    output = run.add_argument(
        "--output", help="folder of all runs; default: runs/lab/<name of the file>"
    )
    run.add_argument("--jobs", type=int, default=1, help="runs at once, which share the cores")
    run.add_argument("--steps", type=int, help="optimizer steps, in place of the file's budget")
    run.add_argument("--seeds", help="in place of the file's, as in 0,1,2")
    config = run.add_argument(
        "--config", action="append", default=[], help="for each run: configs/logger/wandb.yaml"
    )
    run.add_argument("--dry_run", action="store_true", help="check all, print commands, run none")
    about = "Write the report again, also of an unfinished lab."
    report = commands.add_parser("report", help=about, description=about, allow_abbrev=False)
    folder = report.add_argument("folder", metavar="FOLDER", help="of `lab run`")
    return [file, output, config, folder]
