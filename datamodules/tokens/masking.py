"""Masking tokens for masked pretraining (Devlin 2019), a batch at a time, on its device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from datamodules.tokenizers import SpecialTokenIds
from datamodules.utils.errors import UsageError
from datamodules.utils.random_numbers import rand_of_seeds


@dataclass(frozen=True)
class MaskConfig:
    """Which tokens are masked, and how.

    Args:
        probability: Probability that a token is selected; with `whole_words`, that a word is.
        mask: Fraction of the selected tokens that become [MASK].
        random: Fraction of the selected tokens that become a random token; the rest are not
            changed.
        whole_words: Select words, with all of their pieces, instead of tokens.
    """

    probability: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise UsageError(
                f"--model.mask.probability is {self.probability}, but must lie between 0 and 1."
            )
        if min(self.mask, self.random) < 0 or self.mask + self.random > 1 + 1e-9:
            raise UsageError(
                f"--model.mask.mask is {self.mask} and --model.mask.random {self.random}, but both "
                "must be at least 0, and together at most 1."
            )


class Masker:
    """Selects and replaces tokens, never special ones, with new random numbers at each call.

    `starts_word` is that of a `Tokenizer`, for each of the V tokens. Raises `UsageError` if there
    is no [MASK], or nothing but special tokens.
    """

    def __init__(
        self,
        config: MaskConfig,
        special_ids: SpecialTokenIds,
        vocab_size: int,
        starts_word: list[bool],
    ) -> None:
        if special_ids.mask is None:
            raise UsageError(
                "the tokenizer has no [MASK] token for masked pretraining: use another one."
            )
        self.config = config
        self.mask_id = special_ids.mask
        self._special = torch.zeros(vocab_size, dtype=torch.bool)
        self._special[list(special_ids.known().values())] = True
        self._starts_word = torch.tensor(starts_word) | self._special
        self._ordinary = (~self._special).nonzero()[:, 0]  # (V, 1) -> (V,)
        if len(self._ordinary) == 0:
            raise UsageError("the tokenizer knows special tokens only: train one on more text.")

    def __call__(
        self, tokens: Tensor, padding_mask: Tensor, seeds: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Masks some tokens of each sequence, at least one unless it has only special tokens.

        Args:
            tokens: int64 (B, N).
            padding_mask: bool (B, N), False at padding.
            seeds: Of the B sequences: the random numbers of each then depend on its seed alone,
                whatever the batch; None: they come from torch's global generator.

        Returns:
            The masked tokens (B, N), and bool (B, N): which positions to predict.
        """
        self._special = self._special.to(tokens.device)
        self._starts_word = self._starts_word.to(tokens.device)
        self._ordinary = self._ordinary.to(tokens.device)
        maskable = padding_mask & ~self._special[tokens]
        selection, replacement, random_token = self._random(tokens, seeds)
        if self.config.whole_words:  # the pieces of a word share a random number
            selection = selection.gather(1, self._words(tokens))  # (B, N) -> (B, N)
        smallest = selection.masked_fill(~maskable, 2.0).amin(1, keepdim=True)
        selected = maskable & ((selection < self.config.probability) | (selection == smallest))
        masked = torch.where(selected & (replacement < self.config.mask), self.mask_id, tokens)
        randomised = (
            selected
            & (replacement >= self.config.mask)
            & (replacement < self.config.mask + self.config.random)
        )
        random_ids = self._ordinary[(random_token * len(self._ordinary)).long()]
        return torch.where(randomised, random_ids, masked), selected

    @staticmethod
    def _random(tokens: Tensor, seeds: list[int] | None) -> Tensor:
        """Three uniform random numbers for each token: (B, N) -> (3, B, N)."""
        if seeds is None:
            return torch.rand(3, *tokens.shape, dtype=torch.float32, device=tokens.device)
        rows = rand_of_seeds(seeds, tokens.shape[1], 3)  # (B, N, 3)
        return rows.to(tokens.device).movedim(2, 0)  # (3, B, N)

    def _words(self, tokens: Tensor) -> Tensor:
        """Index of each token's word: (B, N) -> (B, N). A special token is a word of its own."""
        starts = self._starts_word[tokens]
        starts[:, 0] = True
        return starts.cumsum(1) - 1
