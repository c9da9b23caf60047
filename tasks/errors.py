"""Errors as users see them: one line on stderr and an exit code; a traceback only with --debug."""

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.extras import core_requirement
from datamodules.utils.files import DISK_FULL
from tasks.cli.app import TRUST
from tasks.cli.signals import MESSAGES, SIGNALS, Stopped

OTHER_NAMES = {  # short, usual and other commands' names of options, and the last words of theirs
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "max_epochs"),
    "steps": "max_steps",
    "device": "accelerator",
    **dict.fromkeys(("gpus", "gpu", "num_gpus"), "devices"),
    "accelerator": "device",
    "seed": "seed_everything",
    "seed_everything": "seed",
    "learning_rate": "lr",
    **dict.fromkeys(("output", "output_dir"), "run_dir"),
    "workers": "num_workers",
    "text": "prompt input",
    "input": "image text",
    **dict.fromkeys(("image", "predict_path", "prompt_file", "file", "path"), "input"),
    **dict.fromkeys(("run_dir", "out", "format"), "output"),
}
TOO_LONG = "learned positions of the network"  # in messages; `lab` reads it


class RunError(RuntimeError):
    """A valid request failed while it ran: a loss that became NaN, a full disk. Exit code 1."""


class UnknownLength(UsageError):
    """The schedule needs the number of steps of a training that only time ends."""


@dataclass
class ExitStatus:
    """A command's exit code: 0 done, 1 failed, 2 usage, 130 SIGINT, 141 SIGPIPE, 143 SIGTERM."""

    code: int = 0


@contextmanager
def exit_status(
    debug: bool, arguments: Sequence[str] = (), command: str = ""
) -> Iterator[ExitStatus]:
    """Turn an exception raised inside into one line on stderr and an exit code.

    Args:
        debug: Let exceptions through, with their traceback.
        arguments: Of the command line, to name the option whose path cannot be used.
        command: Of the task, such as "fit", which can be resumed.
    """
    status = ExitStatus()
    try:
        with SIGNALS.installed():
            yield status
            sys.stdout.flush()  # output that cannot be written is an error, too
    except Stopped as stop:
        print(stop, end="\n" if str(stop) else "", file=sys.stderr)
        status.code = 128 + stop.number
    except BaseException as error:
        if SIGNALS.raised:  # Lightning may have replaced our exception by its own
            _print_error(MESSAGES[SIGNALS.raised].removeprefix("error: "))
            status.code = 128 + SIGNALS.raised
        elif debug:
            raise
        else:
            status.code = _exit_code(error, arguments, command)


def _exit_code(error: BaseException, arguments: Sequence[str], command: str) -> int:
    """Print an error and return its exit code; re-raise SystemExit and the like."""
    message = str(error)
    code = 1
    if isinstance(error, BrokenPipeError):  # the reader of the output, such as `head`, has ended
        _discard_output()
        return 128 + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        message = "interrupted"  # Lightning raises SystemExit(1)
        code = 128 + signal.SIGINT
    elif is_usage_error(error):
        code = 2
        if not is_local_rank_zero():  # rank 0 has the same options and prints the error
            return code
    elif isinstance(error, OSError) and error.errno in DISK_FULL:
        reason = error.strerror
        if error.filename is not None:
            path = os.fsdecode(error.filename)
            option = _option_of_path(path, arguments)
            reason = f"{option}'{path}' cannot be written ({reason})"
        message = f"{reason}: make room"
        if command == "fit":
            message += "; saved checkpoints are whole, and `fit --resume` continues from them"
    elif isinstance(error, OSError) and error.filename is not None and error.strerror:
        path = os.fsdecode(error.filename2 or error.filename)
        option = _option_of_path(path, arguments)
        message = f"{option}'{path}' cannot be used ({error.strerror}): give another path"
        code = 2 if option else 1
    elif isinstance(error, ModuleNotFoundError) and (lacks := core_requirement(error.name or "")):
        message = f'{error.name} is not installed: pip install "{lacks}"'
        code = 2
    elif not isinstance(error, DataError | RunError):
        if not isinstance(error, Exception):
            raise error
        message = f"{type(error).__name__}: {error} (add --debug for the traceback)"
    _print_error(message)
    return code


def is_usage_error(error: BaseException) -> bool:
    """Whether this is a `UsageError`, or Lightning's error about options."""
    return isinstance(error, UsageError) or _is_misconfiguration(error)


def _is_misconfiguration(error: BaseException) -> bool:
    """Whether this is Lightning's error about options, without importing Lightning."""
    return type(error).__name__ == "MisconfigurationException"


def _option_of_path(path: str, arguments: Sequence[str]) -> str:
    """The option whose value is this path, a folder above it or a path below it; else empty.

    >>> _option_of_path("out/run/a.txt", ["--input", "x", "--run_dir=out/run"])
    '--run_dir: '
    """
    unusable = Path(path).absolute()
    above_all = (Path.cwd(), *Path.cwd().parents)  # these say nothing
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        given = Path(value if equals else following).absolute()
        if not option.startswith("--") or given in above_all:
            continue
        is_below = unusable.is_relative_to(given)
        is_above = given.is_relative_to(unusable) and unusable not in above_all
        if is_below or is_above:
            return f"{option}: "
    return ""


