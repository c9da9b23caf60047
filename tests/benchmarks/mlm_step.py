"""Masked-LM training step, ours beside Hugging Face's BertForMaskedLM: `python -m tests.benchmarks.mlm_step`.

4 layers, 256 wide, 4 heads, 30,000 tokens, 256 tokens a text, batch 32, 15 % masked, dropout 0.1, float32, two
threads; forward, backward, AdamW. Theirs makes the scores of all tokens at all places, ours at the masked ones.
"""

from collections.abc import Callable

from tests.benchmarks._compare import command_line, interleave, table

BATCH, LENGTH, VOCABULARY, SHARE = 32, 256, 30_000, 0.15


def step(loss, optimizer) -> Callable[[], int]:  # type: ignore[no-untyped-def]
    """A step on random tokens; `loss` takes tokens and where they are masked, both (B, N)."""
    import torch

    tokens, where = (
        torch.randint(10, VOCABULARY, (BATCH, LENGTH)),
        torch.rand(BATCH, LENGTH) < SHARE,
    )

    def run() -> int:
        loss(tokens, where).backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH

    return run


def hugging_face() -> Callable[[], int]:
    """Their model with PyTorch's AdamW, as it comes."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    net = BertForMaskedLM(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    ).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return step(
        lambda tokens, where: net(tokens, labels=tokens.masked_fill(~where, -100)).loss, optimizer
    )


def tessera() -> Callable[[], int]:
    """Our model with our optimizer, the allocator tuned as `fit` does it."""
    from dataclasses import replace

    from modules.models.bert import BERT_PRESETS, BertMaskedLM
    from tasks.training.allocator import tune_allocator
    from tasks.training.optim import OptimConfig, build

    tune_allocator()
    net = BertMaskedLM(
        replace(BERT_PRESETS["mini"], vocabulary=VOCABULARY, max_length=LENGTH)
    ).train()
    optimizer = build(net, OptimConfig(lr=1e-4), 1000)["optimizer"]
    return step(
        lambda tokens, where: net.loss(net.encoder(tokens), tokens[where], where)[0], optimizer
    )


COMPETITORS = {"hugging face": hugging_face, "tessera": tessera}


def main() -> None:
    """Parses the command line and prints the table."""
    options = command_line(__doc__ or "", COMPETITORS, 5)
    print(
        table(
            interleave("tests.benchmarks.mlm_step", list(COMPETITORS), options.rounds),
            "texts/s",
            "hugging face",
        )
    )


if __name__ == "__main__":
    main()
