"""Translation: the network, its recipe and its results."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from datamodules.tokenizers.pairs import PairTokenizer
from datamodules.utils.files import write_text
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.seq2seq import SEQ2SEQ_PRESETS, Seq2Seq, Seq2SeqConfig
from tasks.base import Batch
from tasks.checkpoints.contents import build_seq2seq as build
from tasks.cli.text_io import printed
from tasks.errors import UsageError
from tasks.seq2seq.architectures import fitted
from tasks.seq2seq.rules import writing
from tasks.seq2seq.scores import TranslationScores, table
from tasks.seq2seq.translator import Model
from tasks.text import MeanOf, TextTask
from tasks.tracking.media import MediaTask, Picture, Table, rendered
from tasks.training.averaging import LastWeights
from tasks.training.optim import OptimConfig
from tasks.training.throughput import TokenCount

SHOWN, LOGGED = (
    3,
    16,
)  # test sentences that a run ends with; those of an evaluation that loggers show


@dataclass(frozen=True)
class DecodingConfig:
    """How texts are translated to be scored.

    Args:
        beams: Width of the beam search in tests; 1: always the likeliest token.
        val_beams: The same in validations, of which there are many.
        length_penalty: Beam search ranks by sum of log probabilities / length^this; above 0 favours long texts.
        max_new_tokens: Tokens of a translation at most; null: `data.max_length`.
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
                raise ValueError(f"decoding.{str(error).replace('beams', name, 1)}") from error

    def generation(self, beams: int, longest: int) -> GenerationConfig:
        """The same for `beams` beams and a network that writes up to `longest` tokens; nothing is sampled."""
        new = longest if self.max_new_tokens is None else min(self.max_new_tokens, longest)
        return GenerationConfig(
            new,
            temperature=0.0,
            beams=beams,
            length_penalty=self.length_penalty,
            early_stopping="likely",
        )


