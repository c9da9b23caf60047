"""Options of all tasks, for the message about one that a command does not have."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import get_args, get_type_hints

from tasks.cli.app import load
from tasks.tessera.command import TASKS, app

SWIN = "tasks.vit.task:SwinTask"  # what --model.net.architecture swin takes


def who_has(option: str, task: str) -> str:
    """Says which tasks' `fit` has an option that a command of `task` does not have, or "".

    >>> who_has("--model.mask.probability", "lm")
    'tasks.mlm has it, tasks.lm does not'
    """
    name = option.removeprefix("--")
    owners = [other for other in TASKS if name in names_of_task(other)]
    if task not in TASKS or task in owners:  # a program of the user; another command has it
        return ""
    if task == "vit" and name in {*names(load(SWIN), "model")}:
        return "a Swin has it: add --model.net.architecture swin or --preset swin_cifar"
    if not owners:
        return ""
    *first, last = [f"tasks.{owner}" for owner in owners]
    listed = f"{', '.join(first)} and {last} have" if first else f"{last} has"
    return f"{listed} it, tasks.{task} does not"


def names_of_task(task: str) -> set[str]:
    """The options of a task's `fit` below `model` and `data`."""
    known = app(task)
    return {*names(load(known.task), "model"), *names(load(known.data), "data")}


def names(kind: type, prefix: str) -> Iterator[str]:
    """The arguments of a class as options, with those inside of dataclasses."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
    else:
        own = [
            one
            for one in reversed(kind.mro())
            if one.__module__.startswith(("tasks.", "datamodules."))
        ]
        parts = [get_type_hints(vars(one).get("__init__", object)) for one in own]
        hints = {name: hint for part in parts for name, hint in part.items()}
    for name in hints.keys() - {"return", "kwargs"}:
        yield f"{prefix}.{name}"
        for part in (hints[name], *get_args(hints[name])):
            if is_dataclass(part) and isinstance(part, type):
                yield from names(part, f"{prefix}.{name}")
