"""Texts in two languages: generated dates, tables, and data sets of the hub."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import torch
from pytorch_lightning.utilities import rank_zero_warn

from datamodules.sources.base import HubOptions
from datamodules.sources.readers.cells import is_text
from datamodules.sources.readers.formats import read_table
from datamodules.sources.readers.tables import CSV, JSON_LINES, CellTypes, TableSource
from datamodules.sources.texts import TextSamples, TextSource, is_empty, text_samples
from datamodules.utils.errors import DataError, UsageError


@dataclass(frozen=True)
class ParallelOptions(HubOptions):
    """What to know about texts in two languages that their files do not say.

    Args:
        source_column: Column of the source texts, or the suffix of their files; null: the name of
            the language.
        target_column: The same for the target texts.
        header: Whether the first line of a CSV or TSV file names the columns; else they are called
            1, 2, ...
        test: Name of the test files without the language, if there are several, such as
            test_2016_flickr.
        val_fraction: Fraction of the training pairs that is held out if the data have no
            validation split.
        split_seed: Seed of that split; independent of the seed of training, so that runs can be
            compared.
    """

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

    `languages` are the names of both in files or columns; other arguments as `Source`.
    """

    noun = "pairs"
    labelled = False

    def __init__(
        self,
        path: str | None,
        options: ParallelOptions,
        languages: list[str],
        skip_bad: bool = False,
    ) -> None:
        super().__init__(path, options, skip_bad)
        self.languages = languages
        source, target = languages
        self.columns = [options.source_column or source, options.target_column or target]
        if self.columns[0] == self.columns[1]:
            raise UsageError(
                f"--data.languages is {language_pair(languages)}, where source and target are both "
                f"{self.columns[0]}: name two languages, or set --data.dataset.source_column and "
                "target_column."
            )

    def languages_there(self) -> list[str]:
        """Names in the training files that `languages` may have, whatever it is; [] if unknown."""
        return []

    def usable(self, samples: TextSamples, split: str) -> TextSamples:
        """The pairs that are UTF-8, have text on both sides, and no word that is too long.

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
            f"{where}: left out {len(names):,} of {len(pairs):,} pairs for an empty side, such as "
            f"{names[0]}."
        )
        return pairs.select(~empty)


class Dates(ParallelSource):
    """Dates and numbers, in digits and in words: English to French, or back."""

    noun = "dates"
    embedded = True
    unused_options = {field.name for field in fields(ParallelOptions)}

    def prepare(self) -> None:
        """As in the base class.

        Raises `UsageError` if the languages are others than those of these texts.
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
        english, french = self._splits[split]
        texts = {"en": english, "fr": french}
        source, target = (texts[name] for name in self.languages)
        where = f"pair {{}} of the {split} split"
        return text_samples(source, torch.arange(len(source)), where, targets=target)


class PairHub(TableSource, ParallelSource):
    """Pairs in two columns of a data set of the Hugging Face hub, or of a local copy.

    The columns are called as the languages, or translation.en and so on, or as the options say.
    """

    unused_options = {"header", "test"}
    advice = ", or choose with --data.languages"
    header_advice = ""  # follows if the first row is a header

    def candidates(self, side: int) -> tuple[str, ...]:
        """The columns that may hold the source (0) or the target (1)."""
        name = self.columns[side]
        numbers = () if self.options.header else (str(side + 1),)
        return (name, f"translation.{name}", *numbers)

    def languages_there(self) -> list[str]:
        """The columns of text."""
        if "train" not in self.table_files:  # not downloaded
            return []
        schema = read_table(self.table_files["train"][0]).flatten().schema
        return [field.name.removeprefix("translation.") for field in schema if is_text(field.type)]

    def read(self, split: str) -> TextSamples:
        table = self.table(split)
        source, target = self.texts(split, 0), self.texts(split, 1)
        return text_samples(source, table.rows, table.where, targets=target)

    def texts(self, split: str, side: int) -> pa.ChunkedArray:
        """(S,) the texts of the source (0) or the target (1)."""
        columns = self.table(split).columns.flatten()  # structs become columns
        option = ("source_column", "target_column")[side]
        candidates = self.candidates(side)
        advice = self.advice + self.header_advice * self.options.header
        names = {*columns.schema.names}
        if side == 0 and names.isdisjoint(candidates) and names.isdisjoint(self.candidates(1)):
            advice += f"; nor is there a column {self.candidates(1)[0]}" * bool(self.columns[1])
        name = self.find_column(columns.schema, option, candidates, is_text, "text", advice)
        return columns.column(name)


class PairTables(PairHub):
    """Base of pairs in tables that are files; a single file, or one for each split."""

    unused_options = {"name", "subset", "test"}

    @property
    def cell_types(self) -> CellTypes:
        return {self.candidates(side): (str,) for side in (0, 1)}

    def languages_there(self) -> list[str]:
        """The columns of the first row, if they have names."""
        if not self.options.header:
            return []
        _, row = next(self._rows(self.table_files["train"][0]))
        texts = [name for name, cell in row.items() if isinstance(cell, str)]
        return [name.removeprefix("translation.") for name in texts]


class CsvPairs(PairTables):
    """Pairs in CSV or TSV files. Quotes mean nothing in TSV, as is the custom for sentences."""

    suffixes = CSV
    example = "train.tsv"
    kind = "CSV or TSV"
    quoted_tsv = False
    header_advice = "; if the first line of a file is a pair, too, add --data.dataset.header false"


class JsonPairs(PairTables):
    """Pairs in JSON Lines files."""

    suffixes = JSON_LINES
    example = "train.jsonl"
    kind = "JSON Lines"
    unused_options = PairTables.unused_options | {"header"}


TABLES: tuple[type[PairHub], ...] = (CsvPairs, JsonPairs, PairHub)


def sources_in_table(path: str, language: str, options: ParallelOptions) -> list[str] | None:
    """The texts to translate in a table, one for each row; None if the file is no table.

    They are in the column that the options call the source, or that is called as the language. An
    empty cell is an empty text. Raises `UsageError` if there is no such column, `DataError` if a
    text is not UTF-8.
    """
    kind = next((kind for kind in TABLES if kind.reads(Path(path))), None)
    if kind is None:
        return None
    source = kind(path, replace(options, target_column=None), [language, ""])
    source.option_prefix = "--"
    source.path_option = "--input"
    source.skip_advice = ""
    source.advice = ""
    if kind is CsvPairs:
        source.header_advice = "; if the first line is a text, too, add --header false"
    table = source.table("train")
    texts = source.decodable(text_samples(source.texts("train", 0), table.rows, table.where))
    return [text or "" for text in texts.column.to_pylist()]
