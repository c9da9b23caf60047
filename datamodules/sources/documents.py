"""Text for language models: a stream of documents, of which only a piece is in memory at a time."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.base import Source
from datamodules.utils.cache import cache_folder, content_key, unwritable
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import read_bytes, replacing
from datamodules.utils.progress import progress_bar

PIECE = 2**16  # characters of a document that are handled at once


@dataclass(frozen=True)
class CorpusOptions:
    """What to know about a corpus that its files do not say.

    Args:
        name: Id on the Hugging Face hub, for the source hub, such as stanfordnlp/imdb.
        subset: Part of that data set where it has several, such as wikitext-2-raw-v1 of Salesforce/wikitext.
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
    subset: str | None = None
    local: str | None = None
    text_column: str | None = None
    val_share: float = 0.1
    blank_lines: bool = False
    sample: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.val_share < 1:
            raise UsageError(f"val_share is {self.val_share}, but must lie between 0 and 1.")
        if self.sample <= 0:
            raise UsageError(
                f"sample is {self.sample} million characters, but must be more than 0."
            )


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
        return [
            piece.text
            for piece in replace(self, stop=self.start + min(characters, self.characters))
        ]


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

    def stamp(self, split: str) -> str | None:
        """What changes when the files of a split do, such as their sizes and times; None where there is no telling."""
        return None

    def size(self, split: str) -> int:
        """Bytes that have to be read for a split, about; 0 where there is no telling."""
        return 0

    def survey(self, split: str) -> Survey:
        """What a split that the data have holds. It is read once for that, and then remembered with its `stamp`.

        Raises:
            DataError: There is no text in it, or the cache cannot be written.
        """
        if split not in self._surveys:
            stamp = (
                None if self.skip_bad else self.stamp(split)
            )  # what was skipped is to be counted again
            path = None
            if stamp is not None:
                key = content_key(
                    "1", stamp, repr(self.options.text_column), repr(self.options.blank_lines)
                )
                path = cache_folder("surveys") / f"{key}.json"
            self._surveys[split] = _stored(path) or _store(path, self._surveyed(split))
        return self._surveys[split]

    def _surveyed(self, split: str) -> Survey:
        content, marks = hashlib.blake2b(), hashlib.blake2b()
        documents = characters = 0
        with progress_bar(
            f"reading {self.origin}, bytes", self.size(split), least=200_000_000
        ) as advance:
            for piece in self.read(split):
                text = piece.text.encode()
                content.update(text)
                if piece.opens:
                    marks.update(characters.to_bytes(8, "little"))
                documents, characters = documents + piece.opens, characters + len(piece.text)
                advance(len(text))
        if not documents:
            parted = any(self.has(other) for other in ("train", "val", "test") if other != split)
            raise DataError(
                f"{f'the {split} split of ' if parted else ''}{self.origin} holds no text."
            )
        return Survey(content_key(content.hexdigest(), marks.hexdigest()), documents, characters)

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

    def whole(self) -> Documents:
        """The test split where the data have one, else all that there is: the text to measure a model with.

        Raises:
            DataError: There is no text in it.
        """
        splits = (
            ["test"]
            if self.has("test")
            else [split for split in ("train", "val") if self.has(split)]
        )
        parts = [Documents(partial(self.read, split), self.survey(split)) for split in splits]
        digest = content_key(*(part.digest for part in parts))
        survey = Survey(
            digest,
            sum(part.survey.documents for part in parts),
            sum(part.survey.characters for part in parts),
        )
        return Documents(lambda: chain.from_iterable(parts), survey)


class ReferenceDocuments(DocumentSource):
    """The reference of the Python language (`datamodules.embedded.reference`), a document for each topic."""

    noun = "reference"
    unused = {"name", "subset", "local", "text_column", "val_share", "blank_lines"}

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
            yield from pieces([(text, True)])


def _stored(path: Path | None) -> Survey | None:
    try:
        return Survey(**json.loads(read_bytes(path))) if path else None
    except (OSError, TypeError, ValueError):
        return None


def _store(path: Path | None, survey: Survey) -> Survey:
    if path is not None:
        try:
            with replacing(path) as partial:
                partial.write_text(json.dumps(asdict(survey)))
        except OSError as error:
            raise unwritable(path, error) from error
    return survey


def pieces(parts: Iterable[tuple[str, bool]], size: int = PIECE) -> Iterator[Piece]:
    """Documents in pieces of `size` characters at most; shorter ones of nothing but space are passed over.

    Args:
        parts: Text, of any length, and whether a document ends with it.
        size: Of a piece.
    """
    text, opens = "", True
    for part, ends in parts:
        text, start = text + part, 0
        while len(text) - start > size:
            stop = seam(text, start, size)
            yield Piece(text[start:stop], opens, False)
            start, opens = stop, False
        text = text[start:]
        if ends:
            if text and not (opens and text.isspace()):
                yield Piece(text, opens, True)
            text, opens = "", True


def seam(text: str, start: int, size: int) -> int:
    """Where to cut what begins at `start` and is longer than `size`: at most so many characters further.

    That is between two lines that both have text, which tokenizers treat as they would without the cut; else after a
    line, else before a space, else anywhere.
    """
    place = start + size
    while (place := text.rfind("\n", start + 1, place)) > 0:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
    stop = text.rfind("\n", start, start + size) + 1 or text.rfind(" ", start + 1, start + size)
    return stop if stop > start else start + size
