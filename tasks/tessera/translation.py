"""Translation in Python."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from datamodules.utils.errors import UsageError
from modules.models.seq2seq import Seq2Seq
from tasks.predictions import Score
from tasks.seq2seq.architectures import TranslationModel
from tasks.seq2seq.attend import (
    cross_attention_weights,
    encode_translation,
    token_labels,
    translate_text,
)
from tasks.seq2seq.translate import TranslateOptions, translations, with_folder_defaults

from .models import Attention, Model, Texts, check_single, generation_options, stacked, texts_of


class Translator(Model):
    """An encoder-decoder (Vaswani 2017).

    >>> model = tessera.load(run_folder)
    >>> text = model.translate("two three", beams=2)
    >>> isinstance(text, str) and len(model.translate(["two", "three four"])) == 2
    True
    >>> model.score("two three", "TWO THREE").tokens > 1
    True
    >>> model.embed(["two", "three four"]).shape[0]
    2
    >>> weights, queries, keys = model.attention("two three")
    >>> weights.shape[2:] == (len(queries), len(keys))
    True
    """

    net: Seq2Seq

    def __init__(self, model: TranslationModel, source: str) -> None:
        super().__init__(model.net, model.metadata, source)
        self.model = model

    @overload
    def translate(self, texts: str, **options: Any) -> str: ...

    @overload
    def translate(self, texts: Iterable[str], **options: Any) -> list[str]: ...

    def translate(self, texts: Texts, **options: Any) -> str | list[str]:
        """The translation of a text, or a list of those of several.

        Args:
            texts: A text, or a list or a column of a table of texts.
            options: batch_size (32 texts), and those of `GenerationConfig`: beams (5; 1: no beam
                search), max_new_tokens (512, or as many as the model can generate), temperature
                (0: no sampling), ... A folder of Hugging Face's layout may have other defaults.

        Raises:
            UsageError: There is no such option, or its value does not fit.
        """
        given = generation_options(options, "batch_size")
        asked = TranslateOptions(ckpt_path=self.source, **options)
        asked = replace(with_folder_defaults(self.model, asked, given), nbest=1)

        def run(lines: list[str]) -> list[str]:
            found = translations(self.model, lines, asked)
            return [self.model.tokenizer.decode(best[0].tokens) for best in found]

        return texts_of(texts, run)

    @torch.no_grad()
    def score(self, text: str, translation: str) -> Score:
        """How well the model predicts a given translation of one text.

        Raises `UsageError` if either is longer than the model can read.
        """
        tokens = self._target(translation)
        start = self.model.tokenizer.decoder_start_id
        inputs = torch.tensor([[start, *tokens[:-1]]], device=self.device)  # (1, N)
        hidden = self.net(self._source(text), inputs)  # (1, N, E)
        loss, _ = self.net.loss(hidden, torch.tensor([tokens], device=self.device))
        return Score.of(float(loss) * len(tokens), len(tokens), len(translation.encode()))

    @torch.no_grad()
    def embed(self, texts: Texts) -> Tensor:
        """Mean of the encoder's vectors over the tokens: (E,) for one text, (S, E) for several.

        Of a decoder-only model, of the embeddings of the tokens.
        """

        def run(many: list[str]) -> list[Tensor]:
            return [self.net.encode(self._source(text)).states[0].mean(0).cpu() for text in many]

        found = texts_of(texts, run)
        return stacked(found)

    def attention(self, text: str, translation: str | None = None) -> Attention:
        """Cross-attention of all layers and heads for one text, (L, H, N, M).

        Of a decoder-only model, its self-attention to the text; rows sum to less than 1.

        Args:
            text: One text, of M tokens.
            translation: Of N tokens; None: the model's own.
        """
        (source,) = self._source(text).tolist()
        if translation is None:
            tokens = translate_text(self.model, source, beams=5).tokens
        else:
            tokens = self._target(translation)
        weights = cross_attention_weights(self.model, source, tokens)
        pair = self.model.tokenizer
        queries = token_labels(pair.target, tokens)
        return Attention(weights.float().clone(), queries, token_labels(pair.source, source))

    def _source(self, text: str) -> Tensor:
        """Token ids of a text, (1, M)."""
        check_single(isinstance(text, str), text, "text")
        rows, (is_cut,) = self.model.tokenizer.encode_sources([text], self.net.max_length)
        if is_cut:
            raise UsageError(f"the text has more than {self.net.max_length} tokens: shorten it")
        return torch.tensor(rows, device=self.device)

    def _target(self, text: str) -> list[int]:
        """Token ids of a translation, with the end token."""
        check_single(isinstance(text, str), text, "translation")
        tokens, is_cut = encode_translation(self.model, text)
        if is_cut:
            raise UsageError(
                f"the translation has more than {self.net.max_length} tokens: shorten it"
            )
        return tokens
