"""What all datamodules of texts share: batches of token sequences of similar length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from datamodules.sources import TextDatasetOptions, TextSource
from datamodules.tokenized import TokenizedData
from datamodules.tokenizers import Tokenizer, TokenizerConfig, truncation
from datamodules.utils.batching import (
    BucketBatchSampler,
    ResumableBatchSampler,
    count_tokens,
    round_up,
)
from datamodules.utils.errors import UsageError


@dataclass(frozen=True)
class TextLoading:
    """How batches reach the model.

    Args:
        eval_batch_size: Texts per batch in validation, test and prediction.
        batch_tokens: Tokens per training batch and device, with padding, instead of `batch_size`
            texts; for pairs, tokens of the longer side.
        buckets: Put texts of similar length into a batch, so that there is little padding; else
            batches are formed from all texts.
        multiple: Batches are padded to a multiple of this many tokens, if `max_length` allows;
            texts of one such length are mixed at random.
        seed: Seed of the order of the training texts.
    """

    eval_batch_size: int = 64
    batch_tokens: int | None = None
    buckets: bool = True
    multiple: int = 8
    seed: int = 0


class TokenRows(Protocol):
    """Token ids of many texts, on disk or in memory."""

    @property
    def lengths(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class TokenLists(list[list[int]]):
    """Token ids of a few texts, in memory."""

    @property
    def lengths(self) -> Tensor:
        """(S,) int64."""
        return torch.tensor([len(ids) for ids in self], dtype=torch.int64)


class TextData(TokenizedData):
    """Base of texts of any length; subclasses load a split as `Sequences`, or as pairs of them.

    Args:
        batch_size: Training samples per step and device; not used if `loading.batch_tokens` is set.
        max_length: Maximum number of tokens, special tokens included.
        skip_bad: Skip and count texts that are empty or not UTF-8; else the first one stops the
            run.
        dataset: Options of the data set (not the data set itself): hub id, columns, validation
            fraction.
        tokenizer: How to train one from the training texts, or a file of one.
        loading: Sizes of evaluation batches, batches by tokens, and seed of the order.
    """

    source: TextSource
    noun = "texts"
    loading_section = "loading."

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
                f"--data.max_length is {max_length}, but must be at least 4: special tokens and "
                "text."
            )
        if loading.multiple < 1:
            raise UsageError(
                f"--data.loading.multiple is {loading.multiple}, but must be at least 1."
            )
        if loading.batch_tokens is not None and loading.batch_tokens < max_length:
            raise UsageError(
                f"--data.loading.batch_tokens is {loading.batch_tokens}, but --data.max_length is "
                f"{max_length}: raise it."
            )
        if loading.batch_tokens is not None and not loading.buckets:
            raise UsageError(
                "--data.loading.batch_tokens needs texts of similar length: leave "
                "--data.loading.buckets on."
            )
        self.options = dataset
        self.loading = loading

    def warn_truncated(self, datasets: list[Any]) -> None:
        count = sum(dataset.truncated for dataset in datasets)
        if count:
            total = sum(len(dataset) for dataset in datasets)
            what = f"{count:,} of {total:,} {self.noun}"
            said = truncation(what, self.max_length, self.tokenizer_config.truncate)
            advice = "raise --data.max_length to keep all"
            if self.trainer is not None:
                limit = getattr(
                    getattr(self.trainer, "lightning_module", None), "max_positions", None
                )
                if self.trainer.state.fn != "fit" or limit == self.max_length:
                    advice = "the model reads no more"
                elif limit is not None:
                    advice = f"raise --data.max_length, to {limit} at most, to keep more"
            rank_zero_warn(f"{said}; {advice}.")

    def count_tokens(self) -> tuple[float, float]:
        dataset = self.dataset("train")
        epoch = self.trainer.current_epoch if self.trainer else 0
        batches = self.train_sampler(dataset).batches(epoch)
        return count_tokens(batches, dataset.padded_lengths, dataset.token_counts)

    # Batches.

    def train_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of training: batches of similar length, by texts or by tokens."""
        lengths = dataset.padded_lengths
        if not self.loading.buckets:
            lengths = torch.ones_like(lengths)
        world_size, rank = self.train_ranks(dataset)
        return BucketBatchSampler(
            lengths,
            self.batch_size,
            self.loading.batch_tokens,
            self.seed,
            True,
            rank,
            world_size,
            self.balanced_classes(dataset),
        )

    def eval_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of evaluation: longest first; "index" says which sample is which."""
        if not self.loading.buckets:
            return super().eval_sampler(dataset)
        return BucketBatchSampler(dataset.padded_lengths, self.eval_batch_size)

    def batch_layout(self, world_size: int) -> dict[str, Any]:
        """As in the base class, with what decides how long a batch is."""
        return super().batch_layout(world_size) | {
            "batch_tokens": self.loading.batch_tokens or 0,
            "buckets": self.loading.buckets,
            "multiple": self.loading.multiple,
        }


class Sequences:
    """Base of token data sets: how long a sample is, and the padded tensors of a batch.

    Args:
        tokenizer: Knows the padding token.
        token_counts: (S,) int64, tokens of each sample with special tokens.
        max_length: Tokens of a sample at most.
        multiple: See `TextLoading`.
    """

    in_memory = True  # or mapped into it: no workers
    truncated = 0  # samples that were truncated

    def __init__(
        self, tokenizer: Tokenizer, token_counts: Tensor, max_length: int, multiple: int
    ) -> None:
        self.tokenizer = tokenizer
        self.token_counts = token_counts
        self.max_length = max_length
        self.padded_lengths = round_up(token_counts, multiple, max_length)  # (S,)
        self.pad_id = tokenizer.special_id("pad")

    def __len__(self) -> int:
        return len(self.token_counts)

    def pad(self, index: Tensor, rows: Sequence[list[int]], fill: int | None = None) -> Tensor:
        """Rows of token ids as one tensor (B, N), as long as the samples `index` (B,) need."""
        length = int(self.padded_lengths[index].max())
        value = self.pad_id if fill is None else fill
        return torch.tensor([[*row, *[value] * (length - len(row))] for row in rows])

    def batch(self, index: Tensor, rows: Sequence[list[int]]) -> dict[str, Any]:
        """{"tokens": int64 (B, N), "padding_mask": bool (B, N), "index": int64 (B,)}."""
        tokens = self.pad(index, rows)
        sizes = torch.tensor([len(row) for row in rows])
        padding_mask = torch.arange(tokens.shape[1]) < sizes[:, None]  # (N,), (B, 1) -> (B, N)
        return {"tokens": tokens, "padding_mask": padding_mask, "index": index}
