"""The options of a fit, validate, test or predict, before any class is built."""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from datamodules.sources import Source
from datamodules.utils.files import may_hold
from tasks.base import Task
from tasks.checkpoints.pretrained import read_settings
from tasks.checkpoints.reading import KEY, best_checkpoint, read_checkpoint
from tasks.checkpoints.resume import read_run, run_folder
from tasks.checkpoints.weights import PRETRAINED
from tasks.cli.app import App, load, program
from tasks.cli.config_files import dump_yaml, in_yaml, read_config
from tasks.cli.help_screens import take_help
from tasks.cli.parsing import (
    arguments_name_data,
    collect_lists,
    join_values,
    one_line,
    option_names,
    take_option,
)
from tasks.distributed.environment import with_launcher
from tasks.distributed.launch import resume_if_restarted
from tasks.errors import UsageError, needs_checkpoint, unknown_name
from tasks.options import Options, flat, merge_options

COMMAND_LINE_ONLY = {
    *("config", "help", "print_config", "run_dir", "debug"),
    *("ckpt_path", "resume", "compile", "text", "input", "output", "top_k"),
}


def has_option(arguments: list[str], name: str) -> bool:
    return any(argument.partition("=")[0] == name for argument in arguments)


def net_of(options: Options) -> Options:
    """The options of the network among those of a run; none if they are not options."""
    model = options.get("model")
    net = model.get("net") if isinstance(model, dict) else None
    return net if isinstance(net, dict) else {}


