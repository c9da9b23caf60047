"""Texts in tables: of the hub, or in CSV and JSON Lines files."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.sources.base import Source
from datamodules.sources.compressed import LONGEST, bounded_lines, ending, opened
from datamodules.sources.tables import Tables, TableSource, holds_classes
from datamodules.sources.texts import Texts, TextSource, arrow_texts, holds_text
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import problem, regular_files
from datamodules.utils.splits import split_of

TEXT_COLUMNS = ("text", "review", "sentence", "content", "document")
NOT_UTF8 = re.compile(
    "[\ud800-\udfff]"
)  # what Python makes of bytes that are not UTF-8, with "surrogateescape"
NOT_TEXT = "holds bytes that are not UTF-8"
CHUNK = 10_000  # rows that exist as Python objects at a time
KINDS = {
    list: "a list",
    dict: "an object",
    float: "a number with a decimal point",
    int: "a number",
    bool: "true or false",
}


class TextTable(TableSource[Texts], TextSource):
    """Texts in a column of a table, their classes in another.

    `label_column` names it, else it is called label or labels, or is described as one of classes; words are classes by
    themselves, numbers in their order.
    """

    def read(self, split: str) -> Texts:
        table, where = (
            self.tables.table(split),
            f"{self.tables.unit} {{}} of {self.tables.where(split)}",
        )
        column = table.column(text_column(self, table))
        labels = (
            self.labels(split)
            if split != "unlabelled"
            else torch.zeros(table.num_rows, dtype=torch.int64)
        )
        return Texts(arrow_texts(column), labels, self.tables.rows(split), where)

    def labels(self, split: str) -> Tensor:
        if self.labelled:
            return super().labels(split)
        table = self.tables.table(split)
        named = self.options.label_column is not None or self.label_columns(table)
        return self.places(split) if named else torch.zeros(table.num_rows, dtype=torch.int64)

    def label_columns(self, table: Any) -> list[str]:
        found = super().label_columns(table)
        return [
            name for name in found if self.labelled or holds_classes(table.schema.field(name).type)
        ]

    def check(self, row: Mapping[str, Any]) -> str | None:
        labels = [name] if (name := self.options.label_column) else ("label", "labels")
        wrong = unlike(row, text_names(self.options), (str,), "text")
        return wrong or (
            unlike(row, labels, (str, int), "text or a whole number") if self.labelled else None
        )


def text_names(options: Any) -> Sequence[str]:
    """Names that the column of texts may have; the likeliest first."""
    return TEXT_COLUMNS if options.text_column is None else (options.text_column,)


def unlike(
    row: Mapping[str, Any], names: Sequence[str], kinds: tuple[type, ...], wanted: str
) -> str | None:
    """What is wrong with a row of JSON whose first cell of these names is of no such type; None if it is, or null."""
    name = next((name for name in names if name in row), None)
    kind = type(None if name is None else row[name])
    return (
        None
        if kind in (*kinds, type(None))
        else f"has {KINDS[kind]} as {name}, which must be {wanted}"
    )


def text_column(source: Source[Any], table: Any) -> str:
    """Name of the column of texts in a table of this source.

    Raises:
        UsageError: There is none, or it holds something else.
    """
    name = source.column(table, "text_column", [n for n in TEXT_COLUMNS if n in table.column_names])
    if not holds_text(kind := table.schema.field(name).type):
        words = [field.name for field in table.schema if holds_text(field.type)]
        raise UsageError(
            f"column {name} of {source.origin} holds {kind}, not text: set {source.prefix}.text_column to one of "
            f"{', '.join(words) or 'those that hold text (there are none)'}."
        )
    return name


class TextHub(TextTable):
    """A data set of the Hugging Face hub, or a local folder of the same schema (parquet or arrow, named by split)."""


class LineTables(Tables):
    """Base: a file of rows for each split, in a folder and named by split; a single file is the training split. Also as
    .gz or .zst.
    """

    unit = "line"
    kind: str

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each split."""
        want = (
            f"a {self.kind} file, or a folder of such files named by split (train{self.endings[0]})"
        )
        if self.path is None:
            raise UsageError(f"this source needs --data.path: {want}.")
        path = Path(self.path)
        if not path.is_dir() and (fault := problem(path)):
            raise UsageError(f"{path} {fault}: --data.path takes {want}.")
        inside = (
            []
            if path.is_file()
            else regular_files(path, self.bad, lambda file: ending(file) in self.endings)
        )
        found = inside if path.is_dir() else [path]
        files: dict[str, Path] = {}
        for file in found:
            if ending(file) not in self.endings:
                raise UsageError(f"{file} is not {want}{self.hint(file)}.")
            split = "train" if path.is_file() else split_of(file.relative_to(path))
            if split in files:
                raise UsageError(
                    f"{files[split]} and {file} are both of the {split} split: join them."
                )
            if split:
                files[split] = file
        if not files:
            raise UsageError(f"{path} does not hold {want}{self.hint(path)}.")
        return files

    @cached_property
    def _tables(self) -> dict[str, tuple[Any, Tensor]]:
        return {}

    @property
    def origin(self) -> str:
        return str(self.path)

    def splits(self) -> list[str]:
        return list(self.files)

    def table(self, split: str) -> Any:
        return self._load(split)[0]

    def rows(self, split: str) -> Tensor:
        return self._load(split)[1]

    def where(self, split: str) -> str:
        return str(self.files[split])

    def _load(self, split: str) -> tuple[Any, Tensor]:
        if split not in self._tables:
            import pyarrow as pa

            rows, lines, parts = self.good(self.files[split]), list[int](), []
            while chunk := list(islice(rows, CHUNK)):
                lines += [line for line, _ in chunk]
                parts.append(
                    pa.Table.from_pylist(
                        [row for _, row in chunk], self._schema([row for _, row in chunk])
                    )
                )
            if not parts:
                raise DataError(f"{self.files[split]} is empty.")
            self._tables[split] = (
                pa.concat_tables(parts, promote_options="default"),
                torch.tensor(lines),
            )
        return self._tables[split]

    @staticmethod
    def _schema(rows: list[dict[str, str]]) -> Any:
        import pyarrow as pa

        return pa.schema(
            [(name, pa.large_string()) for name in dict.fromkeys(chain.from_iterable(rows))]
        )

    def good(self, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
        """(line, cells) of the rows that are well-formed; the others are bad.

        Raises:
            DataError: The file is damaged.
        """
        try:
            with io.TextIOWrapper(
                opened(path), "utf-8-sig", errors="surrogateescape", newline=""
            ) as file:
                for line, row in self._parsed(path, file):
                    problem = row if isinstance(row, str) else None
                    if isinstance(row, dict) and any(map(broken, chain(row, row.values()))):
                        line, problem = self._bad_line(line, row), NOT_TEXT
                    if problem:
                        self.bad(f"line {line} of {path}", problem)
                    elif isinstance(row, dict):
                        yield line, row
        except (OSError, EOFError) as error:
            reason = str(error).splitlines()[0][:99]
            raise DataError(
                f"{path} cannot be read ({reason}): fetch or write it again."
            ) from error

    def _parsed(self, path: Path, file: Any) -> Iterator[tuple[int, dict[str, str] | str]]:
        """(line, cells) of each row, or (line, what is wrong with it)."""
        raise NotImplementedError

    def _bad_line(self, line: int, row: dict[str, str]) -> int:
        """Where the first bytes are that are not UTF-8, in a row that begins at `line`."""
        return line


def broken(cell: str | None) -> bool:
    return cell is not None and not cell.isascii() and NOT_UTF8.search(cell) is not None


class CsvTables(LineTables):
    """Comma-separated values with a first line of column names; .tsv files are separated by tabs."""

    kind, endings = "CSV", (".csv", ".tsv")
    header = True  # else the columns are called 1, 2, ...

    def _parsed(self, path: Path, file: Any) -> Iterator[tuple[int, dict[str, str] | str]]:
        csv.field_size_limit(LONGEST)  # texts may be longer than the 128 kB that are the limit else
        reader = self._cut(path, bounded_lines(file, path))
        try:
            first: list[str] = next(reader, [])
            names = (
                [name.strip() for name in first]
                if self.header
                else [str(i + 1) for i in range(len(first))]
            )
            if any(map(broken, names)):
                raise DataError(f"line 1 of {path} {NOT_TEXT}: save the file as UTF-8.")
            if twice := next(
                (name for name, count in Counter(names).items() if name and count > 1), None
            ):
                raise DataError(
                    f"line 1 of {path} has several columns {twice}: rename or remove one."
                )
            before = reader.line_num if self.header else 0
            for cells in chain([] if self.header else [first], reader):
                line, before = before + 1, reader.line_num
                if any("\0" in cell for cell in cells):
                    yield line, "holds NUL bytes, as no text does"
                elif len(cells) == len(names):
                    yield line, dict(zip(names, cells, strict=True))
                elif cells:  # else an empty line
                    yield line, f"has {len(cells)} cells where the first line has {len(names)}"
        except csv.Error as error:
            raise DataError(
                f"line {reader.line_num} of {path} is not valid CSV: {error}."
            ) from error

    def _cut(self, path: Path, file: Any) -> Any:
        """What gives the cells of each row, of Python's csv module."""
        return csv.reader(file, delimiter="\t" if ending(path) == ".tsv" else ",", strict=True)

    def _bad_line(self, line: int, row: dict[str, str]) -> int:
        before = NOT_UTF8.split(",".join(row.values()), maxsplit=1)[0]
        return line + len(re.findall(r"\r\n?|\n", before))  # of cells with several lines


class JsonTables(LineTables):
    """One JSON object a line."""

    kind, endings = "JSON Lines", (".jsonl", ".ndjson", ".json")

    def _parsed(self, path: Path, file: Any) -> Iterator[tuple[int, dict[str, str] | str]]:
        for line, text in enumerate(bounded_lines(file, path), 1):
            if text.strip():
                yield line, self._row(text)

    def _row(self, text: str) -> dict[str, Any] | str:
        """The cells that hold text or whole numbers, the others as null; or what is wrong with the line."""
        try:
            row = json.loads(text.rstrip())
        except json.JSONDecodeError as error:
            return f"is not JSON ({error.msg} at character {error.colno})"
        except ValueError:  # Python's limit
            return "is not JSON to be read here (a number of thousands of digits)"
        except RecursionError:
            return "is not JSON to be read here (nested too deeply)"
        if not isinstance(row, dict):
            return "is not a JSON object such as {...}"
        row = self._flat(row)
        kept = {name: str(cell) if type(cell) in (str, int) else None for name, cell in row.items()}
        return self.check(row) or kept

    def _flat(self, row: dict[str, Any]) -> dict[str, Any]:
        """The cells of a row by the names of their columns."""
        return row


class Csv(TextTable):
    """Texts in CSV files; a single file, or a folder with train.csv and where given validation.csv and test.csv."""

    reader = CsvTables
    unused = {"name", "subset", "local"}


class JsonLines(TextTable):
    """Texts in JSON Lines files; a single file, or a folder with train.jsonl and where given others named by split."""

    reader = JsonTables
    unused = {"name", "subset", "local"}
