"""Time and size of checkpoints against the number of parameters.

    python -m tests.benchmarks.checkpoints [--largest 10M]

Weights in float32 with AdamW's two moments of each (12 bytes a parameter), in matrices of
1024 x 1024. They are saved as `fit` does it (beside the target, synced, renamed) into a temporary
folder (`TMPDIR`), and read as `fit --resume` does it, each size in a process of its own. What was
just written is read from the system's cache. Taken: how much the first save raised the peak.
"""

import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round, status_mib

SIZES = {"1M": 1, "3M": 3, "10M": 10, "30M": 30, "100M": 100}  # million parameters
SIDE = 1024


def checkpoint(millions: int) -> dict:
    """A checkpoint with so many million parameters."""
    from tasks.checkpoints.reading import KEY, VERSION

    names = [f"net.{number}" for number in range(millions * 10**6 // SIDE**2 + 1)]
    weights = {name: torch.randn(SIDE, SIDE) for name in names}
    moments = {
        name: {"exp_avg": torch.randn(SIDE, SIDE), "exp_avg_sq": torch.rand(SIDE, SIDE)}
        for name in names
    }
    entry = {"task": "mine", "version": VERSION, "metadata": {}, "net": {}}
    entry["config"] = {"model": {}, "data": {}}
    return {"state_dict": weights, "optimizer_states": [{"state": moments}], KEY: entry}


def saving(options: Namespace) -> Round:
    """Rounds of saving a checkpoint and reading it: seconds of both, bytes of the file, memory."""
    from tasks.checkpoints.reading import read_checkpoint
    from tasks.checkpoints.writing import AtomicCheckpointIO

    whole = checkpoint(SIZES[options.worker])
    folder = tempfile.TemporaryDirectory(dir=options.folder)
    path = Path(folder.name, "last.ckpt")
    writer = AtomicCheckpointIO()
    first_taken: list[float] = []

    def run() -> dict[str, float]:
        before = status_mib("VmHWM")
        start = time.perf_counter()
        writer.save_checkpoint(whole, path)
        saved = time.perf_counter()
        first_taken.append(status_mib("VmHWM") - before)
        read_checkpoint(path, "mine")
        return {
            "parameters": len(whole["state_dict"]) * SIDE**2,
            "save": saved - start,
            "load": time.perf_counter() - saved,
            "bytes": path.stat().st_size,
            "taken": first_taken[0],
        }

    return run


def main() -> None:
    """Parses the command line and prints the table."""
    parser = _compare.arguments(__doc__, 5)
    parser.add_argument("--largest", choices=SIZES, default="100M", help="leave out larger sizes")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = _compare.parse(parser, dict.fromkeys(SIZES, saving))
    print(_compare.machine(), flush=True)
    heads = ("", "save s", "load s", "MiB", "save MiB/s", "load MiB/s", "bytes each", "taken MiB")
    print("{:<8}{:>9}{:>9}{:>9}{:>12}{:>12}{:>12}{:>11}".format(*heads))
    for name in list(SIZES)[: list(SIZES).index(options.largest) + 1]:
        found = _compare.interleave([name], options.rounds)[name].rounds
        row = {key: statistics.median(one[key] for one in found) for key in found[0]}
        mib = row["bytes"] / 2**20
        print(
            f"{name:<8}{row['save']:>9.3f}{row['load']:>9.3f}{mib:>9.1f}"
            f"{mib / row['save']:>12.0f}{mib / row['load']:>12.0f}"
            f"{row['bytes'] / row['parameters']:>12.2f}{row['taken']:>11.0f}"
        )


if __name__ == "__main__":
    main()
