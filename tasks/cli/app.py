"""What makes a task a command line. Imports nothing heavy."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        name: task name: `python -m tasks.NAME`, run folders under `runs/NAME`.
        title: one line that says what the task does.
        task: the LightningModule, as "module:Class".
        data: the LightningDataModule, as "module:Class".
        presets: function that gives the named model configurations, as "module:function".
        pretrained: function from a `--model.pretrained` value to the options it implies, as
            "module:function".
        links: model options that data options follow, such as the image size.
        default_config: what `fit` reads where no config says which data to use.
        trainer: Lightning Trainer defaults of this task.
        epochs: how long `fit` trains where nothing says so.
        trains: the commands among `TRAINER_COMMANDS` that this task has.
        takes_text: whether `predict` takes one text from the command line, as `--text`.
        functions: further commands, name to (help, "module:function"); their options are the
            function's arguments.
        examples: command lines worth showing, without the leading `python -m tasks.NAME`.
        follow: command lines to try after a fit, with {best} for its best checkpoint and {folder}
            for its run folder.
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
        trainer_commands = {name: TRAINER_COMMANDS[name] for name in self.trains}
        return trainer_commands | {name: text for name, (text, _) in self.functions.items()}


def load(target: str) -> Any:
    """Import "module:name" and return it."""
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


def program(app: App) -> str:
    """How the user calls this task."""
    return f"python -m tasks.{app.name}"
