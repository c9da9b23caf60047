"""Reads texts with a model and its cache: what generation needs of a model."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from modules.config import require
from modules.generation.beam_cache import Branches
from modules.kv_cache import Cache
from modules.models.gpt import Decoder

NEVER = float("-inf")


class Reader:
    """Reads texts token after token, and tells how likely each token is to follow: the base of all readers.

    There are P prompts, and K = `beams` texts that go on from each, next to each other: "rows" are P x K.
    """

    net: Decoder
    cache: Cache | Branches
    tokens: Tensor  # of one beam, (P, size and room for new tokens); what several beams write, their search keeps
    size: int  # number of tokens of each text as yet
    new: int  # number of tokens that will follow
    beams: int
    banned: Tensor  # tokens that never follow, (B,)
    logs = False  # whether scores are logarithms of probabilities, of which banned tokens keep their share

    @property
    def seen(self) -> Tensor:
        """The texts as yet, (P, size), with one beam; padded on the left with their first token."""
        return self.tokens[:, : self.size]

    def start(self) -> Tensor:
        """Reads the prompts: scores of the tokens that follow, (P, V)."""
        scores = self.scores(self.begin())
        if self.beams > 1:
            assert isinstance(self.cache, Cache)
            self.cache = Branches(
                self.cache, self.beams, self.new - 1
            )  # the last token is not read
        return scores

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one more token in each row, (rows,): scores of those that follow, (rows, V)."""
        if self.beams == 1:
            self.tokens[:, self.size] = tokens
        self.size += 1
        return self.scores(self.read(tokens[:, None])[:, 0])  # (rows, 1) -> (rows, E)

    def begin(self) -> Tensor:
        """Reads the prompts: the vectors that tell what follows them, (P, E)."""
        return self.read(self.seen)[:, -1]

    def read(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Reads prompts (P, N) or next tokens (rows, 1) with the cache: vectors (P, N, E) or (rows, 1, E)."""
        raise NotImplementedError

    def scores(self, vectors: Tensor) -> Tensor:
        """Vectors (..., E) -> scores of the tokens that follow, (..., V)."""
        scores = self.net.logits(vectors)
        scores = scores.float().log_softmax(-1) if self.logs else scores
        return scores.index_fill(-1, self.banned, NEVER) if len(self.banned) else scores

    def reorder(self, beams: Tensor) -> None:
        """Lets each text go on with another of the same prompt: (P, K) of K."""
        assert isinstance(self.cache, Branches)
        self.cache.reorder(beams)

    def select(self, prompts: Tensor) -> None:
        """Goes on with some of the prompts only: (R,) of P."""
        self.cache = self.cache.select(prompts)
        self.tokens = self.tokens[prompts]  # (R, ...)


class TextReader(Reader):
    """Reads prompts with a decoder, then what follows them.

    Rows of different lengths are padded on the left. Where a row outgrows the context, its last half is read anew.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each row.
        new: Number of tokens that will follow.
        beams: Texts that go on from each prompt.
        banned: Tokens that never follow.
        logs: Those keep their share of probability, which is lost; False: it goes to the others.

    Raises:
        ValueError: A prompt is empty, longer than the context, or has tokens that the decoder does not know; or it
            does not know a banned one.
    """

    def __init__(
        self,
        net: Decoder,
        prompts: Sequence[Sequence[int]],
        new: int,
        beams: int = 1,
        banned: Collection[int] = (),
        logs: bool = False,
    ) -> None:
        self.net, self.new, self.beams, self.context, self.logs = (
            net,
            new,
            beams,
            net.max_length,
            logs,
        )
        check_ready(net)
        check_texts("Prompt", prompts, self.context, net.vocabulary)
        for token in banned:
            require(
                0 <= token < net.vocabulary,
                f"Banned token {token} is none of the model's {net.vocabulary}.",
            )
        self.banned = torch.tensor([*banned], dtype=torch.int64, device=net.embed.weight.device)
        self.size = max(len(prompt) for prompt in prompts)
        self.first = [self.size - len(prompt) for prompt in prompts]  # where each row's text begins
        rows = [
            [text[0]] * pad + [*text] + [0] * new
            for pad, text in zip(self.first, prompts, strict=True)
        ]
        self.tokens = torch.tensor(rows, device=net.embed.weight.device)  # (P, size + new)
        self.cache = net.make_cache(
            len(prompts), self.size if beams > 1 else min(self.context, self.size + new)
        )

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one more token in each row, (rows,): scores of those that follow, (rows, V)."""
        if self.cache.filled < self.cache.length:
            return super().step(tokens)
        self.tokens[:, self.size] = tokens
        self.size += 1
        half = max(1, self.context // 2)
        self.first = [
            at if self.size - at <= self.context else self.size - half for at in self.first
        ]
        return self.scores(self.begin())

    def begin(self) -> Tensor:
        """Reads the rows from where each begins: (P, E)."""
        assert isinstance(self.cache, Cache)
        self.cache.clear()
        start, last = min(self.first), max(self.first)
        keep = None
        if start < last:
            first = torch.tensor(self.first, device=self.tokens.device)
            keep = torch.arange(start, self.size, device=first.device) >= first[:, None]  # (P, N)
        return self.read(self.tokens[:, start : self.size], keep)[:, -1]

    def read(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Reads prompts (P, N) or next tokens (rows, 1) with the cache: vectors (P, N, E) or (rows, 1, E)."""
        return self.net(tokens, keep, cache=self.cache)

    def select(self, prompts: Tensor) -> None:
        """Goes on with some of the prompts only: (R,) of P."""
        super().select(prompts)
        self.first = [self.first[row] for row in prompts.tolist()]


def check_ready(net: torch.nn.Module) -> None:
    """Raises `ValueError` unless a model is in evaluation mode."""
    require(
        not net.training,
        "The model is in training mode, where dropout is on; call its eval() first.",
    )


def check_texts(name: str, texts: Sequence[Sequence[int]], length: int, vocabulary: int) -> None:
    """Raises `ValueError` unless a model of so many positions and tokens can read these texts, called `name`."""
    require(len(texts) > 0, f"There is no {name.lower()}; give at least one.")
    for number, text in enumerate(texts):
        require(
            len(text) > 0,
            f"{name} {number} is empty; give at least one token, such as the end token.",
        )
        require(
            len(text) <= length,
            f"{name} {number} has {len(text)} tokens, over the {length} of the model; shorten it.",
        )
        require(
            min(text) >= 0 and max(text) < vocabulary,
            f"{name} {number} has a token that is not among the {vocabulary} of the model; "
            "use the tokenizer that it was trained with.",
        )
