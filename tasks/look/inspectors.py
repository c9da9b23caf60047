"""What is shown of the models of each task, and all tasks by name."""

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor

from datamodules.sources.base import shortened
from modules.activations import attention_parts, stacks
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.measures import token_losses
from modules.models.swin import Swin
from tasks.look.inspector import (
    LIKELIEST,
    AttentionLayers,
    ClassifierInspector,
    Inspector,
    Interventions,
)
from tasks.look.pictures import (
    EncoderInspector,
    ImageInspector,
    PixelInspector,
    WindowInspector,
)
from tasks.look.token_views import MAX_ROWS, cut_note, induction_views, lens, neighbours
from tasks.look.views import Matrix, Sample, Table, Tokens, View
from tasks.seq2seq.attend import token_labels

WORDS = 32  # of a language model's text from the test split, whose windows fill the context


class TextInspector(Inspector):
    """Views of models that read tokens."""

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def sample(self, name: str, inputs: Sequence[Any], interventions: Interventions) -> Sample:
        """As in the base class; warns of words that the tokenizer does not know."""
        self.warn_unknown(self.tokenizer, inputs[0], interventions.patch_from)
        return super().sample(name, inputs, interventions)

    def warn_unknown(self, tokenizer: Any, *texts: str) -> None:
        """Warns if the network reads [UNK] in place of words."""
        found = dict.fromkeys(word for text in texts for word in tokenizer.unknown_words(text))
        if found:
            (unknown,) = tokenizer.convert_ids_to_tokens([tokenizer.special_ids.unk])
            warnings.warn(
                f"the tokenizer does not know {shortened([*map(repr, found)])}: the network reads "
                f"{unknown} there, as for any other unknown word",
                stacklevel=2,
            )

    def ids(self, *inputs: Any) -> list[int]:
        """Tokens that the network reads."""
        ids: list[int] = self.model.token_ids(*inputs)
        return ids

    def inputs(self, batch: Mapping[str, Any]) -> list[Sequence[Any]]:
        return [(self.text(self.tokenizer, row),) for row in batch["tokens"].tolist()]

    def text(self, tokenizer: Any, ids: Sequence[int]) -> str:
        """Without special tokens, and without targets that are ignored; warns of unknown words."""
        special = {*tokenizer.special_ids.known().values(), IGNORE_INDEX}
        unknown = [*ids].count(tokenizer.special_ids.unk)
        if unknown:
            warnings.warn(
                f"the tokenizer does not know {unknown} tokens of a test sample: they are missing "
                "in the text shown",
                stacklevel=2,
            )
        text: str = tokenizer.decode([token for token in ids if token not in special])
        return text

    def attention_layers(self, *inputs: Any) -> list[AttentionLayers]:
        labels = token_labels(self.tokenizer, self.ids(*inputs))
        return [AttentionLayers("", labels, labels)]

    def neighbours(self, table: Tensor, ids: Sequence[int]) -> Table:
        """The nearest tokens of those of a text."""
        return neighbours(table, ids, partial(token_labels, self.tokenizer))

    def lens(
        self, activations: Mapping[str, Tensor], queries: Sequence[str], prefix: str = ""
    ) -> Matrix:
        """The likeliest token after each block, at each position."""
        labels = partial(token_labels, self.output_tokenizer)
        return lens(self.net, activations, queries, labels, prefix)

    @property
    def output_tokenizer(self) -> Any:
        return self.tokenizer


class TextClassifierInspector(ClassifierInspector, TextInspector):
    """Views of text classifiers."""

    model_name = "TextClassifier"

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        table = self.net.encoder.embed.weight
        neighbours = self.neighbours(table, self.ids(*inputs))
        return {**super().task_tabs(inputs, activations), "neighbours": [neighbours]}


