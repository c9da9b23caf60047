"""Hiding tokens for masked pretraining (Devlin 2019), a batch at a time, on the device that the batch is on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from datamodules.tokenizers import SpecialTokenIds
from datamodules.utils.errors import UsageError


@dataclass(frozen=True)
class MaskConfig:
    """Which tokens are hidden, and how.

    Args:
        share: Chance of each token to be chosen; of each word where whole words are.
        mask: Share of the chosen tokens that become [MASK].
        random: Share of the chosen tokens that become any other token; what then remains stays as it is.
        whole_words: Choose words, with all of their pieces, instead of tokens.

    Raises:
        UsageError: A share is out of range.
    """

    share: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(
                f"the share of masked tokens is {self.share}, but must lie between 0 and 1."
            )
        if min(self.mask, self.random) < 0 or self.mask + self.random > 1 + 1e-9:
            raise UsageError(
                f"of the chosen tokens {self.mask} become [MASK] and {self.random} random ones: both must be at "
                "least 0, and together at most 1."
            )


class Masker:
    """Chooses tokens anew at each call, by the generator that `torch.manual_seed` sets, or by seeds of the sequences;
    control tokens never.

    Args:
        config: Which and how.
        ids: Numbers of the control tokens.
        vocabulary: Number of tokens V.
        starts_word: Whether a token begins a word, for each of the V (`Tokenizer.starts_word`).

    Raises:
        UsageError: The tokenizer has no [MASK], or nothing but control tokens.
    """

    def __init__(
        self, config: MaskConfig, ids: SpecialTokenIds, vocabulary: int, starts_word: list[bool]
    ) -> None:
        if ids.mask is None:
            raise UsageError(
                "the tokenizer has no [MASK] token, which masked pretraining needs: use another one."
            )
        self.config, self.mask = config, ids.mask
        self._control = torch.zeros(vocabulary, dtype=torch.bool)
        self._control[list(ids.known().values())] = True
        self._starts = torch.tensor(starts_word) | self._control
        self._ordinary = (~self._control).nonzero()[
            :, 0
        ]  # (V, 1) -> (V,): what a token may turn into
        if len(self._ordinary) == 0:
            raise UsageError("the tokenizer knows control tokens only: train one on more text.")

    def __call__(
        self, tokens: Tensor, keep: Tensor, seeds: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hides some tokens of each sequence, at least one where it has any but control tokens.

        Args:
            tokens: int64 (B, N).
            keep: bool (B, N), False at padding.
            seeds: Of the B sequences: what is drawn for one then follows from its seed alone, whatever the batch.

        Returns:
            The tokens as the model shall see them (B, N), and bool (B, N): where it has to guess.
        """
        self._control, self._starts, self._ordinary = (
            table.to(tokens.device) for table in (self._control, self._starts, self._ordinary)
        )
        free = keep & ~self._control[tokens]
        luck, fate, other = self._draws(tokens, seeds)
        if self.config.whole_words:
            luck = luck.gather(
                1, self._words(tokens)
            )  # (B, words) -> (B, N): pieces of a word share its luck
        lowest = luck.masked_fill(~free, 2.0).amin(1, keepdim=True)
        where = free & ((luck < self.config.share) | (luck == lowest))
        hidden = torch.where(where & (fate < self.config.mask), self.mask, tokens)
        changed = (
            where & (fate >= self.config.mask) & (fate < self.config.mask + self.config.random)
        )
        others = self._ordinary[(other * len(self._ordinary)).long()]
        return torch.where(changed, others, hidden), where

    @staticmethod
    def _draws(tokens: Tensor, seeds: list[int] | None) -> Tensor:
        """Numbers from 0 to below 1: (B, N) -> (3, B, N)."""
        if seeds is None:
            return torch.rand(3, *tokens.shape, device=tokens.device)
        rows = [
            torch.rand(tokens.shape[1], 3, generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
        return torch.stack(rows).to(tokens.device).movedim(2, 0)

    def _words(self, tokens: Tensor) -> Tensor:
        """Number of each token's word in its sequence: (B, N) -> (B, N). A control token begins a word, too."""
        begins = self._starts[tokens]
        begins[:, 0] = True
        return begins.cumsum(1) - 1
