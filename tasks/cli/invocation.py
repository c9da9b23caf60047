"""The options of a fit, validate, test or predict, before any class is built."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from tasks.checkpoints.reading import KEY, best_checkpoint, read_checkpoint
from tasks.checkpoints.resume import read_run, run_folder
from tasks.cli.app import App, load, program
from tasks.cli.config_files import in_yaml, read_config
from tasks.cli.help_screens import take_help
from tasks.cli.parsing import (
    collect_lists,
    join_values,
    names_data,
    one_line,
    option_names,
    take_option,
)
from tasks.distributed.launch import resume_if_restarted
from tasks.errors import UsageError, unknown_name
from tasks.options import Options, flat, merged

COMMAND_LINE_ONLY = {
    *("config", "help", "print_config", "run_dir", "debug"),
    *("ckpt_path", "resume", "compile", "text", "input", "output", "top_k"),
}


def has_option(arguments: list[str], name: str) -> bool:
    return any(argument.partition("=")[0] == name for argument in arguments)


class Invocation:
    """The options of one command, and what they refer to: configs, presets and checkpoints.

    Args:
        app: The task.
        command: "fit", "validate", "test" or "predict".
        arguments: Command line after the command.

    Attributes:
        arguments: For the parser; configs, presets and checkpoints are `--config=<YAML>` at the
            front.
        on_command_line: Names of the options on the command line, such as "--data.path".
        given: The same, and names of those in configs.
        saved_at: Run folder to resume, or checkpoint to use; None for a new run.
        saved_options: Of that run or checkpoint.
        checkpoint: Content of the checkpoint to use or to resume from.
        resume_path: Its path, if a run is resumed.
        command_line: As it was given.
        help_topic: What `--help` asks for, as of `take_help`; None: no help is asked for.
        preset: Of the network, as given here or in a config, the last one.
        damaged: The damaged last checkpoint, if a run is resumed from an earlier one.
    """

    def __init__(self, app: App, command: str, arguments: list[str]) -> None:
        self.app = app
        self.command = command
        self.command_line = f"{program(app.name)} {shlex.join([command, *arguments])}"
        self.checkpoint: dict[str, Any] | None = None
        self.resume_path: Path | None = None
        self.damaged: Path | None = None
        self.saved_options: Options = {}
        self.saved_at: str | None = None
        self.on_command_line: set[str] = set()
        self.given: set[str] = set()
        self.preset: str | None = None
        self.help_topic, arguments = take_help(arguments)
        if (
            self.help_topic is not None
            and command != "fit"
            and not has_option(arguments, "--ckpt_path")
        ):
            self.arguments = []
            return
        arguments = join_values(arguments, switches=["--compile", "--data.skip_bad"])
        self.arguments = self.expand(collect_lists(arguments, ["--text"]))

    def expand(self, arguments: list[str]) -> list[str]:
        """Replace checkpoint, configs and presets by the options that they stand for, in front."""
        is_fit = self.command == "fit"
        if is_fit:
            arguments = resume_if_restarted(self.app.name, arguments)
        option = "--resume" if is_fit else "--ckpt_path"
        self.saved_at, arguments = take_option(arguments, option)
        self.on_command_line = set(option_names(arguments))
        self.given = set(self.on_command_line)
        origin = str(self.saved_at)
        if not is_fit:
            self.read_checkpoint()
        elif self.saved_at:
            self.saved_at = run_folder(self.saved_at)
            run = read_run(Path(self.saved_at), self.app)
            self.saved_options = run.options
            self.damaged = run.damaged
            self.resume_path = run.path
            self.checkpoint = run.checkpoint
            origin += "/config.yaml"
        elif self.app.default_config and not names_data(arguments):
            arguments = [f"--config={self.app.default_config}", *arguments]
        self.saved_options.get("data", {}).pop("predict_path", None)  # a former option, now --input
        configs = []
        saved = self.saved_options
        if saved and "--data.path" in self.on_command_line:
            saved = merged(saved, {"data": {"source": None}})  # as the new path shows
        if saved:
            configs.append(f"--config=# {one_line(origin)}\n{yaml.safe_dump(saved)}")
        others = []
        for argument in arguments:
            name, _, value = argument.partition("=")
            if name in ("--config", "-c", "--preset", "--model.pretrained"):
                configs.append(self.as_config(name, value))
            elif name == "--compile":
                others.append(f"--model.compile={value}")
            else:
                others.append(argument)
        return configs + others

    def as_config(self, name: str, value: str) -> str:
        """What a config, preset or pretrained weights stand for, as `--config=<YAML>`.

        The first line is a comment: the origin, which errors of parsing name.
        """
        origin = one_line(f"{name} {value}")
        try:
            if name == "--preset":
                options = self.with_implied({"preset": value})
            elif name == "--model.pretrained":
                options = self.with_implied({"model": {"pretrained": value}})
            else:
                options = self.with_implied(read_config(value))
        except UsageError as error:
            if value in str(error):
                raise
            raise UsageError(f"{error} (in {origin})") from error
        return f"--config=# {origin}\n{in_yaml(options)}"

    def with_implied(self, options: Options) -> Options:
        """Options, on top of those that their preset and their pretrained weights imply."""
        misplaced = sorted(COMMAND_LINE_ONLY.intersection(options))
        if misplaced:
            raise UsageError(f"{misplaced[0]} belongs on the command line, not in a config file")
        self.given |= {f"--{name}" for name in flat(options)}
        implied: Options = {}
        if name := options.get("preset"):
            presets = load(self.app.presets) if self.app.presets else {}
            if name not in presets:
                raise UsageError(unknown_name(name, presets, "preset"))
            net = replace(presets[name], **dict.fromkeys(self.app.sizes_of_data))
            implied = {"model": {"net": asdict(net)}}
            self.preset = name
        pretrained = options.get("model", {}).get("pretrained")
        if isinstance(pretrained, str):
            pretrained = best_checkpoint(pretrained)
            options = merged(options, {"model": {"pretrained": pretrained}})
        if pretrained and self.saved_at:
            option = "--resume" if self.command == "fit" else "--ckpt_path"
            raise UsageError(f"{option} and --model.pretrained both name weights: leave one out")
        if pretrained and self.app.pretrained:
            implied = merged(implied, load(self.app.pretrained)(pretrained))
        return merged(implied, {key: value for key, value in options.items() if key != "preset"})

    def read_checkpoint(self) -> None:
        """Read the checkpoint of --ckpt_path, with its options of model and data."""
        if not self.saved_at:
            raise UsageError(
                f"{self.command} needs --ckpt_path, such as --ckpt_path "
                f"runs/{self.app.name}/latest/checkpoints/best.ckpt"
            )
        self.checkpoint = read_checkpoint(self.saved_at, self.app.name)
        self.saved_options = self.checkpoint[KEY]["config"]
        if "pretrained" in self.saved_options["model"]:
            self.saved_options = merged(self.saved_options, {"model": {"pretrained": None}})