class LanguageInspector(TextInspector):
    """Views of language models."""

    model_name = "LanguageModel"

    def inputs(self, batch: Mapping[str, Any]) -> list[Sequence[Any]]:
        """The first words of windows, which fill the context."""
        texts = [text for (text,) in super().inputs(batch)]
        return [(text[: len(" ".join(text.split()[:WORDS]))],) for text in texts]

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        ids = self.ids(*inputs)
        values = {}
        if len(ids) > 1:
            losses = token_losses(logits[:-1], torch.tensor(ids[1:]))
            values["loss (nats per token)"] = float(losses.mean())
        probabilities = logits[-1].softmax(-1)
        best = reference[-1].topk(min(LIKELIEST, len(probabilities))).indices.tolist()
        (last,) = token_labels(self.tokenizer, ids[-1:])
        for label, index in zip(token_labels(self.tokenizer, best), best, strict=True):
            values[f"next token after {last}: {label}"] = float(probabilities[index])
        return values

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        ids = self.ids(*inputs)
        labels = token_labels(self.tokenizer, ids)
        targets = torch.tensor(ids[1:], dtype=torch.long)  # also of a single token
        losses = token_losses(activations["logits"][:-1], targets).tolist()
        note = (
            f"mean {sum(losses) / max(1, len(losses)):.3f} nats; the first token is not predicted"
        )
        return {
            "logit lens": [self.lens(activations, labels)],
            "losses": [Tokens("loss of each token", labels, [None, *losses], "nats", note)],
            "neighbours": [self.neighbours(self.net.embed.weight, ids)],
        }

    def head_statistics(self, layers: AttentionLayers, weights: Tensor) -> list[View]:
        views = super().head_statistics(layers, weights)
        return [*views, *induction_views(self.net, self.net.vocabulary)]


class MaskedInspector(TextInspector):
    """Views of masked language models."""

    model_name = "MaskedLanguageModel"

    def warn_unknown(self, tokenizer: Any, *texts: str) -> None:
        """As in the base class; masks are known."""
        pieces = (text.split(self.model.mask_token) for text in texts)
        super().warn_unknown(tokenizer, *chain.from_iterable(pieces))

    def text(self, tokenizer: Any, ids: Sequence[int]) -> str:
        """As in the base class, without the ##pieces of a word that the chunk cuts."""
        cls, *others = ids
        pieces = tokenizer.convert_ids_to_tokens(others)
        cut = [*takewhile(lambda piece: piece.startswith("##"), pieces)]
        return super().text(tokenizer, [cls, *others[len(cut) :]])

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        ids = torch.tensor(self.ids(*inputs))
        masks = (ids == self.tokenizer.special_id("mask")).nonzero().flatten().tolist()
        loss = float(token_losses(logits, ids).mean())
        values = {"loss of the text as it is (nats per token)": loss}
        for position in masks:
            probabilities = logits[position].softmax(-1)
            best = reference[position].topk(LIKELIEST).indices.tolist()
            for label, index in zip(token_labels(self.tokenizer, best), best, strict=True):
                values[f"{label} at token {position}"] = float(probabilities[index])
        return values

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        ids = self.ids(*inputs)
        labels = token_labels(self.tokenizer, ids)
        return {
            "fill-mask": [self.filled(ids)],
            "logit lens": [self.lens(activations, labels)],
            "neighbours": [self.neighbours(self.net.encoder.embed.weight, ids)],
        }

    @torch.no_grad()
    def filled(self, ids: list[int]) -> Table:
        """The likeliest tokens at the masks of a text; without masks, at each token in turn."""
        mask = self.tokenizer.special_id("mask")
        tokens = torch.tensor(ids)
        positions = (tokens == mask).nonzero().flatten()
        note = ""
        if not len(positions):
            note = "each token masked in turn" + cut_note(len(ids) - 2)
            positions = torch.arange(len(ids))[1:-1][:MAX_ROWS]  # not [CLS] and [SEP]
        every = torch.arange(len(positions))
        masked = tokens.repeat(len(positions), 1)  # (S, N)
        masked[every, positions] = mask
        logits = self.model.outputs(masked.to(self.model.device))  # (S, N, V)
        best = logits[every, positions].float().softmax(-1).topk(LIKELIEST)  # (S, K)
        rows = []
        for position, values, others in zip(
            positions.tolist(), best.values.tolist(), best.indices.tolist(), strict=True
        ):
            names = token_labels(self.tokenizer, others)
            cells = [f"{name} {value:.3f}" for name, value in zip(names, values, strict=True)]
            (label,) = token_labels(self.tokenizer, [ids[position]])
            rows.append([position, label, *cells])
        columns = ("position", "token", *(f"{rank}." for rank in range(1, LIKELIEST + 1)))
        return Table("likeliest tokens", columns, rows, note)


