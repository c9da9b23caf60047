"""The next token: the likeliest, or one drawn by chance from the likely ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from modules.config import require

StoppingName = Literal["never", "likely", "first"]

RANGES = {  # of options: memory is taken for all new tokens and beams, and scores are to stay numbers
    "max_new_tokens": (1, 1_000_000),
    "repetition_penalty": (0.0001, 10_000),
    "beams": (1, 10_000),
    "length_penalty": (-10, 10),
    "seed": (-(2**63), 2**63 - 1),
}
MOST = 1000  # tokens that nearly always have the share of `top_p`; sorting all of them takes ten times as long


@dataclass(frozen=True)
class GenerationConfig:
    """How to make new tokens.

    Args:
        max_new_tokens: Number of new tokens at most.
        temperature: What scores are divided by before drawing; 0: always the likeliest token, the lowest of equals.
        top_k: Draw from the k likeliest tokens only (Fan 2018); null: from all.
        top_p: Draw from the likeliest tokens that together have this probability (Holtzman 2020); null: from all.
        min_p: Draw from tokens at least this share as likely as the likeliest (Nguyen 2024); null or 0: from all.
        repetition_penalty: Divides positive scores of tokens that are in the text, multiplies negative ones (Keskar
            2019); 1: does nothing.
        beams: Number of texts that beam search goes on with; 1: no beam search.
        length_penalty: Beam search ranks by sum of log probabilities / length^this; above 0 favours long texts.
        early_stopping: When beam search for a prompt is over: "never" before no open text can still be among the best;
            "likely" already when none could if it ended at once, though longer ones may divide by more; "first" as soon
            as there are as many texts as beams.
        seed: Of the first row's draws; the next row's is one more.
    """

    max_new_tokens: int = 100
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: StoppingName = "never"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            number = getattr(self, name)
            require(
                least <= number <= most,
                f"{name} is {number}; give a number from {least} to {most}.",
            )
        require(
            self.temperature == 0 or 0.0001 <= self.temperature <= 10_000,
            f"temperature is {self.temperature}; give 0, or a number from 0.0001 to 10000.",
        )
        require(
            self.top_k is None or self.top_k >= 1, f"top_k is {self.top_k}; it must be at least 1."
        )
        require(
            self.top_p is None or 0 < self.top_p <= 1,
            f"top_p is {self.top_p}; give a probability above 0, up to 1.",
        )
        require(
            self.min_p is None or 0 <= self.min_p <= 1,
            f"min_p is {self.min_p}; give a share from 0 to 1.",
        )
        self._check_beams()

    def _check_beams(self) -> None:
        """Raises `ValueError` for options that say how to draw, where beam search draws nothing."""
        draws = (
            self.top_k,
            self.top_p,
            self.min_p,
            None if self.repetition_penalty == 1 else self.repetition_penalty,
        )
        require(
            self.beams == 1 or all(option is None for option in draws),
            "Beam search ranks whole texts; leave top_k, top_p, min_p and repetition_penalty out, or set beams to 1.",
        )
        require(
            self.beams == 1 or (self.temperature in (0, 1) and self.seed == 0),
            "Beam search draws nothing; leave temperature and seed out, or set beams to 1.",
        )


def noise(seeds: Sequence[int], count: int) -> Tensor:
    """Numbers from 0 up to 1, (rows, count) in float64: each row's from its own seed, whatever the others are."""
    drawn = [
        torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in seeds
    ]
    return torch.stack(drawn)  # (rows, count)


def penalise(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Makes tokens that were seen, (B, M), less likely in scores (B, V): see `GenerationConfig`. Keeps the shape."""
    old = scores.gather(1, seen)  # (B, M)
    return scores.scatter(1, seen, torch.where(old < 0, old * penalty, old / penalty))


def candidates(scores: Tensor, config: GenerationConfig) -> tuple[Tensor, Tensor | None]:
    """Scores (B, V) of a temperature above 0 -> those to draw from, (B, K), -inf for none, and their tokens, (B, K).

    Tokens are None where they are all, in order. Filters follow each other as top_k, top_p, min_p.
    """
    scores, tokens = scores.float() / config.temperature, None
    if config.top_k is not None:
        scores, tokens = scores.topk(min(config.top_k, scores.shape[1]))
    if config.top_p is not None and config.top_p < 1:
        whole = scores.logsumexp(1, keepdim=True)  # (B, 1)
        if tokens is None:
            scores, tokens = ranked(scores, config.top_p, whole)
        chances = (scores - whole).exp()
        scores = scores.masked_fill(chances.cumsum(1) - chances >= config.top_p, float("-inf"))
    if config.min_p:
        edge = scores.amax(1, keepdim=True) + math.log(config.min_p)
        scores = scores.masked_fill(scores < edge, float("-inf"))
    return scores, tokens


def ranked(scores: Tensor, share: float, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The best scores of (B, V) in order, (B, K), and their places: as many as have a `share` of the sum, and more.

    `whole` is the logarithm of the sum of all exponentials, (B, 1).
    """
    top, places = scores.topk(min(MOST, scores.shape[1]))
    if (top - whole).exp().sum(1).min() < share:
        return scores.sort(descending=True)
    return top, places


def draw(scores: Tensor, config: GenerationConfig, noise: Tensor) -> Tensor:
    """The next tokens: (B, V), numbers from 0 up to 1 (B,) -> (B,)."""
    if config.temperature == 0:
        return scores.argmax(1)
    scores, tokens = candidates(scores, config)
    sums = scores.softmax(1).cumsum(1, dtype=torch.float64)  # (B, K)
    place = torch.searchsorted(sums, noise[:, None] * sums[:, -1:], right=True)  # (B, 1)
    return (place if tokens is None else tokens.gather(1, place))[:, 0]
