"""Translation in Python."""

from collections.abc import Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from datamodules.tokenizers import truncation
from datamodules.utils.errors import UsageError
from modules.generation.translation import Translation
from modules.models.seq2seq import Seq2Seq
from modules.pooling import masked_mean
from tasks.predictions import Score
from tasks.seq2seq.architectures import TranslationModel
from tasks.seq2seq.attend import (
    cross_attention_weights,
    encode_translation,
    token_labels,
)
from tasks.seq2seq.translate import TranslateOptions, translations, with_folder_defaults

from .models import (
    Attention,
    Model,
    Texts,
    check_single,
    generation_options,
    stack_rows,
    texts_of,
    warn,
)
from .options import TranslationOptions


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
    def translate(  # type: ignore[overload-overlap]
        self, texts: str, **options: Unpack[TranslationOptions]
    ) -> str: ...

    @overload
    def translate(
        self, texts: Iterable[str], **options: Unpack[TranslationOptions]
    ) -> list[str]: ...

    def translate(self, texts: Texts, **options: Unpack[TranslationOptions]) -> str | list[str]:
        """The translation of a text, or a list of those of several.

        Args:
            texts: A text, or a list or a column of a table of texts.
            options: batch_size (32 texts), and those of `GenerationConfig`: beams (5; 1: no beam
                search), max_new_tokens (512, or as many as the model can generate), temperature
                (0: no sampling), ... A folder of Hugging Face's layout may have other defaults.

        Raises:
            UsageError: There is no such option, or its value does not fit.
        """

        def run(lines: list[str]) -> list[str]:
            found = self._translations(lines, options)
            return [self.model.tokenizer.decode(one.tokens) for one in found]

        return texts_of(texts, run)

    @torch.no_grad()
    def score(self, text: str, translation: str) -> Score:
        """How well the model predicts a given translation of one text.

        Raises `UsageError` if either is longer than the model can read.
        """
        check_single(isinstance(text, str), text, "text")
        check_single(isinstance(translation, str), translation, "translation")
        limit = self.net.max_length
        source, (is_cut,) = self.model.tokenizer.encode_sources([text], limit)
        tokens, is_target_cut = encode_translation(self.model, translation)
        if is_cut or is_target_cut:
            what = "text" if is_cut else "translation"
            raise UsageError(f"the {what} has more than {limit} tokens: shorten it")
        start = self.model.tokenizer.decoder_start_id
        inputs = torch.tensor([[start, *tokens[:-1]]], device=self.device)  # (1, N)
        hidden = self.net(torch.tensor(source, device=self.device), inputs)  # (1, N, E)
        loss, _ = self.net.loss(hidden, torch.tensor([tokens], device=self.device))
        return Score.of(float(loss) * len(tokens), len(tokens), len(translation.encode()))

    def embed(self, texts: Texts, batch_size: int = 64) -> Tensor:
        """Mean of the encoder's vectors over the tokens: (E,) for one text, (S, E) for several.

        Of a decoder-only model, of the embeddings of the tokens.
        """

        def run(tokens: Tensor, padding_mask: Tensor) -> list[Tensor]:
            states = self.net.encode(tokens, padding_mask).states  # (B, M, E)
            return list(masked_mean(states, padding_mask).cpu())

        def all_batches(many: list[str]) -> list[Tensor]:
            return self.run_batches(self._sources(many), batch_size, run)

        return stack_rows(texts_of(texts, all_batches))

    @torch.no_grad()
    def logits(self, text: str, translation: str | None = None) -> Tensor:
        """Logits of each token of a translation, (N, V); arguments and errors as of `attention`."""
        source, tokens = self.pair(text, translation)
        start = self.model.tokenizer.decoder_start_id
        inputs = torch.tensor([[start, *tokens[:-1]]], device=self.device)  # (1, N)
        hidden = self.net(torch.tensor([source], device=self.device), inputs)  # (1, N, E)
        return self.net.logits(hidden)[0].float().cpu()

    def attention(self, text: str, translation: str | None = None) -> Attention:
        """Cross-attention of all layers and heads for one text, (L, H, N, M).

        Of a decoder-only model, its self-attention to the text; rows sum to less than 1.

        Args:
            text: One text, of M tokens.
            translation: Of N tokens; None: that of `translate`.

        Raises:
            UsageError: The text is empty.
        """
        source, tokens = self.pair(text, translation)
        weights = cross_attention_weights(self.model, source, tokens)
        pair = self.model.tokenizer
        queries = token_labels(pair.target, tokens)
        return Attention(weights.float().clone(), queries, token_labels(pair.source, source))

    def pair(self, text: str, translation: str | None) -> tuple[list[int], list[int]]:
        """Token ids of a text, and of its translation, without the start token."""
        check_single(isinstance(text, str), text, "text")
        if not text.strip():
            raise UsageError("the text is empty: give a sentence to translate")
        (source,) = self._sources([text])
        if translation is None:
            return source, self._translations([text], {})[0].tokens
        return source, self._target(translation)

    def _translations(self, lines: list[str], options: Mapping[str, Any]) -> list[Translation]:
        """The best translation of each line; options as in `translate`."""
        asked = generation_options(TranslateOptions, options, "batch_size", ckpt_path=self.source)
        asked = with_folder_defaults(self.model, asked, [*options, "nbest"], warn)
        found = translations(self.model, lines, asked, warn, progress=False)
        return [best[0] for best in found]

    def _sources(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, with special tokens; warns of those that are truncated."""
        limit = self.net.max_length
        rows, cut = self.model.tokenizer.encode_sources(texts, limit)
        if any(cut):
            what = f"{sum(cut)} of {len(texts)} sentences"
            warn(truncation(what, limit, self.model.tokenizer.source.truncation))
        return rows

    def _target(self, text: str) -> list[int]:
        """Token ids of a translation, with the end token; warns if it is truncated."""
        check_single(isinstance(text, str), text, "translation")
        tokens, is_cut = encode_translation(self.model, text)
        if is_cut:
            kept = self.model.tokenizer.target.truncation
            warn(truncation("the translation", self.net.max_length, kept))
        return tokens
