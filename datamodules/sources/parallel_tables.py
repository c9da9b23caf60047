"""Texts in two languages in the columns of tables: files, or data sets of the hub."""

import csv
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from datamodules.sources.compressed import ending
from datamodules.sources.parallel import Pairs, ParallelSource, hint
from datamodules.sources.tables import HubTables, Tables
from datamodules.sources.text_tables import CsvTables, JsonTables, LineTables, unlike
from datamodules.sources.texts import arrow_texts, holds_text
from datamodules.utils.errors import DataError, UsageError


class PairCsv(CsvTables):
    """CSV as elsewhere; in TSV quotes mean nothing, as is the custom for sentences. The first line may be a pair."""

    @property
    def header(self) -> bool:  # type: ignore[override]
        """Whether the first line names the columns."""
        return bool(self.options.header)

    def _cut(self, path: Path, file: Any) -> Any:
        plain = ending(path) == ".tsv"
        return (
            csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            if plain
            else super()._cut(path, file)
        )


class PairJson(JsonTables):
    """One JSON object a line; {"translation": {"en": ...}} has a column translation.en."""

    def _flat(self, row: dict[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, cell in row.items():
            flat |= (
                {f"{name}.{key}": value for key, value in cell.items()}
                if isinstance(cell, dict)
                else {name: cell}
            )
        return flat


class PairLines(LineTables):
    """A file of one of these kinds for each split, also as .gz or .zst; a single file is the training split."""

    kind, endings = "CSV, TSV or JSON Lines", (*CsvTables.endings, *JsonTables.endings)

    def hint(self, path: Path) -> str:
        return hint(path, self.endings)

    def good(self, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
        kind = PairJson if ending(path) in PairJson.endings else PairCsv
        return kind(self.path, self.options, self.bad, self.check).good(path)


class PairHubTables(HubTables):
    """As elsewhere."""

    def hint(self, path: Path) -> str:
        return hint(path, self.endings)


class PairTable(ParallelSource):
    """Pairs in two columns of files: CSV, TSV or JSON Lines; a single file, or a folder of files named by split.

    The columns are called as the languages, or translation.en and so on, or as the options say.
    """

    reader: type[Tables] = PairLines
    unused = {"name", "subset", "test"}

    @cached_property
    def tables(self) -> Tables:
        """The tables by split."""
        return self.reader(
            None if self.place is None else str(self.place), self.options, self.bad, self.check
        )

    def check(self, row: Mapping[str, Any]) -> str | None:
        sides = ((name, f"translation.{name}") for name in self.columns)
        return next(filter(None, (unlike(row, names, (str,), "text") for names in sides)), None)

    @property
    def origin(self) -> str:
        return self.tables.origin

    def prepare(self) -> None:
        self.tables.splits()

    def has(self, split: str) -> bool:
        return split in self.tables.splits()

    def read(self, split: str) -> Pairs:
        table = self.tables.table(split).flatten()  # structs become columns
        source, target = (self._texts(table, i) for i in (0, 1))
        where = f"{self.tables.unit} {{}} of {self.tables.where(split)}"
        return Pairs(source, target, self.tables.rows(split), where)

    def _texts(self, table: Any, side: int) -> Any:
        """Arrow strings (S,): the column of the source (0) or of the target (1).

        Raises:
            UsageError: There is none, or it holds something else.
        """
        name, option = self.columns[side], ("source_column", "target_column")[side]
        names = (name, f"translation.{name}", *(() if self.options.header else (str(side + 1),)))
        found = next((name for name in names if name in table.column_names), None)
        if found is None:
            lines = "; if the first line of a CSV or TSV file is a pair, too, say --data.dataset.header false"
            raise UsageError(
                f"no column {name} in {self.origin}: choose with --data.languages or --data.dataset.{option} among "
                f"{', '.join(table.column_names)}{lines if self.tables.unit == 'line' else ''}."
            )
        if table.column_names.count(found) > 1:
            raise DataError(f"{self.origin} has several columns {found}: rename or remove one.")
        if not holds_text(kind := table.schema.field(found).type):
            raise UsageError(
                f"column {found} of {self.origin} holds {kind}, not text: set --data.dataset.{option}."
            )
        return arrow_texts(table.column(found))


class PairHub(PairTable):
    """A data set of the Hugging Face hub, or a local folder of the same schema (parquet or arrow, named by split), with
    a column translation, or one for each language.
    """

    reader = PairHubTables
    unused = {"header", "test"}
