"""Texts with or without classes: what every source of them offers, and the embedded ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.labelled import LabelledSource, SourceOptions
from datamodules.sources.readers.cells import is_not_utf8
from datamodules.sources.readers.formats import NOT_UTF8
from datamodules.utils.errors import DataError, UsageError

MAX_WORD = 100_000  # characters: the time that BPE takes for a word grows with their square


@dataclass(frozen=True)
class TextDatasetOptions(SourceOptions):
    """What to know about a data set of texts that its files do not say.

    Args:
        text_column: Column with the texts; null: text, review, sentence, content or document.
    """

    text_column: str | None = None


@dataclass(frozen=True)
class TextSamples:
    """The S texts of one split with a class for each, or texts with their translations."""

    columns: tuple[pa.ChunkedArray, ...]  # strings: the texts, or sources and targets
    labels: Tensor  # as `Split.labels`; (S,) zeros if the texts have no classes
    rows: Tensor  # (S,) int64, the number of each sample in its file or table
    where: str | Sequence[Any]  # names for messages: "line {} of reviews.csv", or files by number

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def column(self) -> pa.ChunkedArray:
        """The texts, or the source texts."""
        return self.columns[0]

    def select(self, index: Tensor) -> "TextSamples":
        """The samples with these indices, or those for which this mask is True."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        columns = tuple(column.take(pa.array(index.numpy())) for column in self.columns)
        labels = self.labels[index]
        return replace(self, columns=columns, labels=labels, rows=self.rows[index])

    def unreadable(self) -> list[str]:
        """None: a source checks the texts that it reads."""
        return []

    def find(self, test: Callable[[pa.ChunkedArray], Tensor]) -> Tensor:
        """(S,) bool: for which samples a test of the texts is True in any column."""
        return torch.stack([test(column) for column in self.columns]).any(0)

    def name(self, i: int) -> str:
        """The name of sample i in a message."""
        row = int(self.rows[i])
        if isinstance(self.where, str):
            return self.where.replace("{}", str(row), 1)
        return str(self.where[row])


def text_samples(
    texts: Any,
    rows: Tensor,
    where: str | Sequence[Any],
    labels: Tensor | None = None,
    targets: Any = None,
) -> TextSamples:
    """Samples of texts, in Python or in Arrow, with labels or target texts; see `TextSamples`."""
    if labels is None:
        labels = torch.zeros_like(rows)
    columns = [texts] if targets is None else [texts, targets]
    return TextSamples(tuple(map(arrow_strings, columns)), labels, rows, where)


def arrow_strings(texts: Any) -> pa.ChunkedArray:
    """Texts, in Python or in Arrow, as Arrow strings with 64-bit offsets."""
    if isinstance(texts, pa.ChunkedArray):
        return texts.cast(pa.large_string())
    return pa.chunked_array([pa.array(texts, pa.large_string())])


def has_long_word(column: pa.ChunkedArray) -> Tensor:
    """(S,) bool: which of some Arrow strings hold a word of more than MAX_WORD characters."""
    import pyarrow.compute as pc

    sizes = pc.binary_length(column).fill_null(0).to_numpy()
    found = torch.from_numpy((sizes > MAX_WORD).copy())
    for i in found.nonzero().flatten().tolist():
        found[i] = max(map(len, column[i].as_py().split()), default=0) > MAX_WORD
    return found


def is_empty(column: pa.ChunkedArray) -> Tensor:
    """(S,) bool: which of some Arrow strings are null or hold nothing but spaces."""
    import pyarrow.compute as pc

    sizes = pc.binary_length(pc.utf8_trim_whitespace(column)).fill_null(0)
    return torch.from_numpy(sizes.to_numpy() == 0)


def require_texts(texts: Sequence[str], name: str, first: int = 0) -> None:
    """Raises `UsageError` if one of some texts is empty or holds nothing but spaces.

    The message calls it by `name`, with {} its number, counted from `first`.
    """
    for number, text in enumerate(texts, first):
        if not text.strip():
            raise UsageError(f"{name.format(number)} is empty: fix or remove it.")


