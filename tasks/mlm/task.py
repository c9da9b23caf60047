"""Masked-language-model pretraining of a BERT-style encoder: loss and metrics."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from datamodules.tokenizers import Tokenizer
from datamodules.tokens.masking import MaskConfig, Masker
from modules.models.bert import BertConfig, BertMaskedLM
from tasks.base import Batch, StepOutput
from tasks.bert.architectures import fit_to_data, load_pretrained
from tasks.text import MeanOf, TextTask
from tasks.training.seeds import evaluation_seeds


class MaskedLMTask(TextTask):
    """Prediction of masked tokens and, with pairs in the data, of the next sentence (Devlin 2019).

    Args:
        net: The network. A null `vocabulary` is filled in from the data.
        mask: Which tokens are masked: different ones in each epoch, the same in each evaluation.
        kwargs: Those of `TextTask`.
    """

    name = "mlm"

    def __init__(
        self, net: BertConfig = BertConfig(), mask: MaskConfig = MaskConfig(), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.net_config = net
        self.mask = mask

    def build(self, metadata: Mapping[str, Any]) -> BertMaskedLM:
        tokenizer = Tokenizer.from_json(metadata["tokenizer"])
        self.masker = Masker(
            self.mask, tokenizer.special_ids, tokenizer.vocab_size, tokenizer.starts_word
        )
        config = fit_to_data(self.net_config, metadata, self.pretrained)
        build = partial(BertMaskedLM, replace(config, next_sentence=metadata["next_sentence"]))
        if self.pretrained is None:
            return build()
        return load_pretrained(build, self.pretrained, metadata)

    def make_metrics(self) -> dict[str, Metric]:
        """Accuracy of masked tokens; with pairs, also their loss, and that of the next sentence."""
        pairs = ("token_loss", "next_loss", "next_acc") if self.metadata["next_sentence"] else ()
        return {name: MeanOf(name) for name in ("acc", *pairs)}

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Perplexity of masked tokens; with pairs, also the loss, which is the sum of two means."""
        if f"{split}/next_loss" not in values:
            return {f"{split}/perplexity": values[f"{split}/loss"].exp()}
        token_loss = values[f"{split}/token_loss"]
        loss = token_loss + values[f"{split}/next_loss"]
        return {f"{split}/perplexity": token_loss.exp(), f"{split}/loss": loss}

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns the loss, a scalar, and means with their numbers of targets, of tokens (B, N).

        The loss is the mean over masked tokens plus, with pairs, the mean over pairs (Devlin 2019,
        A.2). Micro-batches and processes are weighted by their masked tokens.
        """
        tokens = batch["tokens"]
        seeds = None if training else evaluation_seeds(batch["index"])
        masked, where = self.masker(tokens, batch["padding_mask"], seeds)  # both (B, N)
        hidden = self.net.hidden(masked, batch["padding_mask"], batch.get("segments"))
        targets = tokens[where]  # (S,)
        loss, correct = self.net.loss(hidden, targets, where)
        # In evaluation, a batch without targets, such as one of [UNK] only, does not count.
        count = max(1, len(targets)) if training else len(targets)
        means = {"acc": correct / max(1, count), "token_loss": loss}
        counts = {"acc": count, "token_loss": count}
        if "is_next" in batch:
            logits = self.net.sentence_logits(hidden)  # (B, 2)
            label = 1 - batch["is_next"]  # (B,); 0: the second sentence follows the first
            means["next_loss"] = F.cross_entropy(logits.float(), label)
            means["next_acc"] = (logits.argmax(-1) == label).float().mean()
            counts |= {"next_loss": len(label), "next_acc": len(label)}
            loss = loss + means["next_loss"]
        return StepOutput(loss, count, outputs=means, targets=counts)
