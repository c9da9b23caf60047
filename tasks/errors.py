"""The one place that prints errors: one line on stderr and an exit code, a traceback only on request."""

import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from datamodules.utils.errors import DataError, UsageError
from tasks.cli.signals import SIGNALS, Stopped

__all__ = [
    "DataError",
    "RunError",
    "UsageError",
    "first_here",
    "guarded",
    "nearest",
    "nearest_option",
    "refusals",
]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATHS = (  # what is wrong with a path itself, not with a disk
    *(
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    ),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENXIO),
)


class RunError(RuntimeError):
    """What was asked for is sound but failed while it ran: a loss that became NaN, a full disk. Exit code 1."""


def guarded(run: Callable[[], object], debug: bool, arguments: Sequence[str] = ()) -> int:
    """Call `run` and turn what it raises into an exit code.

    Args:
        run: what to do, without arguments.
        debug: let errors through, with their traceback.
        arguments: of the command line, some of which may be paths.

    Returns:
        0 done, 1 it failed, 2 the user asked for something wrong, 130 interrupted, 141 unread, 143 terminated.
    """
    try:
        with SIGNALS.handled():
            run()
            sys.stdout.flush()  # what cannot be written is an error, too
    except Stopped as stop:
        print(stop, end="\n" if str(stop) else "", file=sys.stderr)
        return 128 + stop.number
    except BaseException as error:
        if SIGNALS.raised:  # Lightning, or code in C++, may have raised something else in its place
            said = "terminated" if SIGNALS.raised == signal.SIGTERM else "interrupted"
            return _say(said, 128 + SIGNALS.raised)
        if debug:
            raise
        return _exit_code(error, arguments)
    return 0


def _exit_code(error: BaseException, arguments: Sequence[str]) -> int:
    if isinstance(error, UsageError):
        return _say(str(error), 2)
    if isinstance(error, DataError | RunError):
        return _say(str(error), 1)
    if isinstance(
        error, BrokenPipeError
    ):  # whoever read the output, such as `head`, has seen enough
        drop_output()
        return 128 + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return _say(
            "interrupted", 128 + signal.SIGINT
        )  # Lightning's own, a SystemExit, would exit with 1
    if isinstance(error, OSError) and error.errno in FULL:
        return _say(
            f"{error}: make room; what was saved before is whole, and `fit --resume` goes on from there",
            1,
        )
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        place = os.fsdecode(error.filename2 or error.filename)
        what = f"'{place}' cannot be used ({error.strerror}): give another path"
        if error.errno in PATHS and (option := named_by(place, arguments)):
            return _say(f"{option}: {what}", 2)
        return _say(f"{what} (add --debug for the traceback)", 1)
    if (
        type(error).__name__ == "MisconfigurationException"
    ):  # Lightning's, of options that do not go together
        return _say(str(error), 2)
    if isinstance(error, Exception):
        return _say(f"{type(error).__name__}: {error} (add --debug for the traceback)", 1)
    raise error


def named_by(place: str, arguments: Sequence[str]) -> str | None:
    """The option whose value is a path, is in it, or is a folder that it is in; the current folder is everybody's.

    >>> named_by("out/run/a.txt", ["--file", "x", "--run_dir=out/run"])
    '--run_dir'
    """
    shared, path = (Path.cwd(), *Path.cwd().parents), Path(place).absolute()
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        option, equals, value = argument.partition("=")
        named = Path(value if equals else following).absolute()
        inside = named not in shared and path.is_relative_to(named)
        if option.startswith("--") and (
            inside or (path not in shared and named.is_relative_to(path))
        ):
            return option
    return None


@contextmanager
def refusals(what: str = "") -> Iterator[None]:
    """What is raised while things are built from options is about the options: make it a `UsageError`.

    Args:
        what: the option that it is about, where that is known.

    Raises:
        UsageError: for a `ValueError`, and for Lightning's own of its Trainer's options.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or type(error).__name__ == "MisconfigurationException":
            raise UsageError(f"{what}: {error}" if what else str(error)) from error
        raise


def nearest(word: str, known: Iterable[str], what: str) -> str:
    """A sentence that refuses `word` and suggests the nearest of the known ones.

    >>> nearest("fti", ["fit", "test"], "command")
    "unknown command 'fti': did you mean 'fit'? choose from fit, test"
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, 1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    listed = f"choose from {', '.join(known)}" if len(known) <= 12 else f"there are {len(known)}"
    return f"unknown {what} '{word}': {hint}{listed}"


def nearest_option(name: str, known: Iterable[str]) -> str:
    """A sentence that refuses an option and suggests the nearest of the known ones.

    >>> nearest_option("--dpeth", ["--depth"])
    'unknown option --dpeth: did you mean --depth?'
    """
    close = difflib.get_close_matches(name, known, 1, cutoff=0.6)
    return f"unknown option {name[:200]}: " + (
        f"did you mean {close[0]}?" if close else "`--help` lists the options"
    )


def first_here() -> bool:
    """Whether this is the first process of its run on this machine, or the only one."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def _say(message: str, code: int) -> int:
    if code == 2 and not first_here():  # all processes have the same options
        return code
    one_line = re.sub(r"\s*\n\s*", " ", message.strip())
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
    with suppress(OSError):
        sys.stderr.write(
            f"error: {one_line}\n"
        )  # at once: a print is two writes, and other processes print, too
    return code


def drop_output() -> None:
    """Let what could not be written, and would be tried again at exit, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
