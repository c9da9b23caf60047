"""Lines that a command reads from a file or from standard input, and those that it prints."""

import sys

from datamodules.files import read_bytes
from tasks.errors import UsageError

UNFINISHED = " [...]"  # behind a text that was not at its end


def read_lines(name: str, option: str, what: str) -> list[str]:
    """The lines of a text in UTF-8.

    Args:
        name: Of a file; - is standard input.
        option: Which named it.
        what: What its lines are.

    Raises:
        UsageError: The file does not exist, or is not UTF-8.
    """
    try:
        raw = sys.stdin.buffer.read() if name == "-" else read_bytes(name)
        return raw.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n") if raw else []
    except OSError as error:
        raise UsageError(f"{option} {name} cannot be read ({error.strerror}): give a file of {what}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{option} {name} holds bytes that are not UTF-8 in line {line}") from error


def flat(text: str) -> str:
    """A text without tabs and line breaks."""
    return " ".join(text.split())


def printed(text: str, finished: bool) -> str:
    """A text on one line, with a mark behind it if it was not at its end."""
    return flat(text) + ("" if finished else UNFINISHED)
