"""Text classification and masked language models in Python."""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple, overload

import torch
from torch import Tensor

from datamodules.sources.texts import require_texts
from datamodules.tokenizers import Tokenizer, truncation
from datamodules.utils.errors import UsageError
from modules.models.bert import BertClassifier, BertMaskedLM
from modules.pooling import masked_mean
from modules.record import AttentionRecord
from tasks.predictions import AnyPrediction

from .models import (
    Attention,
    Classifier,
    Model,
    Result,
    Run,
    Texts,
    check_single,
    recorded_weights,
    stack_rows,
    texts_of,
    warn,
)


class Filling(NamedTuple):
    """A token for a mask: its text, its probability, and the whole text with it."""

    token: str
    probability: float
    text: str


class TextModel(Model):
    """A model of texts with an encoder. Texts longer than its `max_length` are truncated."""

    net: BertClassifier | BertMaskedLM

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training."""
        options = self.metadata["tokenizer_options"]
        return Tokenizer.from_json(self.metadata["tokenizer"], options["truncate"])

    def vectors(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        """(B, N) -> (B, E), what `embed` returns."""
        raise NotImplementedError

    def embed(self, texts: Texts, batch_size: int = 64) -> Tensor:
        """A vector of each text: (E,) for one, (S, E) for several.

        Args:
            texts: A text, or a list or a column of a table of texts.
            batch_size: Texts that the network reads at a time.
        """
        found = self._run(texts, batch_size, lambda *inputs: list(self.vectors(*inputs).cpu()))
        return stack_rows(found)

    def outputs(self, tokens: Tensor) -> Tensor:
        """(B, N) -> (B, K) of a classifier, else (B, N, V)."""
        raise NotImplementedError

    @torch.no_grad()
    def logits(self, text: str) -> Tensor:
        """Outputs of the network for one text, (K,) of a classifier, else (N, V)."""
        ids = self.token_ids(text)
        return self.outputs(torch.tensor([ids], device=self.device))[0].float().cpu()

    @torch.no_grad()
    def attention(self, text: str) -> Attention:
        """Weights of all layers and heads for one text of N tokens, (L, H, N, N).

        Labels are the tokens, with special ones.
        """
        ids = self.token_ids(text)
        record = AttentionRecord()
        self.net.encoder(torch.tensor([ids], device=self.device), record=record)
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        return Attention(recorded_weights(record), tokens, tokens)

    def _run(self, texts: Texts, batch_size: int, run: Run[Result]) -> Result | list[Result]:
        """What `run` makes of each text."""
        return texts_of(texts, lambda many: self.run_batches(self._inputs(many), batch_size, run))

    def token_ids(self, text: str) -> list[int]:
        """The tokens of one text that the network reads, with special ones."""
        check_single(isinstance(text, str), text, "text")
        return self._inputs([text])[0]

    def _inputs(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, with special tokens; warns of those that are truncated."""
        limit = self.metadata["max_length"]
        inputs = [
            self.tokenizer.build_inputs(ids, limit) for ids in self.tokenizer.encode_batch(texts)
        ]
        cut = sum(row.truncated for row in inputs)
        if cut:
            what = f"{cut} of {len(texts)} texts"
            warn(truncation(what, limit, self.tokenizer.truncation))
        return [row.ids for row in inputs]


