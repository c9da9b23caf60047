"""BERT on real IMDB reviews, ours beside Hugging Face's with equal weights.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.bert_step

4 layers, 256 wide, 4 heads, 16,000 tokens, at most 256 tokens a review, batch 32, float32, two threads. Training:
dropout 0.1 everywhere, AdamW, batches of like length from each side's own sampler. Inference: sorted by length; the
largest difference between the logits is printed.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.benchmarks._compare import command_line, interleave, table

BATCH, LENGTH, STEPS = 32, 256, 10  # steps in each round
Batch = dict[str, torch.Tensor]


def data(multiple: int = 8) -> Any:
    """IMDB as `python -m tasks.bert` reads it; `multiple` is what lengths are rounded up to."""
    from datamodules.reviews import ReviewData
    from datamodules.sources import TextDatasetOptions
    from datamodules.text import TextLoading
    from datamodules.tokenizers import TokenizerConfig

    module = ReviewData(
        source="hub",
        path=str(Path(os.environ["TESSERA_DATA"], "imdb")),
        batch_size=BATCH,
        max_length=LENGTH,
        dataset=TextDatasetOptions(),
        tokenizer=TokenizerConfig(vocabulary=16_000),
        loading=TextLoading(eval_batch_size=BATCH, multiple=multiple),
    )
    module.setup("fit")
    return module


def config(dropout: float) -> Any:
    """The same sizes for both, as Hugging Face's config."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=16_000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=LENGTH,
    )


def hugging_face() -> Any:
    """Their model, the same weights in every process."""
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    return BertForSequenceClassification(config(0.1))


def tessera() -> Any:
    """Our model with the weights of theirs."""
    from modules.models.bert import BertClassifier
    from modules.pretrained.bert import FAMILIES, HEADS
    from modules.pretrained.family import config_from_huggingface
    from modules.pretrained.weights import load_weights

    theirs = hugging_face()
    family, sizes = config_from_huggingface(theirs.config.to_dict(), FAMILIES)
    net = BertClassifier(replace(sizes, num_classes=2))
    left = load_weights(
        net, FAMILIES[family].weights_from_external(theirs.state_dict(), net.config), HEADS
    )
    assert not left, left
    return net


def grouped() -> Iterator[Batch]:
    """Batches as their trainer makes them where it groups by length: padded to the longest."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    dataset = data(multiple=1).dataset("train")
    lengths = dataset.token_counts.tolist()
    order = list(
        LengthGroupedSampler(BATCH, lengths=lengths, generator=torch.Generator().manual_seed(0))
    )
    for start in itertools.cycle(
        range(BATCH, len(order) - BATCH, BATCH)
    ):  # the first is the longest of all
        yield dataset[order[start : start + BATCH]]


def bucketed() -> Iterator[Batch]:
    """Batches as `python -m tasks.bert fit` has them."""
    loader = data().train_dataloader()
    while True:
        yield from loader


def training(
    net: Any, optimizer: Any, batches: Iterator[Batch], logits: Callable[[Batch], Any]
) -> Callable[[], int]:
    """A round of training steps; returns the number of reviews."""
    net.train()

    def run() -> int:
        for batch in itertools.islice(batches, STEPS):
            F.cross_entropy(logits(batch), batch["label"]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return STEPS * BATCH

    return run


def train_theirs() -> Callable[[], int]:
    """Hugging Face's model with PyTorch's AdamW, as it comes."""
    net = hugging_face()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    return training(
        net, optimizer, grouped(), lambda b: net(b["tokens"], b["padding_mask"].long()).logits
    )


def train_ours() -> Callable[[], int]:
    """Our model with our optimizer, the allocator tuned as `fit` does it."""
    from tasks.training.allocator import tune_allocator
    from tasks.training.optim import OptimConfig, build

    tune_allocator()
    net = tessera()
    optimizer = build(net, OptimConfig(lr=1e-4), 1000)["optimizer"]
    return training(net, optimizer, bucketed(), lambda b: net(b["tokens"], b["padding_mask"]))


def evaluation() -> list[Batch]:
    """Every tenth batch of the validation reviews sorted by length."""
    return list(data().val_dataloader())[::10]


def inference(net: Any, logits: Callable[[Batch], Any]) -> Callable[[], int]:
    """A round of evaluation batches."""
    net.eval()
    batches = evaluation()

    @torch.inference_mode()
    def run() -> int:
        for batch in batches:
            logits(batch)
        return sum(len(batch["tokens"]) for batch in batches)

    return run


def infer_theirs() -> Callable[[], int]:
    """Hugging Face's model."""
    net = hugging_face()
    return inference(net, lambda b: net(b["tokens"], b["padding_mask"].long()).logits)


def infer_ours() -> Callable[[], int]:
    """Our model."""
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    net = tessera()
    return inference(net, lambda b: net(b["tokens"], b["padding_mask"]))


COMPETITORS = {
    "train: hugging face": train_theirs,
    "train: tessera": train_ours,
    "infer: hugging face": infer_theirs,
    "infer: tessera": infer_ours,
}


@torch.inference_mode()
def difference() -> float:
    """Largest difference between the logits of both over the batches that inference is timed with."""
    theirs, ours, largest = hugging_face().eval(), tessera().eval(), 0.0
    for batch in evaluation():
        expected = theirs(batch["tokens"], batch["padding_mask"].long()).logits
        largest = max(
            largest, float((ours(batch["tokens"], batch["padding_mask"]) - expected).abs().max())
        )
    return largest


def main() -> None:
    """Parses the command line and prints the tables."""
    options = command_line(__doc__ or "", COMPETITORS, 8)
    print(f"largest difference of the logits {(largest := difference()):.1e}")
    if largest > 1e-4:
        raise SystemExit("The outputs are not equal: the times say nothing.")
    for kind in ("train", "infer"):
        names = [name for name in COMPETITORS if name.startswith(kind)]
        print(
            table(
                interleave("tests.benchmarks.bert_step", names, options.rounds),
                "reviews/s",
                names[0],
            )
        )


if __name__ == "__main__":
    main()
