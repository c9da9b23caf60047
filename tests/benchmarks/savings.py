"""Memory saved against time paid: activation checkpointing and gradient accumulation.

    python -m tests.benchmarks.savings

A decoder of 8 layers, 256 wide, 4 heads, 256 tokens, vocabulary 1,000, in steps over 16 sequences:
forward, backward, AdamW, float32, no dropout, two threads, in turns. "checkpointing" recomputes the
activations of each layer in the backward pass (`--model.net.stack.checkpoint_activations`), "k x n"
accumulates k micro-batches of n sequences (`--trainer.accumulate_grad_batches`). All make the same
step. Taken: peak less the idle process with its network.
"""

from argparse import Namespace

import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round
from tests.benchmarks._decoders import SMALL_VOCABULARY, small_decoder

BATCH = 16
LENGTH = 256
WAYS = {  # name: (whether activations are recomputed, micro-batches of a step)
    "plain": (False, 1),
    "checkpointing": (True, 1),
    "2 x 8": (False, 2),
    "4 x 4": (False, 4),
    "16 x 1": (False, 16),
    "checkpointing, 4 x 4": (True, 4),
}


def training(options: Namespace) -> Round:
    """Rounds of one step, in tokens."""
    recompute, parts = WAYS[options.worker]
    net, optimizer = small_decoder(256, 8, 4, LENGTH, recompute)

    def run() -> int:
        tokens, targets = torch.randint(SMALL_VOCABULARY, (2, BATCH, LENGTH))
        for part in range(parts):
            rows = slice(part, None, parts)
            (net.loss(net(tokens[rows]), targets[rows])[0] / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH * LENGTH

    return run


def main() -> None:
    """Parses the command line and prints the table."""
    options = _compare.parse(_compare.arguments(__doc__, 5), dict.fromkeys(WAYS, training))
    results = _compare.interleave(WAYS, options.rounds)
    print(_compare.table(results, "tokens/s"))
    plain = results["plain"]
    for name, found in list(results.items())[1:]:
        saved = 1 - found.taken / plain.taken
        paid = plain.median / found.median - 1
        print(f"{name:<24}saves {saved:>6.1%} of the memory taken for {paid:>+7.1%} of time")


if __name__ == "__main__":
    main()
