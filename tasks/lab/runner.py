"""Runs the processes of a laboratory, and resumes what an earlier one has left unfinished."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from datamodules.utils.cores import usable_cores
from datamodules.utils.files import DISK_FULL
from tasks.cli.signals import Stopped
from tasks.errors import TOO_LONG, RunError
from tasks.lab.plan import Run
from tasks.lab.state import (
    error_of,
    failure_file,
    forget_failures,
    is_evaluated,
    is_finished,
    is_same,
    is_trained,
    log_file,
    next_command,
    refusal_file,
    run_folder,
    save_command,
)
from tasks.tracking.csv_files import last_row
from tasks.tracking.progress import SECONDS_BETWEEN_LINES, duration

GRACE_SECONDS = 60.0  # for a run to finish its step and save
POLL_SECONDS = 0.2
START_WEIGHT = 0.1  # of a process's start in the estimate of time; the longest training has 1
DISK_FULL_TEXTS = tuple(os.strerror(number) for number in DISK_FULL)
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).parents[2]  # of the packages


@dataclass
class Job:
    """A process that works on a run.

    Args:
        run: Which one.
        evaluation: Name of its evaluation; empty while it trains.
        process: Which writes to the run's log.
        log_start: Bytes that the log had before.
    """

    run: Run
    evaluation: str
    process: subprocess.Popen[bytes]
    log_start: int


def end_with_parent() -> None:
    """Has Linux end this process if the laboratory is killed; called before it is started."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Runner:
    """Runs processes, at most `jobs` at once.

    Args:
        title: Of the laboratory, which groups the runs in W&B.
        folder: Where the runs are kept, which this process has locked.
        jobs: Processes at once; each has an equal part of the cores as threads.
        resume_command: For messages.
    """

    def __init__(self, title: str, folder: Path, jobs: int, resume_command: str) -> None:
        self.folder = folder
        self.max_jobs = jobs
        self.resume_command = resume_command
        # The same packages as here, also in a folder with packages of the same names.
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        self.environment["WANDB_RUN_GROUP"] = title
        if jobs > 1:
            self.environment["OMP_NUM_THREADS"] = str(max(1, usable_cores() // jobs))
        self.runs: list[Run] = []
        self.jobs: list[Job] = []
        self.started = 0.0
        self.printed = 0.0
        self.work_before = 0.0  # of earlier processes

    def run(self, runs: list[Run]) -> None:
        """Runs what is not finished; a run that fails does not end the others.

        What failed in an earlier process is tried again.

        Raises:
            Stopped: SIGINT or SIGTERM; the runs have saved, and the message says how to resume.
            RunError: The disk is full.
        """
        self.runs = runs
        for run in runs:
            forget_failures(self.folder, run)
        waiting = deque(run for run in runs if not is_finished(self.folder, run))
        if len(waiting) < len(runs):
            print(f"{self.counts()} already", flush=True)
            self.printed = time.monotonic()
        self.work_before = self.work_done()
        self.started = time.monotonic()
        try:
            while waiting or self.jobs:
                while waiting and len(self.jobs) < self.max_jobs:
                    self.start(waiting.popleft())
                time.sleep(POLL_SECONDS)
                for job in [one for one in self.jobs if one.process.poll() is not None]:
                    self.jobs.remove(job)
                    self.finish(job)
                    if next_command(self.folder, job.run) is not None:
                        waiting.appendleft(job.run)
                if time.monotonic() - self.printed >= SECONDS_BETWEEN_LINES:
                    self.print_progress()
        except (KeyboardInterrupt, Stopped) as stop:
            self.stop()
            signal_number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
            message = f"stopped: {self.counts()}; to resume: {self.resume_command}"
            raise Stopped(signal_number, message) from None
        finally:
            for job in self.jobs:
                job.process.kill()
                job.process.wait()

    def start(self, run: Run) -> None:
        """Starts the process of what is next for a run."""
        command = next_command(self.folder, run)
        assert command is not None
        evaluation, arguments = command
        target = run_folder(self.folder, run)
        if arguments == run.arguments and target.exists():
            if not is_same(self.folder, run):
                print(f"{run.name} was started with other options: it starts anew", flush=True)
            shutil.rmtree(target)
        # First, or after a kill in between the old result would count for the new command.
        if evaluation:
            shutil.rmtree(target / f"test_{evaluation}", ignore_errors=True)
            refusal_file(self.folder, run, evaluation).unlink(missing_ok=True)
        if "--resume" not in arguments:
            save_command(self.folder, run, evaluation)
        with open(log_file(self.folder, run), "ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", f"tasks.{run.task}", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, "WANDB_NAME": run.name},
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on
                preexec_fn=end_with_parent,
            )
        self.jobs.append(Job(run, evaluation, process, log_start))

    def finish(self, job: Job) -> None:
        """Reports what an ended process has done; a full disk ends the laboratory."""
        run = job.run
        if job.process.returncode == 0 and self.has_result(job):
            if is_finished(self.folder, run):
                self.print_progress(f"finished {run.name}")
            return
        message = self.error_message(job)
        if any(text in message for text in DISK_FULL_TEXTS):
            raise RunError(
                f"no room is left in {self.folder}: make room; {self.counts()}, and are kept; to "
                f"resume: {self.resume_command}"
            )
        is_refused = job.evaluation and TOO_LONG in message
        file_of = refusal_file if is_refused else failure_file
        file_of(self.folder, run, job.evaluation).write_text(message + "\n")
        what = f"the test {job.evaluation} of {run.name}" if job.evaluation else run.name
        self.print_progress(f"{what} {'was refused' if is_refused else 'failed'}: {message}")

    def has_result(self, job: Job) -> bool:
        if job.evaluation:
            return is_evaluated(self.folder, job.run, job.evaluation)
        return is_trained(self.folder, job.run)

    def error_message(self, job: Job) -> str:
        """The last error in what a failed process wrote, or else its last line."""
        code = job.process.returncode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        written = log_file(self.folder, job.run).read_bytes()[job.log_start :]
        lines = [line for line in written.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        last = [*lines, *errors][-1:] or [f"ended with exit code {code}"]
        return last[0].removeprefix("error: ")

    def stop(self) -> None:
        """Lets all processes save and end; a second signal kills them."""
        with suppress(KeyboardInterrupt, Stopped):
            for job in self.jobs:
                job.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
            while any(job.process.poll() is None for job in self.jobs):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)

    # Progress -------------------------------------------------------------------------------------

    def counts(self) -> str:
        finished = sum(is_finished(self.folder, run) for run in self.runs)
        return f"{finished} of {len(self.runs)} runs are finished"

    def has_failed(self, run: Run) -> bool:
        return error_of(self.folder, run) != ""

    def fraction(self, run: Run) -> float:
        """How much of a run's training is done."""
        if is_trained(self.folder, run) or self.has_failed(run):
            return 1.0
        if run.steps is None:
            return 0.0
        row = last_row(run_folder(self.folder, run) / "metrics.csv")
        return min(1.0, float(row.get("step") or 0) / run.steps)

    def weight(self, run: Run) -> float:
        """A run's part of the work: its FLOPs relative to the longest run, and its start."""
        if run.steps is None:  # the time ends it
            return START_WEIGHT + 1.0
        most = max((one.steps or 0) * one.step_flops for one in self.runs)
        return START_WEIGHT + run.steps * run.step_flops / max(most, 1.0)

    def work_done(self) -> float:
        return sum(self.weight(run) * self.fraction(run) for run in self.runs)

    def print_progress(self, event: str = "") -> None:
        """A line on what is done, with an estimate of the time that is left."""
        self.printed = time.monotonic()
        done = self.work_done()
        new = done - self.work_before
        total = sum(map(self.weight, self.runs))
        parts = [event] if event else []
        parts.append(self.counts())
        failed = sum(map(self.has_failed, self.runs))
        if failed:
            parts.append(f"{failed} failed")
        if new > 0 and done < total:
            seconds = (time.monotonic() - self.started) * (total - done) / new
            parts.append(f"about {duration(seconds)} left")
        print(*parts, sep="; ", flush=True)
