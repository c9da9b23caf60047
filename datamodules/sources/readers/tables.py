"""Tables by split: in files, or from the Hugging Face hub."""

import json
import logging
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import Source, unknown_splits
from datamodules.sources.readers.formats import (
    Row,
    read_csv,
    read_json_lines,
    read_table,
    uncompressed_suffix,
)
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.extras import requires_extra
from datamodules.utils.files import regular_files
from datamodules.utils.splits import SPLITS, split_of

CSV = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson", ".json")
ARROW: tuple[str, ...] = (".parquet", ".arrow")
CellTypes = dict[tuple[str, ...], tuple[type, ...]]  # types of JSON by names of a column
TYPE_NAMES = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "a boolean",
    list: "a list",
}
JSON_TYPES = (int, float, bool, list, dict)  # of cells that become text
MAX_NAMED = 5  # rows with a fault that a message names
ROWS_AT_ONCE = 10_000  # rows that exist as Python objects at a time


@dataclass(frozen=True)
class TableSplit:
    """The S rows of one split."""

    columns: pa.Table
    rows: Tensor  # (S,) int64, the number of each row in its file
    where: str  # names of rows for messages: "line {} of reviews.csv"
    is_json: pa.Table | None = None  # bool, the cells that `as_text` turned into text
    entries: Set[str] = frozenset()  # columns that `flattened` added

    def name(self, i: int) -> str:
        """The name of row i in a message."""
        return self.where.replace("{}", str(int(self.rows[i])), 1)

    def cells(self, positions: Tensor, without: Sequence[str]) -> dict[str, list[Any]]:
        """Cells of the rows at some positions, by column; without some columns, and without bytes.

        A JSON object is in its own cell only, not in the columns that `flattened` added.
        """
        index = pa.array(positions.numpy())
        found: dict[str, list[Any]] = {}
        for field, column in zip(self.columns.schema, self.columns.columns, strict=True):
            left_out = (*without, *found, *self.entries)
            if field.name not in left_out and not is_encoded(field.type):
                found[field.name] = column.take(index).to_pylist()
        if self.is_json is not None:
            for name, cells in found.items():
                pairs = zip(cells, self.is_json[name].take(index).to_pylist(), strict=True)
                found[name] = [json.loads(cell) if is_json else cell for cell, is_json in pairs]
        return found

    def count(self, faulty: Sequence[int]) -> str:
        """In parentheses, how many rows have the fault of a message, and which; empty if one has.

        >>> TableSplit(pa.table({"a": [1] * 9}), torch.arange(9), "").count([2, 3, 7])
        ' (3 of 9 rows: 2, 3, 7)'
        """
        if len(faulty) < 2:
            return ""
        numbers = ", ".join(str(int(self.rows[i])) for i in faulty[:MAX_NAMED])
        more = ", ..." if len(faulty) > MAX_NAMED else ""
        return f" ({len(faulty):,} of {len(self.rows):,} rows: {numbers}{more})"


