"""Texts to pretrain encoders on: chunks of documents, or pairs for next-sentence prediction."""

from functools import cached_property
from random import Random
from typing import Any, Literal

import torch

from datamodules.sources import CORPORA, open_source
from datamodules.text import Sequences, TextData, TokenRows
from datamodules.tokenizers import Tokenizer
from datamodules.tokens.token_cache import tokenised
from datamodules.utils.batching import ResumableBatchSampler
from datamodules.utils.cache import text_digest
from datamodules.utils.errors import DataError, UsageError, require_same


class Chunks(Sequences):
    """Documents split into chunks of `max_length` with special tokens; the last of each is shorter.

    `table` has the tokens of the documents without special tokens; `multiple` as `TextLoading`.
    """

    pair = False

    def __init__(
        self, table: TokenRows, tokenizer: Tokenizer, max_length: int, multiple: int
    ) -> None:
        num_special = tokenizer.num_special_tokens(self.pair)
        room = max_length - num_special
        if room < 2:
            raise UsageError(
                f"--data.max_length is {max_length}, which leaves no room for text between special "
                "tokens."
            )
        self.table = table
        # chunks of each document, (D,)
        counts = table.lengths.add(room - 1).div(room, rounding_mode="floor")
        self.document = torch.arange(len(counts)).repeat_interleave(counts)  # (S,)
        first_chunk = (counts.cumsum(0) - counts)[self.document]  # (D,) -> (S,)
        self.start = (torch.arange(len(first_chunk)) - first_chunk) * room
        self.size = (table.lengths[self.document] - self.start).clamp(max=room)
        min_size = 2 if self.pair else 1  # at least one token in each span
        super().__init__(
            tokenizer, self.size.clamp(min=min_size) + num_special, max_length, multiple
        )

    def tokens(self, i: int) -> Any:
        """The tokens of chunk i, without special tokens."""
        start = int(self.start[i])
        return self.table[int(self.document[i])][start : start + int(self.size[i])]

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        inputs = [self.tokenizer.build_inputs(self.tokens(i), self.max_length) for i in indices]
        return self.batch(torch.tensor(indices), [row.ids for row in inputs])


class NextSentencePairs(Chunks):
    """Chunks split in two at random (next-sentence prediction: Devlin 2019).

    Half of the second spans are replaced by as many tokens of another document, or by all of a
    shorter one. The random choices depend on (seed, epoch, chunk) only.
    """

    pair = True

    def __init__(
        self, table: TokenRows, tokenizer: Tokenizer, max_length: int, multiple: int, seed: int
    ) -> None:
        super().__init__(table, tokenizer, max_length, multiple)
        self.seed = seed
        self.sampler: ResumableBatchSampler | None = None  # has the epoch; None: evaluation
        self.documents: list[int] = self.document.unique().tolist()  # those that are not empty
        if len(self.documents) < 2:
            raise UsageError(
                "--data.next_sentence needs two documents in each split: add some, or switch it "
                "off."
            )

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index = torch.tensor(indices)
        pairs = [self._pair(i) for i in indices]
        inputs = [
            self.tokenizer.build_inputs(first, self.max_length, second)
            for first, second, _ in pairs
        ]
        batch = self.batch(index, [row.ids for row in inputs])
        batch["segments"] = self.pad(index, [row.segments for row in inputs], fill=0)
        batch["is_next"] = torch.tensor([is_next for _, _, is_next in pairs], dtype=torch.int64)
        return batch

    def _pair(self, i: int) -> tuple[Any, Any, bool]:
        """Two spans, and whether the second follows the first."""
        rng = Random(f"{self.seed}/{self.sampler.epoch if self.sampler else 0}/{i}")
        tokens = self.tokens(i)
        split = rng.randint(1, max(1, len(tokens) - 1))
        if len(tokens) > 1 and rng.random() < 0.5:
            return tokens[:split], tokens[split:], True
        index = rng.randrange(len(self.documents) - 1)
        index += self.documents[index] >= int(self.document[i])  # skips this document
        other = self.table[self.documents[index]]
        count = min(max(1, len(tokens) - split), len(other))
        start = rng.randint(0, len(other) - count)
        return tokens[:split], other[start : start + count], False


class MaskedTextData(TextData):
    """Batches of text to pretrain on.

    {"tokens": int64 (B, N), "padding_mask": bool (B, N), False at padding, "index": int64 (B,)}.
    With `next_sentence` also "segments": int64 (B, N), 1 in the second of two spans, and "is_next":
    int64 (B,), 1 if it follows the first. Tokens are masked later, on the device (see
    `datamodules.tokens.masking`).

    Args:
        source: Format of the data; null: as the path shows, or reference without a path; reference:
            that of the Python language, no download; reviews: generated ones, no download; csv,
            jsonl: files with a column of texts; txt: a file whose documents are separated by empty
            lines, or a folder of files; folder: texts in train/CLASS/*.txt; hub: a data set of the
            hub, or Parquet files named by split. Texts without labels (a split called unsupervised)
            are trained on, too; the validation texts are those of `ReviewData` with the same
            options.
        path: File or folder to read, or a data set of the hub.
        next_sentence: Read pairs of spans instead of chunks of one document; in half of them the
            second follows the first.
    """

    sources = CORPORA
    noun = "chunks"
    splits_samples = True

    def __init__(
        self,
        source: Literal["reference", "reviews", "csv", "jsonl", "txt", "folder", "hub"]
        | str
        | None = None,
        path: str | None = None,
        next_sentence: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.source = open_source(CORPORA, source, path, self.options, skip_bad=self.skip_bad)
        self.source.labelled = False
        self.next_sentence = next_sentence

    def measure_metadata(self) -> dict[str, Any]:
        """As in the base class, and next_sentence (bool)."""
        return {"next_sentence": self.next_sentence, **super().measure_metadata()}

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """As in the base class; the kind of samples must agree, too."""
        require_same("next_sentence", self.next_sentence, metadata["next_sentence"])
        super().set_metadata(metadata)

    @cached_property
    def _training(self) -> Any:
        return self.source.corpus("train")

    def training_texts(self) -> Any:
        return self._training

    def training_key(self) -> str:
        """As in the base class."""
        return text_digest(self._training)

    def load(self, split: str) -> Chunks:
        if split == "predict":
            raise UsageError("there is nothing to predict here: fine-tune on another task first.")
        texts = self._training if split == "train" else self.source.corpus(split)
        table = tokenised(texts, self.tokenizer)
        if not int(table.lengths.sum()):
            raise DataError(
                f"the {split} split of {self.origin} has no tokens, only characters that the "
                "tokenizer leaves out: give other texts."
            )
        if not self.next_sentence:
            return Chunks(table, self.tokenizer, self.max_length, self.loading.multiple)
        return NextSentencePairs(
            table, self.tokenizer, self.max_length, self.loading.multiple, self.seed
        )