class TextClassifier(TextModel, Classifier):
    """A BERT-style classifier (Devlin 2019).

    Methods take one text, or a list or a column of a table of texts.

    >>> model = tessera.load(run_folder)
    >>> model.predict("a good film").label in model.class_names
    True
    >>> model.embed(["a good film", "a bad film"]).shape[0]
    2
    >>> weights, tokens, _ = model.attention("a good film")
    >>> weights.shape[-1] == len(tokens)
    True
    """

    net: BertClassifier

    @overload
    def predict(  # type: ignore[overload-overlap]
        self, texts: str, batch_size: int = 64, top_k: int | None = None
    ) -> AnyPrediction: ...

    @overload
    def predict(
        self, texts: Iterable[str], batch_size: int = 64, top_k: int | None = None
    ) -> list[AnyPrediction]: ...

    def predict(
        self, texts: Texts, batch_size: int = 64, top_k: int | None = None
    ) -> AnyPrediction | list[AnyPrediction]:
        """A `Prediction` for each text, or a `LabelSet` or `Number`, as the model was trained.

        `isinstance` tells a type checker which.

        Args:
            texts: One text, or several, as the class describes.
            batch_size: Texts at a time.
            top_k: `probabilities` of the k most likely classes only; None: of all.

        Raises:
            UsageError: A text is empty, or holds nothing but spaces.
        """

        def run(tokens: Tensor, padding_mask: Tensor) -> list[AnyPrediction]:
            return self.to_predictions(self.net(tokens, padding_mask), top_k)

        def run_many(many: list[str]) -> list[AnyPrediction]:
            require_texts(many, "the text" if isinstance(texts, str) else "texts[{}]")
            return self.run_batches(self._inputs(many), batch_size, run)

        return texts_of(texts, run_many)

    def outputs(self, tokens: Tensor) -> Tensor:
        """(B, N) -> (B, K)."""
        return self.net(tokens)

    def vectors(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        """The pooled vectors, before the classifier and any layer before it."""
        num_read = self.net.pool.num_read
        x = self.net.encoder(tokens, padding_mask, num_outputs=num_read)  # (B, N or `num_read`, E)
        return self.net.pool(x, padding_mask)


class MaskedLanguageModel(TextModel):
    """A BERT-style masked language model (Devlin 2019). `embed` returns means over tokens.

    >>> model = tessera.load(run_folder)
    >>> (best, *others), = model.fill_mask("a good [MASK]", top_k=5)
    >>> 0 < best.probability <= 1 and len(others) == 4
    True
    >>> model.embed(["a good film", "a bad film"]).shape[0]
    2
    >>> model.attention("a good film").weights.ndim
    4
    """

    net: BertMaskedLM

    @property
    def mask_token(self) -> str:
        """What stands for a masked token in `fill_mask`, such as [MASK]."""
        return self.tokenizer.convert_ids_to_tokens([self.tokenizer.special_id("mask")])[0]

    @torch.no_grad()
    def fill_mask(self, text: str, top_k: int = 5) -> list[list[Filling]]:
        """The most likely tokens for each mask in a text, most likely first.

        The text that is returned with a token has it in its place, and the other masks as they are.

        Args:
            text: One text with at least one `mask_token`.
            top_k: Tokens for each mask.

        Raises:
            UsageError: The text has no mask, or is too long.
        """
        check_single(isinstance(text, str), text, "text")
        pieces = text.split(self.mask_token)
        if len(pieces) == 1:
            raise UsageError(f"the text has no {self.mask_token}: put one where a token is to be")
        if top_k < 1:
            raise UsageError(f"top_k is {top_k}, but must be at least 1")
        tokens, places = self._masked_inputs(pieces)
        probabilities = self.net(tokens, where=places).float().softmax(-1)  # (masks, V)
        best = probabilities.topk(min(top_k, probabilities.shape[1]))
        found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        fillings = []
        for number, (row, values) in enumerate(found, 1):
            before = self.mask_token.join(pieces[:number])
            after = self.mask_token.join(pieces[number:])
            pairs = zip(row, values, strict=True)
            fillings.append([self._filling(before, token, after, value) for token, value in pairs])
        return fillings

    def _masked_inputs(self, pieces: list[str]) -> tuple[Tensor, Tensor]:
        """Tokens (1, N) of the pieces of a text with masks between them, and the masks' places."""
        parts = pieces
        if not self.tokenizer.is_character_level:  # a space belongs to the word after it
            parts = [part.rstrip() for part in parts[:-1]] + parts[-1:]
        ids: list[int] = []
        places = []
        for number, part in enumerate(self.tokenizer.encode_batch(parts)):
            if number:
                places.append(len(ids) + 1)  # after [CLS]
                ids.append(self.tokenizer.special_id("mask"))
            ids += part
        inputs = self.tokenizer.build_inputs(ids, self.metadata["max_length"])
        if inputs.truncated:
            longest = self.metadata["max_length"]
            raise UsageError(f"the text has more than {longest} tokens: shorten it")
        tokens = torch.tensor([inputs.ids], device=self.device)  # (1, N)
        return tokens, torch.tensor(places, device=self.device)

    def _filling(self, before: str, token: int, after: str, probability: float) -> Filling:
        """A token between two parts of a text; a continuation such as ##ing joins the word."""
        word = self.tokenizer.decode([token]).strip()
        starts = self.tokenizer.starts_word[token : token + 1] != [False]  # or it has no text
        if starts or self.tokenizer.is_character_level:
            return Filling(word, probability, f"{before}{word}{after}")
        return Filling(word, probability, f"{before.rstrip()}{word.removeprefix('##')}{after}")

    def token_ids(self, text: str) -> list[int]:
        """The tokens of one text that the network reads, with special ones and masks."""
        check_single(isinstance(text, str), text, "text")
        if self.mask_token not in text:
            return super().token_ids(text)
        tokens, _ = self._masked_inputs(text.split(self.mask_token))
        return tokens[0].tolist()

    def outputs(self, tokens: Tensor) -> Tensor:
        """(B, N) -> (B, N, V)."""
        return self.net.head(self.net.hidden(tokens))

    def vectors(self, tokens: Tensor, padding_mask: Tensor) -> Tensor:
        """Means of the encoder's vectors."""
        return masked_mean(self.net.encoder(tokens, padding_mask), padding_mask)
