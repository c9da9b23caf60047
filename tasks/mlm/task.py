"""Masked-language-model pretraining: the network, its recipe and its results."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from datamodules.tokenizers import Tokenizer
from datamodules.tokens.masking import MaskConfig, Masker
from modules.models.bert import BertConfig, BertMaskedLM
from tasks.base import Batch
from tasks.bert.architectures import fitted, load_pretrained
from tasks.text import MeanOf, TextTask
from tasks.training.optim import OptimConfig
from tasks.training.seeds import position_seed, run_seed


class MaskedLMTask(TextTask):
    """Guessing masked tokens and, if wanted, whether one sentence follows another (Devlin 2019).

    Args:
        net: The network. The number of tokens comes from the data where it is null.
        optimizer: Optimizer, schedule and clipping.
        mask: Which tokens are masked, anew in each epoch; in evaluation always the same of a sample.
        pretrained: Weights to go on from, tokenizer included: a checkpoint of `python -m tasks.mlm`, `hf/<model>` of
            the Hugging Face hub, or a local folder of its layout; null starts from random weights.
        ema: Decay of a running average of the weights, per optimizer step, such as 0.999; evaluation and the saved
            weights use the average. Null keeps none.
        compile: Compile the network with torch.compile, in place.
    """

    name = "mlm"

    def __init__(
        self,
        net: BertConfig = BertConfig(),
        optimizer: OptimConfig = OptimConfig(),
        mask: MaskConfig = MaskConfig(),
        pretrained: str | None = None,
        ema: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(optimizer, ema, compile)
        self.net_config, self.mask, self.pretrained = net, mask, pretrained

    def build(self, facts: Mapping[str, Any]) -> BertMaskedLM:
        """An encoder with heads for masked tokens and, where the data have pairs, for sentences."""
        config = fitted(self.net_config, facts, self.pretrained)
        net = BertMaskedLM(replace(config, next_sentence=facts["next_sentence"]))
        if self.pretrained is not None and self.restored is None:
            load_pretrained(net, self.pretrained, facts)
        tokenizer = Tokenizer.from_json(facts["tokenizer"])
        self.masker = Masker(
            self.mask, tokenizer.special_ids, tokenizer.vocab_size, tokenizer.starts_word
        )
        return net

    def compiled(self) -> list[nn.Module]:
        """The encoder: a step has it run and then the loss, not the network as a whole."""
        return [self.net.encoder]

    def make_metrics(self) -> dict[str, Metric]:
        """Share of the masked tokens guessed rightly; with sentence pairs, each guess's own figures."""
        names = ("acc", "token_loss", "next_acc") if self.facts["next_sentence"] else ("acc",)
        return {name: MeanOf(name) for name in names}

    @staticmethod
    def weight(targets: dict[str, int]) -> int:
        """Masked tokens in the batch."""
        return targets["acc"]

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Perplexity: e to the mean loss over masked tokens."""
        return {
            f"{split}/perplexity": values.get(f"{split}/token_loss", values[f"{split}/loss"]).exp()
        }

    def step(
        self, batch: Batch, training: bool
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
        """Loss (), figures by name and how many guesses each is the mean of, for a batch of tokens (B, N).

        The loss is the sum of two means, over masked tokens and over pairs of sentences if there are any (Devlin 2019,
        A.2). Over several micro-batches or processes the second is weighted as the first, by their masked tokens.
        """
        tokens, keep, segments = batch["tokens"], batch["keep"], batch.get("segments")
        evaluated = (
            None
            if training
            else [position_seed(run_seed(), -1, i, 0) for i in batch["index"].tolist()]
        )
        masked, where = self.masker(tokens, keep, evaluated)
        hidden = self.net.hidden(masked, keep, segments)
        targets = tokens[where]  # (S,)
        loss, right = self.net.loss(hidden, targets, where)
        count = max(1, len(targets))
        figures, counts = (
            {"acc": right / count, "token_loss": loss},
            {"acc": count, "token_loss": count},
        )
        if "is_next" in batch:
            logits, label = (
                self.net.sentence_logits(hidden),
                1 - batch["is_next"],
            )  # (B, 2), (B,); 0: it follows
            loss = loss + F.cross_entropy(logits.float(), label)
            figures["next_acc"], counts["next_acc"] = (
                (logits.argmax(-1) == label).float().mean(),
                len(label),
            )
        return loss, figures, counts