class TableSource(Source):
    """Base of the sources that are tables: those of the hub, or files with other suffixes.

    Downloaded tables, and those in Parquet and Arrow files, keep the hub's description of the
    columns in their schema.
    """

    suffixes = ARROW
    example = "train.parquet"
    kind = "Parquet or Arrow"  # what the files are called in messages
    quoted_tsv = True  # whether cells of TSV files may be quoted

    @property
    def cell_types(self) -> CellTypes:
        """Types of cells of JSON, which may also be null."""
        return {}

    def prepare(self) -> None:
        self.table_splits()

    def has(self, split: str) -> bool:
        return split in self.table_splits()

    @cached_property
    def table_files(self) -> dict[str, list[Path]]:
        """The files of each split, a single file is the training split; none if downloaded.

        Raises `UsageError` if there are none, or too many.
        """
        if self.suffixes == ARROW and self.local_path is None:
            if self.options.name is None:
                raise UsageError(
                    "the source hub needs --data.dataset.name ID or --data.path FOLDER."
                )
            return {}
        wanted = f"a {self.kind} file, or a folder of such files named by split ({self.example})"
        path = self.require_path(wanted)
        files = self._files_by_split(path)
        if not files:
            verb = "is" if path.is_file() else "holds"
            hint = self.suggest_source(path)
            raise UsageError(f"{path} {verb} no {self.kind} file such as {self.example}{hint}.")
        for split, paths in files.items():
            if len(paths) > 1 and self.suffixes != ARROW:
                raise UsageError(
                    f"{paths[0]} and {paths[1]} are both of the {split} split: join them."
                )
        return files

    def _files_by_split(self, path: Path) -> dict[str, list[Path]]:
        def is_wanted(file: Path) -> bool:
            return uncompressed_suffix(file) in self.suffixes

        files: dict[str, list[Path]] = {}
        if path.is_file():
            return {"train": [path]} if is_wanted(path) else {}
        others = []
        paths = regular_files(path, self.reject, is_wanted)
        for file in paths:
            split = split_of(file.relative_to(path))
            if split is None:
                others.append(file)
            else:
                files.setdefault(split, []).append(file)
        if files and others:
            self.warn_once(unknown_splits(path, others, len(paths)))
        return files

    @cached_property
    def _downloaded(self) -> dict[str, dict[str, pa.Table]]:
        return download_splits(self.options)

    def table_splits(self) -> list[str]:
        """The splits that the data have."""
        return list(self.table_files or self._downloaded)

    @cached_property
    def _tables(self) -> dict[str, TableSplit]:
        """Those that were read."""
        return {}

    def table(self, split: str) -> TableSplit:
        """A split that the data have, read once.

        Raises `DataError` if a file is damaged or empty, or has other columns than another.
        """
        if split not in self._tables:
            is_text = self.suffixes != ARROW
            read = self._read_text if is_text else self._read_arrow
            self._tables[split] = read(split)
        return self._tables[split]

    def _read_arrow(self, split: str) -> TableSplit:
        if self.table_files:
            parts = {str(path): read_table(path) for path in self.table_files[split]}
        else:
            parts = self._downloaded[split]
        first, *_ = parts
        for name, part in parts.items():
            if not part.schema.equals(parts[first].schema):
                advice = "give both the same columns, or remove one"
                raise DataError(f"{name} has other columns than {first}: {advice}.")
        table = pa.concat_tables(parts.values())
        where = f"row {{}} of the {split} split of {self.origin}"
        return TableSplit(table, torch.arange(table.num_rows), where)

    def _read_text(self, split: str) -> TableSplit:
        """The rows of a CSV, TSV or JSON Lines file, as text."""
        path = self.table_files[split][0]
        rows = self._rows(path)
        lines: list[int] = []
        tables = []
        flags = []
        entries: set[str] = set()
        is_csv = uncompressed_suffix(path) in CSV
        while part := list(islice(rows, ROWS_AT_ONCE)):
            lines += [line for line, _ in part]
            names = dict.fromkeys(name for _, row in part for name in row)
            columns = {name: [as_text(row.get(name)) for _, row in part] for name in names}
            schema = pa.schema([(name, pa.large_string()) for name in names])
            tables.append(pa.table(columns, schema))
            if not is_csv:
                was_json = {n: [type(row.get(n)) in JSON_TYPES for _, row in part] for n in names}
                flags.append(pa.table(was_json))
                entries.update(*[entry_names(row) for _, row in part])
        if not tables:
            if self.skipped:
                raise DataError(
                    f"{path}: all {len(self.skipped):,} rows were skipped, {self.skipped[0]} "
                    "first; without --data.skip_bad the message says what is wrong with it."
                )
            raise DataError(f"{path} has no rows.")
        table = pa.concat_tables(tables, promote_options="default")
        is_json = None if is_csv else pa.concat_tables(flags, promote_options="default")
        return TableSplit(table, torch.tensor(lines), f"line {{}} of {path}", is_json, entries)

    def _rows(self, path: Path) -> Iterator[Row]:
        if uncompressed_suffix(path) in CSV:
            header = getattr(self.options, "header", True)
            yield from read_csv(path, self.reject, header, self.quoted_tsv)
            return
        for line, nested in read_json_lines(path, self.reject):
            row = flattened(nested)
            faults = [type_fault(row, *cells) for cells in self.cell_types.items()]
            fault = next(filter(None, faults), None)
            if fault is None:
                yield line, row
            else:
                self.reject(f"line {line} of {path}", fault)


