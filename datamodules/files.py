"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write in its stead: it takes its place at the end, or vanishes where writing fails.

    Raises:
        OSError: the folder is missing or cannot be written; what was at `path` stays.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
