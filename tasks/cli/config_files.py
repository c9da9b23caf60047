"""Config files: YAML that is read in one way or refused, and that holds options that exist."""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from datamodules.utils.files import read_bytes
from modules.schema import format_value
from tasks.errors import UsageError, unknown_option
from tasks.options import Options, flat, merge_options

TAG = "tag:yaml.org,2002:"
SECTIONS = ("trainer", "model", "data", "checkpoint")


# Numbers of YAML 1.1 that hardly anybody means: 010 is 8, and 1:30 is 90.
SURPRISING = re.compile(r"[-+]?0[0-7_]+|.*:.*")
# YAML 1.2 and jsonargparse read 1e3 as a number; PyYAML does not, and would not quote it.
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)[eE][-+]?\d+$")


class Loader(yaml.SafeLoader):
    """YAML in which dates are texts. It refuses keys that are given twice, and `SURPRISING`."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in patterns if tag != f"{TAG}timestamp"]
        for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key.value, str):
                if (key.tag, key.value) in seen:
                    raise yaml_error(key, f"{format_value(key.value)} is given twice")
                seen.add((key.tag, key.value))
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        is_number = isinstance(node, yaml.ScalarNode) and node.tag in (f"{TAG}int", f"{TAG}float")
        # Without a parent it is all of an option's value, such as the time 1:00:00:00.
        if parent is not None and is_number and SURPRISING.fullmatch(node.value):
            number = self.construct_object(node)
            raise yaml_error(node, f"{node.value} would be the number {number}: quote it")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError) as error:
            kind = node.tag.removeprefix(TAG)
            raise yaml_error(node, f"{format_value(node.value)} is not of type {kind}") from error


class Dumper(yaml.SafeDumper):
    """YAML whose texts are quoted if PyYAML or jsonargparse would read them as anything else."""


Dumper.add_implicit_resolver(f"{TAG}float", NUMBER, [*"-+.0123456789"])


def dump_yaml(value: Any, **style: Any) -> str:
    """The YAML of a value; `style` as of `yaml.dump`.

    >>> dump_yaml(["1e3", 1000.0])
    "['1e3', 1000.0]\\n"
    """
    return yaml.dump(value, Dumper=Dumper, **{"default_flow_style": None, **style})


def yaml_error(node: yaml.Node, why: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)


def load_yaml(text: str) -> Any:
    """The value of a YAML text; raises `yaml.YAMLError` for what `Loader` refuses."""
    return Loader(text).get_single_data()


def in_yaml(value: Any) -> str:
    """JSON that is YAML, too: JSON writes a character beyond 16 bits as two, YAML as one.

    >>> in_yaml(["a", "\N{SLIGHTLY SMILING FACE}"])
    '["a", "\\\\U0001f642"]'
    """
    return re.sub(
        r"[^\0-~]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False)
    )


def read_config(value: str) -> Options:
    """Options of a YAML or JSON file, by path or by name in the installed `configs/`."""
    try:
        options = load_yaml(read_bytes(config_path(value)).decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(
            f"config file '{value}' cannot be read ({error.strerror}): give the path of a YAML file"
        ) from error
    except RecursionError as error:
        raise UsageError(f"config file '{value}' is nested too deeply") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = yaml_problem(error)
        raise UsageError(f"config file '{value}' is not valid YAML: {problem}") from error
    if not isinstance(options, dict):
        raise UsageError(
            f"config file '{value}' must hold options, as in `trainer: {{max_epochs: 10}}`"
        )
    options = nested(options, f"(in config file '{value}')")
    for name in SECTIONS:
        if not isinstance(options.get(name, {}), dict):
            raise UsageError(f"{not_a_section(name, options[name])} (in config file '{value}')")
    pretrained = options.get("model", {}).get("pretrained")
    for name, given in {"preset": options.get("preset"), "model.pretrained": pretrained}.items():
        if given is not None and not (isinstance(given, str) and given):
            raise UsageError(
                f"{name} is {format_value(given)}, not a name (in config file '{value}')"
            )
    return options


def nested(options: Options, where: str = "") -> Options:
    """Options of a file, with dotted names such as `model.net.patch_size: 2` put into sections.

    Raises `UsageError` if an option has both forms.

    >>> nested({"model": {"preset": "a"}, "model.net.patch_size": 2})
    {'model': {'preset': 'a', 'net': {'patch_size': 2}}}
    """
    found: Options = {}
    for key, value in options.items():
        if isinstance(key, str) and key.partition(".")[0] in SECTIONS:
            key, *below = key.split(".")
            for name in reversed(below):
                value = {name: value}
        for twice in sorted(flat(found).keys() & flat({key: value}).keys()):
            raise UsageError(f"{twice} is given twice, in two forms: keep one of them {where}")
        found = merge_options(found, {key: value})
    return found


def config_path(value: str) -> Path:
    """Path of a config file: as given, else in the installed package."""
    package = find_spec("configs")
    folders = package.submodule_search_locations if package else None
    for path in (Path(value), *(Path(folder).parent / value for folder in folders or [])):
        if os.path.exists(path):
            return path
    return Path(value)


def yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark else str(error)


def refuse_unknown(
    options: Mapping[str, Any],
    known: Iterable[str],
    links: Mapping[str, str],
    elsewhere: Callable[[str], str],
    above: str = "",
) -> None:
    """Refuse options that jsonargparse would ignore.

    Args:
        options: Nested options of a file.
        known: Names of all options, such as "model.net.stack".
        links: Options that follow others, to those.
        elsewhere: As of `unknown_option`.
        above: Name of the section that they are in, with a dot.
    """
    for key, value in options.items():
        name = f"{above}{key}"
        if name in links:
            raise UsageError(f"--{name} cannot be set: it follows --{links[name]}")
        if name not in known:
            names = [f"--{option}" for option in known]
            raise UsageError(unknown_option(f"--{name}", names, elsewhere))
        if not any(option.startswith(f"{name}.") for option in known):
            continue  # a single option
        if not isinstance(value, Mapping):
            raise UsageError(not_a_section(name, value))
        if "class_path" not in value:  # jsonargparse checks the options of classes
            refuse_unknown(value, known, links, elsewhere, f"{name}.")


def not_a_section(name: str, value: Any) -> str:
    """The message about a value in place of a section."""
    given = "null" if value is None else format_value(value)
    below = "write options below it, by name, or leave it out"
    meant = {"data": f"--data.path {value}", "model": "--preset"}.get(name)
    if meant and isinstance(value, str):
        return f"--{name} {value}: did you mean {meant}? Else {below}"
    return f"{name} is {given}: {below}"
