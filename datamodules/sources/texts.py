"""What every source of texts offers, and the sources that need no file."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.sources.base import Source, SourceOptions, other_source
from datamodules.utils.errors import DataError, UsageError

WORD = 100_000  # characters of a word at most: the time that BPE takes to merge them grows faster than their square


@dataclass(frozen=True)
class TextDatasetOptions(SourceOptions):
    """What to know about a data set of texts that its files do not say.

    Args:
        text_column: Column with the texts; None: text, review, sentence, content or document.
    """

    text_column: str | None = None


@dataclass(frozen=True)
class Texts:
    """Texts of one split, with a class for each.

    Args:
        column: Arrow strings (S,): a ChunkedArray.
        labels: (S,) int64; 0 where the texts have no classes.
        rows: (S,) int64: the number of each in what it was read from.
        where: What that is: "line {} of reviews.csv", or the files that `rows` counts.
    """

    column: Any
    labels: Tensor
    rows: Tensor
    where: str | Sequence[Any]

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, keep: Tensor) -> "Texts":
        """The samples with these indices, or where this mask is True."""
        import pyarrow as pa

        keep = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        column = self.column.take(pa.array(keep.numpy()))
        return replace(self, column=column, labels=self.labels[keep], rows=self.rows[keep])

    def name(self, i: int) -> str:
        """What to call text i in a message."""
        row = int(self.rows[i])
        return (
            self.where.replace("{}", str(row), 1)
            if isinstance(self.where, str)
            else str(self.where[row])
        )


def arrow_texts(texts: Any) -> Any:
    """Python strings or an Arrow column as Arrow strings with 64-bit offsets, which no corpus outgrows."""
    import pyarrow as pa

    if isinstance(texts, pa.ChunkedArray):
        return texts.cast(pa.large_string())
    return pa.chunked_array([pa.array(texts, pa.large_string())])


def holds_text(kind: Any) -> bool:
    """Whether an Arrow type is one of texts."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_endless(column: Any) -> Tensor:
    """(S,) bool: which of some Arrow strings hold a word that is too long to learn a vocabulary from, or null."""
    import pyarrow.compute as pc

    long = torch.from_numpy((pc.binary_length(column).fill_null(0).to_numpy() > WORD).copy())
    for i in long.nonzero().flatten().tolist():
        long[i] = max(map(len, column[i].as_py().split())) > WORD
    return long


def is_utf8(column: Any) -> Tensor:
    """(S,) bool: which of some Arrow strings are UTF-8, which tables do not guarantee."""
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return torch.tensor([_decodes(cell) for cell in column])
    return torch.ones(len(column), dtype=torch.bool)


def _decodes(cell: Any) -> bool:
    try:
        cell.as_py()
    except UnicodeDecodeError:
        return False
    return True


def is_empty(column: Any) -> Tensor:
    """(S,) bool: which of some Arrow strings are null or hold nothing but spaces."""
    import pyarrow.compute as pc

    length = pc.binary_length(pc.utf8_trim_whitespace(column)).fill_null(0)
    return torch.from_numpy(length.to_numpy() == 0)


