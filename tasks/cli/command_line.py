"""What a command line of a Trainer's command asks for, before any class is built."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.checkpoints.resume import read_run
from tasks.cli.app import App, load
from tasks.cli.config_files import Options, read_config
from tasks.cli.parsing import (
    expand_macros,
    flat,
    join_values,
    merged,
    names_data,
    one_line,
    option_names,
    take_option,
)
from tasks.distributed.launch import resume_if_restarted
from tasks.errors import UsageError, unknown_name

COMMAND_LINE_ONLY = {
    "config",
    "help",
    "print_config",
    "run_dir",
    "debug",
    "ckpt_path",
    "resume",
    "compile",
    "text",
}


class CommandLine:
    """The options of one command, with those that configs, checkpoints and presets stand for.

    Args:
        app: the task.
        command: "fit", "validate", "test" or "predict".
        arguments: command line after the command.
    """

    def __init__(self, app: App, command: str, arguments: list[str]) -> None:
        self.app = app
        self.command = command
        self.checkpoint: dict[str, Any] | None = None
        self.resume_path: Path | None = None  # of the checkpoint that a run continues from
        self.damaged: Path | None = None  # a last checkpoint that another one stands in for
        self.saved_options: Options = {}  # of the resumed run, or of the checkpoint
        self.source: str | None = None  # run folder or checkpoint
        self.typed: set[str] = set()
        self.named: set[str] = set()  # on the command line or in a config
        self.arguments = ["--help"]
        if {"-h", "--help"}.isdisjoint(arguments):
            self.arguments = self.expand(join_values(arguments, ["--compile", "--data.skip_bad"]))

    def expand(self, arguments: list[str]) -> list[str]:
        """Put what a checkpoint, configs and presets stand for below the rest."""
        is_fit = self.command == "fit"
        if is_fit:
            arguments = resume_if_restarted(self.app.name, arguments)
        self.source, arguments = take_option(arguments, "--resume" if is_fit else "--ckpt_path")
        self.typed = set(option_names(arguments))
        self.named = set(self.typed)
        if not is_fit:
            self.saved_options = self.read_checkpoint()
        elif self.source:
            self.read_run(Path(self.source))
        elif self.app.default_config and not names_data(arguments):
            arguments = [f"--config={self.app.default_config}", *arguments]
        macros: dict[str, Callable[[str], Options]] = {
            "--config": lambda value: self.with_implied(read_config(value)),
            "-c": lambda value: self.with_implied(read_config(value)),
            "--preset": lambda value: self.with_implied({"preset": value}),
            "--model.pretrained": lambda value: self.with_implied({"model": {"pretrained": value}}),
        }
        arguments = [
            one.replace("--compile=", "--model.compile=", 1)
            if one.startswith("--compile=")
            else one
            for one in arguments
        ]
        arguments = expand_macros(arguments, macros)
        if not self.saved_options:
            return arguments
        origin = f"{self.source}/config.yaml" if is_fit else str(self.source)
        saved = f"--config=# {one_line(origin)}\n{yaml.safe_dump(self.saved_options)}"
        return [saved, *arguments]

    def with_implied(self, options: Options) -> Options:
        """Options of a file, above those that its preset and its pretrained weights imply."""
        misplaced = sorted(COMMAND_LINE_ONLY.intersection(options))
        if misplaced:
            raise UsageError(f"{misplaced[0]} belongs on the command line, not in a config file")
        self.named |= {f"--{name}" for name in flat(options)}
        implied: Options = {}
        if name := options.get("preset"):
            presets = load(self.app.presets)() if self.app.presets else {}
            if name not in presets:
                raise UsageError(unknown_name(name, presets, "preset"))
            implied = {"model": {"net": presets[name]}}
        pretrained = options.get("model", {}).get("pretrained")
        if pretrained and self.source:
            option = "--resume" if self.command == "fit" else "--ckpt_path"
            raise UsageError(
                f"--model.pretrained cannot go with {option}: the checkpoint has the weights"
            )
        if pretrained and self.app.pretrained:
            implied = merged(implied, load(self.app.pretrained)(pretrained))
        return merged(implied, {key: value for key, value in options.items() if key != "preset"})

    def read_run(self, folder: Path) -> None:
        """Take over options and checkpoint of the run to continue."""
        run = read_run(folder, self.app)
        self.saved_options = run.options
        self.damaged = run.damaged
        self.resume_path = run.path
        self.checkpoint = run.checkpoint

    def read_checkpoint(self) -> Options:
        """The model and data options kept in the checkpoint of --ckpt_path."""
        if not self.source:
            raise UsageError(
                f"{self.command} needs --ckpt_path, such as --ckpt_path "
                f"runs/{self.app.name}/latest/checkpoints/best.ckpt"
            )
        self.checkpoint = read_checkpoint(self.source, self.app.name)
        options: Options = self.checkpoint[KEY]["config"]
        if "pretrained" in options["model"]:
            return merged(options, {"model": {"pretrained": None}})
        return options
