"""Shared by the benchmarks: workers in processes of their own, rounds interleaved A B A B, medians, peak memory."""

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Result:
    """What one worker measured: items per second in each round; its memory before the first and its peak, in MiB."""

    rates: list[float] = field(default_factory=list)
    idle: float = 0.0
    peak: float = 0.0

    @property
    def median(self) -> float:
        """Median of the rates."""
        return statistics.median(self.rates)

    @property
    def taken(self) -> float:
        """Memory that the rounds took, in MiB."""
        return self.peak - self.idle


def status_mib(field: str) -> float:
    """A size from this process's status: `VmRSS`, `VmHWM`, in MiB."""
    return int(Path("/proc/self/status").read_text().partition(field + ":")[2].split()[0]) / 1024


def memory_mib() -> tuple[float, float]:
    """Memory of this process now and its peak so far: the GPU's where it uses one, else what is resident."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20
    return status_mib("VmRSS"), status_mib(
        "VmHWM"
    )  # unlike `ru_maxrss`, VmHWM starts anew with each program


def serve(measure: Callable[[], float]) -> None:
    """A worker's loop: for each line on standard input, measures one round (items per second) and answers with it."""
    idle = memory_mib()[0]
    for line in sys.stdin:
        answer = (
            {"rate": measure()} if line.strip() == "go" else {"idle": idle, "peak": memory_mib()[1]}
        )
        print(json.dumps(answer), flush=True)


def arguments(doc: str, names: Iterable[str], rounds: int) -> ArgumentParser:
    """Options that all these benchmarks have.

    Args:
        doc: The benchmark's docstring.
        names: The competitors.
        rounds: Rounds of each, if not said otherwise.
    """
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="rounds of each, after one that does not count"
    )
    parser.add_argument("--worker", choices=list(names), help=SUPPRESS)
    return parser


def work(run: Callable[[], int]) -> None:
    """Serves as a worker that measures rounds, and ends; a round returns how many items it did."""

    def measure() -> float:
        start = time.perf_counter()
        return run() / (time.perf_counter() - start)

    serve(measure)
    raise SystemExit


def command_line(
    doc: str, competitors: Mapping[str, Callable[[], Callable[[], int]]], rounds: int
) -> Namespace:
    """Options of a benchmark's command line; a worker that `interleave` started serves here, and ends.

    Args:
        doc: The benchmark's docstring.
        competitors: Name to a function that makes a round, which returns how many items it did.
        rounds: Rounds of each, if not said otherwise.
    """
    options = arguments(doc, competitors, rounds).parse_args()
    if "TESSERA_DATA" in doc and "TESSERA_DATA" not in os.environ:
        raise SystemExit("TESSERA_DATA is not set: it names the folder of real data sets.")
    if options.worker:
        work(competitors[options.worker]())
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


def interleave(
    module: str, names: list[str], rounds: int = 10, threads: int = 2, options: Sequence[str] = ()
) -> dict[str, Result]:
    """Runs `python -m MODULE --worker NAME` for each name and measures in turns.

    Args:
        module: Full name of the benchmark's module.
        names: The competitors.
        rounds: Rounds of each, after one that does not count.
        threads: Threads of each worker; only one works at a time.
        options: More of each worker's command line.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    results = {name: Result() for name in names}
    workers = {
        name: subprocess.Popen(
            [sys.executable, "-m", module, *options, "--worker", name],
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
            answer = ask(worker, "memory")
            results[name].idle, results[name].peak = answer["idle"], answer["peak"]
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return results


def alone(module: str, name: str, rounds: int, options: Sequence[str]) -> list[dict[str, float]]:
    """What each round of `python -m MODULE --worker NAME`, which no other runs beside, said of itself in JSON."""
    command = [sys.executable, "-m", module, *options, "--rounds", str(rounds), "--worker", name]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@contextmanager
def save_plot(file: str, rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on, by row and column; the picture is written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns + 1, 3 * rows + 1), layout="constrained", squeeze=False
    )
    yield axes
    figure.savefig(file, dpi=100)


def table(results: dict[str, Result], unit: str, base: str) -> str:
    """The results as lines of text; ratios are of medians against `base`. Taken: peak less what was there before."""
    heads = (f"median {unit}", "lowest", "highest", "ratio", "peak MiB", "taken MiB")
    lines = ["{:<24}{:>18}{:>10}{:>10}{:>8}{:>10}{:>11}".format("", *heads)]
    for name, found in results.items():
        ratio, rates = found.median / results[base].median, found.rates
        lines.append(
            f"{name:<24}{found.median:>18.1f}{min(rates):>10.1f}{max(rates):>10.1f}{ratio:>8.2f}"
            f"{found.peak:>10.0f}{found.taken:>11.0f}"
        )
    return "\n".join(lines)
