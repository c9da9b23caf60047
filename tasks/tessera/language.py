"""Language models in Python."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Unpack

from datamodules.tokenizers import Tokenizer, truncation
from datamodules.utils.errors import UsageError
from modules.models.gpt import Decoder
from modules.pooling import masked_mean
from modules.record import AttentionRecord
from modules.schema import check_value
from tasks.errors import usage_errors
from tasks.lm import architectures
from tasks.lm.generate import Completion, GenerateOptions, completions, read_by_model
from tasks.lm.score import check_windows, total_losses
from tasks.lm.streaming import prompt_tokens, refuse_unknown_characters
from tasks.predictions import Score

from .models import (
    Attention,
    Model,
    Texts,
    check_single,
    generation_options,
    recorded_weights,
    split_into_batches,
    stack_rows,
    texts_of,
    warn,
)
from .options import GenerationOptions


class LanguageModel(Model):
    """A decoder language model (Radford 2019).

    >>> model = tessera.load(run_folder)
    >>> text = model.generate("The", max_new_tokens=8, seed=1)
    >>> text == "".join(model.stream("The", max_new_tokens=8, seed=1))
    True
    >>> model.score("The text").perplexity > 1
    True
    >>> len(model.score(["The text", "A list of texts"]))
    2
    >>> model.embed(["The text", "A list of texts"]).shape[0]
    2
    >>> weights, tokens, _ = model.attention("The text")
    >>> weights.shape[-1] == len(tokens)
    True
    """

    net: Decoder

    def __init__(self, model: architectures.LanguageModel, source: str) -> None:
        super().__init__(model.net, model.metadata, source)
        self.model = model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training."""
        return self.model.tokenizer

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str = "",
        stop: str | Sequence[str] = (),
        batch_size: int = 64,
        **options: Unpack[GenerationOptions],
    ) -> str: ...

    @overload
    def generate(
        self,
        prompts: Iterable[str],
        stop: str | Sequence[str] = (),
        batch_size: int = 64,
        **options: Unpack[GenerationOptions],
    ) -> list[str]: ...

    def generate(
        self,
        prompts: Texts = "",
        stop: str | Sequence[str] = (),
        batch_size: int = 64,
        **options: Unpack[GenerationOptions],
    ) -> str | list[str]:
        """The text that follows a prompt, or a list of the texts that follow several.

        `stream` returns the text of one prompt in parts.

        Args:
            prompts: A text, or a list or a column of a table of texts; "" begins a document.
            stop: String or strings that end a text and are not part of it.
            batch_size: Prompts at a time.
            options: Those of `modules.generation.sampling.GenerationConfig`: max_new_tokens (100),
                temperature (1; 0: always the most likely token), top_k and top_p (None: sample from
                all tokens), seed (0, the same for all prompts), beams (1: no beam search), ... A
                folder of Hugging Face's layout may have other defaults.

        Raises:
            UsageError: There is no such option, its value does not fit, or a character of a prompt
                is not in the vocabulary.
        """

        def run(texts: list[str]) -> list[str]:
            found = self._start(texts, stop, options, batch_size)
            return ["".join(completion.chunks()) for completion in found]

        return texts_of(prompts, run)

    def stream(
        self, prompt: str = "", stop: str | Sequence[str] = (), **options: Unpack[GenerationOptions]
    ) -> Iterator[str]:
        """Yields the text of `generate` for one prompt in parts, as early as possible.

        Arguments and errors as in `generate`.
        """
        check_single(isinstance(prompt, str), prompt, "prompt")
        (completion,) = self._start([prompt], stop, options)
        return (chunk for chunk in completion.chunks() if chunk)

    @overload
    def score(  # type: ignore[overload-overlap]
        self, texts: str, stride: int | None = None, batch_size: int = 8
    ) -> Score: ...

    @overload
    def score(
        self, texts: Iterable[str], stride: int | None = None, batch_size: int = 8
    ) -> list[Score]: ...

    def score(
        self, texts: Texts, stride: int | None = None, batch_size: int = 8
    ) -> Score | list[Score]:
        """How well the model predicts each text, as a document of its training data.

        By a sliding window, as `python -m tasks.lm score`.

        Args:
            texts: A text of at least two tokens, or a list or a column of a table of texts.
            stride: Tokens between the starts of windows; None: half the context.
            batch_size: Windows at a time.
        """
        step = check_windows(self.net, stride, batch_size)
        marks = self.model.boundary_tokens
        begin = [token for token in (marks.prefix, marks.bos) if token is not None]
        end = [token for token in (marks.eos,) if token is not None]

        def run(many: list[str]) -> list[Score]:
            refuse_unknown_characters(self.tokenizer, many, "a text")
            rows = [np.array(begin + ids + end) for ids in self.tokenizer.encode_batch(many)]
            if any(len(row) < 2 for row in rows):
                raise UsageError("a text has only one token, nothing to predict: give longer ones")
            found = total_losses(self.net, rows, step, batch_size, progress=False)
            scores = []
            for text, (loss, _, tokens) in zip(many, found, strict=True):
                size = len(text.encode())
                if not begin:  # the first token of the text is not predicted
                    size -= self.tokenizer.first_token_bytes(text)
                scores.append(Score.of(loss, tokens, size))
            return scores

        return texts_of(texts, run)

    def embed(self, texts: Texts, batch_size: int = 64) -> Tensor:
        """Mean of the last block's vectors over the tokens: (E,) for one text, (S, E) for several.

        Only the tokens that fit into the context count. Without a causal mask, tokens would attend
        to the padding behind them, so that texts run one by one.
        """
        batch_size = batch_size if self.net.config.stack.causal else 1

        def run(tokens: Tensor, padding_mask: Tensor) -> list[Tensor]:
            hidden = self.net(tokens)  # (B, N, E); no token attends to the padding behind it
            return list(masked_mean(hidden, padding_mask).cpu())

        def all_batches(many: list[str]) -> list[Tensor]:
            return self.run_batches(self._inputs(many), batch_size, run)

        return stack_rows(texts_of(texts, all_batches))

    @torch.no_grad()
    def logits(self, text: str) -> Tensor:
        """Logits of what follows each of the N tokens of a text that `attention` names, (N, V)."""
        ids = self.token_ids(text)
        hidden = self.net(torch.tensor([ids], device=self.device))  # (1, N, E)
        return self.net.logits(hidden)[0].float().cpu()

    @torch.no_grad()
    def attention(self, text: str) -> Attention:
        """Weights of all layers and heads for one text, (L, H, N, N).

        N is the number of its tokens that fit into the context, which are the labels.
        """
        ids = self.token_ids(text)
        record = AttentionRecord()
        self.net(torch.tensor([ids], device=self.device), cache=record)
        tokens = self.tokenizer.convert_ids_to_tokens(ids)
        return Attention(recorded_weights(record), tokens, tokens)

    def _start(
        self,
        prompts: list[str],
        stop: str | Sequence[str],
        options: Mapping[str, Any],
        batch_size: int = 1,
    ) -> Iterator[Completion]:
        fixed = {"ckpt_path": self.source, "prompt": prompts}
        stops = [stop] if isinstance(stop, str) else list(stop)
        with usage_errors():
            check_value(list[str], stops, "stop")
        asked = generation_options(GenerateOptions, options, stop=stops, **fixed)
        given = [*options, "samples"] + ["stop"] * bool(stops)
        tokens, asked = read_by_model(self.model, prompts, asked, given, warn)
        for rows in split_into_batches(range(len(prompts)), batch_size):
            batch = [prompts[i] for i in rows], [tokens[i] for i in rows]
            yield from completions(self.model, *batch, asked)

    def token_ids(self, text: str) -> list[int]:
        """The tokens of one text that the network reads, with special ones."""
        check_single(isinstance(text, str), text, "text")
        return self._inputs([text])[0]

    def _inputs(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, as many as fit into the context; warns of those that do not."""
        limit = self.net.max_length
        rows = [prompt_tokens(self.model, text, "a text") for text in texts]
        cut = sum(len(row) > limit for row in rows)
        if cut:
            warn(truncation(f"{cut} of {len(texts)} texts", limit, "head"))
        return [row[:limit] for row in rows]