class TranslationInspector(TextInspector):
    """Views of translators."""

    model_name = "Translator"

    def inputs(self, batch: Mapping[str, Any]) -> list[Sequence[Any]]:
        pair = self.model.model.tokenizer
        sources = [self.text(pair.source, row) for row in batch["source"].tolist()]
        targets = [self.text(pair.target, row) for row in batch["targets"].tolist()]
        return [*zip(sources, targets, strict=True)]

    def completed(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """With the model's own translation, unless there is one."""
        text, translation = inputs
        if translation is not None:
            self.warn_unknown(self.output_tokenizer, translation)
        return text, self.model.translate(text) if translation is None else translation

    def patch_inputs(self, inputs: Sequence[Any], patch_from: str) -> Sequence[Any]:
        """Another source; the decoder reads the same translation."""
        return patch_from, inputs[1]

    @property
    def tokenizer(self) -> Any:
        return self.model.model.tokenizer.source

    @property
    def output_tokenizer(self) -> Any:
        return self.model.model.tokenizer.target

    def labels(self, *inputs: Any) -> tuple[list[str], list[str], list[str]]:
        """Of the source, of what the decoder reads, and of what it is to predict."""
        source, tokens = self.model.pair(*inputs)
        pair = self.model.model.tokenizer
        read = [pair.decoder_start_id, *tokens[:-1]]
        return (
            token_labels(pair.source, source),
            token_labels(pair.target, read),
            token_labels(pair.target, tokens),
        )

    def attention_layers(self, *inputs: Any) -> list[AttentionLayers]:
        source, read, predicted = self.labels(*inputs)
        if "" in attention_parts(self.net):  # a prefix language model
            both = source + read
            return [AttentionLayers("", both, both)]
        return [
            AttentionLayers("cross", predicted, source),
            AttentionLayers("encoder", source, source),
            AttentionLayers("decoder", read, read),
        ]

    def outputs(self, logits: Tensor, reference: Tensor, inputs: Sequence[Any]) -> dict[str, float]:
        _, tokens = self.model.pair(*inputs)
        losses = token_losses(logits, torch.tensor(tokens)).tolist()
        labels = self.labels(*inputs)[2]
        values = {"loss (nats per token)": sum(losses) / len(losses)}
        for index, (label, loss) in enumerate(zip(labels, losses, strict=True)):
            values[f"loss of token {index}, {label}"] = loss
        return values

    def task_tabs(
        self, inputs: Sequence[Any], activations: Mapping[str, Tensor]
    ) -> dict[str, list[View]]:
        source, tokens = self.model.pair(*inputs)
        labels = self.labels(*inputs)[2]
        losses = token_losses(activations["logits"], torch.tensor(tokens)).tolist()
        table = self.net.embed if self.net.source_embed is None else self.net.source_embed
        nearest: list[View] = [self.neighbours(table.weight, source)]
        if self.net.source_embed is not None:
            target = partial(token_labels, self.output_tokenizer)
            nearest.append(neighbours(self.net.embed.weight, tokens, target, " of the translation"))
        tabs: dict[str, list[View]] = {
            "losses": [Tokens("loss of each token of the translation", labels, losses, "nats")],
            "neighbours": nearest,
        }
        if "decoder." in stacks(self.net):
            tabs["logit lens"] = [self.lens(activations, labels, "decoder.")]
        return tabs


def inspector_of(task: str, model: Any) -> Inspector:
    """The inspector of a model of a task."""
    if isinstance(model.net, Swin):
        return WindowInspector(model)
    return INSPECTORS[task](model)


INSPECTORS: dict[str, type[Inspector]] = {
    "vit": ImageInspector,
    "mae": EncoderInspector,
    "bert": TextClassifierInspector,
    "mlm": MaskedInspector,
    "lm": LanguageInspector,
    "igpt": PixelInspector,
    "seq2seq": TranslationInspector,
}