def library_of(source: str | None) -> str | None:
    """The library of pretrained weights, "timm" or "hf"; None: they are of `fit` or of a file."""
    if source is None:
        return None
    if source.startswith(("timm/", "hf/timm/")):
        return "timm"
    if source.startswith("hf/"):
        return "hf"
    if not Path(source).is_dir():
        return None
    settings = read_settings(Path(source), "config.json", PRETRAINED)
    return "timm" if "architecture" in settings else "hf"


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
        help_topic: What `--help` asks for, as in `take_help`; None: no help is asked for.
        preset: Of the network, as given here or in a config, the last one.
        task: Class of the task, for the network that the last option names.
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
        self.task = load(app.task)
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
        """Replace checkpoint, configs and presets by the options that they stand for, in front.

        Each is `--config=<YAML>`; its first line is a comment: the origin, which errors name.
        """
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
        elif self.app.default_config and not arguments_name_data(arguments):
            arguments = [f"--config={self.app.default_config}", *arguments]
        self.saved_options.get("data", {}).pop("predict_path", None)  # a former option, now --input
        configs: list[tuple[str, Options, Callable[[Options], str]]] = []
        saved = self.saved_options
        if saved and "--data.path" in self.on_command_line:
            saved = merge_options(saved, {"data": {"source": None}})  # as the new path shows
        if saved:
            configs.append((origin, saved, dump_yaml))
        others = []
        for argument in arguments:
            name, _, value = argument.partition("=")
            if name in ("--config", "-c", "--preset", "--model.pretrained"):
                configs.append((f"{name} {value}", self.options_of(name, value), in_yaml))
            elif name == "--compile":
                others.append(f"--model.compile={value}")
            else:
                others.append(argument)
        if self.command in ("validate", "test"):
            self.check_data()
        last, _ = take_option(others, "--model.net.architecture")
        named = [net_of(options).get("architecture") for _, options, _ in configs]
        names = [one for one in (*named, last) if one is not None]
        if names:
            self.task = self.task.for_network({"architecture": names[-1]})
        return [
            f"--config=# {one_line(origin)}\n{dump(self.of_network(options))}"
            for origin, options, dump in configs
        ] + others

    def of_network(self, options: Options) -> Options:
        """The options of a config, without those of a network that a later one replaces."""
        net = net_of(options)
        if "architecture" not in net or self.task.for_network(net) is self.task:
            return options
        return {**options, "model": {**options["model"], "net": {}}}

    @property
    def names_length(self) -> bool:
        """Whether an option, or the run that is resumed, says how long to train."""
        length = ("--trainer.max_epochs", "--trainer.max_steps", "--trainer.max_time")
        return self.saved_at is not None or not self.given.isdisjoint(length)

    def check_data(self) -> None:
        """Refuses a checkpoint that a plain Trainer wrote, if no option says which data to read."""
        is_saved = "source" in self.saved_options["data"]
        is_given = not self.given.isdisjoint(["--data.source", "--data.path"])
        if load(self.app.data).sources and not (is_saved or is_given):
            raise UsageError(
                f"{self.saved_at} does not say which data: give --data.path or --data.source"
            )

    def describe_source(self, source: Source, path: str | None) -> None:
        """Says whether a source has unseen data, and whether a checkpoint recorded its path."""
        saved = self.saved_options.get("data", {}).get("path")
        if self.command in ("validate", "test"):
            source.unseen = not may_hold(path, saved)
        if path == saved and "--data.path" not in self.given:
            source.recorded_by = self.saved_at

    def options_of(self, name: str, value: str) -> Options:
        """What a config, preset or pretrained weights stand for."""
        try:
            if name == "--preset":
                return self.with_implied({"preset": value})
            if name == "--model.pretrained":
                path = None if value == "null" else value
                return self.with_implied({"model": {"pretrained": path}})
            return self.with_implied(read_config(value))
        except UsageError as error:
            if value in str(error):
                raise
            raise UsageError(f"{error} (in {one_line(f'{name} {value}')})") from error

    def with_implied(self, options: Options) -> Options:
        """Options, on top of those that their preset and their pretrained weights imply."""
        placed = COMMAND_LINE_ONLY.intersection(options)
        misplaced = sorted(name for name in placed if options[name] not in (None, False))
        options = {name: value for name, value in options.items() if name not in placed}
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
            options = merge_options(options, {"model": {"pretrained": pretrained}})
        if pretrained and self.saved_at:
            option = "--resume" if self.command == "fit" else "--ckpt_path"
            raise UsageError(f"{option} and --model.pretrained both name weights: leave one out")
        if pretrained and self.app.pretrained:
            implied = merge_options(implied, load(self.app.pretrained)(pretrained))
        return merge_options(
            implied, {key: value for key, value in options.items() if key != "preset"}
        )

    def read_checkpoint(self) -> None:
        """Read the checkpoint of --ckpt_path, with its options of model and data."""
        if not self.saved_at:
            raise UsageError(needs_checkpoint(self.command, self.app.name))
        self.checkpoint = read_checkpoint(self.saved_at, self.app.name)
        self.saved_options = self.checkpoint[KEY]["config"]
        if "pretrained" in self.saved_options["model"]:
            self.saved_options = merge_options(self.saved_options, {"model": {"pretrained": None}})

    def next_commands(self, limit: str, task: Task) -> list[str]:
        """Commands to try after a fit of the task, without those that its network refuses.

        `limit` is the Trainer's option that ended training, if one did. What was fine-tuned is
        exported for the library that its weights came from.
        """
        refused = task.refused_commands
        lines = [line for line in self.app.next_commands if line.split()[0] not in refused]
        library = library_of(task.pretrained)
        if library in self.app.library_formats:
            lines = [re.sub(r"--format \w+", f"--format {library}", line) for line in lines]
        if limit:
            value = "DD:HH:MM:SS" if limit == "max_time" else "N"
            lines += [f"fit --resume {{folder}} --trainer.{limit} {value}"]
        commands = [with_launcher(f"{program(self.app.name)} {line}") for line in lines]
        if pretrains := self.app.pretrains:
            line = "fit --model.pretrained {best} --data.path FILE_OR_FOLDER"
            commands.insert(0, with_launcher(f"{program(pretrains)} {line}"))
        return commands

    @contextmanager
    def defaults_named(self, values: Options) -> Iterator[None]:
        """A `UsageError` about a value that is not on the command line says so.

        `values` are all options by their full names.
        """

        def named(found: re.Match[str]) -> str:
            name, value = found.groups()
            is_given = f"--{name}" in self.on_command_line
            is_default = not is_given and values.get(name) == value
            return found[0] + " (the default, or of a preset or config)" * is_default

        try:
            yield
        except UsageError as error:
            raise UsageError(re.sub(r'--([\w.]+) "([^"]*)"', named, str(error))) from error
