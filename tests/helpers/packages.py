"""Installed packages by name, and a Python process that lacks some of them."""

import re
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def hide(names: set[str]) -> str:
    """Code after which a process does not find these top-level packages, as if not installed."""
    owners = packages_distributions()
    distributions = {owner for name in names for owner in owners.get(name, [])}
    return f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(names)!r}:
            return None
        return super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        found = super().find_distributions(*context)
        return (one for one in found if one.metadata["Name"] not in {sorted(distributions)!r})

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def outside_core() -> set[str]:
    """The top-level packages here that `pip install tessera` without extras would not install."""
    core = required(PROJECT["dependencies"]) | {PROJECT["name"]}
    owners = packages_distributions()
    return {name for name, found in owners.items() if not core & {normal(one) for one in found}}


def required(requirements: list[str]) -> set[str]:
    """The names of distributions that requirements install, with all that those require."""
    found: set[tuple[str, str]] = set()  # of a distribution and one of its extras, or ""
    todo = [(Requirement(text), "") for text in requirements]
    while todo:
        requirement, of_extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for extra in ("", *requirement.extras):
            key = (normal(requirement.name), extra)
            if key not in found:
                found.add(key)
                todo += [(Requirement(text), extra) for text in requires_of(requirement.name)]
    return {name for name, _ in found}


def requires_of(name: str) -> list[str]:
    """What a distribution requires; nothing if it is not installed here."""
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def normal(name: str) -> str:
    """The name of a distribution as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
