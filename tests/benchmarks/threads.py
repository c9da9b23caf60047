"""Training steps alone and beside other jobs, by how long waiting threads spin.

    python -m tests.benchmarks.threads [--tasks vit,lm] [--jobs 0,1,3]

Whole runs of the default `fit` of each task, cut to some steps, in turns; a run's rate is the
median of the samples/s that it logs, without the first. "default" is what the commands choose,
"spin" is what OpenMP does by itself, "sleep" does not spin at all. The other jobs multiply matrices
with two threads each, without end. All use the same two cores. Ratios are against the first row.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.benchmarks import _compare

RATE = "train/samples_per_s"
FIT = (
    "fit --trainer.max_steps {steps} --trainer.log_every_n_steps {every} --trainer.max_epochs -1"
    " --trainer.limit_val_batches 0 --trainer.limit_test_batches 0 --trainer.enable_progress_bar"
    " false"
)
POLICIES = {  # how threads wait
    "default": {},
    "spin": {"GOMP_SPINCOUNT": "300000"},
    "sleep": {"GOMP_SPINCOUNT": "0"},
}
JOB = "import torch; torch.set_num_threads(2); a = torch.randn(512, 512)\nwhile True: a @ a"


@contextmanager
def others(count: int) -> Iterator[None]:
    """Runs other jobs meanwhile."""
    jobs = [subprocess.Popen([sys.executable, "-c", JOB]) for _ in range(count)]
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def main() -> None:
    """Prints a table for each task."""
    parser = _compare.arguments(__doc__, 3)
    parser.add_argument("--tasks", default="vit,bert,lm,mlm,seq2seq")
    parser.add_argument("--jobs", default="0,1,3", help="numbers of other jobs")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    os.environ.pop("OMP_WAIT_POLICY", None)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    line = FIT.format(steps=options.steps, every=max(1, options.steps // 8))
    for task in options.tasks.split(","):
        results = {
            (int(count), policy): _compare.Result()
            for count in options.jobs.split(",")
            for policy in POLICIES
        }
        for _ in range(max(1, options.rounds)):
            for (count, policy), result in results.items():
                with others(count):
                    found = _compare.fit_medians(f"tasks.{task} {line}", [RATE], **POLICIES[policy])
                result.rounds.append({"rate": found[RATE]})
        named = {f"{count} other jobs, {policy}": one for (count, policy), one in results.items()}
        print(f"\n{task}\n{_compare.table(named, 'samples/s')}", flush=True)


if __name__ == "__main__":
    main()
