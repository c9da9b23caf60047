"""Beam search with an encoder-decoder on Multi30k, ours beside Hugging Face's `generate`.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.seq2seq_decode [--batch 100]

The first 100 test sentences, 5 beams, 50 new tokens each (no token ends a translation), length penalty 1; 4 + 4 layers,
128 wide, 256 feed-forward, 4 heads, 8,000 tokens, float32, two threads. Both have the same random weights and make the
same tokens, which is checked before.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from tests.benchmarks._compare import arguments, interleave, table, work

NAMES = ["hugging face", "tessera"]
SENTENCES, BEAMS, NEW, START = 100, 5, 50, 5
SPREAD = 0.3  # of the weights, so that tokens differ in their chances


def sentences() -> list[list[int]]:
    """Token numbers of the sources."""
    from tests.benchmarks._translators import LENGTH, data

    module = data()
    module.setup("test")
    return module.tokenizer.encode_sources(
        module.source.split("test").source.to_pylist()[:SENTENCES], LENGTH
    )[0]


def translator(name: str, batch: int) -> Callable[[], list[list[int]]]:
    """A function that translates all sentences."""
    import torch

    from tests.benchmarks import _translators

    rows = sentences()
    parts = [rows[first : first + batch] for first in range(0, len(rows), batch)]
    if name == "tessera":
        from modules.generation.quantized import prepare
        from modules.generation.translation import GenerationConfig, translate
        from tasks.training.allocator import tune_allocator

        tune_allocator()
        net = prepare(_translators.tessera(spread=SPREAD).eval())
        config = GenerationConfig(NEW, beams=BEAMS)
        return lambda: [
            best.tokens for part in parts for best, *_ in translate(net, part, config, START, [])
        ]
    net = _translators.hugging_face(spread=SPREAD).eval()
    net.generation_config.eos_token_id = None
    options = {"num_beams": BEAMS, "max_new_tokens": NEW, "do_sample": False, "length_penalty": 1.0}

    def run() -> list[list[int]]:
        found = []
        for part in parts:
            longest = max(map(len, part))
            tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in part])  # (B, M)
            keep = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
            found += net.generate(tokens, attention_mask=keep, **options)[:, 1:].tolist()
        return found

    return run


def decoding(options: Namespace) -> Callable[[], int]:
    """A round: all sentences once."""
    run: Any = translator(options.worker, options.batch)
    return lambda: len(run())


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    parser = arguments(__doc__ or "", NAMES, 5)
    parser.add_argument("--batch", type=int, default=SENTENCES, help="sentences at a time")
    options = parser.parse_args()
    if options.worker:
        work(decoding(options))
    theirs, ours = (translator(name, options.batch)() for name in NAMES)
    equal = sum(one == other for one, other in zip(theirs, ours, strict=True))
    print(f"the same {NEW} tokens for {equal} of {len(ours)} sentences")
    if equal < len(ours):
        raise SystemExit("The outputs are not equal: the times say nothing.")
    print(
        table(
            interleave(
                "tests.benchmarks.seq2seq_decode", NAMES, options.rounds, options=sys.argv[1:]
            ),
            "sentences/s",
            NAMES[0],
        )
    )


if __name__ == "__main__":
    main()
