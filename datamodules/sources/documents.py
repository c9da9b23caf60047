"""Text for language models: a stream of documents, of which only a piece is in memory at a time."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from datamodules.sources.base import HubOptions, Source
from datamodules.utils.cache import cache_folder, content_key, write_cached
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import read_bytes
from datamodules.utils.progress import progress_bar

PIECE_SIZE = 2**16  # characters of a document that are handled at once
CACHE_VERSION = "2"  # of the statistics on disk
PROGRESS_FROM = 200_000_000  # bytes from which on reading shows a progress bar


@dataclass(frozen=True)
class CorpusOptions(HubOptions):
    """What to know about a corpus that its files do not say.

    Args:
        text_column: Column with the texts; null: text, review, sentence, content or document.
        val_fraction: Fraction of the training text, in characters, that is held out from its end
            for validation, if the data have no validation split.
        blank_lines: Split plain text into documents at blank lines; else each file is a document.
        sample: Millions of characters from the beginning of the training text to train a tokenizer
            on.
    """

    text_column: str | None = None
    val_fraction: float = 0.1
    blank_lines: bool = False
    sample: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UsageError(
                f"--data.dataset.val_fraction is {self.val_fraction}, but must lie between 0 and 1."
            )
        if self.sample <= 0:
            raise UsageError(
                f"--data.dataset.sample is {self.sample} million characters, but must be more "
                "than 0."
            )


class Piece(NamedTuple):
    """Some text of one document; whether the document begins with it, and ends with it."""

    text: str
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class TextStatistics:
    """Numbers of documents and characters; hash of the text, and of where documents begin."""

    digest: str
    documents: int
    characters: int


@dataclass(frozen=True)
class Documents:
    """The text of one split; iterating over it reads it again, piece by piece.

    Args:
        read: Reads the text that the split is a part of.
        statistics: Of that text.
        start: First character of the split. A document that is cut there begins there.
        stop: First character after the split; None: the end. A document that is cut there does not
            end there.
    """

    read: Callable[[], Iterator[Piece]]
    statistics: TextStatistics
    start: int = 0
    stop: int | None = None

    @property
    def characters(self) -> int:
        """Length of the text."""
        stop = self.statistics.characters if self.stop is None else self.stop
        return stop - self.start

    @property
    def digest(self) -> str:
        """Hash of the text, and of where documents begin and end."""
        return content_key(self.statistics.digest, str(self.start), str(self.stop))

    def __iter__(self) -> Iterator[Piece]:
        position = 0
        is_open = False
        for text, opens, closes in self.read():
            first = max(self.start - position, 0)
            last = len(text)
            if self.stop is not None:
                last = min(self.stop - position, last)
            position += len(text)
            if first < last:
                yield Piece(text[first:last], opens or not is_open, closes and last == len(text))
                is_open = True
            if self.stop is not None and position >= self.stop:
                return

    def sample(self, characters: int) -> list[str]:
        """The first `characters`, as texts."""
        stop = self.start + min(characters, self.characters)
        return [piece.text for piece in replace(self, stop=stop)]


class DocumentSource(Source):
    """Base of the sources of documents: subclasses read a split, this class measures and cuts it.

    Without a validation split, it is the end of the training text: exactly `val_fraction` of the
    characters, as is the custom for tiny Shakespeare (Karpathy 2015), even if that cuts a document.
    Without a test split, the validation split is tested, with a warning. Of `unseen` data that are
    not split, both are the whole text.
    """

    noun = "documents"

    def __init__(self, path: str | None, options: CorpusOptions, skip_bad: bool = False) -> None:
        super().__init__(path, options, skip_bad)
        self._statistics: dict[str, TextStatistics] = {}

    def read(self, split: str) -> Iterator[Piece]:
        """The documents of a split that the data have, without empty ones."""
        raise NotImplementedError

    def fingerprint(self, split: str) -> str | None:
        """Changes when the files of a split do; None if that is unknown."""
        return None

    def size(self, split: str) -> int:
        """About how many bytes a split has; 0 if that is unknown."""
        return 0

    def statistics(self, split: str) -> TextStatistics:
        """Of a split that the data have; cached on disk as long as its files do not change.

        Raises `DataError` if there is no text in it, or the cache cannot be written.
        """
        if split not in self._statistics:
            self._statistics[split] = self._find_statistics(split)
        return self._statistics[split]

    def _find_statistics(self, split: str) -> TextStatistics:
        fingerprint = self.fingerprint(split)
        if fingerprint is None or self.skip_bad:  # what is skipped has to be counted again
            return self._measure(split)
        options = repr(self.options.text_column), repr(self.options.blank_lines)
        key = content_key(CACHE_VERSION, fingerprint, *options)
        path = cache_folder("statistics") / f"{key}.json"
        try:
            return TextStatistics(**json.loads(read_bytes(path)))
        except (OSError, TypeError, ValueError):
            statistics = self._measure(split)
        write_cached(path, json.dumps(asdict(statistics)))
        return statistics

    def _measure(self, split: str) -> TextStatistics:
        content = hashlib.blake2b()
        starts = hashlib.blake2b()
        documents = 0
        characters = 0
        title = f"reading {self.origin}, bytes"
        with progress_bar(title, self.size(split), PROGRESS_FROM) as advance:
            for piece in self.read(split):
                text = piece.text.encode()
                content.update(text)
                if piece.opens:
                    starts.update(characters.to_bytes(8, "little"))
                    documents += 1
                characters += len(piece.text)
                advance(len(text))
        if not documents:
            raise DataError(f"{self.origin} holds no text in its {split} split.")
        digest = content_key(content.hexdigest(), starts.hexdigest())
        return TextStatistics(digest, documents, characters)

    def split(self, split: str) -> Documents:
        """The text of "train", "val" or "test".

        Raises `UsageError` if there is no training split; `DataError` if there is no text in it.
        """
        if self.is_evaluated_whole(split) and self.has("train"):
            return Documents(partial(self.read, "train"), self.statistics("train"))
        if self.has(split) and (split != "train" or self.has("val")):
            return Documents(partial(self.read, split), self.statistics(split))
        if split == "test":
            self.warn_untested()
            return self.split("val")
        if not self.has("train"):
            raise UsageError(f"{self.origin} has no training split: add files for training.")
        statistics = self.statistics("train")
        cut = int(statistics.characters * (1 - self.options.val_fraction))
        documents = Documents(partial(self.read, "train"), statistics)
        if split == "train":
            return replace(documents, stop=cut)
        return replace(documents, start=cut)

    def whole(self) -> Documents:
        """The text to measure a model with: the test split if there is one, else everything.

        Raises `DataError` if there is no text in it.
        """
        splits = ("test",) if self.has("test") else ("train", "val")
        parts = [
            Documents(partial(self.read, split), self.statistics(split))
            for split in splits
            if self.has(split)
        ]
        statistics = TextStatistics(
            content_key(*(part.digest for part in parts)),
            sum(part.statistics.documents for part in parts),
            sum(part.statistics.characters for part in parts),
        )
        return Documents(lambda: chain.from_iterable(parts), statistics)


class ReferenceDocuments(DocumentSource):
    """The reference of the Python language, a document for each topic."""

    noun = "reference"
    embedded = True
    unused_options = {"name", "subset", "local", "text_column", "val_fraction", "blank_lines"}

    def has(self, split: str) -> bool:
        return split in ("train", "val", "test")

    def read(self, split: str) -> Iterator[Piece]:
        from datamodules.embedded.reference import documents

        for text in documents()[split]:
            yield from split_pieces([(text, True)])


def split_pieces(parts: Iterable[tuple[str, bool]], size: int = PIECE_SIZE) -> Iterator[Piece]:
    """Documents in pieces of at most `size` characters, without short ones of only space.

    `parts` are text, of any length, and whether a document ends with it.
    """
    text = ""
    opens = True
    for part, ends in parts:
        text += part
        start = 0
        while len(text) - start > size:
            stop = cut_position(text, start, size)
            yield Piece(text[start:stop], opens, False)
            start = stop
            opens = False
        text = text[start:]
        if ends:
            if text and not (opens and text.isspace()):
                yield Piece(text, opens, True)
            text = ""
            opens = True


def cut_position(text: str, start: int, size: int) -> int:
    """Where to cut a text from `start` on, at most `size` characters further.

    That is between two lines that both have text, where tokenizers do not notice it; else after a
    line, else before a space, else anywhere.
    """
    stop = start + size
    newline = text.rfind("\n", start + 1, stop)
    while newline > 0:
        if not text[newline - 1].isspace() and not text[newline + 1].isspace():
            return newline + 1
        newline = text.rfind("\n", start + 1, newline)
    cut = text.rfind("\n", start, stop) + 1 or text.rfind(" ", start + 1, stop)
    return cut if cut > start else stop
