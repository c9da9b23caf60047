"""A progress bar for what takes seconds before a run begins."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_EVERY = 30.0  # seconds, without a terminal


@contextmanager
def progress_bar(title: str, total: int, least: int = 20_000) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, else a line now and then; nothing if `total` is below `least`.

    Yields:
        The function that advances it by a count.
    """
    if total < least:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        print(f"{title} ({total:,})", file=sys.stderr, flush=True)
        yield line_printer(title, total)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def line_printer(title: str, total: int) -> Callable[[int], None]:
    """A function that adds a count, and prints a line if the last one is `LINE_EVERY` old."""
    done = 0
    printed_at = time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, printed_at
        done += count
        if time.monotonic() - printed_at >= LINE_EVERY:
            printed_at = time.monotonic()
            print(f"{title}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return advance
