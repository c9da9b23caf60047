"""Options and config files: what a command line means before any class is built.

What is typed as an option wins. A config file, a preset, pretrained weights, `--resume` and `--ckpt_path` are each a
set of options below all typed ones, wherever they stand; among those sets the later one wins.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import Any, NoReturn, get_type_hints

import jsonargparse
import yaml

from tasks.cli.complaints import TRUST, readable
from tasks.cli.config_files import (
    Options,
    in_yaml,
    load_yaml,
    not_a_section,
    problem,
    read_config,
    refuse_unknown,
)
from tasks.cli.signals import SIGNALS
from tasks.errors import UsageError, refusals

TEXTS = ("--text", "--target", "--prompt", "--stop")  # may be any text, also an empty one
DEEPEST = 1000  # lists and mappings in a value
PACKAGES = [  # whose classes options may name; importing any other would run whatever code has that name
    *("pytorch_lightning", "lightning_fabric", "tasks", "modules", "datamodules"),
    *("torch.nn", "torch.optim", "torch.distributed", "torch.profiler"),
]
jsonargparse.set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=[*PACKAGES, *filter(None, os.environ.get(TRUST, "").split(","))],
    instantiate_subclass_spec_in_any=False,
)


plain_yaml = jsonargparse.get_loader("yaml")


def checked_yaml(text: str) -> Any:
    """What jsonargparse makes of a text that is not refused."""
    load_yaml(text)
    return plain_yaml(text)


jsonargparse.set_loader("yaml", checked_yaml, (yaml.YAMLError,), json_superset=True)


class PlainErrors(jsonargparse.ArgumentParser):
    """A parser whose complaints are one sentence, raised as `UsageError`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            *args, **{"allow_abbrev": False} | kwargs
        )  # an option cut short is a typing error
        self.links: dict[str, str] = {}

    def link_arguments(self, source: str, target: str, **kwargs: Any) -> None:  # type: ignore[override]
        """Let option `target` follow `source`."""
        self.links[target] = source
        super().link_arguments(source, target, **kwargs)

    def parse_args(self, args: list[str], **kwargs: Any) -> jsonargparse.Namespace:  # type: ignore[override]
        """Options of a command line, each of its type; by itself jsonargparse takes null for all of them."""
        options = super().parse_args(list(self.sections_checked(args)), **kwargs)
        try:
            self.validate(options, skip_unset=False)
        except (TypeError, KeyError) as error:
            self.error(str(error), error)
        return options

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `message`, made readable, with the nearest option where one is unknown."""
        raise UsageError(readable(message, list(self.options()))) from ex

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:
        """Options of a text; where its first line is a comment that says where they come from, complaints do so too."""
        try:
            refuse_unknown(load_yaml(cfg_str), self.known(), dict(self.all_links()))
            return super().parse_string(cfg_str, *args, **kwargs)
        except UsageError as error:
            if not cfg_str.startswith("# "):
                raise
            raise UsageError(f"{error} (in {cfg_str.splitlines()[0][2:]})") from error

    def sections_checked(self, arguments: list[str]) -> Iterator[str]:
        """The same command line, with options such as `--model FILE` or `--model.net {depth: 3}` as checked YAML."""
        known, links = self.known(), dict(self.all_links())
        source = iter(arguments)
        for argument in source:
            option, equals, value = argument.partition("=")
            name = option.removeprefix("--")
            if (
                name == option
                or name not in known
                or not any(one.startswith(f"{name}.") for one in known)
            ):
                yield argument
                continue
            if not equals and (value := next(source, "")) == "":
                raise UsageError(f"{option} needs a value")
            origin = f" (in {one_line(f'{option} {value}')[:200]})"
            try:
                options = read_config(value) if os.path.exists(value) else load_yaml(value)
                if not isinstance(options, dict):
                    raise UsageError(not_a_section(name, options))
                refuse_unknown(options, known, links, f"{name}.")
            except yaml.YAMLError as error:
                raise UsageError(f"not valid YAML: {problem(error)}{origin}") from error
            except UsageError as error:
                raise error if value in str(error) else UsageError(f"{error}{origin}") from error
            yield f"{option}={in_yaml(options)}"

    def all_links(self) -> Iterator[tuple[str, str]]:
        """Options that follow others, to those, of the command's parser where there is one."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):
                for parser in action.choices.values():
                    yield from parser.all_links()
        yield from self.links.items()

    def options(self) -> Iterator[str]:
        """All option names, of the command's parser where there is one."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):
                for parser in action.choices.values():
                    yield from parser.options()
            yield from (name for name in action.option_strings if name.startswith("--"))

    def known(self) -> set[str]:
        """Names of all options that a file may hold."""
        return {
            name.removeprefix("--")
            for name in self.options()
            if not name.endswith(("help", "print_config"))
        }


def expand(
    arguments: list[str], macros: Mapping[str, Callable[[str], Options]], flags: Mapping[str, str]
) -> list[str]:
    """Replace each macro option by the options it stands for, and put those below everything typed.

    Args:
        arguments: command line, without program and command.
        macros: option name to a function from its value to nested options; `--config` is one of them.
        flags: option that needs no value, "true" being meant, to the option that it stands for.

    Returns:
        Every macro as `--config=<JSON below a comment that names the macro>`, in their order, then the other options in
        theirs.

    Raises:
        UsageError: a macro without its value.
    """
    below, typed, rest = [], [], deque(arguments)
    while rest:
        argument = rest.popleft()
        name, equals, value = argument.partition("=")
        if name in flags:
            said = (
                rest.popleft()
                if not equals and rest and rest[0] in ("true", "false")
                else value or "true"
            )
            typed.append(f"{flags[name]}={said}")
        elif name in macros:
            value = value if equals else rest.popleft() if rest else ""
            if not value:
                raise UsageError(f"{name} needs a value")
            origin = one_line(f"{name} {value}")
            try:
                below.append(f"--config=# {origin}\n{in_yaml(macros[name](value))}")
            except UsageError as error:
                raise (
                    error if value in str(error) else UsageError(f"{error} (in {origin})")
                ) from error
        else:
            typed.append(argument)
    return below + typed


def values(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Options and their values, in their order."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=False):
        option, equals, value = argument.partition("=")
        if option.startswith("-") and (equals or following is not None):
            yield option, value if equals else str(following)


def refuse_values(arguments: list[str], pipes: bool = True) -> None:
    """Refuse what is no value of any option: nothing, as a variable of the shell that is not set, or a deep nest.

    Args:
        arguments: command line, without program and command.
        pipes: whether values may name pipes and devices, which jsonargparse would wait for.

    Raises:
        UsageError: names the option.
    """
    for option, value in values(arguments):
        if not value and option not in TEXTS:
            raise UsageError(f"{option} needs a value")
        if option not in TEXTS and value.count("[") + value.count("{") > DEEPEST:
            raise UsageError(f"{option} {value[:20]}... has more than {DEEPEST} brackets")
        if (
            not pipes
            and os.path.exists(value)
            and not (os.path.isfile(value) or os.path.isdir(value))
        ):
            raise UsageError(f"{option} {value} is not a regular file: give the path of one")


def one_line(origin: str) -> str:
    """Where options come from, as a comment of one line, also where that is a name that is not UTF-8."""
    return " ".join(origin.encode(errors="backslashreplace").decode().split())


def given(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """Take the last value of option `name` out of a command line: (value or None, what remains)."""
    value, rest, source = None, [], iter(arguments)
    for argument in source:
        option, equals, text = argument.partition("=")
        if option == name:
            value = text if equals else next(source, "")
            if not value:
                raise UsageError(f"{name} needs a value")
        else:
            rest.append(argument)
    return value, rest


def names_data(arguments: list[str]) -> bool:
    """Whether the options typed, or a config among them, say which data to use."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if name in ("--config", "-c") and "data" in read_config(value if equals else following):
            return True
        if name in ("--data.source", "--data.path", "--data.dataset.name"):
            return True
    return False


