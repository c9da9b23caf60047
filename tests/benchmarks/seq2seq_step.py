"""Training step of an encoder-decoder on Multi30k, ours beside Marian and `nn.Transformer`.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.seq2seq_step

4 + 4 layers, 128 wide, 256 feed-forward, 4 heads, one table for 8,000 tokens of English and German,
batches of 64 pairs of similar length, the same ones for all; dropout 0.1, AdamW, float32, two
threads. Tokens/s are those of the targets, without padding. All have the same weights; that their
logits are equal is checked before. Marian is Hugging Face's.
"""

from argparse import Namespace
from collections.abc import Iterator
from itertools import islice

import torch

from tests.benchmarks import _compare, _translators
from tests.benchmarks._compare import Round
from tests.benchmarks._translators import BUILDERS, Batch

STEPS = 10  # in each round
LR = 1e-4


def batches() -> Iterator[Batch]:
    """Training batches as `python -m tasks.seq2seq fit` makes them."""
    module = _translators.data()
    module.setup("fit")
    loader = module.train_dataloader()
    while True:
        yield from loader


def training(options: Namespace) -> Round:
    """Rounds of training steps, in target tokens."""
    name = options.worker
    if name == "tessera":
        from tasks.training.allocator import tune_allocator

        tune_allocator()
    net = BUILDERS[name](0.1).train()
    if name == "tessera":
        optimizer = _compare.our_optimizer(net, lr=LR)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR, fused=True)
    source = batches()

    def loss() -> tuple[torch.Tensor, int]:
        batch = next(source)
        return _translators.loss(name, net, batch), int((batch["targets"] >= 0).sum())

    return _compare.training(optimizer, loss, STEPS)


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    options = _compare.parse(_compare.arguments(__doc__, 8), dict.fromkeys(BUILDERS, training))
    _translators.check(islice(batches(), 3))
    print(_compare.table(_compare.interleave(BUILDERS, options.rounds), "target tokens/s"))


if __name__ == "__main__":
    main()
