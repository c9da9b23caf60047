"""Step time and memory of a decoder as the work grows: `python -m tests.benchmarks.growth [--plot FILE.png]`.

Sequence length, width, depth and batch grow one at a time from 256 tokens, 256 wide, 4 layers, batch 4 (batch 1 where
the length grows). Forward, backward, AdamW, float32, rotary positions, no dropout, two threads, vocabulary 1,000; each
size in a process of its own, whose idle memory, network included, is taken off. Growth: how many times as much the
last size takes as the one before, as a power of how many times larger it is; 1 is in proportion, attention makes time
more than that.
"""

import math
from argparse import Namespace
from collections.abc import Callable

from tests.benchmarks._compare import Result, arguments, interleave, save_plot, work

BASE = {"length": 256, "width": 256, "depth": 4, "batch": 4}
AXES = {
    "length": [64, 128, 256, 512, 1024, 2048, 4096],
    "width": [64, 128, 256, 512, 1024],
    "depth": [1, 2, 4, 8, 16],
    "batch": [1, 2, 4, 8, 16, 32],
}
NAMES = {f"{axis} {value}": (axis, value) for axis, values in AXES.items() for value in values}
VOCABULARY = 1000


def training(axis: str, value: int) -> Callable[[], int]:
    """A round of one training step; returns 1."""
    import torch

    from modules.config import StackConfig
    from modules.models.gpt import Decoder, DecoderConfig
    from tasks.training.allocator import tune_allocator
    from tasks.training.optim import OptimConfig, build

    tune_allocator()
    torch.manual_seed(0)
    sizes = {**BASE, "batch": 1 if axis == "length" else BASE["batch"], axis: value}
    stack = StackConfig(sizes["width"], sizes["depth"], sizes["width"] // 64, causal=True)
    net = Decoder(DecoderConfig(VOCABULARY, sizes["length"], "rotary", stack=stack))
    optimizer = build(net, OptimConfig(), 1000)["optimizer"]

    def run() -> int:
        tokens, targets = torch.randint(VOCABULARY, (2, sizes["batch"], sizes["length"]))
        net.loss(net(tokens), targets)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        return 1

    return run


def growth(found: dict[int, Result], quantity: Callable[[Result], float]) -> float:
    """The power by which a quantity grew between the last two sizes."""
    (small, before), (large, after) = list(found.items())[-2:]
    return math.log(quantity(after) / quantity(before)) / math.log(large / small)


def plot(file: str, axes: dict[str, dict[int, Result]]) -> None:
    """Time and memory over each size, both logarithmic."""
    with save_plot(file, 2, len(axes)) as rows:
        for column, (axis, found) in enumerate(axes.items()):
            for row, label, values in [
                (0, "ms per step", [1000 / one.median for one in found.values()]),
                (1, "MiB taken", [one.taken for one in found.values()]),
            ]:
                rows[row][column].loglog(list(found), values, "o-", base=2)
                rows[row][column].set(xlabel=axis, ylabel=label)


def measured(options: Namespace) -> dict[str, dict[int, Result]]:
    """What each size took, by axis, in one process after the other."""
    axes = {}
    for axis in options.axes.split(","):
        names = {f"{axis} {value}": value for value in AXES[axis] if value >= options.smallest}
        axes[axis] = {
            value: interleave("tests.benchmarks.growth", [name], options.rounds)[name]
            for name, value in names.items()
        }
    return axes


def main() -> None:
    """Parses the command line and prints the table."""
    parser = arguments(__doc__ or "", NAMES, 3)
    parser.add_argument("--axes", default=",".join(AXES), help="which sizes grow")
    parser.add_argument("--smallest", type=int, default=1, help="leave out smaller sizes")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    options = parser.parse_args()
    if options.worker:
        work(training(*NAMES[options.worker]))
    axes = measured(options)
    print(f"{'':<16}{'median ms':>10}{'peak MiB':>10}{'taken MiB':>11}")
    for axis, found in axes.items():
        for value, one in found.items():
            print(
                f"{f'{axis} {value}':<16}{1000 / one.median:>10.1f}{one.peak:>10.0f}{one.taken:>11.0f}"
            )
        time, memory = (
            growth(found, lambda one: 1 / one.median),
            growth(found, lambda one: one.taken),
        )
        print(f"{'growth':<16}{time:>10.2f}{'':>10}{memory:>11.2f}")
    if options.plot:
        plot(options.plot, axes)


if __name__ == "__main__":
    main()