class Seq2SeqTask(MediaTask, TextTask):
    """Translation with an encoder-decoder (Vaswani 2017).

    Args:
        net: The network. Numbers of tokens and lengths come from the data where they are null.
        optimizer: Optimizer, schedule and clipping.
        label_smoothing: Share of the target spread evenly over all tokens (Szegedy 2016), 0 to 1.
        decoding: How texts are translated to be scored.
        pretrained: Weights to go on from, tokenizers included: a checkpoint of `python -m tasks.seq2seq`, `hf/<model>`
            of the Hugging Face hub (Marian, BART, T5), or a local folder of its layout; null starts from random ones.
        average: Evaluate and save the mean of the weights at so many latest validations (Vaswani 2017); null: those of
            the latest. Checkpoints hold the network once for each.
        ema: Decay of a running average of the weights, per optimizer step, such as 0.999; evaluation and the saved
            weights use the average. Null keeps none.
        compile: Compile the network with torch.compile, in place.
    """

    name = "seq2seq"
    monitor, monitor_mode = "val/bleu", "max"
    train_names = (*TextTask.train_names, "tokens_per_s")

    def __init__(
        self,
        net: Seq2SeqConfig = SEQ2SEQ_PRESETS["tiny"],
        optimizer: OptimConfig = OptimConfig(),
        label_smoothing: float = 0.1,
        decoding: DecodingConfig = DecodingConfig(),
        pretrained: str | None = None,
        average: int | None = None,
        ema: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(optimizer, ema, compile)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} must be from 0 to below 1")
        if average is not None and ema is not None:
            raise UsageError(
                f"--model.average {average} and --model.ema {ema} are two averages: leave one out"
            )
        if average is not None and average < 2:
            raise UsageError(
                f"--model.average {average} must be at least 2 validations; leave it out for none"
            )
        self.net_config, self.label_smoothing, self.decoding = net, label_smoothing, decoding
        self.pretrained, self.average = pretrained, average
        self.trained = TokenCount()
        self.collected: dict[str, Picture] = {}

    def build(self, facts: Mapping[str, Any]) -> Seq2Seq:
        """An encoder-decoder for the data's tokens and lengths."""
        net = build(fitted(self.net_config, facts))
        if self.pretrained is not None and self.restored is None:
            from tasks.seq2seq.pretrained import load_pretrained

            load_pretrained(net, self.pretrained, facts)
        return net

    def configure_callbacks(self) -> list[pl.Callback]:
        """The shared ones, and the mean of the latest weights where asked for."""
        return [
            *super().configure_callbacks(),
            *([LastWeights(self.average)] if self.average else []),
        ]

    def configure_model(self) -> None:
        """As in the base class, and the tokenizers of the data."""
        super().configure_model()
        self.tokenizer = PairTokenizer.from_facts(self.facts)

    @property
    def language(self) -> str:
        """That of translations, such as "de"."""
        return str(self.facts["languages"][1])

    # Training and evaluation ----------------------------------------------------------------------------------------

    def make_metrics(self) -> dict[str, Metric]:
        """Share of the tokens foreseen rightly after the right ones; BLEU, chrF and exact matches of translations."""
        return {"acc": MeanOf("acc"), "scores": TranslationScores(self.language)}

    @staticmethod
    def weight(targets: dict[str, Any]) -> Tensor:
        """Tokens of the batch that count, ()."""
        return targets["acc"]

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Perplexity: e to the mean loss of a token after the right ones."""
        return {f"{split}/perplexity": values[f"{split}/loss"].exp()}

    def step(self, batch: Batch, training: bool) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
        """Loss () of a batch of sources (B, M) and targets (B, N); in evaluation figures and translations, too."""
        targets = batch["targets"]
        hidden = self.net(batch["source"], batch["tokens"], batch["source_keep"])
        loss, right = self.net.loss(hidden, targets, self.label_smoothing if training else 0.0)
        count = (targets != IGNORE_INDEX).sum()
        if training:
            self.trained.add(count, len(targets))
            return loss, {}, {"acc": count}
        texts, finished = self.translations(batch)
        outputs = {"acc": right / count.clamp(min=1), "texts": texts, "finished": finished}
        pairs = {
            "index": batch["index"].tolist(),
            "sources": batch["text"],
            "references": batch["reference"],
        }
        return loss, outputs, {"acc": count, **pairs}

    def translations(self, batch: Batch) -> tuple[list[str], list[bool]]:
        """What the network makes of the sources of a batch, each without its padding, and of each whether it ended."""
        beams = self.decoding.beams if self.trainer.testing else self.decoding.val_beams
        config = self.decoding.generation(beams, self.net.max_length)
        sources = [
            row[keep].tolist()
            for row, keep in zip(batch["source"], batch["source_keep"], strict=True)
        ]
        found = translate(self.net, sources, config, **writing(self.tokenizer))
        best = [some[0] for some in found]
        return [self.tokenizer.decode(one.tokens) for one in best], [one.finished for one in best]

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Target tokens/s, padding left out."""
        return {"train/tokens_per_s": samples_per_s * self.trained.per_sample()}

    def collect_media(self, batch: Batch, outputs: dict[str, Any]) -> None:
        """Keep what the network looks at in the first source while it writes what it made of it."""
        from tasks.seq2seq.attend import cross_weights, draw, given_translation, spelled

        if self.collected or not any(outputs["texts"][:1]):
            return
        model = Model(self.net, self.tokenizer, self.facts, writing(self.tokenizer))
        source = batch["source"][0][batch["source_keep"][0]].tolist()
        tokens = given_translation(model, outputs["texts"][0])
        with (
            self.trainer.precision_plugin.val_step_context(),
            torch.compiler.set_stance("force_eager"),
        ):
            weights = (
                cross_weights(model, source, tokens).float().mean(1, keepdim=True)
            )  # (L, 1, N, M)
        labels = spelled(self.tokenizer.source, source), spelled(self.tokenizer.target, tokens)
        self.collected["attention"] = rendered(lambda file: draw(weights, *labels, file, "png"))

    def media(self, split: str) -> dict[str, Table | Picture]:
        """Translations, and what `look` kept."""
        collected, self.collected = self.collected, {}
        rows: list[tuple[Any, ...]] = [
            row[1:4] for row in self.metrics[split]["scores"].found[:LOGGED]
        ]
        return collected | (
            {"translations": Table(("source", "translation", "reference"), rows)} if rows else {}
        )

    # What a run says and keeps --------------------------------------------------------------------------------------

    def notes(self) -> dict[str, Any]:
        """How BLEU and chrF were computed, and how many translations did not end before the limit, if any."""
        cut = next((scores.unfinished for scores in self._scores("test", "val") if scores.found), 0)
        return TranslationScores(self.language).signatures() | ({"unfinished": cut} if cut else {})

    def _scores(self, *splits: str) -> list[TranslationScores]:
        """The scores of these splits."""
        return [
            scores
            for split in splits
            if isinstance(scores := self.metrics[split]["scores"], TranslationScores)
        ]

    def keep_files(self, folder: Path) -> None:
        """Write `source.tokenizer.json` and `target.tokenizer.json`, or `tokenizer.json` where they are one."""
        files = {
            f"{side}.tokenizer.json": self.facts[f"{side}_tokenizer"]
            for side in ("source", "target")
        }
        if len(set(files.values())) == 1:
            files = {"tokenizer.json": self.facts["target_tokenizer"]}
        for name, text in files.items():
            write_text(folder / name, text)

    def draw_results(self, folder: Path) -> None:
        """Write `translations.tsv`: the test's translations beside the references."""
        write_text(folder / "translations.tsv", table(self.metrics["test"]["scores"].found))

    def closing_texts(self, folder: Path) -> dict[str, str]:
        """Some translations of the test."""
        rows = self.metrics["test"]["scores"].found[:SHOWN]
        lines = (
            f"{row.source}\n  translation: {printed(row.text, row.finished)}\n  reference:   {row.reference}"
            for row in rows
        )
        return {"translations": "\n".join(lines)} if rows else {}
