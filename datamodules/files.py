"""Files that are written whole or not at all."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

STALE = 3600  # seconds: what nobody wrote to for so long was left by a process that was killed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write in its stead: it takes its place at the end, or vanishes where writing fails.

    Those that were left beside it by processes that were killed are removed.

    Raises:
        OSError: the folder is missing or cannot be written; what was at `path` stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # another process may be quicker
        for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
