"""Reads texts with a decoder and its cache: what generation needs of a model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modules.config import require
from modules.decoder import Decoder


class Reader:
    """Reads prompts with a decoder, then token after token, and tells how likely each token is to follow.

    Rows of different lengths are padded on the left. Where a row outgrows the context, its last half is read anew.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each row.
        new: Number of tokens that will follow.
        beams: Rows that go on from each prompt; they are next to each other.

    Raises:
        ValueError: A prompt is empty, longer than the context, or has tokens that the decoder does not know.
    """

    def __init__(self, net: Decoder, prompts: Sequence[Sequence[int]], new: int, beams: int = 1) -> None:
        self.net, self.context, self.beams = net, net.max_length, beams
        self.check(prompts)
        self.size = max(len(prompt) for prompt in prompts)
        self.first = [self.size - len(prompt) for prompt in prompts]  # where each row's text begins
        rows = [[text[0]] * pad + [*text] + [0] * new for pad, text in zip(self.first, prompts, strict=True)]
        self.tokens = torch.tensor(rows, device=net.embed.weight.device)  # (rows, size + new)
        self.room = min(self.context, self.size + new)
        self.cache = net.make_cache(len(prompts), self.size if beams > 1 else self.room)

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises `ValueError` unless the decoder can read these."""
        require(not self.net.training, "The decoder is in training mode, where dropout is on; call its eval() first.")
        require(len(prompts) > 0, "There is no prompt; give at least one.")
        for number, prompt in enumerate(prompts):
            require(len(prompt) > 0, f"Prompt {number} is empty; give at least one token, such as the end token.")
            require(
                len(prompt) <= self.context,
                f"Prompt {number} has {len(prompt)} tokens, over the context of {self.context}; keep its last part.",
            )
            require(
                min(prompt) >= 0 and max(prompt) < self.net.vocabulary,
                f"Prompt {number} has a token that is not among the {self.net.vocabulary} of the decoder; "
                "use the tokenizer that it was trained with.",
            )

    @property
    def seen(self) -> Tensor:
        """The texts as yet, (rows, size); padded on the left with their first token."""
        return self.tokens[:, : self.size]

    def start(self) -> Tensor:
        """Reads the prompts: scores of the tokens that follow, (rows, V)."""
        scores = self.refill()
        self.shared = self.cache.filled
        if self.beams > 1:
            rows = torch.arange(len(scores), device=scores.device).repeat_interleave(self.beams)
            self.cache = self.cache.select(rows, self.room)
            scores, self.tokens = scores[rows], self.tokens[rows]
        return scores

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one more token in each row, (rows,): scores of those that follow, (rows, V)."""
        self.tokens[:, self.size] = tokens
        self.size += 1
        if self.cache.filled < self.cache.length:
            return self.scores(tokens[:, None])
        half = max(1, self.context // 2)
        self.first = [at if self.size - at <= self.context else self.size - half for at in self.first]
        return self.refill()

    def refill(self) -> Tensor:
        """Reads the rows from where each begins: (rows, V)."""
        self.cache.clear()
        start, last = min(self.first), max(self.first)
        keep = None
        if start < last:
            first = torch.tensor(self.first, device=self.tokens.device)
            keep = torch.arange(start, self.size, device=first.device) >= first[:, None]  # (rows, N)
        return self.scores(self.tokens[:, start : self.size], keep)

    def scores(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Reads (rows, N): scores (rows, V) of what follows the last."""
        return self.net.logits(self.net(tokens, keep, cache=self.cache)[:, -1])

    def reorder(self, rows: Tensor) -> None:
        """Lets each row go on with the text of another, (rows,), of the same prompt."""
        self.cache.reorder(rows, self.shared)
        self.tokens = self.tokens[rows]
