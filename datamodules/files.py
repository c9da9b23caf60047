"""Files: only regular ones are read, and what is written is whole or not there at all."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

STALE = 3600  # seconds: what nobody wrote to for so long was left by a process that was killed


def open_regular(path: str | os.PathLike, follow: bool = True) -> BinaryIO:
    """Opens a regular file to read bytes; never waits for a pipe, and never reads a device.

    Args:
        path: The file.
        follow: Whether the file may be a symbolic link.

    Raises:
        OSError: It is missing, cannot be read, is a link that is not to be followed, or no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = "Is a directory" if stat.S_ISDIR(mode) else "Not a regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, kind, str(path))
    return os.fdopen(number, "rb")


def read_bytes(path: str | os.PathLike, follow: bool = True) -> bytes:
    """The content of a regular file; see `open_regular`."""
    with open_regular(path, follow) as file:
        return file.read()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write in its stead: it takes its place at the end, or vanishes where writing fails.

    A symbolic link at `path` is replaced, not followed. Files that were left beside it by processes that were killed
    are removed.

    Raises:
        OSError: the folder is missing or cannot be written; what was at `path` stays. It names `path`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # another process may be quicker
        for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):
            if left == partial or time.time() - left.lstat().st_mtime > STALE:
                left.unlink()
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        if error.filename is not None and Path(os.fsdecode(error.filename)) == partial:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        with suppress(OSError):  # gone, or its name was refused
            partial.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all; names of files that are not UTF-8 keep their bytes."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="surrogateescape")
