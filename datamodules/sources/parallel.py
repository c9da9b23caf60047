"""Texts in two languages: what every source of them offers, and the one that needs no file."""

import os
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_warn
from torch import Tensor

from datamodules.sources.base import Source, other_source
from datamodules.sources.texts import WORD, arrow_texts, is_empty, is_endless, is_utf8
from datamodules.utils.errors import DataError, UsageError


@dataclass(frozen=True)
class ParallelOptions:
    """What to know about texts in two languages that their files do not say.

    Args:
        name: Id on the Hugging Face hub, for the source hub, such as wmt/wmt16.
        subset: Part of that data set where it has several, such as de-en.
        local: Folder below the one that the environment variable TESSERA_DATA names, read instead of the hub, or where
            no path is named.
        source_column: Column of the source texts, or the ending of their files; null: the name of the language.
        target_column: The same of the target texts.
        header: Whether the first line of a CSV or TSV file names the columns; else they are called 1, 2, ...
        test: Name of the test files without the language, where there are several, such as test_2016_flickr.
        val_fraction: Share of the training pairs set aside where the data have no validation split.
        split_seed: Of the draw of that share; kept apart from the seed of training, so that runs can be compared.
    """

    name: str | None = None
    subset: str | None = None
    local: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    header: bool = True
    test: str | None = None
    val_fraction: float = 0.02
    split_seed: int = 0


@dataclass(frozen=True)
class Pairs:
    """Texts of one split with their translations.

    Args:
        source, target: Arrow strings (S,): ChunkedArrays.
        rows: (S,) int64: the number of each pair in what it was read from.
        where: What that is: "line {} of pairs.tsv".
    """

    source: Any
    target: Any
    rows: Tensor
    where: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def labels(self) -> Tensor:
        """(S,) int64: all pairs are of one class when some are held back."""
        return torch.zeros(len(self), dtype=torch.int64)

    def select(self, keep: Tensor) -> "Pairs":
        """The pairs with these indices, or where this mask is True."""
        import pyarrow as pa

        keep = keep.nonzero().flatten() if keep.dtype == torch.bool else keep
        source, target = (side.take(pa.array(keep.numpy())) for side in (self.source, self.target))
        return replace(self, source=source, target=target, rows=self.rows[keep])

    def name(self, i: int) -> str:
        """What to call pair i in a message."""
        return self.where.replace("{}", str(int(self.rows[i])), 1)


def pair_name(languages: list[str]) -> str:
    """Source and target as --data.languages takes them."""
    return (":" if any("-" in name for name in languages) else "-").join(languages)


READS = {
    ".csv": "table",
    ".tsv": "table",
    ".jsonl": "table",
    ".ndjson": "table",
    ".parquet": "hub",
    ".arrow": "hub",
}


def hint(path: Path, own: tuple[str, ...] = ()) -> str:
    """Which source of pairs reads what lies at `path`, as the end of a sentence; empty where none but its `own`."""
    return other_source(path, own, READS)


class ParallelSource(Source[Pairs]):
    """Base of the sources of pairs: subclasses read a split, here it is checked, once.

    Args:
        path: File or folder that the user named, or None.
        options: What the files do not say.
        languages: Names of the source and of the target language, as files or columns call them.
        skip_bad: Leave out pairs that are not UTF-8, and count them.
    """

    noun = "pairs"

    def __init__(
        self,
        path: str | None,
        options: ParallelOptions,
        languages: list[str],
        skip_bad: bool = False,
    ) -> None:
        super().__init__(path, options, skip_bad)
        self.languages = languages
        self.columns = [
            options.source_column or languages[0],
            options.target_column or languages[1],
        ]
        if self.columns[0] == self.columns[1]:
            raise UsageError(
                f"--data.languages is {pair_name(languages)}, where source and target are both {self.columns[0]}: name "
                "two languages, or set --data.dataset.source_column and target_column."
            )
        self._read: dict[str, Pairs] = {}

    @property
    def place(self) -> Path | None:
        """The path that the user named, else the folder that TESSERA_DATA has of these data; None where neither is."""
        if self.path is not None:
            return Path(self.path)
        at_hand = os.environ.get("TESSERA_DATA")
        folder = Path(at_hand, self.options.local) if at_hand and self.options.local else None
        return folder if folder and folder.is_dir() else None

    def read(self, split: str) -> Pairs:
        """A split that the data have: "train", "val" or "test"."""
        raise NotImplementedError

    def records(self, split: str) -> Pairs | None:
        """The pairs of a split that have text on both sides; None where the data have no such split.

        Raises:
            DataError: A text is not UTF-8, and such are not to be skipped; or no pair is left.
        """
        if not self.has(split):
            return None
        if split not in self._read:
            self._read[split] = self._usable(self.read(split), split)
        return self._read[split]

    def _usable(self, found: Pairs, split: str) -> Pairs:
        good = is_utf8(found.source) & is_utf8(found.target)
        for i in (~good).nonzero().flatten().tolist():
            self.bad(found.name(i), "holds bytes that are not UTF-8")
        pairs = found if good.all() else found.select(good)
        endless = is_endless(pairs.source) | is_endless(pairs.target)
        for i in endless.nonzero().flatten().tolist():
            self.bad(pairs.name(i), f"holds a word of more than {WORD:,} characters")
        pairs = pairs.select(~endless) if endless.any() else pairs
        empty = is_empty(pairs.source) | is_empty(pairs.target)
        if empty.all():
            raise DataError(
                f"no pair of the {split} split of {self.origin} has text on both sides."
            )
        if not empty.any():
            return pairs
        names = [pairs.name(i) for i in empty.nonzero().flatten().tolist()]
        self.skipped += names
        rank_zero_warn(
            f"{len(names):,} of the {len(pairs):,} pairs of the {split} split of {self.origin} have an empty side and "
            f"were left out, such as {names[0]}."
        )
        return pairs.select(~empty)


class Dates(ParallelSource):
    """Dates and numbers, in digits and in words (`datamodules.embedded.dates`): English to French, or back."""

    unused = {field.name for field in fields(ParallelOptions)}

    def prepare(self) -> None:
        """Nothing to download.

        Raises:
            UsageError: A path is named, or other languages are, which these texts do not have.
        """
        from datamodules.embedded.dates import LANGUAGES

        if self.path is not None:
            raise UsageError(
                f"--data.path {self.path} says where, not what: the source dates has no files; try --data.source "
                "files, table or hub."
            )
        if set(self.languages) != set(LANGUAGES):
            raise UsageError(
                f"the source dates is en-fr or fr-en, not {pair_name(self.languages)}."
            )

    @cached_property
    def _splits(self) -> dict[str, tuple[list[str], list[str]]]:
        from datamodules.embedded.dates import generate

        self.prepare()
        return generate()

    def has(self, split: str) -> bool:
        return split in ("train", "val", "test")

    def read(self, split: str) -> Pairs:
        from datamodules.embedded.dates import LANGUAGES

        sides = dict(zip(LANGUAGES, map(arrow_texts, self._splits[split]), strict=True))
        source, target = (sides[name] for name in self.languages)
        return Pairs(source, target, torch.arange(len(source)), f"pair {{}} of the {split} split")
