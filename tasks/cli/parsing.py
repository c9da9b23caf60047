"""Parsing options on the command line and in config files.

Options on the command line win. A config file, a preset, pretrained weights, `--resume` and
`--ckpt_path` each stand for a set of options below those, in whatever order they are given; of
those sets the later one wins.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from inspect import signature
from itertools import takewhile
from typing import Any, NoReturn, get_type_hints

import jsonargparse
import yaml

from tasks.cli.command_help import show_help
from tasks.cli.config_files import (
    in_yaml,
    load_yaml,
    not_a_section,
    read_config,
    refuse_unknown,
    yaml_problem,
)
from tasks.cli.help_screens import HelpFormatter, take_help
from tasks.cli.other_options import names_of_task, who_has
from tasks.cli.own_modules import OWN_MODULES, is_module_name
from tasks.cli.parser_messages import as_typed, full_names, one_sentence
from tasks.errors import UsageError, needs_checkpoint, usage_errors
from tasks.options import Options, merge_options, names_data

TEXT_OPTIONS = ("--text", "--target", "--prompt", "--stop")  # any text may follow, "" too
# Options that are read before the parser reads the others.
READ_BEFORE = ("-c", "--config", "--preset", "--model.pretrained", "--resume", "--ckpt_path")
SECTIONS = {"net": "--model.net", "data": "--data"}  # by parameter of a command's function
NO_VALUE = ("-h", "--help", "--print_config")
GIVEN_ONCE = {  # a second value would silently replace the first; what to do instead
    "--input": ": give a folder of images, or a file with all texts",
    **dict.fromkeys(("--ablate", "--patch", "--patch_from"), ""),
}
# Options may name only their classes: importing another package would run its code.
TRUSTED_PACKAGES = [
    *("pytorch_lightning", "lightning_fabric", "tasks", "modules", "datamodules"),
    *("torch.nn", "torch.optim", "torch.distributed", "torch.profiler"),
]

jsonargparse.set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=[*TRUSTED_PACKAGES, *filter(is_module_name, OWN_MODULES)],
    instantiate_subclass_spec_in_any=False,
)
plain_yaml = jsonargparse.get_loader("yaml")


@lru_cache(maxsize=1024)  # jsonargparse reads every value several times
def check_yaml(text: str) -> None:
    """Raises `yaml.YAMLError` for a text that `load_yaml` refuses."""
    load_yaml(text)


def checked_yaml(text: str) -> Any:
    """The value of a YAML text by jsonargparse's rules, after our checks."""
    check_yaml(text)
    return plain_yaml(text)


jsonargparse.set_loader("yaml", checked_yaml, (yaml.YAMLError,), json_superset=True)


@contextmanager
def full_option_names(section: str, options: Collection[str]) -> Iterator[None]:
    """Turn a `ValueError` of a class about its arguments into a `UsageError`; see `full_names`."""
    try:
        with usage_errors():
            yield
    except UsageError as error:
        raise UsageError(full_names(str(error), section, options)) from error


