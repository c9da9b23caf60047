"""Texts to pretrain on: documents in pieces that fill the model, or pairs of spans where one may follow the other."""

from functools import cached_property
from random import Random
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from datamodules.sources import CORPORA
from datamodules.text import Sequences, TextData, TokenRows
from datamodules.tokenizers import Tokenizer
from datamodules.tokens.token_cache import tokenised
from datamodules.utils.batching import ResumableBatchSampler
from datamodules.utils.errors import UsageError


class Pieces(Sequences):
    """Documents cut into pieces of `max_length` with control tokens; the last of each is shorter. No token is left out.

    Args:
        table: Tokens of the documents, without control tokens.
        tokenizer: Puts control tokens around a piece.
        max_length: Tokens of a piece at most.
        multiple: See `TextLoading`.
    """

    pair = False

    def __init__(
        self, table: TokenRows, tokenizer: Tokenizer, max_length: int, multiple: int
    ) -> None:
        self.table, room = table, max_length - tokenizer.num_special_tokens(self.pair)
        if room < 2:
            raise UsageError(
                f"max_length is {max_length}, which leaves no room for text between control tokens."
            )
        counts = table.lengths.add(room - 1).div(
            room, rounding_mode="floor"
        )  # (D,) pieces of each document
        self.document = torch.arange(len(counts)).repeat_interleave(counts)  # (S,)
        first = (counts.cumsum(0) - counts).repeat_interleave(
            counts
        )  # (S,) number of its document's first piece
        self.start = (torch.arange(len(first)) - first) * room
        self.size = (table.lengths[self.document] - self.start).clamp(max=room)
        least = 2 if self.pair else 1  # a span has a token at least
        super().__init__(
            tokenizer,
            self.size.clamp(min=least) + tokenizer.num_special_tokens(self.pair),
            max_length,
            multiple,
        )

    def tokens(self, i: int) -> Any:
        """The tokens of piece i, without control tokens."""
        start = int(self.start[i])
        return self.table[int(self.document[i])][start : start + int(self.size[i])]

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        rows = [self.tokenizer.build_inputs(self.tokens(i), self.max_length).ids for i in indices]
        return self.batch(torch.tensor(indices), rows)


class Pairs(Pieces):
    """Pieces cut in two at a random place; every other second half is replaced by tokens of another document.

    Place, replacement and its length, which is that of what it replaces where the other document is as long, are drawn
    from (seed, epoch, piece), with new draws in each epoch (next-sentence prediction: Devlin 2019).

    Args:
        table, tokenizer, max_length, multiple: See `Pieces`.
        seed: Of the draws.
    """

    pair = True

    def __init__(
        self, table: TokenRows, tokenizer: Tokenizer, max_length: int, multiple: int, seed: int
    ) -> None:
        super().__init__(table, tokenizer, max_length, multiple)
        self.seed = seed
        self.sampler: ResumableBatchSampler | None = (
            None  # whose epoch it is; evaluation draws the same each time
        )
        self.documents: list[int] = self.document.unique().tolist()  # those that are not empty
        if len(self.documents) < 2:
            raise UsageError(
                "next_sentence needs two documents at least in each split: add some, or switch it off."
            )

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index, drawn = torch.tensor(indices), [self._pair(i) for i in indices]
        built = [
            self.tokenizer.build_inputs(first, self.max_length, second)
            for first, second, _ in drawn
        ]
        segments = self.filled(index, [row.segments for row in built], padding=0)
        is_next = torch.tensor([follows for _, _, follows in drawn], dtype=torch.int64)
        return self.batch(index, [row.ids for row in built]) | {
            "segments": segments,
            "is_next": is_next,
        }

    def _pair(self, i: int) -> tuple[Any, Any, bool]:
        """Two spans, and whether the second follows the first."""
        draw = Random(f"{self.seed}/{self.sampler.epoch if self.sampler else 0}/{i}")
        tokens, document = self.tokens(i), int(self.document[i])
        cut = draw.randint(1, max(1, len(tokens) - 1))
        if len(tokens) > 1 and draw.random() < 0.5:
            return tokens[:cut], tokens[cut:], True
        place = draw.randrange(len(self.documents) - 1)
        # The documents are sorted: from this one on, those behind it move up.
        other = self.table[self.documents[place + (self.documents[place] >= document)]]
        count = min(max(1, len(tokens) - cut), len(other))
        start = draw.randint(0, len(other) - count)
        return tokens[:cut], other[start : start + count], False


class MaskedTextData(TextData):
    """Batches of text to pretrain on: {"tokens": int64 (B, N), "keep": bool (B, N), "index": int64 (B,)}.

    "keep" is False at padding. With `next_sentence` also "segments": int64 (B, N), 1 in the second of two spans, and
    "is_next": int64 (B,), 1 where it follows the first. Tokens are masked later, on the device (see
    `datamodules.tokens.masking`).

    Args:
        source: reference: that of the Python language, no download; hub: a data set of the hub; csv, jsonl: files with
            a column of texts; txt: a file whose documents are parted by empty lines, or a folder of files. Texts
            without labels (a split called unsupervised) are trained on, too; those that `ReviewData` validates on
            with the same options are validated on here.
        path: File or folder to read; for the source hub a local copy (parquet files named by split).
        next_sentence: Pairs of spans instead of pieces of one document; in half of them the second follows the first.

    Raises:
        UsageError: An option is out of range, or the data are not where it says.
        DataError: A text cannot be used, a file cannot be read, or the hub cannot be reached.
    """

    def __init__(
        self,
        source: Literal["reference", "hub", "csv", "jsonl", "txt"] = "reference",
        path: str | None = None,
        next_sentence: bool = False,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        if source not in CORPORA:
            raise UsageError(f"source is {source}, but must be one of {', '.join(CORPORA)}.")
        self.source = CORPORA[source](path, self.options, self.skip_bad)
        self.source.labelled = False
        self.next_sentence = next_sentence

    def facts(self) -> dict[str, Any]:
        """As in the base class, and next_sentence (bool)."""
        if not self._facts:
            self._facts = {"next_sentence": self.next_sentence, **super().facts()}
        return self._facts

    def adopt(self, facts: dict[str, Any]) -> None:
        """As in the base class; the kind of samples must agree, too."""
        if self.next_sentence != facts["next_sentence"]:
            had = facts["next_sentence"]
            raise UsageError(
                f"next_sentence is {self.next_sentence}, the checkpoint was trained with {had}: leave it out."
            )
        super().adopt(facts)

    @cached_property
    def _training(self) -> Any:
        return self.source.corpus("train")

    def training_texts(self) -> Any:
        return self._training

    def load(self, split: str) -> Pieces:
        if split == "predict":
            raise UsageError(
                "there is nothing to predict here: pretraining ends in weights for another task."
            )
        table = tokenised(
            self._training if split == "train" else self.source.corpus(split), self.tokenizer
        )
        if not self.next_sentence:
            return Pieces(table, self.tokenizer, self.max_length, self.loading.multiple)
        return Pairs(table, self.tokenizer, self.max_length, self.loading.multiple, self.seed)

    def train_dataloader(self) -> DataLoader:
        loader, dataset = super().train_dataloader(), self.dataset("train")
        if isinstance(dataset, Pairs):
            dataset.sampler = loader.sampler  # type: ignore[assignment]
        return loader
