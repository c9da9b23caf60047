"""Time and size of checkpoints against parameters: `python -m tests.benchmarks.checkpoints [--plot FILE.png]`.

Weights in float32 with AdamW's two means of each (12 bytes a parameter), in matrices of 1024 x 1024; saved as `fit`
does it (beside the target, synced, renamed) into a temporary folder (`TMPDIR`), and read as `fit --resume` does it; in
turns, each size in a process of its own. What was just written is read from the system's cache. Taken: how much the
first save raised the peak.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks._compare import alone, arguments, save_plot, status_mib

SIZES = {f"{millions}M": millions for millions in (1, 3, 10, 30, 100)}
SIDE = 1024


def worker(millions: int, folder: str) -> Callable[[], dict[str, float]]:
    """A round: saves a checkpoint and reads it; seconds of both, bytes of the file, and the memory that saving took."""
    import torch

    from tasks.checkpoints.contents import VERSION
    from tasks.checkpoints.reading import KEY, read_checkpoint
    from tasks.checkpoints.writing import AtomicCheckpointIO

    names = [f"net.{number}" for number in range(millions * 10**6 // SIDE**2 + 1)]
    weights = {name: torch.randn(SIDE, SIDE) for name in names}
    means = {
        name: {"exp_avg": torch.randn(SIDE, SIDE), "exp_avg_sq": torch.rand(SIDE, SIDE)}
        for name in names
    }
    entry = {
        "task": "mine",
        "version": VERSION,
        "metadata": {},
        "net": {},
        "config": {"model": {}, "data": {}},
    }
    whole = {"state_dict": weights, "optimizer_states": [{"state": means}], KEY: entry}
    path, writer = Path(folder) / f"{millions}.ckpt", AtomicCheckpointIO()

    def run() -> dict[str, float]:
        before, start = status_mib("VmHWM"), time.perf_counter()
        writer.save_checkpoint(whole, path)
        saved = time.perf_counter()
        taken = status_mib("VmHWM") - before
        read_checkpoint(path, "mine")
        return {
            "parameters": len(names) * SIDE**2,
            "save": saved - start,
            "load": time.perf_counter() - saved,
            "bytes": path.stat().st_size,
            "taken": taken,
        }

    return run


def plot(file: str, rows: list[dict[str, float]]) -> None:
    """Seconds and size over parameters, all logarithmic."""
    with save_plot(file, 1, 2) as ((times, sizes),):
        millions = [row["parameters"] / 1e6 for row in rows]
        for name in ("save", "load"):
            times.loglog(millions, [row[name] for row in rows], "o-", label=name)
        times.set(xlabel="million parameters", ylabel="seconds")
        times.legend()
        sizes.loglog(millions, [row["bytes"] / 2**20 for row in rows], "o-")
        sizes.set(xlabel="million parameters", ylabel="MiB")


def main() -> None:
    """Parses the command line and prints the table."""
    parser = arguments(__doc__ or "", SIZES, 5)
    parser.add_argument("--largest", choices=SIZES, default="100M", help="leave out larger sizes")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    options = parser.parse_args()
    if options.worker:
        run = worker(SIZES[options.worker], options.folder)
        for _ in range(options.rounds + 1):
            print(json.dumps(run()), flush=True)
        return
    rows = []
    heads = ("save MiB/s", "load MiB/s", "bytes each", "taken MiB")
    print(
        "{:<8}{:>9}{:>9}{:>9}{:>12}{:>12}{:>12}{:>11}".format("", "save s", "load s", "MiB", *heads)
    )
    for name, millions in SIZES.items():
        if millions > SIZES[options.largest]:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = alone(
                "tests.benchmarks.checkpoints", name, options.rounds, ["--folder", folder]
            )
        row = {key: statistics.median(one[key] for one in found[1:]) for key in found[0]}
        row["taken"] = found[0]["taken"]  # of the first: the peak stays
        size = row["bytes"] / 2**20
        print(
            f"{name:<8}{row['save']:>9.3f}{row['load']:>9.3f}{size:>9.1f}{size / row['save']:>12.0f}"
            f"{size / row['load']:>12.0f}{row['bytes'] / row['parameters']:>12.2f}{row['taken']:>11.0f}"
        )
        rows.append(row)
    if options.plot:
        plot(options.plot, rows)


if __name__ == "__main__":
    main()
