"""Training step of an encoder-decoder on Multi30k, ours beside Hugging Face's Marian and `nn.Transformer`.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.seq2seq_step

4 + 4 layers, 128 wide, 256 feed-forward, 4 heads, one table for 8,000 tokens of English and German, batches of 64 pairs
of like lengths, the same ones for all; dropout 0.1, AdamW, float32, two threads. Tokens/s are those of the targets,
without padding. All have the same weights; that their logits are equal is checked before.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from tests.benchmarks._compare import command_line, interleave, table

STEPS, DROPOUT = 10, 0.1  # steps in each round


def batches() -> Iterator[Any]:
    """Training batches as `python -m tasks.seq2seq fit` has them."""
    from tests.benchmarks._translators import data

    module = data()
    module.setup("fit")
    loader = module.train_dataloader()
    while True:
        yield from loader


def training(name: str) -> Callable[[], int]:
    """A round of training steps of one competitor; returns the number of target tokens."""
    import torch

    from tests.benchmarks import _translators

    if name == "tessera":
        from tasks.training.allocator import tune_allocator
        from tasks.training.optim import OptimConfig, build

        tune_allocator()
        net = _translators.tessera(DROPOUT)
        optimizer = build(net, OptimConfig(lr=1e-4), 100_000)["optimizer"]
    else:
        make = (
            _translators.hugging_face if name == "hugging face" else _translators.torch_transformer
        )
        net = make(DROPOUT)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    net.train()
    source = batches()

    def run() -> int:
        tokens = 0
        for batch in islice(source, STEPS):
            _translators.loss(net, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            tokens += int((batch["targets"] >= 0).sum())
        return tokens

    return run


COMPETITORS = {
    name: partial(training, name) for name in ("hugging face", "nn.Transformer", "tessera")
}


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    options = command_line(__doc__ or "", COMPETITORS, 8)
    from tests.benchmarks._translators import check

    check(islice(batches(), 3))
    results = interleave("tests.benchmarks.seq2seq_step", list(COMPETITORS), options.rounds)
    print(table(results, "target tokens/s", "hugging face"))


if __name__ == "__main__":
    main()
