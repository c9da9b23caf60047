"""The next token: the most likely, or one sampled from the likely ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from modules.config import require

StoppingName = Literal["never", "likely", "first"]

RANGES = {  # of options: memory for all new tokens and beams is allocated, scores stay finite
    "max_new_tokens": (1, 1_000_000),
    "top_k": (1, 1_000_000_000),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.0001, 10_000),
    "beams": (1, 10_000),
    "length_penalty": (-10, 10),
    "seed": (-(2**63), 2**63 - 1),
}
NUCLEUS = 1000  # the most likely 1000 tokens nearly always reach `top_p`; sorting all is slow


@dataclass(frozen=True)
class GenerationConfig:
    """How to generate tokens.

    Args:
        max_new_tokens: Number of new tokens at most.
        temperature: Number that scores are divided by before sampling; 0: always the most likely
            token, among equals the one with the lowest id.
        top_k: Sample from the k most likely tokens only (Fan 2018); null: from all.
        top_p: Sample from the fewest most likely tokens that together have at least this
            probability (Holtzman 2020); null: from all.
        min_p: Sample from tokens with at least this fraction of the most likely one's probability
            (Nguyen 2024); null or 0: from all.
        repetition_penalty: Penalty of tokens that the sequence already has; above 1: they become
            less likely. Their scores are divided by it (Keskar 2019), or multiplied if negative, as
            in transformers; 1: off.
        beams: Number of sequences that beam search keeps; 1: no beam search.
        length_penalty: Beam search ranks by sum of log probabilities / length^this, as in
            transformers; above 0 favours long sequences. Wu 2016 has ((5 + length) / 6)^this.
        early_stopping: When beam search for a prompt stops: with "first" once as many sequences as
            beams are finished (True in transformers), with "likely" once no unfinished one would be
            among the best if it ended now (False), with "never" once none can be at any length.
        seed: Seed of the first row's samples; that of each next row is 1 higher, unless `seeds` are
            given.
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
        require(
            self.early_stopping in get_args(StoppingName),
            f"early_stopping is {self.early_stopping!r}; choose one of "
            f"{', '.join(get_args(StoppingName))}.",
        )
        # Powers of whole numbers would be limited to 64 bits.
        object.__setattr__(self, "length_penalty", float(self.length_penalty))
        for name, (lowest, highest) in RANGES.items():
            number = getattr(self, name)
            require(
                number is None or lowest <= number <= highest,
                f"{name} is {number}; give a number from {lowest} to {highest}.",
            )
        require(
            self.temperature == 0 or 0.0001 <= self.temperature <= 10_000,
            f"temperature is {self.temperature}; give 0, or a number from 0.0001 to 10000.",
        )
        filters = (self.top_k, self.top_p, self.min_p)
        plain = filters == (None, None, None) and self.repetition_penalty == 1
        require(
            self.beams == 1 or plain,
            "Beam search ranks whole sequences; leave top_k, top_p, min_p and repetition_penalty "
            "out, or set beams to 1.",
        )
        require(
            self.beams == 1 or (self.temperature in (0, 1) and self.seed == 0),
            "Beam search does not sample; leave temperature and seed out, or set beams to 1.",
        )

    def require_sampling(self) -> None:
        """Raises `ValueError` for filters of tokens that are not sampled."""
        filters = (self.top_k, self.top_p, self.min_p or None)
        require(
            self.temperature > 0 or filters == (None, None, None),
            "top_k, top_p and min_p are for sampling; give a temperature, such as 1.",
        )


def uniform(seeds: Sequence[int], count: int) -> Tensor:
    """Random numbers in [0, 1), (rows, count), float64: each row's from its own seed."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(count, generator=generator, dtype=torch.float64))
    return torch.stack(rows)  # (rows, count)


def penalize_repetition(scores: Tensor, sequences: Tensor, penalty: float) -> Tensor:
    """Makes tokens of the sequences (B, M) less likely in scores (B, V): see `GenerationConfig`."""
    old = scores.gather(1, sequences)  # (B, M)
    return scores.scatter(1, sequences, torch.where(old < 0, old * penalty, old / penalty))


def filter_scores(scores: Tensor, config: GenerationConfig) -> tuple[Tensor, Tensor | None]:
    """Applies temperature (above 0), top_k, top_p and min_p, in this order, to scores (B, V).

    Returns scores to sample from, (B, K), -inf for never, and their tokens, (B, K); None: all.
    """
    scores = scores.float() / config.temperature
    tokens = None
    if config.top_k is not None:
        scores, tokens = scores.topk(min(config.top_k, scores.shape[1]))
    if config.top_p is not None and config.top_p < 1:
        log_mass = scores.logsumexp(1, keepdim=True)  # (B, 1)
        if tokens is None:
            scores, tokens = nucleus(scores, config.top_p, log_mass)
        probabilities = (scores - log_mass).exp()
        before = probabilities.cumsum(1) - probabilities
        scores = scores.masked_fill(before >= config.top_p, float("-inf"))
    if config.min_p:
        lowest = scores.amax(1, keepdim=True) + math.log(config.min_p)
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    return scores, tokens


def nucleus(scores: Tensor, mass: float, log_mass: Tensor) -> tuple[Tensor, Tensor]:
    """The K highest of scores (B, V), descending, (B, K), and their tokens.

    Together they have at least the probability `mass`. `log_mass` is the logarithm of the sum of
    all exponentials, (B, 1).
    """
    top, tokens = scores.topk(min(NUCLEUS, scores.shape[1]))
    if (top - log_mass).exp().sum(1).min() < mass:
        return scores.sort(descending=True)
    return top, tokens


def sample_tokens(scores: Tensor, config: GenerationConfig, random: Tensor) -> Tensor:
    """The next tokens: scores (B, V), random numbers in [0, 1), (B,) -> (B,).

    If the scores of a row are NaN, returns any valid token: training then reports the NaN loss.
    """
    if config.temperature == 0:
        return scores.argmax(1)
    scores, tokens = filter_scores(scores, config)
    sums = scores.softmax(1).cumsum(1, dtype=torch.float64)  # (B, K)
    index = torch.searchsorted(sums, random[:, None] * sums[:, -1:], right=True)  # (B, 1)
    index = index.clamp(max=sums.shape[1] - 1)  # of NaN it is K
    if tokens is not None:
        index = tokens.gather(1, index)
    return index[:, 0]
