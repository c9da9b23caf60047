"""Options and config files: what a command line means before any class is built.

What is typed as an option wins. A config file, a preset, pretrained weights, `--resume` and `--ckpt_path` are each a
set of options below all typed ones, wherever they stand; among those sets the later one wins.
"""

import difflib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import jsonargparse
import yaml

from tasks.errors import UsageError, refusals

Options = dict[str, Any]
TRUST = "TESSERA_TRUST"  # environment variable: further packages, parted by commas, whose classes options may name
PACKAGES = [  # whose classes options may name; importing any other would run whatever code has that name
    *("pytorch_lightning", "lightning_fabric", "tasks", "modules", "datamodules"),
    *("torch.nn", "torch.optim", "torch.distributed", "torch.profiler"),
]
MOST = 10**7  # characters of a text of options, aliases written out
jsonargparse.set_parsing_settings(
    import_path_denylist=["*"],
    import_path_allowlist=[*PACKAGES, *filter(None, os.environ.get(TRUST, "").split(","))],
    instantiate_subclass_spec_in_any=False,
)


plain_yaml = jsonargparse.get_loader("yaml")
jsonargparse.set_loader("yaml", lambda text: plain_yaml(bounded(text)), (yaml.YAMLError,), json_superset=True)


class PlainErrors(jsonargparse.ArgumentParser):
    """A parser whose complaints are one sentence, raised as `UsageError`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)  # an option cut short is a typing error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise `message`, made readable, with the nearest option where one is unknown."""
        raise UsageError(readable(message, list(self.options()))) from ex

    def parse_string(self, cfg_str: str, *args: Any, **kwargs: Any) -> jsonargparse.Namespace:
        """Options of a text; where its first line is a comment that says where they come from, complaints do so too."""
        try:
            return super().parse_string(cfg_str, *args, **kwargs)
        except UsageError as error:
            if not cfg_str.startswith("# "):
                raise
            raise UsageError(f"{error} (in {cfg_str.splitlines()[0][2:]})") from error

    def options(self) -> Iterator[str]:
        """All option names, of the command's parser where there is one."""
        for action in self._actions:
            if isinstance(action.choices, Mapping):
                for parser in action.choices.values():
                    yield from parser.options()
            yield from (name for name in action.option_strings if name.startswith("--"))


UNKNOWN = (
    r"[Uu]nrecognized arguments?:? '?(--[\w.+-]+)|does not accept option '([\w.]+)'|[Kk]ey '([\w.]+)' is not expected"
)
WRONG = r'.*Parser key "([\w.]+)":(.*)(?:Got value|Given value): (.*)'
PLAIN = {  # what jsonargparse says, and the same as a sentence for the user
    r".*argument (--\S+): expected .*argument": r"\1 needs a value",
    r".*arguments are required: (\w+).*": r"--\1 is missing",
    r".*argument ([\w.]+) --> ([\w.]+):.*": r"--\2 cannot be set: it follows --\1",
    r".*Parser key \"([\w.]+)\": Unable to load config \"(.*?)\"": r"--\1 \2: no such file of options",
    r".*Neither 'tensorboard' nor 'tensorboardX' is available.*": "TensorBoard needs one more package: "
    "pip install tensorboard",
    r"Parser key \"(\w+)\": Not of type Seed: (\S+) .*": r"--\1 \2: must lie between 0 and 4294967295",
    r"[Uu]nrecognized arguments: (.*)": r"unexpected '\1': options begin with --",
}
KINDS = {"int": "a whole number", "float": "a number", "bool": "true/false", "str": "text", "NoneType": "null",
         "tuple": "a list", "list": "a list", "Iterable": "a list", "dot import path": "a class"}  # fmt: skip


def readable(message: str, options: list[str]) -> str:
    """One sentence from jsonargparse's message, with the nearest of `options` for an unknown one."""
    message = re.sub(r"\s*\n\s*(- )?", " ", message.strip()).removeprefix('Parser key "config": ')
    if found := re.search(r"Importing '(([\w-]+)[\w.-]*)' is not allowed", message):
        return f"{found[1]} is refused, since naming it would run its code: set {TRUST}={found[2]} if you trust it"
    if found := re.search(UNKNOWN, message):
        name = "--" + next(filter(None, found.groups())).removeprefix("--")
        close = difflib.get_close_matches(name, options, 1, cutoff=0.6)
        return f"unknown option {name}: " + (f"did you mean {close[0]}?" if close else "`--help` lists the options")
    if found := re.fullmatch(WRONG, message):
        return wrong_value(*found.groups())
    for pattern, sentence in PLAIN.items():
        if re.fullmatch(pattern, message):
            return re.sub(pattern, sentence, message)
    return message


