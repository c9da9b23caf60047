"""BERT on real IMDB reviews, ours beside Hugging Face's with equal weights.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.bert_step

4 layers, 256 wide, 4 heads, 16,000 tokens, at most 256 tokens a review, batch 32, float32, two
threads. Training: dropout 0.1 everywhere, AdamW, batches of similar length from each side's own
sampler. Inference: sorted by length. That the logits are equal is checked before.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.benchmarks import _compare
from tests.benchmarks._compare import Round

BATCH = 32
LENGTH = 256
VOCABULARY = 16_000
STEPS = 10  # in each round
LR = 1e-4
Batch = dict[str, torch.Tensor]


def data(multiple: int = 8) -> Any:
    """IMDB as `python -m tasks.bert` reads it; `multiple` is what lengths are rounded up to."""
    from datamodules.reviews import ReviewData
    from datamodules.sources import TextDatasetOptions
    from datamodules.text import TextLoading
    from datamodules.tokenizers import TokenizerConfig

    module = ReviewData(
        source="hub",
        path=str(_compare.data_folder("imdb")),
        batch_size=BATCH,
        max_length=LENGTH,
        dataset=TextDatasetOptions(),
        tokenizer=TokenizerConfig(vocabulary=VOCABULARY),
        loading=TextLoading(eval_batch_size=BATCH, multiple=multiple),
    )
    module.setup("fit")
    return module


def hugging_face() -> Any:
    """Their model, the same weights in every process."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 1024}
    vocabulary = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(num_attention_heads=4, **sizes, **vocabulary))


def tessera() -> Any:
    """Our model with the weights of theirs."""
    from modules.models.bert import BertClassifier
    from modules.pretrained.bert import FAMILIES, HEADS
    from modules.pretrained.family import config_from_huggingface
    from modules.pretrained.weights import load_weights
    from tasks.training.allocator import tune_allocator

    tune_allocator()
    theirs = hugging_face()
    family, sizes = config_from_huggingface(theirs.config.to_dict(), FAMILIES)
    net = BertClassifier(replace(sizes, num_classes=2))
    weights = FAMILIES[family].weights_from_external(theirs.state_dict(), net.config)
    left = load_weights(net, weights, HEADS)
    assert not left, left
    return net


def their_logits(net: Any, batch: Batch) -> torch.Tensor:
    """(B, 2) from their model."""
    return net(batch["tokens"], batch["padding_mask"].long()).logits


def our_logits(net: Any, batch: Batch) -> torch.Tensor:
    """(B, 2) from ours."""
    return net(batch["tokens"], batch["padding_mask"])


def their_batches() -> Iterator[Batch]:
    """Batches as their trainer makes them if it groups by length: padded to the longest."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    dataset = data(multiple=1).dataset("train")
    generator = torch.Generator().manual_seed(0)
    lengths = dataset.token_counts.tolist()
    order = list(LengthGroupedSampler(BATCH, lengths=lengths, generator=generator))
    for start in itertools.cycle(
        range(BATCH, len(order) - BATCH, BATCH)
    ):  # the first is the longest
        yield dataset[order[start : start + BATCH]]


def our_batches() -> Iterator[Batch]:
    """Batches as `python -m tasks.bert fit` makes them."""
    loader = data().train_dataloader()
    while True:
        yield from loader


SIDES = {"hugging face": (hugging_face, their_logits), "tessera": (tessera, our_logits)}


def training(options: Namespace) -> Round:
    """Rounds of training steps."""
    name = options.worker.removeprefix("train: ")
    build, logits = SIDES[name]
    net = build().train()
    if name == "tessera":
        optimizer = _compare.our_optimizer(net, lr=LR)
        batches = our_batches()
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
        batches = their_batches()

    def loss() -> tuple[torch.Tensor, int]:
        batch = next(batches)
        return F.cross_entropy(logits(net, batch), batch["label"]), BATCH

    return _compare.training(optimizer, loss, STEPS)


def evaluation() -> list[Batch]:
    """Every tenth batch of the validation reviews, sorted by length."""
    return list(data().val_dataloader())[::10]


def inference(options: Namespace) -> Round:
    """Rounds over the evaluation batches."""
    build, logits = SIDES[options.worker.removeprefix("infer: ")]
    net = build().eval()
    batches = evaluation()

    @torch.inference_mode()
    def run() -> int:
        for batch in batches:
            logits(net, batch)
        return sum(len(batch["tokens"]) for batch in batches)

    return run


@torch.inference_mode()
def difference() -> float:
    """Largest difference between the logits of both over the evaluation batches."""
    theirs = hugging_face().eval()
    ours = tessera().eval()
    both = ((their_logits(theirs, batch), our_logits(ours, batch)) for batch in evaluation())
    return max(float((one - other).abs().max()) for one, other in both)


def main() -> None:
    """Parses the command line and prints the tables."""
    kinds = {"train": training, "infer": inference}
    competitors = {f"{kind}: {name}": run for kind, run in kinds.items() for name in SIDES}
    options = _compare.parse(_compare.arguments(__doc__, 8), competitors)
    _compare.require_equal({"Hugging Face": difference()})
    for kind in kinds:
        names = [name for name in competitors if name.startswith(kind)]
        print(_compare.table(_compare.interleave(names, options.rounds), "reviews/s"))


if __name__ == "__main__":
    main()
