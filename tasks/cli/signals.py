"""SIGTERM and SIGINT (Ctrl-C): in training they wait for the end of a step, elsewhere they stop at once."""

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TOGETHER = 2.0  # seconds
AGAIN, TIMES = 0.05, 400  # seconds until a moment is looked for again, and how often
STOPPING = (signal.SIGTERM, signal.SIGINT)
SAID: dict[int, str] = {signal.SIGTERM: "terminated", signal.SIGINT: "error: interrupted"}


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

    A process that is a command's own raises nothing before and after its work, when there is nothing to clean up: it
    ends where it is. Raised in the middle of an import, an exception could leave half a module, or end in C++.
    """

    def __init__(self) -> None:
        self.noted, self.waiting = 0, False
        self.since = 0.0  # when it was noted; infinite once that is done which it asked for
        self.raised = 0  # the signal that an exception was raised for
        self.raises = True
        self.own, self.ended = (
            False,
            False,
        )  # whether the process is a command's, and whether that is over
        self.process = os.getpid()
        self.later, self.times = 0, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if (
            os.getpid() != self.process
        ):  # a worker that was forked a moment ago: its parent stops it
            if number != signal.SIGINT:
                os._exit(128 + signal.SIGTERM)
        elif self.waiting and not self.noted:
            self.noted, self.since = number, time.monotonic()
        elif (
            self.noted
            and "TORCHELASTIC_RUN_ID" in os.environ
            and time.monotonic() - self.since < TOGETHER
        ):
            return
        elif not self.raises:
            if not self.ended and os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, f"{SAID[number]}\n".encode())
            os._exit(128 + number)
        elif fragile(frame) and self.times < TIMES and hasattr(signal, "setitimer"):
            self.later, self.times = number, self.times + 1
            signal.signal(signal.SIGALRM, lambda _, frame: self(self.later, frame))
            signal.setitimer(signal.ITIMER_REAL, AGAIN)
        else:
            self.raised = number
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    def own_process(self) -> None:
        """Handle signals to the end of this process, which is a command's; to be called before any slow import."""
        self.own, self.raises = True, False
        for number in STOPPING:
            signal.signal(number, self)
        atexit.register(ignore)  # the first to be registered is the last to be called

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals inside, as only the main thread of a process can; nothing of a command comes after it."""
        alone = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self) for number in STOPPING if alone}
        self.process, self.raised, self.raises, self.times = os.getpid(), 0, not self.own, 0
        try:
            yield
        finally:
            self.noted, self.waiting, self.ended = 0, False, True
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Inside, a signal raises, so that files and processes are cleaned up."""
        before, self.raises = self.raises, True
        try:
            yield
        finally:
            self.raises = before


def fragile(frame: FrameType | None) -> bool:
    """Whether an exception must not be raised here: in an import, or where Python would drop it."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" or code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def ignore() -> None:
    """Let the interpreter, which has nothing more to run, end with the exit code that it has."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


SIGNALS = Signals()  # of this process
