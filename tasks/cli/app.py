"""The description of a task's command line. Imports nothing heavy."""

import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASKS = ("vit", "mae", "bert", "mlm", "lm", "igpt", "seq2seq")
TRUST = "TESSERA_TRUST"  # variable: modules of the user to import, separated by commas
TRAINER_COMMANDS = {
    "fit": "train, keep the best checkpoint, test it",
    "validate": "evaluate a checkpoint on the validation split",
    "test": "evaluate a checkpoint on the test split",
    "predict": "label new files with a checkpoint",
}


@dataclass(frozen=True)
class App:
    """One task's command line.

    Args:
        name: Of the task; run folders are under `runs/NAME`.
        title: One line that says what the task does.
        task: The LightningModule, as "module:Class".
        data: The LightningDataModule, as "module:Class".
        presets: Network configs by name, as "module:DICT".
        about_presets: A line about each preset, as "module:DICT".
        sizes_of_data: Options of the network that presets leave to the data.
        pretrained: Function from a `--model.pretrained` value to the options it implies, as
            "module:function".
        default_config: Config file that `fit` reads if no option names data.
        links: Model options, and the data options that take their values.
        trainer: Defaults of Trainer options.
        epochs: Default of `--trainer.max_epochs`.
        predict_input: What `predict --input` takes; it calls the task's `write_predictions`. None:
            there is no such command.
        takes_text: Whether `predict` has the option `--text`.
        extra_commands: Other commands, name to (help, "module:function"); their options are the
            function's arguments.
        examples: Command lines for `--help`, without the program that they begin with.
        next_commands: Command lines to suggest after a fit, with {best} for its best checkpoint.
        library_formats: Of `export`, to suggest if the weights came from that library.
        pretrains: Task whose `fit` can start from this one's weights.
    """

    name: str
    title: str
    task: str
    data: str
    presets: str | None = None
    about_presets: str | None = None
    sizes_of_data: Sequence[str] = ()
    pretrained: str | None = None
    default_config: str | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 20
    predict_input: str | None = None
    takes_text: bool = False
    extra_commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    examples: Sequence[str] = ()
    next_commands: Sequence[str] = ()
    library_formats: Sequence[str] = ("hf",)
    pretrains: str | None = None

    @property
    def commands(self) -> dict[str, str]:
        """Name and one-line help of every command."""
        commands = dict(TRAINER_COMMANDS)
        if self.predict_input is None:
            del commands["predict"]
        return commands | {name: text for name, (text, _) in self.extra_commands.items()}


def app(task: str) -> App:
    """The command line of a task."""
    found: App = importlib.import_module(f"tasks.{task}.__main__").APP
    return found


def load(target: str) -> Any:
    """Import "module:name" and return it."""
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


STARTED: dict[str, str] = {}  # name of a task -> how the program that runs it was started


def program(task: str) -> str:
    """How the command line of a task begins, as the user began it, with modules of their own."""
    if Path(sys.argv[0]).stem == "tessera":
        return f"{trust_prefix()}tessera {task}"
    return trust_prefix() + STARTED.get(task, f"python -m tasks.{task}")


def trust_prefix() -> str:
    """`TESSERA_TRUST=MODULES ` as commands begin with it; empty if it is not set."""
    modules = os.environ.get(TRUST)
    return f"{TRUST}={shlex.quote(modules)} " if modules else ""


def remember_start(task: str) -> None:
    """Remembers that this process runs a task: with `python -m MODULE` or `python FILE`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = shlex.quote(sys.argv[0])
    STARTED[task] = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {name}"
