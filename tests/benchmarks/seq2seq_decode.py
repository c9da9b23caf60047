"""Beam search with an encoder-decoder on Multi30k, ours beside Hugging Face's `generate`.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.seq2seq_decode [--batch 100]

The first 100 test sentences, 5 beams, 50 new tokens each (no token ends a translation), length
penalty 1; 4 + 4 layers, 128 wide, 256 feed-forward, 4 heads, 8,000 tokens, float32, two threads.
Both have the same random weights and make the same tokens, which is checked before.
"""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from tests.benchmarks import _compare, _translators
from tests.benchmarks._compare import Round

SENTENCES = 100
BEAMS = 5
NEW = 50
START = 5
SPREAD = 0.3  # of the weights, so that probabilities differ
Translator = Callable[[list[list[int]]], list[list[int]]]


def sentences() -> list[list[int]]:
    """Token numbers of the sources."""
    module = _translators.data()
    module.setup("test")
    texts = module.source.split("test").columns[0].to_pylist()[:SENTENCES]
    return module.tokenizer.encode_sources(texts, _translators.LENGTH)[0]


def tessera(net: Any = None) -> Translator:
    """Our beam search, the allocator tuned as the commands do it."""
    from modules.generation.quantized import prepare
    from modules.generation.sampling import GenerationConfig
    from modules.generation.translation import translate
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    net = prepare(net or _translators.tessera(spread=SPREAD).eval())
    config = GenerationConfig(NEW, beams=BEAMS)
    return lambda rows: [best.tokens for best, *_ in translate(net, rows, config, START, [])]


def hugging_face(net: Any = None) -> Translator:
    """Their beam search."""
    net = net or _translators.hugging_face(spread=SPREAD).eval()
    net.generation_config.eos_token_id = None
    options = {"num_beams": BEAMS, "max_new_tokens": NEW, "do_sample": False, "length_penalty": 1.0}

    def translate(rows: list[list[int]]) -> list[list[int]]:
        tensors = [torch.tensor(row) for row in rows]
        tokens = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)  # (B, M)
        ones = [torch.ones_like(row) for row in tensors]
        mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)  # (B, M)
        inputs = {"input_ids": tokens.to(net.device), "attention_mask": mask.to(net.device)}
        return net.generate(**inputs, **options)[:, 1:].tolist()

    return translate


TRANSLATORS: dict[str, Callable[..., Translator]] = {
    "hugging face": hugging_face,
    "tessera": tessera,
}


def translations(name: str, batch: int) -> Callable[[], list[list[int]]]:
    """A function that translates all sentences."""
    rows = sentences()
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    translate = TRANSLATORS[name]()
    return lambda: [tokens for part in parts for tokens in translate(part)]


def decoding(options: Namespace) -> Round:
    """Rounds of all sentences once."""
    run = translations(options.worker, options.batch)
    return lambda: len(run())


def main() -> None:
    """Parses the command line, checks the outputs and prints the table."""
    parser = _compare.arguments(__doc__, 5)
    parser.add_argument("--batch", type=int, default=SENTENCES, help="sentences at a time")
    options = _compare.parse(parser, dict.fromkeys(TRANSLATORS, decoding))
    theirs, ours = (translations(name, options.batch)() for name in TRANSLATORS)
    equal = sum(one == other for one, other in zip(theirs, ours, strict=True))
    print(f"the same {NEW} tokens for {equal} of {len(ours)} sentences")
    if equal < len(ours):
        raise SystemExit("The outputs are not equal: the times say nothing.")
    print(_compare.table(_compare.interleave(TRANSLATORS, options.rounds), "sentences/s"))


if __name__ == "__main__":
    main()
