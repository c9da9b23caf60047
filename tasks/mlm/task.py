"""Masked-language-model pretraining: the network, its recipe and its results."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from datamodules.tokenizers import Tokenizer
from datamodules.tokens.masking import MaskConfig, Masker
from modules.models.bert import BertConfig, BertMaskedLM
from tasks.base import Batch, StepOutput
from tasks.bert.architectures import fit_to_data, load_pretrained
from tasks.text import MeanOf, TextTask
from tasks.training.optim import OptimConfig
from tasks.training.seeds import position_seed, run_seed


class MaskedLMTask(TextTask):
    """Prediction of masked tokens and, if wanted, of the next sentence (Devlin 2019).

    Args:
        net: The network. The number of tokens comes from the data where it is null.
        optimizer: Optimizer, schedule and clipping.
        mask: Which tokens are masked, anew in each epoch; always the same in evaluation.
        pretrained: Weights to start from, tokenizer included: a checkpoint of `python -m
            tasks.mlm`, `hf/<model>` of the Hugging Face hub, or a local folder of its layout; null
            starts from random weights.
        ema: Decay of a running average of the weights, per optimizer step, such as 0.999;
            evaluation and the saved weights use the average. Null keeps none.
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
        self.net_config = net
        self.mask = mask
        self.pretrained = pretrained

    def build(self, metadata: Mapping[str, Any]) -> BertMaskedLM:
        """Builds an encoder with heads for masked tokens and, if there are pairs, for sentences."""
        tokenizer = Tokenizer.from_json(metadata["tokenizer"])
        self.masker = Masker(
            self.mask, tokenizer.special_ids, tokenizer.vocab_size, tokenizer.starts_word
        )
        config = fit_to_data(self.net_config, metadata, self.pretrained)
        build = partial(BertMaskedLM, replace(config, next_sentence=metadata["next_sentence"]))
        if self.pretrained is None or self.restored is not None:
            return build()
        return load_pretrained(build, self.pretrained, metadata)

    def modules_to_compile(self) -> list[nn.Module]:
        """Returns the encoder; a step calls it and then the loss, not the network."""
        return [self.net.encoder]

    def make_metrics(self) -> dict[str, Metric]:
        """Returns accuracy of masked tokens; with sentence pairs, also what concerns them."""
        names = ("acc", "token_loss", "next_acc") if self.metadata["next_sentence"] else ("acc",)
        return {name: MeanOf(name) for name in names}

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Returns perplexity over masked tokens."""
        return {
            f"{split}/perplexity": values.get(f"{split}/token_loss", values[f"{split}/loss"]).exp()
        }

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns loss (), means and their numbers of targets, for a batch of tokens (B, N).

        The loss is the sum of two means, over masked tokens and over pairs of sentences if there
        are any (Devlin 2019, A.2). Both are weighted by masked tokens over micro-batches and
        processes.
        """
        tokens = batch["tokens"]
        seeds = None
        if not training:
            seeds = [position_seed(run_seed(), -1, i, 0) for i in batch["index"].tolist()]
        masked, where = self.masker(tokens, batch["padding_mask"], seeds)
        hidden = self.net.hidden(masked, batch["padding_mask"], batch.get("segments"))
        targets = tokens[where]  # (S,)
        loss, right = self.net.loss(hidden, targets, where)
        count = max(1, len(targets))
        means = {"acc": right / count, "token_loss": loss}
        counts = {"acc": count, "token_loss": count}
        if "is_next" in batch:
            logits = self.net.sentence_logits(hidden)  # (B, 2)
            label = 1 - batch["is_next"]  # (B,); 0: it follows
            loss = loss + F.cross_entropy(logits.float(), label)
            means["next_acc"] = (logits.argmax(-1) == label).float().mean()
            counts["next_acc"] = len(label)
        return StepOutput(loss, count, means, counts)
