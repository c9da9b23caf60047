"""Start-up time of each command and of each task to its first step, beside the imports that they must beat.

    python -m tests.benchmarks.startup [--rounds 5] [--plot FILE.png]

Whole processes, in turns; the ratio is that of the medians, against the import that bounds it. "First step" is all of
`fit` with one batch for each of training, validation and test; tokenizers are trained in the round that does not count.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from tests.benchmarks._compare import ROOT, save_plot

TASK = [sys.executable, "-m", "tasks.vit"]
COMMANDS = {  # name: (command, what it is measured against, largest ratio wanted)
    "import torch": ([sys.executable, "-c", "import torch"], "import torch", None),
    "--help": ([*TASK, "--help"], "import torch", 0.5),
    "--version": ([*TASK, "--version"], "import torch", 0.5),
    "unknown command": ([*TASK, "fti"], "import torch", 0.5),
    "import pytorch_lightning": (
        [sys.executable, "-c", "import pytorch_lightning"],
        "import pytorch_lightning",
        None,
    ),
    "fit --help": ([*TASK, "fit", "--help"], "import pytorch_lightning", 1.2),
} | {
    f"{task}: fit, first step": (
        [sys.executable, "-m", f"tasks.{task}", "fit", "--trainer.fast_dev_run", "1"],
        "import pytorch_lightning",
        1.5 if task == "vit" else None,
    )
    for task in ("vit", "bert", "mlm", "lm", "seq2seq")
}


def seconds(command: list[str], folder: str) -> float:
    """Wall-clock seconds of one process that runs in `folder`; an error where it fails."""
    start = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TESSERA_CACHE": folder}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != (2 if "fti" in command else 0):
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-500:]}")
    return time.perf_counter() - start


def main() -> None:
    """Parses the command line and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each command, after one that does not count"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    options = parser.parse_args()
    rounds = options.rounds
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, (command, _, _) in COMMANDS.items():
                taken = seconds(command, folder)
                if number:
                    times[name].append(taken)
    print(f"{'':<26}{'median s':>10}{'lowest':>8}{'highest':>9}{'ratio':>8}  at most, of")
    for name, (_, base, bound) in COMMANDS.items():
        middle = statistics.median(times[name])
        ratio = middle / statistics.median(times[base])
        goal = f"{bound}, {base}" if bound else ""
        print(
            f"{name:<26}{middle:>10.2f}{min(times[name]):>8.2f}{max(times[name]):>9.2f}{ratio:>8.2f}  {goal}"
        )
    if options.plot:
        with save_plot(options.plot) as ((axes,),):
            axes.barh(
                list(times)[::-1], [statistics.median(found) for found in times.values()][::-1]
            )
            axes.set(xlabel="seconds")


if __name__ == "__main__":
    main()
