"""Training throughput against the number of CPU processes that share the cores fairly.

    python -m tests.benchmarks.processes [--cores N] [--plot FILE.png]

`fit` of the language model (4 layers, 128 wide, 128 tokens) on Python's reference, 32 windows a step whatever the
number of processes; `--trainer.strategy ddp` on gloo where there are several, each with its share of the cores as
threads. Whole runs in turns; a run's rate is the median of those it logs but the first. Efficiency: rate beside one
process with all cores. "1 x 1" is one process on one core.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks._compare import ROOT, save_plot

WINDOWS, STEPS, EVERY = 32, 30, 5
LINE = (
    f"-m tasks.lm fit --trainer.accelerator cpu --trainer.max_steps {STEPS} --trainer.log_every_n_steps {EVERY} "
    "--trainer.limit_val_batches 0 --trainer.limit_test_batches 0 --data.max_length 128 --model.samples.every null "
    "--data.tokenizer.vocabulary 2000 --model.net.stack.width 128 --model.net.stack.depth 4 --model.net.stack.heads 4"
)


def shares(cores: int) -> dict[str, tuple[int, int]]:
    """Processes and threads of each by name: all ways to share the cores out evenly, and one core alone."""
    even = [(count, cores // count) for count in range(1, cores + 1) if cores % count == 0]
    found = [*even, (1, 1)] if cores > 1 else even
    return {f"{processes} x {threads}": (processes, threads) for processes, threads in found}


def rate(processes: int, threads: int, folder: str) -> float:
    """Tokens per second of one run."""
    line = f"{LINE} --trainer.devices {processes} --data.batch_size {WINDOWS // processes} --run_dir {folder}/run"
    strategy = ["--trainer.strategy", "ddp"] if processes > 1 else []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    environment.pop("TESSERA_RUN_DIR", None)
    done = subprocess.run(
        [sys.executable, *line.split(), *strategy],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr[-500:]}")
    with open(Path(folder, "run", "metrics.csv"), newline="") as file:
        rates = [
            float(row["train/tokens_per_s"])
            for row in csv.DictReader(file)
            if row.get("train/tokens_per_s")
        ]
    return statistics.median(rates[1:])


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument(
        "--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores to share out"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    options = parser.parse_args()
    ways = shares(options.cores)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                rates[name].append(rate(*way, folder))
    base = statistics.median(rates[f"1 x {options.cores}"])
    print(
        f"{'processes x threads':<22}{'median tokens/s':>17}{'lowest':>10}{'highest':>10}{'efficiency':>12}"
    )
    for name, found in rates.items():
        middle = statistics.median(found)
        print(
            f"{name:<22}{middle:>17.1f}{min(found):>10.1f}{max(found):>10.1f}{middle / base:>12.2f}"
        )
    if options.plot:
        shared = {name: way for name, way in ways.items() if way[0] * way[1] == options.cores}
        with save_plot(options.plot) as ((axes,),):
            axes.plot(
                [way[0] for way in shared.values()],
                [statistics.median(rates[name]) for name in shared],
                "o-",
            )
            axes.set(
                xlabel=f"processes that share {options.cores} cores",
                ylabel="tokens/s",
                ylim=(0, None),
            )


if __name__ == "__main__":
    main()
