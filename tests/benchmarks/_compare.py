"""What benchmarks share: a process for each competitor, rounds in turns, medians, peak memory."""

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Round = Callable[[], int | dict[str, float]]  # how many items a round did, or what it measured
Competitor = Callable[[Namespace], Round]  # prepares rounds


@dataclass
class Result:
    """What a worker measured in each round, and its memory before them and at the peak, in MiB."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    idle: float = 0.0
    peak: float = 0.0
    flops: float = 0.0  # of the matrix products for one item, if counted

    @property
    def rates(self) -> list[float]:
        """Items per second of each round."""
        return [found["rate"] for found in self.rounds]

    @property
    def median(self) -> float:
        """Median of the rates."""
        return statistics.median(self.rates)

    @property
    def taken(self) -> float:
        """Memory that the rounds took, in MiB."""
        return self.peak - self.idle


def data_folder(name: str) -> Path:
    """A folder in that of the real data sets."""
    if not os.environ.get("TESSERA_DATA"):
        raise SystemExit(f"TESSERA_DATA is not set: it names the folder that holds {name}/.")
    return Path(os.environ["TESSERA_DATA"], name)


def status_mib(name: str) -> float:
    """A size from this process's status in MiB: `VmRSS`, `VmHWM`."""
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) / 1024


def memory_mib() -> tuple[float, float]:
    """Memory of this process now and at its peak: the GPU's if it uses one, else resident."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated() / 2**20, torch.cuda.max_memory_allocated() / 2**20
    return status_mib("VmRSS"), status_mib("VmHWM")  # `ru_maxrss` would include the parent's


def arguments(doc: str | None, rounds: int = 0, plot: bool = False) -> ArgumentParser:
    """A parser with the options that the benchmark needs of those that several have."""
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    if rounds:
        text = "rounds of each, after one that does not count; 0: only that one, which counts"
        parser.add_argument("--rounds", type=int, default=rounds, help=text)
        parser.add_argument("--worker", help=SUPPRESS)
    if plot:
        parser.add_argument("--plot", metavar="FILE.png", help="draw the results")
    return parser


def parse(parser: ArgumentParser, competitors: Mapping[str, Competitor]) -> Namespace:
    """The options; a worker that `interleave` started measures here, and ends."""
    options = parser.parse_args()
    if options.worker:
        serve(competitors[options.worker](options))
        raise SystemExit
    return options


def serve(run: Round) -> None:
    """Measures a round for each line of standard input, or answers with the memory."""
    idle = memory_mib()[0]
    for line in sys.stdin:
        start = time.perf_counter()
        if line.strip() == "memory":
            found = {"idle": idle, "peak": memory_mib()[1]}  # before counting, which takes more
            found["flops"] = getattr(run, "flops", float)()
        else:
            found = run()
        if not isinstance(found, dict):
            found = {"rate": found / (time.perf_counter() - start)}
        print(json.dumps(found), flush=True)


def ask(worker: subprocess.Popen[str], line: str) -> dict[str, float]:
    """Sends a line to a worker and returns its answer, skipping whatever else it prints."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(line + "\n")
    worker.stdin.flush()
    for answer in worker.stdout:
        if answer.startswith("{"):
            return dict(json.loads(answer))
    raise RuntimeError("A worker ended without an answer; run it alone to see why.")


def interleave(names: Iterable[str], rounds: int) -> dict[str, Result]:
    """Starts this benchmark as a worker for each name, with two threads, and measures in turns.

    The first round of each does not count, unless it is the only one.
    """
    command = [sys.executable, "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = {
        name: subprocess.Popen([*command, "--worker", name], cwd=ROOT, env=environment, **pipes)
        for name in names
    }
    results = {name: Result() for name in workers}
    try:
        for number in range(rounds + 1):
            for name, worker in workers.items():
                start = time.perf_counter()
                found = ask(worker, "round")
                seconds = time.perf_counter() - start
                print(f"round {number} of {rounds}, {name}: {seconds:.1f} s", file=sys.stderr)
                if number or not rounds:
                    results[name].rounds.append(found)
        for name, worker in workers.items():
            results[name] = Result(results[name].rounds, **ask(worker, "memory"))
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    return results