class OneLineErrorParser(jsonargparse.ArgumentParser):
    """A parser whose errors are one sentence, raised as `UsageError`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # "--dep" is a mistake
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)
        self.links: dict[str, str] = {}  # linked option -> the option that it follows
        self.sections: list[str] = []  # those that are taken unchecked, such as --data

    def link_arguments(self, source: str, target: str, **kwargs: Any) -> None:  # type: ignore[override]
        self.links[target] = source
        super().link_arguments(source, target, **kwargs)

    def parse_args(self, args: list[str], **kwargs: Any) -> jsonargparse.Namespace:  # type: ignore[override]
        """Options of a command line; jsonargparse alone would accept null for any type."""
        options = super().parse_args(
            [self.checked_section(argument) for argument in args], **kwargs
        )
        try:
            self.validate(options, skip_unset=False)
        except (TypeError, KeyError) as error:
            self.error(str(error), error)
        return options

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `message` as one sentence, with the nearest option if one is unknown."""
        task, command = self.task_and_command()
        if re.search(r"arguments are required: ckpt_path\b", message):
            raise UsageError(needs_checkpoint(command, task)) from ex
        options = [f"--{name}" for name in self.known_options()]
        if self.sections:
            below = [f"--{name}" for name in names_of_task(task)]
            options += [name for name in below if name.startswith(tuple(self.sections))]
        raise UsageError(one_sentence(message, options, self.elsewhere)) from ex

    def task_and_command(self) -> tuple[str, str]:
        """The two words before the options; ("", file name) in the parser of a class."""
        line = (self.usage or self.prog).removesuffix(" [options]")
        task, command = ["", *line.replace("python -m tasks.", "").split()][-2:]
        return task, command

    def elsewhere(self, option: str) -> str:
        """As of `unknown_option`."""
        return who_has(option, *self.task_and_command())

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:
        """Options of a YAML text; errors name the origin in its first line, a comment."""
        try:
            refuse_unknown(load_yaml(cfg_str), self.known_options(), self.links, self.elsewhere)
            return super().parse_string(cfg_str, *args, **kwargs)
        except UsageError as error:
            if not cfg_str.startswith("# "):
                raise
            raise UsageError(f"{error} (in {cfg_str.splitlines()[0][2:]})") from error

    def instantiate(self, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:
        """Build the classes of all sections; their errors name options in full."""
        known = self.known_options()
        groups: Iterable[Any] = self._action_groups
        for group in groups:
            if hasattr(group, "instantiate_class"):
                build = full_option_names(group.dest, known)(group.instantiate_class)
                group.instantiate_class = build
        return super().instantiate(*args, **kwargs)

    def checked_section(self, argument: str) -> str:
        """An argument; if it gives a whole section, as in `--model=FILE`, its content, checked."""
        known = self.known_options()
        option, _, value = argument.partition("=")
        name = option.removeprefix("--")
        if name not in known or not any(other.startswith(f"{name}.") for other in known):
            return argument
        origin = f" (in {one_line(f'{option} {value}')[:200]})"
        try:
            options = read_config(value) if os.path.exists(value) else load_yaml(value)
            if not isinstance(options, dict):
                raise UsageError(not_a_section(name, options))
            refuse_unknown(options, known, self.links, self.elsewhere, f"{name}.")
        except yaml.YAMLError as error:
            raise UsageError(f"not valid YAML: {yaml_problem(error)}{origin}") from error
        except UsageError as error:
            raise error if value in str(error) else UsageError(f"{error}{origin}") from error
        return f"{option}={in_yaml(options)}"

    def known_options(self) -> set[str]:
        """Names of all options that a file may hold, without dashes in front."""
        # argparse has no public list of a parser's options.
        names = [name for action in self._actions for name in action.option_strings]
        return {
            name.removeprefix("--")
            for name in names
            if name.startswith("--") and not name.endswith(("help", "print_config"))
        }


# Command lines: each option is one `--name=value` -------------------------------------------------


def join_values(arguments: list[str], switches: Collection[str] = ()) -> list[str]:
    """A command line with every option as `--name=value`; `switches` need no value.

    >>> join_values(["--depth", "3", "--fast", "--name=x"], ["--fast"])
    ['--depth=3', '--fast=true', '--name=x']
    """
    joined: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if not name.startswith("-"):
            raise UsageError(unexpected_argument(argument, joined[-1] if joined else ""))
        if name in NO_VALUE:
            joined.append(argument)
            continue
        if not equals and name in switches and remaining[:1] not in (["true"], ["false"], [""]):
            value = "true"
        elif not equals:
            is_text = name in TEXT_OPTIONS
            if not remaining or (remaining[0].startswith("--") and not is_text):
                if is_text or name in READ_BEFORE:
                    raise UsageError(f"{name} needs a value")
                joined.append(name)  # the parser knows whether there is such an option
                continue
            value = remaining.pop(0)
        if not value and name not in TEXT_OPTIONS:
            raise UsageError(f"{name} needs a value")
        if name in GIVEN_ONCE and any(given.startswith(f"{name}=") for given in joined):
            raise UsageError(
                f"{name} is given several times, but takes one value{GIVEN_ONCE[name]}"
            )
        joined.append(f"{name}={value}")
    return joined


def unexpected_argument(argument: str, before: str) -> str:
    """The message about an argument that is not an option, after the option `before`."""
    option, _, value = before.partition("=")
    if value.startswith(("{", "[")):  # which a shell has split
        return f"{option} {value} {argument}: quote it, as in {option} '{value} {argument}'"
    return f"unexpected '{argument}': options begin with --"


def take_option(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """The last value of an option, None if it is not given, and the other arguments."""
    prefix = f"{name}="
    values = [
        argument.removeprefix(prefix) for argument in arguments if argument.startswith(prefix)
    ]
    rest = [argument for argument in arguments if not argument.startswith(prefix)]
    return (values[-1] if values else None), rest


def take_section(arguments: list[str], section: str) -> tuple[Options, list[str]]:
    """The options of a section as nested options, and the other arguments.

    >>> take_section(["--net.stack.depth=3", "--net.pool=max", "--seed=1"], "--net")
    ({'stack': {'depth': 3}, 'pool': 'max'}, ['--seed=1'])
    """
    options: Options = {}
    rest = []
    for argument in arguments:
        name, _, text = argument.partition("=")
        if not name.startswith(f"{section}."):
            rest.append(argument)
            continue
        try:
            value = checked_yaml(text)
        except yaml.YAMLError as error:
            raise UsageError(f"{name} {text}: not valid YAML: {yaml_problem(error)}") from error
        for key in reversed(name.removeprefix(f"{section}.").split(".")):
            value = {key: value}
        options = merge_options(options, value)
    return options, rest


def one_line(origin: str) -> str:
    """The origin of options on one line in UTF-8, for a comment."""
    return " ".join(origin.encode(errors="backslashreplace").decode().split())


def arguments_name_data(arguments: list[str]) -> bool:
    """Whether the options, or a config among them, say which data to use."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in ("--config", "-c"):
            section = read_config(value).get("data")
            if isinstance(section, dict) and names_data(section):
                return True
        if name in ("--data.source", "--data.path", "--data.dataset.name"):
            return True
    return False


def option_names(arguments: list[str]) -> list[str]:
    """Names of the options on a command line, such as --data.path."""
    return [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]


# Commands that are functions ----------------------------------------------------------------------


def parse_function(
    program: str, function: Callable[..., object], arguments: list[str]
) -> Callable[[], object]:
    """A command that is a function, with its options from the command line as arguments.

    A parameter `options` takes a dataclass of all options; a parameter `on_command_line`, the names
    of those on the command line; a parameter `net` or `data`, nested options of `--model.net` or
    `--data`, unchecked; a parameter `models`, the arguments before the first option.
    Lists of texts may be given several times; booleans need no value.
    """
    topic, arguments = take_help(arguments)
    parser = function_parser(program, function)
    if topic is not None:
        show_help(parser, function, topic)
    dataclass = options_class(function)
    types = {f"--{name}": type for name, type in get_type_hints(dataclass or function).items()}
    takes = signature(function).parameters
    others: dict[str, Any] = {}
    if "models" in takes:
        others["models"] = [*takewhile(lambda argument: not argument.startswith("-"), arguments)]
        arguments = arguments[len(others["models"]) :]
    arguments = join_values(arguments, [name for name, type in types.items() if type is bool])
    if "on_command_line" in takes:
        others["on_command_line"] = option_names(arguments)
    for name, section in SECTIONS.items():
        if name in takes:
            others[name], arguments = take_section(arguments, section)
    arguments = collect_lists(arguments, [name for name in types if types[name] == list[str]])
    namespace = parser.parse_args(arguments)
    try:
        values = vars(parser.instantiate_classes(namespace))
    except UsageError as error:
        known = [f"--{name}" for name in parser.known_options()]
        raise UsageError(as_typed(str(error), known)) from error
    refuse_overwriting(values)
    if dataclass is not None:
        with full_option_names("", parser.known_options()):
            values = {"options": dataclass(**values)}
    return partial(function, **values, **others)


def function_parser(program: str, function: Callable[..., object]) -> OneLineErrorParser:
    """The parser of a command that is a function."""
    parser = OneLineErrorParser(prog=program, description=(function.__doc__ or "").split("\n\n")[0])
    takes = signature(function).parameters
    parser.sections = [option for name, option in SECTIONS.items() if name in takes]
    dataclass = options_class(function)
    if dataclass is None:
        parser.add_function_arguments(function, skip={"on_command_line", "models", *SECTIONS})
    else:
        parser.add_class_arguments(dataclass)
        own_first(parser, list(dataclass.__annotations__))
    for action in parser._actions:  # argparse has no public list
        if getattr(action, "_typehint", None) == list[str]:
            action.metavar = "TEXT"
    return parser


def own_first(parser: OneLineErrorParser, own: list[str]) -> None:
    """Lists required options first, then those that the command declares, then inherited ones."""

    def place(action: Any) -> int:
        if action.required or action.dest == "help":
            return -1
        return own.index(action.dest) if action.dest in own else len(own)

    # argparse has no public way to order options.
    for actions in (parser._actions, *(group._group_actions for group in parser._action_groups)):
        actions.sort(key=place)


def refuse_overwriting(options: Mapping[str, Any]) -> None:
    """Raises `UsageError` if `output` is the file of `input` or `ckpt_path`, also by a link."""
    output = options.get("output")
    for name in ("input", "ckpt_path"):
        path = options.get(name)
        if output and path and os.path.isfile(path) and is_same_file(path, output):
            raise UsageError(
                f"--output {output} would overwrite --{name} {path}: give another name"
            )


def is_same_file(path: str, other: str) -> bool:
    """Whether two paths name the same file, which exists."""
    with suppress(OSError):  # no such file
        return os.path.samefile(path, other)
    return False


def options_class(function: Callable[..., object]) -> Any:
    """The dataclass of all options, if a command takes one."""
    return get_type_hints(function).get("options")


def collect_lists(arguments: list[str], names: Iterable[str]) -> list[str]:
    """Options that may be given several times, each as one list in YAML.

    >>> collect_lists(["--stop=a", "--seed=1", "--stop=[b"], ["--stop"])
    ['--seed=1', '--stop=["a", "[b"]']
    """
    lists: dict[str, list[str]] = {name: [] for name in names}
    rest = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in lists:
            rest.append(argument)
            continue
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise UsageError(f"{name} {value} holds bytes that are not UTF-8")
        lists[name].append(value)
    return rest + [f"{name}={in_yaml(values)}" for name, values in lists.items() if values]
