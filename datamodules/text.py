"""What all datamodules of texts share: a tokenizer, tokens kept on disk, and batches of texts of like length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from datamodules.base import BatchedDataset
from datamodules.sources import TextDatasetOptions, TextSource
from datamodules.tokenized import TokenizedData
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.batching import BucketBatchSampler, ResumableBatchSampler, cells, padded
from datamodules.utils.errors import UsageError


@dataclass(frozen=True)
class TextLoading:
    """How batches reach the model.

    Args:
        eval_batch_size: Texts per batch in validation, test and prediction.
        batch_tokens: Tokens per training batch and device, padding among them, instead of `batch_size` texts; of pairs
            the tokens of the longer side.
        buckets: Put texts of like length into a batch, so that little is padded; false draws them from all.
        multiple: Lengths are rounded up to a multiple of this many tokens, if `max_length` allows: batches are padded
            to it, and texts of one rounded length meet in batches at random.
        seed: Of the order of the training texts.
    """

    eval_batch_size: int = 64
    batch_tokens: int | None = None
    buckets: bool = True
    multiple: int = 8
    seed: int = 0


class TokenDataset(BatchedDataset, Protocol):
    """Token sequences of one split, asked for in whole batches."""

    own: Tensor  # (S,) int64, tokens of each sample with special tokens; of pairs (S, 2)
    lengths: Tensor  # of the same shape, the same rounded up: what a sample is padded to
    truncated: int  # samples that were cut off


class TokenRows(Protocol):
    """Token numbers of many texts, on disk or in memory."""

    @property
    def lengths(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class TokenLists(list[list[int]]):
    """Token numbers of a few texts, in memory."""

    @property
    def lengths(self) -> Tensor:
        """(S,) int64."""
        return torch.tensor([len(ids) for ids in self], dtype=torch.int64)


class TextData(TokenizedData):
    """Base of texts of any length: subclasses load a split as a `TokenDataset`; its batches are dicts, batch first.

    Args:
        batch_size: Training samples per step and device; not used where `loading.batch_tokens` is set.
        max_length: Tokens of a sample at most, special tokens among them.
        skip_bad: Leave out texts that are empty or not UTF-8, and count them, instead of stopping at the first.
        dataset: What the files do not say: hub id, columns, validation share.
        tokenizer: What to train one with, from the training texts, or a file of one.
        loading: Sizes of evaluation batches, batches by tokens, seed of the order.

    Raises:
        UsageError: An option is out of range.
    """

    source: TextSource

    def __init__(
        self,
        batch_size: int = 32,
        max_length: int = 128,
        skip_bad: bool = False,
        dataset: TextDatasetOptions = TextDatasetOptions(),
        tokenizer: TokenizerConfig = TokenizerConfig(),
        loading: TextLoading = TextLoading(),
    ) -> None:
        super().__init__(
            batch_size, max_length, tokenizer, loading.eval_batch_size, loading.seed, skip_bad
        )
        if max_length < 4:
            raise UsageError(
                f"max_length is {max_length}, but must be at least 4: special tokens and text."
            )
        if loading.multiple < 1:
            raise UsageError(f"multiple is {loading.multiple}, but must be at least 1.")
        if loading.batch_tokens is not None and loading.batch_tokens < max_length:
            raise UsageError(
                f"batch_tokens is {loading.batch_tokens}, but must hold a text of max_length ({max_length}) at least."
            )
        if loading.batch_tokens is not None and not loading.buckets:
            raise UsageError("batch_tokens needs texts of like length: leave buckets on.")
        self.options, self.loading = dataset, loading

    def loaded(self, datasets: list[TokenDataset]) -> None:
        """Says how many texts were cut."""
        if cut := sum(dataset.truncated for dataset in datasets):
            kept = {"head": "the head", "tail": "the tail", "both": "head and tail"}[
                self.config.truncate
            ]
            rank_zero_warn(
                f"{cut:,} of {sum(map(len, datasets)):,} texts are longer than {self.max_length} tokens and were cut "
                f"(keeping {kept})."
            )

    def cells(self) -> tuple[int, int]:
        """How many of this rank's cells in the present training epoch hold a token, and how many there are."""
        dataset, epoch = self.dataset("train"), self.trainer.current_epoch if self.trainer else 0
        return cells(self.train_sampler(dataset).batches(epoch), dataset.lengths, dataset.own)

    def padding_share(self) -> float:
        """Share of this rank's cells in the present training epoch that are padding."""
        filled, total = self.cells()
        return 1 - filled / total

    # Batches.

    def train_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of training: batches of like length, by texts or by tokens; without buckets all count as alike."""
        lengths = dataset.lengths if self.loading.buckets else torch.ones_like(dataset.lengths)
        world_size, rank = self.train_ranks(dataset)
        return BucketBatchSampler(
            lengths, self.batch_size, self.loading.batch_tokens, self.seed, True, rank, world_size
        )

    def eval_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of evaluation: longest first; "index" says which sample is which."""
        if not self.loading.buckets:
            return super().eval_sampler(dataset)
        return BucketBatchSampler(dataset.lengths, self.eval_batch_size)

    def counted(self, world_size: int) -> dict[str, int]:
        """As in the base class, with what decides how long a batch is."""
        loading = self.loading
        more = {
            "batch_tokens": loading.batch_tokens or 0,
            "buckets": int(loading.buckets),
            "multiple": loading.multiple,
        }
        return super().counted(world_size) | more


class Sequences:
    """Base of token data sets: what a sample has of tokens, and the padded tensors of a batch.

    Args:
        tokenizer: Gives the number of the padding.
        own: (S,) int64, tokens of each sample with special tokens.
        max_length, multiple: See `datamodules.utils.batching.padded`.
    """

    in_memory = True  # or mapped into it: no workers

    def __init__(self, tokenizer: Tokenizer, own: Tensor, max_length: int, multiple: int) -> None:
        self.tokenizer, self.own, self.max_length = tokenizer, own, max_length
        self.lengths, self.padding, self.truncated = (
            padded(own, multiple, max_length),
            tokenizer.special_id("pad"),
            0,
        )

    def __len__(self) -> int:
        return len(self.own)

    def filled(
        self, index: Tensor, rows: Sequence[list[int]], padding: int | None = None
    ) -> Tensor:
        """Rows of numbers as one tensor (B, N), filled up to the longest of the samples `index` (B,)."""
        width, fill = int(self.lengths[index].max()), self.padding if padding is None else padding
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    def batch(self, index: Tensor, rows: Sequence[list[int]]) -> dict[str, Any]:
        """{"tokens": int64 (B, N), "keep": bool (B, N), False at padding, "index": int64 (B,)}."""
        tokens = self.filled(index, rows)
        sizes = torch.tensor([len(row) for row in rows])
        keep = torch.arange(tokens.shape[1]) < sizes[:, None]  # (N,), (B, 1) -> (B, N)
        return {"tokens": tokens, "keep": keep, "index": index}
