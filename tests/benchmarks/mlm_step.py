"""Masked-LM training step, ours beside Hugging Face's BertForMaskedLM.

    python -m tests.benchmarks.mlm_step

4 layers, 256 wide, 4 heads, 30,000 tokens, 256 tokens a text, batch 32, 15 % masked, dropout 0.1,
float32, two threads; forward, backward, AdamW. Theirs computes the scores of all tokens at all
positions, ours at the masked ones.
"""

from argparse import Namespace
from dataclasses import replace

import torch

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

BATCH = 32
LENGTH = 256
VOCABULARY = 30_000
LR = 1e-4


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and which of them are masked, both (B, N)."""
    return torch.randint(10, VOCABULARY, (BATCH, LENGTH)), torch.rand(BATCH, LENGTH) < 0.15


def hugging_face(_: Namespace) -> Round:
    """Their model with PyTorch's AdamW, as it comes."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
    vocabulary = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    net = BertForMaskedLM(BertConfig(num_attention_heads=4, **sizes, **vocabulary)).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    tokens, masked = batch()
    labels = tokens.masked_fill(~masked, -100)
    return _compare.training(optimizer, lambda: (net(tokens, labels=labels).loss, BATCH))


def tessera(_: Namespace) -> Round:
    """Our model with our optimizer, the allocator tuned as `fit` does it."""
    from modules.models.bert import BERT_PRESETS, BertMaskedLM
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    config = replace(BERT_PRESETS["mini"], vocabulary=VOCABULARY, max_length=LENGTH)
    net = BertMaskedLM(config).train()
    tokens, masked = batch()

    def loss() -> tuple[torch.Tensor, int]:
        return net.loss(net.encoder(tokens), tokens[masked], masked)[0], BATCH

    return _compare.training(_compare.our_optimizer(net, lr=LR), loss)


COMPETITORS = {"hugging face": hugging_face, "tessera": tessera}


def main() -> None:
    """Parses the command line and prints the table."""
    options = _compare.parse(_compare.arguments(__doc__, 5), COMPETITORS)
    print(_compare.table(_compare.interleave(COMPETITORS, options.rounds), "texts/s"))


if __name__ == "__main__":
    main()
