"""A progress bar for what takes seconds before a run begins."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str, total: int, least: int = 20_000) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line; nothing if `total` is below `least`.

    Yields:
        The function that advances it by a count.
    """
    if total < least or not sys.stderr.isatty():
        if total >= least:
            print(f"{title} ({total:,})", file=sys.stderr, flush=True)
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
