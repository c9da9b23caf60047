"""Shared by the benchmarks: workers in processes of their own, rounds interleaved A B A B, medians, peak memory."""

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Result:
    """What one worker measured: items per second in each round, and its peak memory in MiB (VmHWM)."""

    rates: list[float] = field(default_factory=list)
    peak: float = 0.0

    @property
    def median(self) -> float:
        """Median of the rates."""
        return statistics.median(self.rates)


def peak_mib() -> float:
    """Largest resident memory of this process so far; unlike `ru_maxrss` it starts anew with each program."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def serve(measure: Callable[[], float]) -> None:
    """A worker's loop: for each line on standard input, measures one round (items per second) and answers with it."""
    for line in sys.stdin:
        answer = {"rate": measure()} if line.strip() == "go" else {"peak": peak_mib()}
        print(json.dumps(answer), flush=True)


def command_line(doc: str, competitors: Mapping[str, Callable[[], Callable[[], int]]], rounds: int) -> Namespace:
    """Options of a benchmark's command line; a worker that `interleave` started serves here, and ends.

    Args:
        doc: The benchmark's docstring.
        competitors: Name to a function that makes a round, which returns how many items it did.
        rounds: Rounds of each, if not said otherwise.
    """
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each, after one that does not count")
    parser.add_argument("--profile", action="store_true", help=SUPPRESS)
    parser.add_argument("--worker", choices=competitors, help=SUPPRESS)
    options = parser.parse_args()
    if "TESSERA_DATA" in doc and "TESSERA_DATA" not in os.environ:
        raise SystemExit("TESSERA_DATA is not set: it names the folder of real data sets.")
    if options.worker:
        run = competitors[options.worker]()

        def measure() -> float:
            start = time.perf_counter()
            return run() / (time.perf_counter() - start)

        serve(measure)
        raise SystemExit
    return options


def ask(worker: subprocess.Popen[str], line: str) -> dict[str, float]:
    """Sends a line to a worker and returns its answer, skipping whatever else it prints."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    for answer in worker.stdout:
        if answer.startswith("{"):
            return dict(json.loads(answer))
    raise RuntimeError("A worker ended without an answer; run it alone to see why.")


def interleave(module: str, names: list[str], rounds: int = 10, threads: int = 2) -> dict[str, Result]:
    """Runs `python -m MODULE --worker NAME` for each name and measures in turns.

    Args:
        module: Full name of the benchmark's module.
        names: The competitors.
        rounds: Rounds of each, after one that does not count.
        threads: Threads of each worker; only one works at a time.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    results = {name: Result() for name in names}
    workers = {
        name: subprocess.Popen(
            [sys.executable, "-m", module, "--worker", name],
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for name in names
    }
    try:
        for number in range(rounds + 1):
            for name, worker in workers.items():
                rate = ask(worker, "go")["rate"]
                if number:
                    results[name].rates.append(rate)
        for name, worker in workers.items():
            results[name].peak = ask(worker, "peak")["peak"]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return results


def table(results: dict[str, Result], unit: str, base: str) -> str:
    """The results as lines of text; ratios are of medians against `base`."""
    lines = [f"{'':<24}{'median ' + unit:>18}{'lowest':>10}{'highest':>10}{'ratio':>8}{'peak MiB':>10}"]
    for name, result in results.items():
        ratio = result.median / results[base].median
        low, high = min(result.rates), max(result.rates)
        lines.append(f"{name:<24}{result.median:>18.1f}{low:>10.1f}{high:>10.1f}{ratio:>8.2f}{result.peak:>10.0f}")
    return "\n".join(lines)
