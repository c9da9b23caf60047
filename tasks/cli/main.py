"""The command line of every task: `python -m tasks.<task> COMMAND [options]`.

This module answers `--help`, `--version` and mistyped commands by itself, so it imports nothing heavy; what a command
needs is imported when the command runs.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks import __version__
from tasks.cli.text_io import settle_streams
from tasks.errors import UsageError, guarded, nearest

TRAINER_COMMANDS = {
    "fit": "train, keep the best checkpoint, test it",
    "validate": "evaluate a checkpoint on the validation split",
    "test": "evaluate a checkpoint on the test split",
    "predict": "label new files with a checkpoint",
}
SHARED = {
    "consolidate": (
        "make one file of a checkpoint in parts (strategy fsdp)",
        "tasks.checkpoints.consolidate:consolidate",
    ),
}


@dataclass(frozen=True)
class App:
    """One task's command line.

    Args:
        name: task name: `python -m tasks.NAME`, run folders under `runs/NAME`.
        title: one line that says what the task does.
        task: the LightningModule, as "module:Class".
        data: the LightningDataModule, as "module:Class".
        presets: function that gives the named model configurations, as "module:function".
        pretrained: function from a `--model.pretrained` value to the options it implies, as "module:function".
        links: model options that data options follow, such as the image size.
        default_config: what `fit` reads where no config says which data to use.
        trainer: Lightning Trainer defaults of this task.
        epochs: how long `fit` trains where nothing says so.
        trains: the commands among `TRAINER_COMMANDS` that this task has.
        takes_text: whether `predict` takes one text from the command line, as `--text`.
        functions: further commands, name to (help, "module:function"); their options are the function's arguments.
        examples: command lines worth showing, without the leading `python -m tasks.NAME`.
        follow: command lines to try after a fit, with {best} for its best checkpoint and {folder} for its run folder.
    """

    name: str
    title: str
    task: str
    data: str
    presets: str | None = None
    pretrained: str | None = None
    default_config: str | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 20
    trains: Sequence[str] = tuple(TRAINER_COMMANDS)
    takes_text: bool = False
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    examples: Sequence[str] = ()
    follow: Sequence[str] = ("fit --resume {folder} --trainer.max_epochs N",)

    @property
    def commands(self) -> dict[str, str]:
        """Name and one-line help of every command."""
        trained = {name: TRAINER_COMMANDS[name] for name in self.trains}
        return trained | {name: text for name, (text, _) in {**self.functions, **SHARED}.items()}


def load(target: str) -> Any:
    """Import "module:name" and return it."""
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


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


def program(app: App) -> str:
    """How the user calls this task."""
    return f"python -m tasks.{app.name}"


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
