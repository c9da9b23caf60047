"""Config files: YAML that is read in one way or refused, and is about options that there are."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from datamodules.utils.files import open_regular
from modules.schema import shown
from tasks.errors import UsageError, unknown_option

Options = dict[str, Any]
MAX_CHARACTERS = 10**7  # characters of a text of options, aliases written out
MAX_BYTES = 2**20  # of a file
MAX_DIGITS = 100
TAGS = ("str", "int", "float", "bool", "null", "seq", "map")  # of YAML's types those of JSON
TAG = "tag:yaml.org,2002:"
SECTIONS = ("trainer", "model", "data", "checkpoint")


class Loader(yaml.SafeLoader):
    """YAML with JSON's types only, dates being texts; each key stands once in its mapping.

    Raises:
        yaml.YAMLError: what it refuses, with the line.
    """

    yaml_constructors = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in TAGS
    }
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in patterns if tag != f"{TAG}timestamp"]
        for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """A mapping without a key that stands twice."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key.value, str):
                if (key.tag, key.value) in seen:
                    raise yaml_error(key, f"{shown(key.value)} is given twice")
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value of the type that its tag says."""
        if node.tag == f"{TAG}int" and len(node.value) > MAX_DIGITS:
            raise yaml_error(node, f"a number has {len(node.value)} digits")
        try:
            if isinstance(node.value, str):
                node.value.encode()  # half a pair of surrogates is no text
            return super().construct_object(node, deep)
        except (ValueError, KeyError) as error:
            raise yaml_error(
                node, f"{shown(node.value)} is no {node.tag.removeprefix(TAG)}"
            ) from error


def yaml_error(node: yaml.Node, why: str) -> yaml.YAMLError:
    """An error about a node."""
    return yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)


def load_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: `Loader` refuses it, it is nested too deeply, or its aliases make it
            immense.
    """
    try:
        return Loader(check_aliases(text)).get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def check_aliases(text: str) -> str:
    """The same YAML, whose aliases must not make it immense ("billion laughs").

    Raises:
        yaml.YAMLError: more than `MAX_CHARACTERS` characters with each alias written out, or an
            alias inside of what it names.
    """
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if isinstance(node, tuple):  # key and value
            return sum(map(size, node))
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # until all that is inside is counted
            inner = [] if isinstance(node.value, str) else node.value
            sizes[id(node)] = len(node.value) + 1 + sum(map(size, inner))
        return sizes[id(node)]

    if "&" in text and "*" in text:
        node = yaml.compose(text, yaml.SafeLoader)
        if node and size(node) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"its aliases stand for more than {MAX_CHARACTERS:,} characters")
    return text


def in_yaml(value: Any) -> str:
    """JSON that is YAML, too: a character beyond ASCII is one number, where JSON would write two.

    >>> in_yaml(["a", "\N{SLIGHTLY SMILING FACE}"])
    '["a", "\\\\U0001f642"]'
    """
    return re.sub(
        r"[^\0-~]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False)
    )


def read_config(value: str) -> Options:
    """Options of a YAML or JSON file, by path or as a name under the installed `configs/`.

    Raises:
        UsageError: it cannot be read, is not YAML, is no mapping, or has a section that is none, or
            a preset or pretrained weights that are no name.
    """
    try:
        with open_regular(config_path(value)) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"config file '{value}' cannot be read ({error.strerror}): give the path of a YAML "
            "file, as in configs/vit/cifar10.yaml"
        ) from error
    if len(raw) > MAX_BYTES:
        raise UsageError(
            f"config file '{value}' has more than {MAX_BYTES:,} bytes: give a YAML file of options"
        )
    try:
        options = load_yaml(raw.decode("utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = yaml_problem(error)
        raise UsageError(f"config file '{value}' is not valid YAML: {problem}") from error
    if not isinstance(options, dict):
        raise UsageError(
            f"config file '{value}' must hold options by name, as in `trainer: {{max_epochs: 10}}`"
        )
    for name in SECTIONS:
        if not isinstance(options.get(name, {}), dict):
            raise UsageError(f"{not_a_section(name, options[name])} (in config file '{value}')")
    pretrained = options.get("model", {}).get("pretrained")
    for name, given in {"preset": options.get("preset"), "model.pretrained": pretrained}.items():
        if given is not None and not (isinstance(given, str) and given):
            raise UsageError(f"{name} is {shown(given)}, not a name (in config file '{value}')")
    return options


def config_path(value: str) -> Path:
    """Where a config file is: as named, or below the installed package."""
    package = find_spec("configs")
    folders = package.submodule_search_locations if package else None
    for path in (Path(value), *(Path(folder).parent / value for folder in folders or [])):
        if os.path.exists(path):
            return path
    return Path(value)


def yaml_problem(error: Exception) -> str:
    """What is wrong with a YAML text, and in which line."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark else str(error)


def refuse_unknown(
    options: Mapping[str, Any], known: Iterable[str], links: Mapping[str, str], above: str = ""
) -> None:
    """Refuse what jsonargparse would drop without a word.

    Args:
        options: nested options of a file.
        known: options that there are, such as "model.net.stack".
        links: options that follow others, to those.
        above: name of the section that they are in, with a dot.

    Raises:
        UsageError: a name that is unknown, or linked; a section that is no mapping.
    """
    for key, value in options.items():
        name = f"{above}{key}"
        if name in links:
            raise UsageError(f"--{name} cannot be set: it follows --{links[name]}")
        if name not in known:
            raise UsageError(unknown_option(f"--{name}", [f"--{one}" for one in known]))
        if not any(one.startswith(f"{name}.") for one in known):
            continue  # no section
        if not isinstance(value, Mapping):
            raise UsageError(not_a_section(name, value))
        if "class_path" not in value:  # else jsonargparse looks at it
            refuse_unknown(value, known, links, f"{name}.")


def not_a_section(name: str, value: Any) -> str:
    """A sentence that refuses a value where options belong."""
    given = "null" if value is None else shown(value)
    return f"{name} is {given}: write options below it, by name, or leave it out"
