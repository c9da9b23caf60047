"""Training throughput against the number of CPU processes that share the cores evenly.

    python -m tests.benchmarks.processes [--cores N]

`fit` of the language model (4 layers, 128 wide, 128 tokens) on Python's reference, 32 windows a
step whatever the number of processes; `--trainer.strategy ddp` on gloo if there are several, each
with an equal part of the cores as threads. Whole runs in turns; a run's rate is the median of those
that it logs but the first. Ratios are against one process with all cores. "1 x 1" is one process on
one core.
"""

import os

from tests.benchmarks import _compare

TOKENS = "train/tokens_per_s"
WINDOWS = 32  # in a step of all processes
FIT = (
    "tasks.lm fit --trainer.accelerator cpu --trainer.max_steps {} --trainer.log_every_n_steps 5"
    " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0 --data.max_length 128"
    " --model.samples.every null --data.tokenizer.vocabulary 2000 --model.net.stack.width 128"
    " --model.net.stack.depth 4 --model.net.stack.heads 4"
)


def rate(processes: int, threads: int, steps: int) -> float:
    """Tokens per second of one run."""
    line = FIT.format(steps)
    line += f" --trainer.devices {processes} --data.batch_size {WINDOWS // processes}"
    if processes > 1:
        line += " --trainer.strategy ddp"
    found = _compare.fit_medians(line, [TOKENS], OMP_NUM_THREADS=str(threads))
    return found[TOKENS]


def main() -> None:
    """Prints the table."""
    parser = _compare.arguments(__doc__, 3)
    all_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--cores", type=int, default=all_cores, help="cores to share")
    parser.add_argument("--steps", type=int, default=30, help="training steps of a run")
    options = parser.parse_args()
    counts = [count for count in range(1, options.cores + 1) if options.cores % count == 0]
    ways = [f"{count} x {options.cores // count}" for count in counts]
    results = {name: _compare.Result() for name in [*ways, "1 x 1"]}
    for _ in range(max(1, options.rounds)):
        for name, result in results.items():
            processes, threads = map(int, name.split(" x "))
            result.rounds.append({"rate": rate(processes, threads, options.steps)})
    print("processes x threads")
    print(_compare.table(results, "tokens/s"))


if __name__ == "__main__":
    main()
