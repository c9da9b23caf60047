"""Start-up time of each command, and of each task to its first step, beside imports.

    python -m tests.benchmarks.startup [--rounds 5]

Whole processes, in turns; the ratio is that of the medians, against the import that bounds it.
"First step" is all of `fit` with one batch each for training, validation and test; tokenizers are
trained in the round that does not count.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

from tests.benchmarks import _compare

TORCH = "import torch"
LIGHTNING = "import pytorch_lightning"
COMMANDS = {  # name: (arguments of Python, what it is measured against, largest ratio wanted)
    TORCH: (["-c", TORCH], TORCH, None),
    "--help": (["-m", "tasks.vit", "--help"], TORCH, 0.5),
    "--version": (["-m", "tasks.vit", "--version"], TORCH, 0.5),
    "unknown command": (["-m", "tasks.vit", "fti"], TORCH, 0.5),
    LIGHTNING: (["-c", LIGHTNING], LIGHTNING, None),
    "fit --help": (["-m", "tasks.vit", "fit", "--help"], LIGHTNING, 1.2),
}
for task in ("vit", "bert", "mlm", "lm", "seq2seq"):
    arguments = ["-m", f"tasks.{task}", "fit", "--trainer.fast_dev_run", "1"]
    COMMANDS[f"{task}: fit, first step"] = (arguments, LIGHTNING, 1.5 if task == "vit" else None)


def seconds(arguments: list[str], folder: str) -> float:
    """Wall-clock seconds of a process of Python that runs in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(_compare.ROOT), "TESSERA_CACHE": folder}
    command = [sys.executable, *arguments]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != (2 if "fti" in arguments else 0):
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start


def main() -> None:
    """Prints the table."""
    options = _compare.arguments(__doc__, 5).parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds + 1):
            for name, (arguments, _, _) in COMMANDS.items():
                taken = seconds(arguments, folder)
                if number or not options.rounds:
                    times[name].append(taken)
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(_compare.machine(), flush=True)
    print(f"{'':<26}{'median s':>10}{'lowest':>8}{'highest':>9}{'ratio':>8}  at most, of")
    for name, (_, base, bound) in COMMANDS.items():
        goal = f"{bound}, {base}" if bound else ""
        print(
            f"{name:<26}{medians[name]:>10.2f}{min(times[name]):>8.2f}{max(times[name]):>9.2f}"
            f"{medians[name] / medians[base]:>8.2f}  {goal}"
        )


if __name__ == "__main__":
    main()
