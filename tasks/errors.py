"""The one place that prints errors: one line on stderr and an exit code, a traceback only on request."""

import difflib
import re
import signal
import sys
from collections.abc import Callable, Iterable

from datamodules.errors import DataError, UsageError

__all__ = ["DataError", "RunError", "UsageError", "guarded", "nearest"]


class RunError(RuntimeError):
    """What was asked for is sound but failed while it ran: a loss that became NaN, a full disk. Exit code 1."""


def guarded(run: Callable[[], object], debug: bool) -> int:
    """Call `run` and turn what it raises into an exit code.

    Args:
        run: what to do, without arguments.
        debug: let exceptions through, with their traceback.

    Returns:
        0 done, 1 it failed, 2 the user asked for something wrong, 130 interrupted, 143 terminated.
    """
    if debug:
        run()
        return 0
    try:
        run()
    except UsageError as error:
        return _say(str(error), 2)
    except (DataError, RunError) as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted", 128 + signal.SIGINT)
    except SystemExit as stop:
        if type(stop).__name__ == "SIGTERMException":  # Lightning's, which would exit with 0
            return _say("terminated", 128 + signal.SIGTERM)
        raise
    except Exception as error:
        return _say(f"{type(error).__name__}: {error} (add --debug for the traceback)", 1)
    return 0


def nearest(word: str, known: Iterable[str], what: str) -> str:
    """A sentence that refuses `word` and suggests the nearest of the known ones.

    >>> nearest("fti", ["fit", "test"], "command")
    "unknown command 'fti': did you mean 'fit'? Known: fit, test"
    """
    known = list(known)
    close = difflib.get_close_matches(word, known, 1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"unknown {what} '{word}': {hint}Known: {', '.join(known)}"


def _say(message: str, code: int) -> int:
    one_line = re.sub(r"\s*\n\s*", " ", message.strip())
    sys.stdout.flush()
    print(f"error: {one_line}", file=sys.stderr)
    return code