def our_optimizer(net: Any, **settings: Any) -> Any:
    """The optimizer of `fit`."""
    from tasks.training.optim import OptimConfig, build

    return build(net, OptimConfig(**settings), 100_000)["optimizer"]


def training(optimizer: Any, loss: Callable[[], tuple[Any, int]], steps: int = 1) -> Round:
    """Rounds of training steps; `loss` gives that of the next batch and its number of items.

    `flops()` of the result counts the FLOP of the matrix products for one item, on CPUs.
    """

    def step() -> int:
        found, count = loss()
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return count

    def train() -> int:
        return sum(step() for _ in range(steps))

    def flops() -> float:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        if torch.cuda.is_initialized():
            return 0.0
        counter = FlopCounterMode(display=False, custom_mapping=own_products())
        with counter:
            items = step()
        return counter.get_total_flops() / items

    train.flops = flops  # type: ignore[attr-defined]
    return train


def own_products() -> dict[Any, Callable[..., int]]:
    """The FLOP of operators that PyTorch's counter does not know."""
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten

    def linear(x: Any, weight: Any, *_: Any, **__: Any) -> int:
        return 2 * int(torch.Size(x).numel()) * int(weight[0])

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    def attention_grad(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad, q, k, v))

    return {
        torch.ops.mkldnn._linear_pointwise: linear,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_grad,
    }


def fit_medians(line: str, names: Iterable[str], **environment: str) -> dict[str, float]:
    """Runs `python -m LINE`: medians of some of the metrics that it logs, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", *line.split(), "--run_dir", f"{folder}/run"]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr[-2000:]}")
        with open(Path(folder, "run", "metrics.csv"), newline="") as file:
            rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows if row.get(name)][1:] for name in names}
    return {name: statistics.median(values) for name, values in logged.items() if values}


def require_equal(differences: Mapping[str, float]) -> None:
    """Prints how far the logits of each peer are from ours; ends the program if they differ."""
    for name, largest in differences.items():
        print(f"largest difference of the logits from {name}'s {largest:.1e}")
    if max(differences.values(), default=0.0) > 1e-4:
        raise SystemExit("The outputs are not equal: the times say nothing.")


@cache
def matmul_flops() -> float:
    """FLOP/s of a large matrix product in float32 with two threads."""
    import torch

    from tasks.training.throughput import matmul_peak

    torch.set_num_threads(2)
    return matmul_peak(torch.device("cpu"), "32-true")


def machine() -> str:
    """The processor, its instructions, the threads, the load, and its fastest matrix product."""
    import torch

    from modules.kernels import cpu

    instructions = torch.backends.cpu.get_cpu_capability() + ", bfloat16" * cpu.HAS_BFLOAT16
    load = os.getloadavg()[0]  # of the last minute: the benchmark's own is part of it
    return (
        f"{cpu.NAME} ({instructions}), 2 threads, load {load:.1f}, "
        f"matmul {matmul_flops() / 1e9:.0f} GFLOP/s"
    )


def table(results: Mapping[str, Result], unit: str) -> str:
    """The machine, and the results as lines of text; ratios are those of medians to the first.

    "of matmul" is the share of the FLOP/s that a large matrix product reaches.
    """
    has_memory = any(found.peak for found in results.values())
    has_flops = any(found.flops for found in results.values())
    base = next(iter(results.values())).median
    head = f"{'':<24}{f'median {unit}':>18}{'lowest':>10}{'highest':>10}{'ratio':>8}"
    head += f"{'of matmul':>11}" * has_flops
    lines = [machine(), head + f"{'peak MiB':>10}{'taken MiB':>11}" * has_memory]
    for name, found in results.items():
        line = f"{name:<24}{found.median:>18.1f}{min(found.rates):>10.1f}{max(found.rates):>10.1f}"
        line += f"{found.median / base:>8.2f}"
        if has_flops:
            line += f"{found.median * found.flops / matmul_flops():>11.2f}"
        memory = f"{found.peak:>10.0f}{found.taken:>11.0f}" * has_memory
        lines.append(line + memory)
    return "\n".join(lines)


@contextmanager
def save_plot(file: str, rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Axes to draw on, by row and column; the picture is written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (4 * columns + 1, 3 * rows + 1)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    yield axes
    figure.savefig(file, dpi=100)
