"""SIGTERM and SIGINT (Ctrl-C): training finishes its step and saves, all else stops at once."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
MESSAGES: dict[int, str] = {signal.SIGTERM: "terminated", signal.SIGINT: "error: interrupted"}


class Stopped(BaseException):
    """A signal ended the command; its exit code is 128 + `number`, its message may be empty."""

    def __init__(self, number: int, message: str = "terminated") -> None:
        super().__init__(message)
        self.number = number


class SignalHandler:
    """Handles SIGTERM and SIGINT as `mode` says.

    - "exit": end the process. Before and after a command's work there is nothing to clean up, and
      an exception during an import could leave half a module.
    - "raise": raise `Stopped` or `KeyboardInterrupt`, so that files and processes are cleaned up.
    - "defer": keep the first signal in `received` until training has finished its step; raise at
      the second one, except in processes of torchrun.
    """

    def __init__(self) -> None:
        self.mode: Literal["exit", "raise", "defer"] = "raise"
        self.received = 0  # the deferred signal
        self.raised = 0  # the signal that an exception was raised for
        self.process = os.getpid()
        self.launched: list[subprocess.Popen] = []  # the other processes of this run

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # a forked worker; at Ctrl-C its parent stops it
            if number != signal.SIGINT:
                os._exit(128 + number)
        elif self.mode != "defer" and self.is_launched():
            return  # the process that launched this one has the signal, too, and ends this one
        elif self.mode == "defer" and not self.received:
            self.received = number
        elif self.received and "TORCHELASTIC_RUN_ID" in os.environ:
            return  # torchrun repeats a signal that the terminal has sent to all of its processes
        elif self.mode == "exit":
            if os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, f"{MESSAGES[number]}\n".encode())
            os._exit(128 + number)
        else:
            self.raised = number
            self.end_launched()
            # torch's handler would raise, too, for data workers that the signal has ended
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            raise KeyboardInterrupt if number == signal.SIGINT else Stopped(number)

    def is_launched(self) -> bool:
        """Whether the main process of this run launched this one, and so ends it, too."""
        main = os.environ.get("TESSERA_MAIN", "")  # its process id
        return os.environ.get("LOCAL_RANK", "0") != "0" and main not in ("", str(self.process))

    def end_launched(self) -> None:
        """Kill the processes that this one launched, which wait for it.

        If they were left to notice that it is gone, torch would print stacks of C++.
        """
        for child in self.launched:
            child.kill()
        self.launched.clear()  # or Lightning would kill this process

    def install(self) -> None:
        """Handle signals until the end of this process; call it before any slow import."""
        self.mode = "exit"
        for number in STOP_SIGNALS:
            signal.signal(number, self)
        sys.unraisablehook = _repeat_if_ignored
        atexit.register(_ignore_signals)  # registered first, called last

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle signals in the `with` block; in other threads than the main one, do nothing."""
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self) for number in STOP_SIGNALS if in_main_thread}
        mode = self.mode
        self.process = os.getpid()
        self.raised = 0
        try:
            yield
        finally:
            self.mode = mode
            self.received = 0
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise at a signal in the `with` block, so that files and processes are cleaned up."""
        before = self.mode
        self.mode = "raise"
        try:
            yield
        finally:
            self.mode = before


@contextmanager
def blocked() -> Iterator[None]:
    """Block the signals in this thread, and until `unblock` in processes that it starts meanwhile.

    Python has no handlers yet while it starts: a signal would end such a process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock() -> None:
    """Let the signals through again."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _repeat_if_ignored(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception Python has ignored, as in `__del__` and at a fork."""
    if isinstance(unraisable.exc_value, (Stopped, KeyboardInterrupt)) and SIGNALS.raised:
        # later and from another thread: an exception raised here would be ignored, too
        threading.Timer(0.01, os.kill, (os.getpid(), SIGNALS.raised)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


SIGNALS = SignalHandler()  # of this process
