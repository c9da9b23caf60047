"""Memory saved against time paid: activation checkpointing and accumulation of gradients.

    python -m tests.benchmarks.savings [--plot FILE.png]

A decoder of 8 layers, 256 wide, 4 heads, 256 tokens, vocabulary 1,000, in steps over 16 sequences: forward, backward,
AdamW, float32, no dropout, two threads, in turns. "checkpointing" recomputes the activations of each layer in the
backward pass (`--model.net.stack.checkpoint_activations`), "k x n" takes k parts of n sequences for a step
(`--trainer.accumulate_grad_batches`). All make the same step. Taken: peak less the idle process with its network.
"""

from collections.abc import Callable

from tests.benchmarks._compare import Result, arguments, interleave, save_plot, table, work

BATCH, LENGTH, VOCABULARY = 16, 256, 1000
WAYS = {  # name: (whether activations are recomputed, parts of a step)
    "plain": (False, 1),
    "checkpointing": (True, 1),
    "2 x 8": (False, 2),
    "4 x 4": (False, 4),
    "16 x 1": (False, 16),
    "checkpointing, 4 x 4": (True, 4),
}


def training(name: str) -> Callable[[], int]:
    """A round of one step; returns the number of tokens."""
    import torch

    from modules.config import StackConfig
    from modules.models.gpt import Decoder, DecoderConfig
    from tasks.training.allocator import tune_allocator
    from tasks.training.optim import OptimConfig, build

    tune_allocator()
    recompute, parts = WAYS[name]
    torch.manual_seed(0)
    stack = StackConfig(256, 8, 4, causal=True, checkpoint_activations=recompute)
    net = Decoder(DecoderConfig(VOCABULARY, LENGTH, "rotary", stack=stack))
    optimizer = build(net, OptimConfig(), 1000)["optimizer"]

    def run() -> int:
        tokens, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH))
        for part in range(parts):
            rows = slice(part, None, parts)
            (net.loss(net(tokens[rows]), targets[rows])[0] / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH * LENGTH

    return run


def plot(file: str, results: dict[str, Result]) -> None:
    """Each way by the memory that it takes and by its time."""
    with save_plot(file) as ((axes,),):
        for name, found in results.items():
            point = found.taken, BATCH * LENGTH / found.median
            axes.plot(*point, "o")
            axes.annotate(name, point, textcoords="offset points", xytext=(5, 5))
        axes.set(xlabel="MiB taken", ylabel="seconds per step", xlim=(0, None), ylim=(0, None))


def main() -> None:
    """Parses the command line and prints the table."""
    parser = arguments(__doc__ or "", WAYS, 5)
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    options = parser.parse_args()
    if options.worker:
        work(training(options.worker))
    results = interleave("tests.benchmarks.savings", list(WAYS), options.rounds)
    print(table(results, "tokens/s", "plain"))
    plain = results["plain"]
    for name, found in list(results.items())[1:]:
        saved, paid = 1 - found.taken / plain.taken, plain.median / found.median - 1
        print(f"{name:<24}saves {saved:>6.1%} of the memory taken for {paid:>+7.1%} of time")
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
