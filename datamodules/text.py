"""What all datamodules of texts share: a tokenizer, tokens kept on disk, and batches of texts of like length."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.base import BatchedDataset, ResumableDataModule
from datamodules.batching import BucketBatchSampler, ResumableBatchSampler, padded, padding_share
from datamodules.errors import UsageError
from datamodules.sources import TextDatasetOptions, TextSource
from datamodules.tokenizers import Tokenizer, TokenizerConfig


@dataclass(frozen=True)
class TextLoading:
    """How batches reach the model.

    Args:
        eval_batch_size: Texts per batch in validation, test and prediction.
        batch_tokens: Tokens per training batch and device, padding among them, instead of `batch_size` texts.
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

    own: Tensor  # (S,) int64, tokens of each sample with control tokens
    lengths: Tensor  # (S,) int64, the same rounded up: what a sample is padded to
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


class TextData(ResumableDataModule):
    """Base: subclasses set `source`, and load a split as a `TokenDataset`; its batches are dicts, batch first.

    Args:
        batch_size: Training samples per step and device; not used where `loading.batch_tokens` is set.
        max_length: Tokens of a sample at most, control tokens among them.
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
        super().__init__(batch_size, loading.eval_batch_size, 0, loading.seed)
        if max_length < 4:
            raise UsageError(f"max_length is {max_length}, but must be at least 4: control tokens and text.")
        if loading.multiple < 1:
            raise UsageError(f"multiple is {loading.multiple}, but must be at least 1.")
        if loading.batch_tokens is not None and loading.batch_tokens < max_length:
            raise UsageError(
                f"batch_tokens is {loading.batch_tokens}, but must hold a text of max_length ({max_length}) at least."
            )
        if loading.batch_tokens is not None and not loading.buckets:
            raise UsageError("batch_tokens needs texts of like length: leave buckets on.")
        self.max_length, self.skip_bad, self.options = max_length, skip_bad, dataset
        self.config, self.loading = tokenizer, loading
        self._facts: dict[str, Any] = {}
        self._datasets: dict[str, TokenDataset] = {}

    # What subclasses say.

    def load(self, split: str) -> TokenDataset:
        """Reads and tokenises a split: "train", "val", "test" or "predict"."""
        raise NotImplementedError

    def training_texts(self) -> Any:
        """Arrow strings that the tokenizer is trained from."""
        raise NotImplementedError

    # What the model must know of the data, and what a checkpoint may tell instead.

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's, a file's, or one trained from the training texts."""
        texts = [] if self.config.file is not None else self.training_texts()
        return Tokenizer.for_texts(texts, self.config)

    def facts(self) -> dict[str, Any]:
        """Primitives that a checkpoint keeps.

        Returns:
            tokenizer (content of its tokenizer.json), tokenizer_options, vocabulary (its size), padding (number of its
            padding token), max_length (tokens).
        """
        if not self._facts:
            self._facts = {
                "tokenizer": self.tokenizer.to_json(),
                "tokenizer_options": asdict(self.config),
                "vocabulary": self.tokenizer.size,
                "padding": self.tokenizer.control("pad"),
                "max_length": self.max_length,
            }
        return self._facts

    def adopt(self, facts: dict[str, Any]) -> None:
        """Takes the facts of a checkpoint: prediction then needs no data set, and other data must agree with them.

        Raises:
            UsageError: Another length or another tokenizer was asked for.
        """
        if self.max_length != facts["max_length"]:
            raise UsageError(
                f"max_length is {self.max_length}, the checkpoint was trained with {facts['max_length']}: leave it out."
            )
        asked = asdict(self.config)
        for name, value in facts["tokenizer_options"].items():
            if name != "file" and asked[name] != value:
                raise UsageError(
                    f"--data.tokenizer.{name} {asked[name]} does not fit the checkpoint, whose tokenizer of "
                    f"{facts['vocabulary']} tokens was made with {name} {value}: leave it out."
                )
        theirs = Tokenizer.from_json(facts["tokenizer"], self.config.truncate)
        known = (None, facts["tokenizer_options"]["file"])  # that file may be another one by now
        if self.config.file not in known and Path(self.config.file).exists():
            own = Tokenizer.from_file(self.config.file)
            if own.digest != theirs.digest:
                raise UsageError(
                    f"the tokenizer {self.config.file} ({own.size} tokens) is not the checkpoint's ({theirs.size} "
                    "tokens): leave --data.tokenizer.file out."
                )
        self.tokenizer = theirs  # in place of the cached property's
        self._facts, self._datasets = dict(facts), {}

    @property
    def origin(self) -> str:
        """Where the texts were read from: a path, a hub id, or "embedded"."""
        return self.source.origin

    @property
    def skipped(self) -> list[str]:
        """Texts left out because of `skip_bad`, so far."""
        return sorted(set(self.source.skipped))

    # Splits: read and tokenised when first asked for, so that the test texts stay untouched until the test.

    def prepare_data(self) -> None:
        """Downloads and tokenises (one process; the others find the tokens on disk)."""
        self.source.prepare()
        if self.trainer is not None and self.trainer.state.fn is not None:
            self.setup(self.trainer.state.fn.value)

    def setup(self, stage: str) -> None:
        """Reads the splits of a stage: "fit", "validate", "test" or "predict"; says how many texts were cut."""
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}[stage]
        new = [self.dataset(split) for split in splits if split not in self._datasets]
        if cut := sum(dataset.truncated for dataset in new):
            kept = {"head": "the head", "tail": "the tail", "both": "head and tail"}[self.config.truncate]
            rank_zero_warn(
                f"{cut:,} of {sum(map(len, new)):,} texts are longer than {self.max_length} tokens and were cut "
                f"(keeping {kept})."
            )
        if stage != "predict":
            self.facts()

    def dataset(self, split: str) -> TokenDataset:
        """A split, read and tokenised once."""
        if split not in self._datasets:
            self._datasets[split] = self.load(split)
        return self._datasets[split]

    def padding_share(self) -> float:
        """Share of this rank's cells in the present training epoch that are padding."""
        dataset, epoch = self.dataset("train"), self.trainer.current_epoch if self.trainer else 0
        return padding_share(self.train_sampler(dataset).batches(epoch), dataset.lengths, dataset.own)

    # Batches.

    def train_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of training: batches of like length, by texts or by tokens."""
        if not self.loading.buckets:
            return super().train_sampler(dataset)
        world_size, rank = self._ranks()
        return BucketBatchSampler(
            dataset.lengths, self.batch_size, self.loading.batch_tokens, self.seed, True, rank, world_size
        )

    def eval_sampler(self, dataset: Any) -> ResumableBatchSampler:
        """The order of evaluation: longest first; "index" says which sample is which."""
        if not self.loading.buckets:
            return super().eval_sampler(dataset)
        world_size, rank = self._ranks()
        return BucketBatchSampler(dataset.lengths, self.eval_batch_size, rank=rank, world_size=world_size)

    def counted(self, world_size: int) -> dict[str, int]:
        """As in the base class, with what decides how long a batch is."""
        loading = self.loading
        more = {
            "batch_tokens": loading.batch_tokens or 0,
            "buckets": int(loading.buckets),
            "multiple": loading.multiple,
        }
        return super().counted(world_size) | more

    def train_batches(self) -> int:
        """Batches of a training epoch on this rank, without making a loader; the same in every epoch."""
        return len(self.train_sampler(self.dataset("train")))

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.dataset("train"))

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("val"))

    def test_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("test"))

    def predict_dataloader(self) -> DataLoader:
        return self.eval_loader(self.dataset("predict"))


class Sequences:
    """Base of token data sets: what a sample has of tokens, and the padded tensors of a batch.

    Args:
        tokenizer: Gives the number of the padding.
        own: (S,) int64, tokens of each sample with control tokens.
        max_length, multiple: See `datamodules.batching.padded`.
    """

    in_memory = True  # or mapped into it: no workers

    def __init__(self, tokenizer: Tokenizer, own: Tensor, max_length: int, multiple: int) -> None:
        self.tokenizer, self.own, self.max_length = tokenizer, own, max_length
        self.lengths, self.padding, self.truncated = padded(own, multiple, max_length), tokenizer.control("pad"), 0

    def __len__(self) -> int:
        return len(self.own)

    def filled(self, index: Tensor, rows: Sequence[list[int]], padding: int | None = None) -> Tensor:
        """Rows of numbers as one tensor (B, N), filled up to the longest of the samples `index` (B,)."""
        width, fill = int(self.lengths[index].max()), self.padding if padding is None else padding
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    def batch(self, index: Tensor, rows: Sequence[list[int]]) -> dict[str, Any]:
        """{"tokens": int64 (B, N), "keep": bool (B, N), False at padding, "index": int64 (B,)}."""
        tokens = self.filled(index, rows)
        sizes = torch.tensor([len(row) for row in rows])
        keep = torch.arange(tokens.shape[1]) < sizes[:, None]  # (N,), (B, 1) -> (B, N)
        return {"tokens": tokens, "keep": keep, "index": index}
