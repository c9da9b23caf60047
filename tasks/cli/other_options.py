"""Options of all tasks, for the message about one that a command does not have."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import get_args, get_type_hints

from tasks.cli.app import TASKS, TRAINER_COMMANDS, app, load

SWIN = "tasks.vit.task:SwinTask"  # what --model.net.architecture swin takes


def who_has(option: str, task: str, command: str) -> str:
    """Says where else an option is known: in other tasks, `fit`, another network; else "".

    >>> who_has("--model.mask.probability", "lm", "fit")
    'tasks.mlm has it, tasks.lm does not'
    """
    if task not in TASKS:  # a program of the user
        return ""
    name = option.removeprefix("--")
    if command != "fit":
        is_other = command not in TRAINER_COMMANDS and name in names_of_task(task)
        return f"`fit` has it, `{command}` does not" if is_other else ""
    owners = [other for other in TASKS if name in names_of_task(other)]
    if task == "vit" and name in {*names(load(SWIN), "model")}:
        return "a Swin has it: add --model.net.architecture swin or --preset swin_cifar"
    if task == "vit" and task in owners:
        return "a ViT has it, a Swin does not: leave it out"
    if not owners or task in owners:  # nobody has it
        return ""
    return f"{who([f'tasks.{owner}' for owner in owners])} it, tasks.{task} does not"


def who(owners: Sequence[str]) -> str:
    """The subject and the verb of a sentence about what some tasks have.

    >>> who(["a"]), who(["a", "b", "c"])
    ('a has', 'a, b and c have')
    """
    *first, last = owners
    return f"{', '.join(first)} and {last} have" if first else f"{last} has"


def names_of_task(task: str) -> set[str]:
    """The options of a task's `fit` below `model` and `data`, without those that follow others.

    Of a program of the user: none.
    """
    if task not in TASKS:
        return set()
    known = app(task)
    found = {*names(load(known.task), "model"), *names(load(known.data), "data")}
    if task == "vit":
        found |= {*names(load(SWIN), "model")}
    return found - {*known.links.values()}


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