class TextSource(LabelledSource[TextSamples]):
    """Base of the sources of texts: subclasses read a split, this class checks it, once.

    If `labelled` is False, for texts to pretrain on, classes may be missing: they only decide which
    validation texts are held out.
    """

    noun = "texts"

    def __init__(self, path: str | None, options: Any, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self._checked: dict[str, TextSamples] = {}

    def read(self, split: str) -> TextSamples:
        """A split that the data have: "train", "val", "test" or "unlabelled"."""
        raise NotImplementedError

    def records(self, split: str) -> TextSamples | None:
        """The usable samples of a split; None if the data have no such split.

        Raises `DataError` if a text is bad, and bad ones are not to be skipped; or none are left;
        `UsageError` if a class is missing from the training split.
        """
        if not self.has(split):
            return None
        if split not in self._checked:
            samples = self.usable(self.read(split), split)
            is_checked = self.labelled and self.options.problem_type != "regression"
            if split == "train" and is_checked and self.needs_every_class:
                self.require_every_class(samples.labels)
            self._checked[split] = samples
        return self._checked[split]

    def corpus(self, split: str) -> pa.ChunkedArray:
        """Texts to pretrain on: those of a split; to train, those without a label, too."""
        texts = self.split(split).column
        more = self.records("unlabelled") if split == "train" else None
        if more is None:
            return texts
        return pa.chunked_array([*texts.chunks, *more.column.chunks])

    def usable(self, samples: TextSamples, split: str) -> TextSamples:
        """The samples whose texts are UTF-8, not empty, and without a word that is too long.

        Raises `DataError` if there are none; or one is bad, and bad ones are not to be skipped.
        """
        found = self.without(self.decodable(samples), is_empty, "holds no text")
        if len(samples) == 0:
            raise DataError(
                f"the {split} split of {self.origin} has no texts: add some, or remove it."
            )
        if len(found) == 0:
            raise DataError(
                f"none of the {len(samples)} texts can be used, such as {samples.name(0)}."
            )
        return found

    def decodable(self, samples: TextSamples) -> TextSamples:
        """The samples that are UTF-8, without a word that is too long; others are rejected."""
        samples = self.without(samples, is_not_utf8, NOT_UTF8)
        fault = f"holds a word of more than {MAX_WORD:,} characters"
        return self.without(samples, has_long_word, fault)

    def without(
        self, samples: TextSamples, is_bad: Callable[[pa.ChunkedArray], Tensor], fault: str
    ) -> TextSamples:
        """The samples for which a test of the texts is False; the others are rejected."""
        bad = samples.find(is_bad)
        for i in bad.nonzero().flatten().tolist():
            self.reject(samples.name(i), fault)
        return samples.select(~bad) if bad.any() else samples


class EmbeddedTexts(TextSource):
    """Base of the texts that come with the program, with splits of their own."""

    embedded = True
    unused_options = {"name", "subset", "local", "label_column", "text_column"}
    unused_options |= {"val_fraction", "split_seed"}

    @cached_property
    def splits(self) -> dict[str, tuple[list[str], list[int]]]:
        """Texts and labels of each split."""
        raise NotImplementedError

    def has(self, split: str) -> bool:
        return split in self.splits

    def read(self, split: str) -> TextSamples:
        texts, labels = self.splits[split]
        where = f"text {{}} of the {split} split"
        return text_samples(texts, torch.arange(len(texts)), where, torch.tensor(labels))


@cache
def generated_reviews() -> dict[str, tuple[list[str], list[int]]]:
    """Texts and labels of each split, generated once in a process."""
    from datamodules.embedded.reviews import generate

    return generate()


class Reviews(EmbeddedTexts):
    """Generated reviews, positive or negative by the order of their words."""

    noun = "reviews"
    class_names = ["negative", "positive"]

    @property
    def splits(self) -> dict[str, tuple[list[str], list[int]]]:
        return generated_reviews()


class Reference(EmbeddedTexts):
    """The reference of the Python language: texts without classes."""

    noun = "reference"
    unused_options = EmbeddedTexts.unused_options | {"class_names"}
    class_names = ["text"]

    @cached_property
    def splits(self) -> dict[str, tuple[list[str], list[int]]]:
        from datamodules.embedded.reference import documents

        return {split: (texts, [0] * len(texts)) for split, texts in documents().items()}
