"""Text for language models: a stream of documents, of which only a piece is in memory at a time."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pytorch_lightning.utilities import rank_zero_warn

from datamodules.cache import content_key
from datamodules.errors import DataError, UsageError
from datamodules.sources.base import Source

PIECE = 2**16  # characters of a document that are handled at once


@dataclass(frozen=True)
class CorpusOptions:
    """What to know about a corpus that its files do not say.

    Args:
        name: Id on the Hugging Face hub, for the source hub, such as stanfordnlp/imdb.
        local: Folder below the one that the environment variable TESSERA_DATA names, read instead of the hub.
        text_column: Column with the texts; None: text, review, sentence, content or document.
        val_share: Share of the training text, counted in characters, whose tail is held back for validation where the
            data have no validation split.
        blank_lines: Part plain text into documents at blank lines; else each file is a document.
        sample: Millions of characters, from the beginning of the training text, that a tokenizer is trained from.

    Raises:
        UsageError: An option is out of range.
    """

    name: str | None = None
    local: str | None = None
    text_column: str | None = None
    val_share: float = 0.1
    blank_lines: bool = False
    sample: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.val_share < 1:
            raise UsageError(f"val_share is {self.val_share}, but must lie between 0 and 1.")
        if self.sample <= 0:
            raise UsageError(f"sample is {self.sample} million characters, but must be more than 0.")


class Piece(NamedTuple):
    """A stretch of text of one document.

    Args:
        text: Not empty.
        opens: Whether the document begins with it.
        closes: Whether the document ends with it.
    """

    text: str
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class Survey:
    """What was found by reading a split once.

    Args:
        digest: Hash of its text, and of where documents begin.
        documents, characters: How many it has.
    """

    digest: str
    documents: int
    characters: int


@dataclass(frozen=True)
class Documents:
    """The text of one split: iterating over it reads it anew, piece by piece.

    Args:
        read: Begins reading all that the split is a part of.
        survey: What that gives.
        start, stop: The characters that belong to the split. A document that is cut by them begins there, but does
            not end there.
    """

    read: Callable[[], Iterator[Piece]]
    survey: Survey
    start: int = 0
    stop: int | None = None

    @property
    def characters(self) -> int:
        """Length of the text."""
        return (self.survey.characters if self.stop is None else self.stop) - self.start

    @property
    def digest(self) -> str:
        """Hash of the text, and of where documents begin and end."""
        return content_key(self.survey.digest, str(self.start), str(self.stop))

    def __iter__(self) -> Iterator[Piece]:
        place, opened = 0, False
        for text, opens, closes in self.read():
            first = max(self.start - place, 0)
            last = len(text) if self.stop is None else min(self.stop - place, len(text))
            place += len(text)
            if first < last:
                yield Piece(text[first:last], opens or not opened, closes and last == len(text))
                opened = True
            if self.stop is not None and place >= self.stop:
                return

    def sample(self, characters: int) -> list[str]:
        """So many characters from the beginning, as texts."""
        return [piece.text for piece in replace(self, stop=self.start + min(characters, self.characters))]


class DocumentSource(Source[Any]):
    """Base of the sources of documents: subclasses read a split, here it is measured and, if need be, parted.

    Data without a validation split give the tail of their training text for it: exactly `val_share` of the characters,
    as is the custom for tiny Shakespeare (Karpathy 2015), even where that cuts a document. Data without a test split
    are tested on the validation split, with a warning.
    """

    noun = "documents"

    def __init__(self, path: str | None, options: CorpusOptions, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self._surveys: dict[str, Survey] = {}

    def read(self, split: str) -> Iterator[Piece]:
        """The documents of a split that the data have; none is empty."""
        raise NotImplementedError

    def survey(self, split: str) -> Survey:
        """What a split that the data have holds; it is read once for that.

        Raises:
            DataError: There is no text in it.
        """
        if split not in self._surveys:
            content, marks = hashlib.blake2b(), hashlib.blake2b()
            documents = characters = 0
            empty = True
            for piece in self.read(split):
                content.update(piece.text.encode())
                if piece.opens:
                    marks.update(characters.to_bytes(8, "little"))
                documents, characters = documents + piece.opens, characters + len(piece.text)
                empty = empty and piece.text.isspace()
            if empty:
                raise DataError(f"the {split} split of {self.origin} holds no text.")
            digest = content_key(content.hexdigest(), marks.hexdigest())
            self._surveys[split] = Survey(digest, documents, characters)
        return self._surveys[split]

    def split(self, split: str) -> Documents:
        """The text of "train", "val" or "test".

        Raises:
            UsageError: There is no training split.
            DataError: There is no text in it.
        """
        if self.has(split) and (split != "train" or self.has("val")):
            return Documents(partial(self.read, split), self.survey(split))
        if split == "test":
            rank_zero_warn("The data have no test split: the validation split is tested instead.")
            return self.split("val")
        if not self.has("train"):
            raise UsageError(f"{self.origin} has no training split.")
        survey = self.survey("train")
        cut = int(survey.characters * (1 - self.options.val_share))
        part = (0, cut) if split == "train" else (cut, None)
        return Documents(partial(self.read, "train"), survey, *part)


class ReferenceDocuments(DocumentSource):
    """The reference of the Python language (`datamodules.embedded.reference`), a document for each topic."""

    noun = "reference"

    def prepare(self) -> None:
        """Nothing to download.

        Raises:
            UsageError: A path is named, which this text does not have.
        """
        if self.path is not None:
            raise UsageError(
                f"--data.path {self.path} says where, not what: the source reference has no files; try "
                "--data.source files or hub."
            )

    def has(self, split: str) -> bool:
        return split in ("train", "val", "test")

    def read(self, split: str) -> Iterator[Piece]:
        from datamodules.embedded.reference import documents

        for text in documents()[split]:
            yield from pieces(text)


def pieces(text: str) -> Iterator[Piece]:
    """A document in pieces of about `PIECE` characters; nothing where it is empty."""
    start = 0
    while start < len(text):
        stop = seam(text, start)
        yield Piece(text[start:stop], start == 0, stop == len(text))
        start = stop


def seam(text: str, start: int = 0, size: int = PIECE) -> int:
    """Where to cut what begins at `start`: at most `size` characters further, at the last place that suits.

    That is between two lines that both have text, which tokenizers treat as they would without the cut; else after a
    line, else before a space, else anywhere.
    """
    if len(text) - start <= size:
        return len(text)
    place = start + size
    while (place := text.rfind("\n", start + 1, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
    stop = text.rfind("\n", start, start + size) + 1 or text.rfind(" ", start + 1, start + size)
    return stop if stop > start else start + size
