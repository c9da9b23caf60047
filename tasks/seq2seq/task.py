"""Translation with an encoder-decoder: loss, metrics and pictures."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from datamodules.tokenizers.pairs import PairTokenizer
from datamodules.utils.files import write_text
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import Translation, translate
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.seq2seq import SEQ2SEQ_PRESETS, Seq2Seq, Seq2SeqConfig
from tasks.base import Batch, StepOutput
from tasks.cli.text_io import format_output
from tasks.errors import UsageError
from tasks.seq2seq.architectures import (
    TranslationModel,
    build_seq2seq,
    fit_to_data,
    load_pretrained,
)
from tasks.seq2seq.attend import cross_attention_weights, draw, encode_translation, token_labels
from tasks.seq2seq.decoding import decoding_tokens
from tasks.seq2seq.scores import TranslationScores, table
from tasks.text import MeanOf, TextTask
from tasks.tracking.media import Picture, Table, render_picture
from tasks.training.averaging import LastWeights
from tasks.training.throughput import TokenCount

PRINTED = 3  # translations of the test that a run prints at its end
PRINTED_CHARACTERS = 160  # of each text
LOGGED = 16  # translations that an evaluation logs


def brief(text: str) -> str:
    """The beginning of a text, for a line on the console."""
    return textwrap.shorten(text, PRINTED_CHARACTERS, placeholder=" ...")


@dataclass(frozen=True)
class DecodingConfig:
    """How evaluation translates.

    Args:
        beams: Beams in testing; 1: greedy.
        val_beams: Beams in validation; 1: greedy.
        length_penalty: Beam search ranks by sum of log probabilities / length^this; above 0 favours
            long translations.
        max_new_tokens: Largest number of tokens of a translation; null: the network's `max_length`.
    """

    beams: int = 5
    val_beams: int = 1
    length_penalty: float = 1.0
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("beams", "val_beams"):
            try:
                self.generation(getattr(self, name), self.max_new_tokens or 1)
            except ValueError as error:
                sentence = str(error).replace("beams", name, 1)  # begins with GenerationConfig's
                raise ValueError(sentence) from error

    def generation(self, beams: int, max_length: int) -> GenerationConfig:
        """Returns options of `translate` for a network of `max_length` tokens."""
        limit = max_length if self.max_new_tokens is None else self.max_new_tokens
        return GenerationConfig(
            min(limit, max_length),
            temperature=0.0,
            beams=beams,
            length_penalty=self.length_penalty,
            early_stopping="likely",  # False in transformers
        )


class Seq2SeqTask(TextTask):
    """Translation with an encoder-decoder (Vaswani 2017).

    Args:
        net: The network. Null sizes of vocabularies and lengths come from the data.
        label_smoothing: Probability mass spread over all tokens (Szegedy 2016); from 0, below 1.
        decoding: How evaluation translates.
        average: Last validations whose mean weights are evaluated; these are also saved,
            and a checkpoint holds the weights of each (Vaswani 2017); null: none.
        kwargs: Those of `TextTask`.
    """

    name = "seq2seq"
    monitor = "val/bleu"
    monitor_mode = "max"

    def __init__(
        self,
        net: Seq2SeqConfig = SEQ2SEQ_PRESETS["tiny"],
        label_smoothing: float = 0.1,
        decoding: DecodingConfig = DecodingConfig(),
        average: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} must be from 0 to below 1")
        if average is not None and self.ema is not None:
            raise UsageError("--model.average and --model.ema exclude each other: leave one out")
        if average is not None and average < 2:
            raise UsageError(f"--model.average {average} must be at least 2 validations")
        self.net_config = net
        self.label_smoothing = label_smoothing
        self.decoding = decoding
        self.average = average
        self.token_count = TokenCount()
        self.collected: dict[str, Picture] = {}

    def build(self, metadata: Mapping[str, Any]) -> Seq2Seq:
        config = fit_to_data(self.net_config, metadata)
        if self.pretrained is None:
            return build_seq2seq(config)
        return load_pretrained(config, self.pretrained, metadata)

    def configure_callbacks(self) -> list[pl.Callback]:
        callbacks = super().configure_callbacks()
        return callbacks if self.average is None else [*callbacks, LastWeights(self.average)]

    @cached_property
    def tokenizer(self) -> PairTokenizer:
        return PairTokenizer.from_metadata(self.metadata)

    @property
    def language(self) -> str:
        return str(self.metadata["languages"][1])

    # Training and evaluation ----------------------------------------------------------------------

    def train_metrics(self) -> list[str]:
        return [*super().train_metrics(), "tokens_per_s"]

    def make_metrics(self) -> dict[str, Metric]:
        """Accuracy of next tokens; BLEU, chrF and exact matches of translations.

        If the target's tokenizer lowercases, texts are compared in lowercase.
        """
        scores = TranslationScores(self.language, self.tokenizer.target.lowercases)
        return {"acc": MeanOf("acc"), "scores": scores}

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Perplexity of the references."""
        return {f"{split}/perplexity": values[f"{split}/loss"].exp()}

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns the loss of sources (B, M) and targets (B, N); evaluation also translates.

        `tokens` are the targets moved right, `source_padding_mask` (B, M) is False at padding.
        """
        targets = batch["targets"]
        hidden = self.net(batch["source"], batch["tokens"], batch["source_padding_mask"])
        loss, correct = self.net.loss(hidden, targets, self.label_smoothing if training else 0.0)
        count = (targets != IGNORE_INDEX).sum()
        if training:
            self.token_count.add(count, len(targets))
            return StepOutput(loss, count, {}, {})
        texts, finished = self.translations(batch)
        outputs = {"acc": correct / count.clamp(min=1), "texts": texts, "finished": finished}
        pairs = {
            "index": batch["index"].tolist(),
            "sources": batch["text"],
            "references": batch["reference"],
        }
        return StepOutput(loss, count, outputs, targets={"acc": count, **pairs})

    def translations(self, batch: Batch) -> tuple[list[str], list[bool]]:
        """Returns the translations of a batch, and whether each ended before the length limit."""
        beams = self.decoding.beams if self.trainer.testing else self.decoding.val_beams
        config = self.decoding.generation(beams, self.net.max_length)
        sources = [
            row[padding_mask].tolist()
            for row, padding_mask in zip(batch["source"], batch["source_padding_mask"], strict=True)
        ]
        ranked = translate(self.net, sources, config, **decoding_tokens(self.tokenizer))
        nothing = Translation([], math.nan, False)  # of a network whose scores are NaN
        best = [translations[0] if translations else nothing for translations in ranked]
        texts = [self.tokenizer.decode(translation.tokens) for translation in best]
        return texts, [translation.finished for translation in best]

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Target tokens/s, without padding."""
        return {"train/tokens_per_s": samples_per_s * self.token_count.per_sample()}

    def reset_media(self) -> None:
        self.collected = {}

    def collect_media(self, batch: Batch, outputs: dict[str, Any]) -> None:
        """Keeps the cross-attention of the first translation."""
        if self.collected or not any(outputs["texts"][:1]):  # an empty one has no picture
            return
        model = TranslationModel.of(self.net, self.metadata)
        source = batch["source"][0][batch["source_padding_mask"][0]].tolist()
        tokens, _ = encode_translation(model, outputs["texts"][0])
        with (
            self.trainer.precision_plugin.val_step_context(),
            torch.compiler.set_stance("force_eager"),
        ):
            weights = cross_attention_weights(model, source, tokens)  # (L, H, N, M)
        mean = weights.float().mean(1, keepdim=True)  # (L, 1, N, M)
        sources = token_labels(self.tokenizer.source, source)
        targets = token_labels(self.tokenizer.target, tokens)
        self.collected["attention"] = render_picture(
            lambda file: draw(mean, sources, targets, file, "png")
        )

    def media(self, split: str) -> dict[str, Table | Picture]:
        media: dict[str, Table | Picture] = {**self.collected}
        found = self.metrics[split]["scores"].found[:LOGGED]  # scored translations
        rows = [(row.source, row.text, row.reference) for row in found]
        if rows:
            media["translations"] = Table(("source", "translation", "reference"), rows)
        return media

    # What a run prints and keeps ------------------------------------------------------------------

    def notes(self) -> dict[str, Any]:
        """Returns the signatures of BLEU and chrF, and the number of unfinished translations."""
        scores = [self.metrics[split]["scores"] for split in ("test", "val")]
        signatures = scores[0].signatures()
        unfinished = next((metric.unfinished for metric in scores if metric.found), 0)
        return signatures | {"unfinished": unfinished} if unfinished else signatures

    def save_files(self, folder: Path) -> None:
        source = self.metadata["source_tokenizer"]
        target = self.metadata["target_tokenizer"]
        if source == target:
            write_text(folder / "tokenizer.json", source)
        else:
            write_text(folder / "source.tokenizer.json", source)
            write_text(folder / "target.tokenizer.json", target)

    def save_results(self, folder: Path, split: str) -> None:
        prefix = "" if split == "test" else f"{split}_"
        write_text(folder / f"{prefix}translations.tsv", table(self.metrics[split]["scores"].found))

    def closing_texts(self, folder: Path) -> dict[str, str]:
        rows = self.metrics["test"]["scores"].found[:PRINTED]
        lines = (
            f"{brief(row.source)}\n"
            f"  translation: {format_output(brief(row.text), row.finished)}\n"
            f"  reference:   {brief(row.reference)}"
            for row in rows
        )
        return {"translations": "\n".join(lines)} if rows else {}