def merged(base: Options, over: Options) -> Options:
    """Nested options of `base` with those of `over` on top."""
    result = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


def flat(options: Options, prefix: str = "") -> dict[str, Any]:
    """Nested options as {"model.net.depth": 9, ...}."""
    result: dict[str, Any] = {}
    for key, value in options.items():
        name = f"{prefix}{key}"
        result |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return result


def typed_options(arguments: list[str]) -> list[str]:
    """Names of the options on a command line, such as --data.path."""
    return [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]


def run_function(program: str, function: Callable[..., object], arguments: list[str]) -> None:
    """Run a command that is a function of its options; one with a parameter `typed` is told which were named.

    A parameter called `options` takes a dataclass of them. Options that are lists of texts may be
    given several times, and those that are true or false need no value.

    Raises:
        UsageError: options that are wrong, also by the dataclass's own checks.
    """
    parser = PlainErrors(prog=program, description=(function.__doc__ or "").split("\n\n")[0])
    names = signature(function).parameters.keys()
    kind = get_type_hints(function)["options"] if "options" in names else None
    if kind is None:
        parser.add_function_arguments(function, skip={"typed"})
    else:
        parser.add_class_arguments(kind)
    types = {f"--{name}": wanted for name, wanted in get_type_hints(kind or function).items()}
    refuse_values(arguments)
    arguments = gathered(arguments, [name for name, wanted in types.items() if wanted == list[str]])
    arguments = expand(
        arguments, {}, {name: name for name, wanted in types.items() if wanted is bool}
    )
    options = vars(parser.instantiate_classes(parser.parse_args(arguments)))
    if kind is not None:
        with refusals():
            options = {"options": kind(**options)}
    if "typed" in names:
        options["typed"] = typed_options(arguments)
    with SIGNALS.raising():
        function(**options)


def gathered(arguments: list[str], names: Iterable[str]) -> list[str]:
    """Options that may be given several times as one list each, whatever their texts look like.

    >>> gathered(["--stop", "a", "--seed", "1", "--stop=[b"], ["--stop"])
    ['--seed', '1', '--stop=["a", "[b"]']
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    rest, source = [], iter(arguments)
    for argument in source:
        name, equals, text = argument.partition("=")
        if name not in found:
            rest.append(argument)
        elif (value := text if equals else next(source, None)) is None:
            raise UsageError(f"{name} needs a value")
        elif any("\ud800" <= character <= "\udfff" for character in value):
            raise UsageError(f"{name} {value} holds bytes that are not UTF-8")
        else:
            found[name].append(value)
    return rest + [f"{name}={in_yaml(values)}" for name, values in found.items() if values]