def wrong_value(key: str, expected: str, value: str) -> str:
    """A sentence that refuses the value of an option and says which there are."""
    kinds = re.findall(
        r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|(dot import path)|typing\.Literal\[(.*?)\])", expected
    )
    choices = [choice for *_, literal in kinds for choice in re.findall(r"[\w.-]+", literal)]
    words = list(dict.fromkeys([KINDS.get(a or b, a) for a, b, _ in kinds if a or b] + choices))
    known = " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]])) or "of another kind"
    close = difflib.get_close_matches(value, choices, 1)
    reason = re.search(r"given class_path '\S+': (.*?)(?= Expected| Problem|$)", expected)
    hint = f": did you mean {close[0]}?" if close else f" ({reason[1].strip()})" if reason else ""
    return f"--{key} {value}: must be {known}{hint}"


def expand(arguments: list[str], macros: Mapping[str, Callable[[str], Options]], flags: Mapping[str, str]) -> list[str]:
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
            said = rest.popleft() if not equals and rest and rest[0] in ("true", "false") else value or "true"
            typed.append(f"{flags[name]}={said}")
        elif name in macros:
            value = value if equals else rest.popleft() if rest else ""
            if not value:
                raise UsageError(f"{name} needs a value")
            origin = " ".join(f"{name} {value}".split())  # a comment has one line
            below.append(f"--config=# {origin}\n{in_yaml(macros[name](value))}")
        else:
            typed.append(argument)
    return below + typed


def in_yaml(value: Any) -> str:
    """JSON that is YAML, too: a character beyond ASCII is one number, where JSON would write two.

    >>> in_yaml(["a", "\N{SLIGHTLY SMILING FACE}"])
    '["a", "\\\\U0001f642"]'
    """
    return re.sub(r"[^\0-~]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))


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


def read_config(value: str) -> Options:
    """Options of a YAML or JSON file, given by path or as a name under `configs/` of the installed package.

    Raises:
        UsageError: no such file, not readable as YAML, or not a mapping.
    """
    path = Path(value)
    if not path.is_file():
        installed = find_spec("configs")
        roots = [Path(root).parent for root in installed.submodule_search_locations or []] if installed else []
        path = next((root / value for root in roots if (root / value).is_file()), path)
    if not path.is_file():
        raise UsageError(f"no config file '{value}': give the path of a YAML file, as in configs/vit/cifar10.yaml")
    try:
        options = yaml.safe_load(bounded(path.read_text()))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"config file '{value}' is not valid YAML: {error}") from error
    if not isinstance(options, dict):
        raise UsageError(f"config file '{value}' must hold options by name, as in `trainer: {{max_epochs: 10}}`")
    return options


def bounded(text: str) -> str:
    """The same YAML, whose aliases must not make it immense ("billion laughs").

    Raises:
        yaml.YAMLError: more than `MOST` characters with each alias written out, or an alias inside of what it names.
    """
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # until all that is inside is counted
            parts = [] if isinstance(node.value, str) else node.value
            inner = (size(one) for part in parts for one in (part if isinstance(part, tuple) else (part,)))
            sizes[id(node)] = len(node.value) + 1 + sum(inner)
        return sizes[id(node)]

    if "&" in text and "*" in text and (node := yaml.compose(text, yaml.SafeLoader)) and size(node) > MOST:
        raise yaml.YAMLError(f"its aliases stand for more than {MOST:,} characters")
    return text


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
    arguments = gathered(arguments, [name for name, wanted in types.items() if wanted == list[str]])
    arguments = expand(arguments, {}, {name: name for name, wanted in types.items() if wanted is bool})
    options = vars(parser.instantiate_classes(parser.parse_args(arguments)))
    if kind is not None:
        with refusals():
            options = {"options": kind(**options)}
    if "typed" in names:
        options["typed"] = typed_options(arguments)
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
        elif (value := text if equals else next(source, None)) is not None:
            found[name].append(value)
        else:
            raise UsageError(f"{name} needs a value")
    return rest + [f"{name}={in_yaml(values)}" for name, values in found.items() if values]
