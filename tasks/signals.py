"""SIGTERM and SIGINT (Ctrl-C): in training they wait for the end of a step, elsewhere they stop at once."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TOGETHER = 2.0  # seconds


class Stopped(BaseException):
    """A signal ended the command.

    Args:
        number: of the signal; the exit code is 128 more.
        message: for the user; empty where another process says it.
    """

    def __init__(self, number: int, message: str = "terminated") -> None:
        super().__init__(message)
        self.number = number


class Signals:
    """Raises `Stopped`, or `KeyboardInterrupt`, where a signal arrives.

    While `waiting` is set the first signal is only `noted`, for the one who set it to stop in good time; a second one
    stops at once, but for those of torchrun: one that it passes on after a terminal has sent it to all, and one that it
    sends to processes which are slower to stop than another.
    """

    def __init__(self) -> None:
        self.noted, self.waiting = 0, False
        self.since = 0.0  # when it was noted; infinite once that is done which it asked for

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.waiting and not self.noted:
            self.noted, self.since = number, time.monotonic()
        elif self.noted and "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self.since < TOGETHER:
            return
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Stopped(number)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside, as only the main thread of a process can."""
        alone = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self) for number in (signal.SIGTERM, signal.SIGINT) if alone}
        try:
            yield
        finally:
            self.noted, self.waiting = 0, False
            for number, handler in before.items():
                signal.signal(number, handler)


SIGNALS = Signals()  # of this process
