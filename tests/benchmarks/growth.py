"""Step time and memory of a decoder as the work grows.

    python -m tests.benchmarks.growth [--plot FILE.png]

Sequence length, width, depth and batch grow one at a time from 256 tokens, 256 wide, 4 layers,
batch 4 (batch 1 if the length grows). Forward, backward, AdamW, float32, rotary positions, no
dropout, two threads, vocabulary 1,000; each size in a process of its own, whose idle memory,
network included, is subtracted. Growth: how many times as much the last size takes as the one
before, as a power of how many times larger it is. 1 is in proportion; attention needs more time.
"""

import math
from argparse import Namespace
from collections.abc import Callable

import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Result, Round
from tests.benchmarks._decoders import SMALL_VOCABULARY, small_decoder

BASE = {"length": 256, "width": 256, "depth": 4, "batch": 4}
AXES = {
    "length": [64, 128, 256, 512, 1024, 2048, 4096],
    "width": [64, 128, 256, 512, 1024],
    "depth": [1, 2, 4, 8, 16],
    "batch": [1, 2, 4, 8, 16, 32],
}


def training(options: Namespace) -> Round:
    """Rounds of one training step."""
    axis, value = options.worker.split()
    sizes = {**BASE, axis: int(value)}
    if axis == "length":
        sizes["batch"] = 1
    heads = sizes["width"] // 64
    net, optimizer = small_decoder(sizes["width"], sizes["depth"], heads, sizes["length"])

    def loss() -> tuple[torch.Tensor, int]:
        shape = (2, sizes["batch"], sizes["length"])
        tokens, targets = torch.randint(SMALL_VOCABULARY, shape)
        return net.loss(net(tokens), targets)[0], 1

    return _compare.training(optimizer, loss)


def growth(found: dict[int, Result], quantity: Callable[[Result], float]) -> float:
    """The power by which a quantity grew between the last two sizes."""
    (small, before), (large, after) = list(found.items())[-2:]
    return math.log(quantity(after) / quantity(before)) / math.log(large / small)


def main() -> None:
    """Parses the command line and prints the table."""
    parser = _compare.arguments(__doc__, 3, plot=True)
    parser.add_argument("--axes", default=",".join(AXES), help="which sizes grow")
    parser.add_argument("--smallest", type=int, default=1, help="leave out smaller sizes")
    names = [f"{axis} {value}" for axis, values in AXES.items() for value in values]
    options = _compare.parse(parser, dict.fromkeys(names, training))
    axes: dict[str, dict[int, Result]] = {}
    print(_compare.machine(), flush=True)
    print(f"{'':<16}{'median ms':>10}{'peak MiB':>10}{'taken MiB':>11}")
    for axis in options.axes.split(","):
        found = axes[axis] = {}
        for value in AXES[axis]:
            if value >= options.smallest:
                name = f"{axis} {value}"
                one = found[value] = _compare.interleave([name], options.rounds)[name]
                print(f"{name:<16}{1000 / one.median:>10.1f}{one.peak:>10.0f}{one.taken:>11.0f}")
        time = growth(found, lambda one: 1 / one.median)
        memory = growth(found, lambda one: one.taken)
        print(f"{'growth':<16}{time:>10.2f}{'':>10}{memory:>11.2f}")
    if options.plot:
        with _compare.save_plot(options.plot, 2, len(axes)) as rows:
            for column, (axis, found) in enumerate(axes.items()):
                times = [1000 / one.median for one in found.values()]
                memories = [one.taken for one in found.values()]
                rows[0][column].loglog(list(found), times, "o-", base=2)
                rows[0][column].set(xlabel=axis, ylabel="ms per step")
                rows[1][column].loglog(list(found), memories, "o-", base=2)
                rows[1][column].set(xlabel=axis, ylabel="MiB taken")


if __name__ == "__main__":
    main()