@contextmanager
def missing_entries(metadata: Mapping[str, Any], task: type = object) -> Iterator[None]:
    """Raises `UsageError` about entries that the metadata of the data lack.

    Those are in `needed_metadata` of a task or its base classes, or of a `KeyError` raised inside.
    """
    kinds = reversed(task.__mro__)
    needed = [name for kind in kinds for name in vars(kind).get("needed_metadata", ())]
    try:
        if missing := [name for name in needed if name not in metadata]:
            raise KeyError(*missing)
        yield
    except KeyError as error:
        if error.args[0] in metadata:
            raise
        names = ", ".join(map(repr, error.args))
        raise UsageError(
            f"the task needs {names} of the data: train on a datamodule whose metadata have "
            f"{'it' if len(error.args) == 1 else 'them'}, or set task.metadata, as "
            "datamodules/README.md lists them"
        ) from error


@contextmanager
def usage_errors(option: str = "") -> Iterator[None]:
    """Turn a `ValueError` or Lightning's error about options into a `UsageError`.

    Its message begins with `option`, such as "--model.pretrained FILE", if it does not already.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or _is_misconfiguration(error):
            message = with_trust(str(error))
            is_named = not option or message.startswith(option.split()[0])
            raise UsageError(message if is_named else f"{option}: {message}") from error
        raise


def with_trust(message: str) -> str:
    """A message about a choice that does not exist, with how to add one's own; others unchanged."""
    if "choose one of" not in message or TRUST in message:
        return message
    advice = f"set {TRUST} to its module, or import it first in Python"
    return f"{message.rstrip('.')}; for one of your own, {advice}"


def unknown_name(name: str, known: Iterable[str], kind: str) -> str:
    """The message about an unknown name, with the nearest known one.

    >>> unknown_name("fti", ["fit", "test"], "command")
    "unknown command 'fti': did you mean 'fit'? choose from fit, test"
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    choices = f"choose from {', '.join(known)}" if len(known) <= 16 else f"there are {len(known)}"
    return f"unknown {kind} '{name}': {hint}{choices}"


def unknown_option(
    name: str, known: Iterable[str], elsewhere: Callable[[str], str] = lambda name: ""
) -> str:
    """The message about an unknown option, with those that end like it, or the nearest one.

    `elsewhere` says where else an option is known, or "".

    >>> unknown_option("--dpeth", ["--depth"])
    'unknown option --dpeth: did you mean --depth?'
    >>> unknown_option("--epochs", ["--trainer.max_epochs", "--model.optimizer.lr"])
    'unknown option --epochs: did you mean --trainer.max_epochs?'
    """
    known = sorted(known)
    word = name.rpartition(".")[2].removeprefix("--")
    ends: dict[str, list[str]] = {}  # options by the last word of their names
    for option in known:
        ends.setdefault(option.rpartition(".")[2].removeprefix("--"), []).append(option)
    found = [
        option for last in OTHER_NAMES.get(word, word).split() for option in ends.get(last, [])
    ] or ends.get(word, [])
    if not found and (where := elsewhere(name)):
        return f"unknown option {name}: {where}"
    near = {
        last: options for last, options in ends.items() if differing_parts_are_similar(word, last)
    }
    found = found or nearest_option(name, near)
    if not found and (close := difflib.get_close_matches(word, near, 1, cutoff=0.7)):
        found = near[close[0]]
    hint = f"did you mean {' or '.join(found[:3])}?" if found else "`--help all` lists them all"
    return f"unknown option {name[:200]}: {hint}"


def needs_checkpoint(command: str, task: str) -> str:
    """The message of a command without --ckpt_path."""
    path = f"runs/{task}/latest/checkpoints/best.ckpt"
    return f"{command} needs --ckpt_path, such as --ckpt_path {path}"


def nearest_option(name: str, ends: Mapping[str, list[str]]) -> list[str]:
    """The option nearest to a name, if any is near; its last word is near, too.

    >>> ends = {"stem": ["--net.stem"], "depth": ["--net.depth"]}
    >>> nearest_option("--nte.dept", ends), nearest_option("--net.tied", ends)
    (['--net.depth'], [])
    """
    words = difflib.get_close_matches(name.rpartition(".")[2].removeprefix("--"), ends, cutoff=0.6)
    options = [option for word in words for option in ends[word]]
    return difflib.get_close_matches(name, options, 1, cutoff=0.6)


def differing_parts_are_similar(word: str, other: str) -> bool:
    """Whether the parts that two names do not share are similar; True if one has no such parts.

    Parts are what stands between underscores.

    >>> differing_parts_are_similar("max_epoch", "max_epochs")
    True
    >>> differing_parts_are_similar("num_workers", "num_nodes")
    False
    """
    own = word.split("_")
    others = other.split("_")
    left = "_".join(part for part in own if part not in others)
    right = "_".join(part for part in others if part not in own)
    is_part = not left or not right
    return is_part or difflib.SequenceMatcher(None, left, right).ratio() >= 0.6


def is_local_rank_zero() -> bool:
    """Whether this is the first process of its run on this machine, or the only one."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _print_error(message: str) -> None:
    one_line = re.sub(r"\s*\n\s*", " ", message.strip())
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    with suppress(OSError):
        sys.stderr.write(f"error: {one_line}\n")  # one write: other processes print, too


def _discard_output() -> None:
    """Discard buffered output that could not be written, or Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