def is_encoded(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of bytes, or a struct with bytes, as encoded images are."""
    if pa.types.is_struct(kind):
        return any(is_encoded(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def type_fault(
    row: dict[str, Any], names: Sequence[str], types: tuple[type, ...] = (str,)
) -> str | None:
    """What is wrong with the cell of the first of some columns that a row of JSON has."""
    name = next((name for name in names if name in row), None)
    if name is None or row[name] is None:
        return None
    cell = row[name]
    is_whole = isinstance(cell, float) and cell.is_integer()  # 2.0: a column that had gaps
    if (int if is_whole else type(cell)) in types:
        return None
    wanted = " or ".join(TYPE_NAMES[kind] for kind in types)
    return f"has {json.dumps(row[name])[:40]} as {name}, which must be {wanted}"


def as_text(cell: Any) -> str | None:
    """A cell of JSON as text, a list or an object as JSON; None if it is null."""
    if type(cell) in JSON_TYPES:
        return json.dumps(cell)
    return cell if isinstance(cell, str) else None


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the entries of objects as columns, too, such as translation.en."""
    flat = dict(row)
    for name, cell in row.items():
        if isinstance(cell, dict):
            flat |= {f"{name}.{key}": value for key, value in cell.items()}
    return flat


def entry_names(row: dict[str, Any]) -> list[str]:
    """The columns that `flattened` adds to a row."""
    objects = {name: cell for name, cell in row.items() if isinstance(cell, dict)}
    return [f"{name}.{key}" for name, cell in objects.items() for key in cell]


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """The hub's description of each column; empty if there is none.

    Raises `DataError` if it is damaged.
    """
    description = (schema.metadata or {}).get(b"huggingface")
    if not description:
        return {}
    try:
        features = json.loads(description)["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "the hub's description of the columns is damaged: fetch or write the file again."
        ) from error


def described_columns(schema: pa.Schema, kind: str) -> list[str]:
    """Columns of this type, such as "Image", in the hub's description."""
    features = features_of(schema)
    return [name for name in schema.names if features.get(name, {}).get("_type") == kind]


def download_splits(options: Any) -> dict[str, dict[str, pa.Table]]:
    """The splits of a data set of the hub, by our names of splits, each of one or several there.

    Raises `DataError` if the hub cannot be reached, or does not have it, and `UsageError` if the
    extra "hub" is not installed.
    """
    with requires_extra("hub"):
        from datasets import load_dataset

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # hides its messages about retries
    try:
        splits = load_dataset(options.name, options.subset)
    except Exception as error:  # a dozen kinds, from sockets to the hub's own
        reason = (str(error) or "no reason given").splitlines()[0][:160]
        if options.local:
            local = f", or set TESSERA_DATA to a folder that holds {options.local}/"
        else:
            local = (
                f", or give --data.dataset.name {options.name} --data.dataset.local NAME for the "
                "folder NAME below TESSERA_DATA"
            )
        raise DataError(
            f"{options.name} is not a file or folder here, and could not be fetched from the "
            f"Hugging Face hub ({type(error).__name__}: {reason}); without network, put its "
            "parquet files into a folder and name it with --data.path FOLDER"
            f"{local}."
        ) from error
    tables: dict[str, dict[str, pa.Table]] = {}
    for name, part in splits.items():
        split = split_of(Path(str(name)))
        if split is not None:
            metadata = part.features.arrow_schema.metadata
            table = part.data.table.replace_schema_metadata(metadata)
            tables.setdefault(split, {})[str(name)] = table
    for split, parts in tables.items():
        whole = [name for name in parts if name.lower() in SPLITS[split]]
        if whole:  # others, such as train_small, may be parts of it
            tables[split] = {whole[0]: parts[whole[0]]}
    return tables