class TextSource(Source[Texts]):
    """Base of the sources of texts: subclasses read a split, here it is checked, once.

    Where `labelled` is switched off, for texts to pretrain on, classes serve to hold back the same validation texts as
    with them, and may be missing.
    """

    noun = "texts"
    labelled = True

    def __init__(
        self, path: str | None, options: TextDatasetOptions, skip_bad: bool = False
    ) -> None:
        super().__init__(path, options, skip_bad)
        self._read: dict[str, Texts] = {}

    def read(self, split: str) -> Texts:
        """A split that the data have: "train", "val", "test" or "unlabelled"."""
        raise NotImplementedError

    def records(self, split: str) -> Texts | None:
        """The texts of a split that are not empty; None where the data have no such split.

        Raises:
            DataError: A text is empty, and bad ones are not to be skipped; or none are left.
            UsageError: A class is missing from the training split.
        """
        if not self.has(split):
            return None
        if split not in self._read:
            texts = self.usable(self.read(split))
            if split == "train" and self.labelled:
                counts = texts.labels.bincount(minlength=len(self.class_names))
                if absent := [
                    name
                    for name, n in zip(self.class_names, counts.tolist(), strict=True)
                    if n == 0
                ]:
                    raise UsageError(
                        f"class {absent[0]} is missing from the training split of {self.origin}: add texts of it, or "
                        "list the classes there are with --data.dataset.class_names."
                    )
            self._read[split] = texts
        return self._read[split]

    def corpus(self, split: str) -> Any:
        """Arrow strings to pretrain on: "train" is the training split with all texts that have no label, or "val"."""
        import pyarrow as pa

        own, more = (
            self.split(split).column,
            self.records("unlabelled") if split == "train" else None,
        )
        return own if more is None else pa.chunked_array([*own.chunks, *more.column.chunks])

    def usable(self, found: Texts) -> Texts:
        """The texts that are UTF-8, hold more than spaces and no endless word; the others are bad.

        Raises:
            DataError: There are none; or one is bad, and bad ones are not to be skipped.
        """
        good = is_utf8(found.column)
        for i in (~good).nonzero().flatten().tolist():
            self.bad(found.name(i), "holds bytes that are not UTF-8")
        texts = found if good.all() else found.select(good)
        empty = is_empty(texts.column)
        for i in empty.nonzero().flatten().tolist():
            self.bad(texts.name(i), "holds no text")
        endless = is_endless(texts.column)
        for i in endless.nonzero().flatten().tolist():
            self.bad(texts.name(i), f"holds a word of more than {WORD:,} characters")
        empty |= endless
        if empty.all():
            raise DataError(f"none of the {len(found)} texts can be used, such as {found.name(0)}.")
        return texts.select(~empty) if empty.any() else texts


class EmbeddedTexts(TextSource):
    """Base of the texts that need no file, with splits of their own."""

    unused = {
        "name",
        "subset",
        "local",
        "label_column",
        "text_column",
        "val_fraction",
        "split_seed",
    }

    def prepare(self) -> None:
        """Nothing to download.

        Raises:
            UsageError: A path is named, which these data do not have.
        """
        if self.path is not None:
            hint = other_source(Path(self.path), ()) or "; try --data.source hub, csv, jsonl or txt"
            raise UsageError(
                f"--data.path {self.path} says where, not what: the source {self.noun} has no files{hint}."
            )

    @cached_property
    def splits(self) -> dict[str, tuple[list[str], list[int]]]:
        """Texts and labels of each split."""
        raise NotImplementedError

    def has(self, split: str) -> bool:
        return split in self.splits

    def read(self, split: str) -> Texts:
        texts, labels = self.splits[split]
        where = f"text {{}} of the {split} split"
        return Texts(arrow_texts(texts), torch.tensor(labels), torch.arange(len(texts)), where)


class Reviews(EmbeddedTexts):
    """Generated reviews, positive or negative by the order of their words (`datamodules.embedded.reviews`)."""

    noun = "reviews"

    @property
    def class_names(self) -> list[str]:
        from datamodules.embedded.reviews import CLASS_NAMES

        return list(CLASS_NAMES)

    @cached_property
    def splits(self) -> dict[str, tuple[list[str], list[int]]]:
        from datamodules.embedded.reviews import generate

        return generate()


class Reference(EmbeddedTexts):
    """The reference of the Python language (`datamodules.embedded.reference`): texts without classes."""

    noun = "reference"
    unused = EmbeddedTexts.unused | {"class_names"}
    class_names = ["text"]

    @cached_property
    def splits(self) -> dict[str, tuple[list[str], list[int]]]:
        from datamodules.embedded.reference import documents

        return {split: (texts, [0] * len(texts)) for split, texts in documents().items()}
