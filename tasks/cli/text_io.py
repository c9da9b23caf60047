"""Lines that a command reads from a file or from standard input, and those that it prints."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import TextIOWrapper
from pathlib import Path

from tasks.errors import UsageError

UNFINISHED = " [...]"  # behind a text that was cut off
# Tabs, and where `splitlines` splits, with the spaces around them.
BREAKS = re.compile(r" *[\t-\r\x1c-\x1e\x85\u2028\u2029][ \t-\r\x1c-\x1e\x85\u2028\u2029]*")


def open_standard_streams() -> None:
    """Open closed standard streams as the null device, and print what an encoding lacks as escapes.

    The next file to be opened would take the number of a closed stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def print_note(message: str) -> None:
    """Prints what a user should know to standard error."""
    print(message, file=sys.stderr)


@contextmanager
def printing_to(output: str | None) -> Iterator[None]:
    """Write what the `with` block prints to the file of `--output`, at its end; None: print it.

    Nothing is left after an error. Raises `UsageError` or `OSError` if it cannot be written.
    """
    if output is None:
        yield
        return
    from tasks.checkpoints.exporting import new_file

    with (
        new_file(Path(output)) as partial,
        partial.open("w", encoding="utf-8", errors="surrogateescape") as file,
        redirect_stdout(file),
    ):
        yield


def json_line(value: object) -> str:
    """JSON on one line, with escapes if standard output is not in UTF-8."""
    ascii_only = not str(sys.stdout.encoding).lower().startswith("utf")
    return json.dumps(value, ensure_ascii=ascii_only)


def read_input_lines(name: str, option: str, what: str) -> list[str]:
    """The lines of a text file in UTF-8; `name` is a path or - for standard input.

    Args:
        name: The file.
        option: The option that names it.
        what: What its lines are, for messages.
    """
    from datamodules.sources.readers.formats import not_utf8, open_decompressed  # imports pyarrow

    try:
        if name == "-":
            raw = sys.stdin.buffer.read()
        else:
            with open_decompressed(Path(name)) as file:
                raw = file.read()
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
        return text.removesuffix("\n").split("\n") if text else []
    except OSError as error:
        raise UsageError(
            f"{option} {name} cannot be read ({error.strerror or error}): give a file of {what}"
        ) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{option} {name}, line {line}: {not_utf8(name)}") from error


def single_line(text: str) -> str:
    """A text with a space for tabs and line breaks, and none at its ends."""
    return BREAKS.sub(" ", text).strip(" ")


def format_output(text: str, finished: bool) -> str:
    """A text on one line, with a mark behind it if it was cut off."""
    return single_line(text) + ("" if finished else UNFINISHED)
