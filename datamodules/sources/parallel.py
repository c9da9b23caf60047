"""Texts in two languages: generated dates, tables, and data sets of the hub."""

from dataclasses import dataclass, fields
from functools import cached_property

import pyarrow as pa
import torch
from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.readers.labels import is_text
from datamodules.sources.readers.tables import (
    CSV,
    JSON_LINES,
    CellType,
    FileTables,
    HubTables,
    Tables,
)
from datamodules.sources.texts import TextSamples, TextSource, arrow_strings, is_empty
from datamodules.utils.errors import DataError, UsageError


@dataclass(frozen=True)
class ParallelOptions:
    """What to know about texts in two languages that their files do not say.

    Args:
        name: Id on the Hugging Face hub, for the source hub, such as wmt/wmt16.
        subset: Part of that data set where it has several, such as de-en.
        local: Folder below the one that the environment variable TESSERA_DATA names, read instead
            of the hub, or where no path is named.
        source_column: Column of the source texts, or the suffix of their files; null: the name of
            the language.
        target_column: The same of the target texts.
        header: Whether the first line of a CSV or TSV file names the columns; else they are called
            1, 2, ...
        test: Name of the test files without the language, where there are several, such as
            test_2016_flickr.
        val_fraction: Fraction of the training pairs that is held out where the data have no
            validation split.
        split_seed: Seed of that split; independent of the seed of training, so that runs can be
            compared.
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


def language_pair(languages: list[str]) -> str:
    """Source and target as --data.languages takes them."""
    separator = ":" if any("-" in name for name in languages) else "-"
    return separator.join(languages)


class ParallelSource(TextSource):
    """Base of the sources of pairs: a sample has two columns, source and target.

    Args:
        path: File or folder that the user named, or None.
        options: What the files do not say.
        languages: Names of the source and of the target language, as files or columns call them.
        skip_bad: Skip pairs that are not UTF-8, and count them.
    """

    noun = "pairs"
    labelled = False
    sources_by_suffix = {
        **dict.fromkeys((*CSV, ".jsonl", ".ndjson"), "table"),
        **dict.fromkeys((".parquet", ".arrow"), "hub"),
    }

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
                f"--data.languages is {language_pair(languages)}, where source and target are both "
                f"{self.columns[0]}: name two languages, or set --data.dataset.source_column and "
                "target_column."
            )

    def usable(self, samples: TextSamples, split: str) -> TextSamples:
        """The pairs that are UTF-8, have text on both sides, and hold no endless word.

        Raises:
            DataError: There are none; or a text is not UTF-8, and such are not to be skipped.
        """
        pairs = self.decodable(samples)
        empty = pairs.find(is_empty)
        where = f"the {split} split of {self.origin}"
        if empty.all():
            raise DataError(f"no pair of {where} has text on both sides.")
        if not empty.any():
            return pairs
        names = [pairs.name(i) for i in empty.nonzero().flatten().tolist()]
        self.skipped += names
        rank_zero_warn(
            f"{len(names):,} of the {len(pairs):,} pairs of {where} have an empty side and were "
            f"left out, such as {names[0]}."
        )
        return pairs.select(~empty)


class Dates(ParallelSource):
    """Dates and numbers, in digits and in words: English to French, or back."""

    noun = "dates"
    embedded = True
    unused_options = {field.name for field in fields(ParallelOptions)}

    def prepare(self) -> None:
        """Nothing to download.

        Raises:
            UsageError: A path is named, or other languages are, which these texts do not have.
        """
        super().prepare()
        if set(self.languages) != {"en", "fr"}:
            languages = language_pair(self.languages)
            raise UsageError(f"the source dates is en-fr or fr-en, not {languages}.")

    @cached_property
    def _splits(self) -> dict[str, tuple[list[str], list[str]]]:
        from datamodules.embedded.dates import generate

        self.prepare()
        return generate()

    def has(self, split: str) -> bool:
        return split in ("train", "val", "test")

    def read(self, split: str) -> TextSamples:
        from datamodules.embedded.dates import LANGUAGES

        texts = dict(zip(LANGUAGES, self._splits[split], strict=True))
        source, target = (arrow_strings(texts[name]) for name in self.languages)
        return pair_samples(
            source, target, torch.arange(len(source)), f"pair {{}} of the {split} split"
        )


class PairTables(ParallelSource):
    """Pairs in two columns of CSV, TSV or JSON Lines files; a single file, or one for each split.

    The columns are called as the languages, or translation.en and so on, or as the options say.
    Quotes mean nothing in TSV, as is the custom for sentences.
    """

    unused_options = {"name", "subset", "test"}

    @cached_property
    def tables(self) -> Tables:
        """The tables by split."""
        sides = tuple(CellType((name, f"translation.{name}")) for name in self.columns)
        kind = "CSV, TSV or JSON Lines"
        return FileTables(
            self, (*CSV, *JSON_LINES), kind, sides, self.options.header, quoted_tsv=False
        )

    @property
    def origin(self) -> str:
        return self.tables.origin

    def prepare(self) -> None:
        self.tables.splits()

    def has(self, split: str) -> bool:
        return split in self.tables.splits()

    def read(self, split: str) -> TextSamples:
        table = self.tables.load(split)
        columns = table.columns.flatten()  # structs become columns
        source = self._texts(columns, 0, "source_column")
        target = self._texts(columns, 1, "target_column")
        return pair_samples(source, target, table.rows, table.where)

    def _texts(self, columns: pa.Table, side: int, option: str) -> pa.ChunkedArray:
        """Arrow strings (S,): the column of the source (0) or of the target (1).

        Raises:
            UsageError: There is none, or it holds something else.
        """
        name = self.columns[side]
        names = [name, f"translation.{name}"]
        if not self.options.header:
            names.append(str(side + 1))
        found = [name for name in names if name in columns.column_names]
        if not found:
            advice = (
                ""
                if isinstance(self.tables, HubTables)
                else (
                    "; if the first line of a CSV or TSV file is a pair, too, say "
                    "--data.dataset.header false"
                )
            )
            raise UsageError(
                f"no column {name} in {self.origin}: choose with --data.languages or "
                f"--data.dataset.{option} among {', '.join(columns.column_names)}{advice}."
            )
        if columns.column_names.count(found[0]) > 1:
            raise DataError(f"{self.origin} has several columns {found[0]}: rename or remove one.")
        kind = columns.schema.field(found[0]).type
        if not is_text(kind):
            raise UsageError(
                f"column {found[0]} of {self.origin} holds {kind}, not text: set "
                f"--data.dataset.{option}."
            )
        return arrow_strings(columns.column(found[0]))


class PairHub(PairTables):
    """A data set of the Hugging Face hub, or a local copy, with a column translation, or one for
    each language.
    """

    unused_options = {"header", "test"}

    @cached_property
    def tables(self) -> Tables:
        return HubTables(self)


def pair_samples(
    source: pa.ChunkedArray, target: pa.ChunkedArray, rows: torch.Tensor, where: str
) -> TextSamples:
    """Texts with their translations; see `TextSamples`."""
    return TextSamples((source, target), torch.zeros_like(rows), rows, where)
