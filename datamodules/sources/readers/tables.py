"""Tables by split: in files, or from the Hugging Face hub."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from datamodules.sources.base import Source
from datamodules.sources.readers.formats import (
    Row,
    read_csv,
    read_json_lines,
    read_table,
    uncompressed_suffix,
)
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import path_fault, regular_files
from datamodules.utils.splits import split_of

CSV = (".csv", ".tsv")
JSON_LINES = (".jsonl", ".ndjson", ".json")
ARROW = (".parquet", ".arrow")
ROWS_AT_ONCE = 10_000  # rows that exist as Python objects at a time
JSON_TYPES = {
    list: "a list",
    dict: "an object",
    float: "a number with a decimal point",
    int: "a number",
    bool: "true or false",
}


@dataclass(frozen=True)
class Table:
    """The rows of one split.

    Args:
        columns: What they hold.
        rows: (S,) int64: the number of each row in what it was read from.
        where: What that is: "line {} of reviews.csv".
    """

    columns: pa.Table
    rows: Tensor
    where: str

    def name(self, i: int) -> str:
        """What to call row i in a message."""
        return self.where.replace("{}", str(int(self.rows[i])), 1)


@dataclass(frozen=True)
class CellType:
    """What the cells of a column must be in JSON, which other formats do not let one choose.

    Args:
        names: The column may have any of these names; the first that a row has counts.
        types: Of its cells, which may also be null.
    """

    names: tuple[str, ...]
    types: tuple[type, ...] = (str,)

    def fault(self, row: dict[str, Any]) -> str | None:
        """What is wrong with a row; None if nothing is."""
        for name in self.names:
            if name in row:
                kind = type(row[name])
                if kind in self.types or kind is type(None):
                    return None
                wanted = "text or a whole number" if int in self.types else "text"
                return f"has {JSON_TYPES[kind]} as {name}, which must be {wanted}"
        return None


class FileTables:
    """CSV, TSV or JSON Lines files, one for each split; a single file is the training split.

    Args:
        source: Says where they are, and is told of rows that cannot be used.
        suffixes: Of the files, in lower case; they may be followed by .gz or .zst.
        kind: What such files are called in messages.
        cell_types: Of JSON cells.
        header: Whether the first row of a CSV or TSV file names the columns.
        quoted_tsv: Whether quotes have a meaning in TSV files.
    """

    def __init__(
        self,
        source: Source[Any],
        suffixes: tuple[str, ...],
        kind: str,
        cell_types: tuple[CellType, ...],
        header: bool = True,
        quoted_tsv: bool = True,
    ) -> None:
        self.source = source
        self.suffixes = suffixes
        self.kind = kind
        self.cell_types = cell_types
        self.header = header
        self.quoted_tsv = quoted_tsv
        self._loaded: dict[str, Table] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each split."""
        example = f"train{self.suffixes[0]}"
        wanted = f"a {self.kind} file, or a folder of such files named by split ({example})"
        found = files_by_split(self.source, self.suffixes, wanted)
        for split, files in found.items():
            if len(files) > 1:
                raise UsageError(
                    f"{files[0]} and {files[1]} are both of the {split} split: join them."
                )
        return {split: files[0] for split, files in found.items()}

    @property
    def origin(self) -> str:
        return str(self.source.local_path)

    def splits(self) -> list[str]:
        return list(self.files)

    def load(self, split: str) -> Table:
        """A split that exists.

        Raises:
            DataError: A file is damaged or empty.
        """
        if split not in self._loaded:
            path = self.files[split]
            rows = self._rows(path)
            lines = list[int]()
            tables = []
            while part := list(islice(rows, ROWS_AT_ONCE)):
                lines += [line for line, _ in part]
                cells = [row for _, row in part]
                names = dict.fromkeys(name for row in cells for name in row)
                columns = {name: [as_text(row.get(name)) for row in cells] for name in names}
                schema = pa.schema([(name, pa.large_string()) for name in names])
                tables.append(pa.table(columns, schema))
            if not tables:
                raise DataError(f"{path} is empty.")
            table = pa.concat_tables(tables, promote_options="default")
            self._loaded[split] = Table(table, torch.tensor(lines), f"line {{}} of {path}")
        return self._loaded[split]

    def _rows(self, path: Path) -> Iterator[Row]:
        reject = self.source.reject
        if uncompressed_suffix(path) in CSV:
            yield from read_csv(path, reject, self.header, self.quoted_tsv)
            return
        for line, nested in read_json_lines(path, reject):
            row = flattened(nested)
            faults = [fault for cells in self.cell_types if (fault := cells.fault(row))]
            if faults:
                reject(f"line {line} of {path}", faults[0])
            else:
                yield line, row


class HubTables:
    """A data set of the hub, or a local copy of its files (Parquet or Arrow, named by split).

    Args:
        source: Says which, and is told of files that cannot be used.
    """

    def __init__(self, source: Source[Any]) -> None:
        self.source = source
        self._loaded: dict[str, Table] = {}

    @cached_property
    def folder(self) -> Path | None:
        """The local copy, if there is one."""
        path = self.source.local_path
        if path is None and self.source.options.name is None:
            raise UsageError(
                "the source hub needs --data.dataset.name ID (uoft-cs/cifar10) or --data.path "
                "FOLDER."
            )
        return path

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The local files of each split."""
        example = "train-00000-of-00001.parquet"
        wanted = f"a folder of parquet or arrow files named by split, such as {example}"
        return files_by_split(self.source, ARROW, wanted)

    @cached_property
    def _downloaded(self) -> dict[str, pa.Table]:
        return download(self.source.options)

    @property
    def origin(self) -> str:
        return str(self.folder or self.source.options.name)

    def splits(self) -> list[str]:
        return list(self._downloaded if self.folder is None else self.files)

    def load(self, split: str) -> Table:
        """A split that exists; the columns keep the hub's description in their schema.

        Raises:
            DataError: A file is damaged, or has other columns than another.
        """
        if split not in self._loaded:
            table = self._downloaded[split] if self.folder is None else self._read(split)
            where = f"row {{}} of the {split} split of {self.origin}"
            self._loaded[split] = Table(table, torch.arange(table.num_rows), where)
        return self._loaded[split]

    def _read(self, split: str) -> pa.Table:
        first, *others = self.files[split]
        tables = [read_table(first)]
        for path in others:
            tables.append(read_table(path))
            if not tables[-1].schema.equals(tables[0].schema):
                raise DataError(
                    f"{path} has other columns than {first}: write them alike, or remove one."
                )
        return pa.concat_tables(tables)


Tables = FileTables | HubTables


def files_by_split(
    source: Source[Any], suffixes: tuple[str, ...], wanted: str
) -> dict[str, list[Path]]:
    """The files of each split at the path of a source; a single file is the training split.

    Args:
        source: Says the path, and is told of files that cannot be used.
        suffixes: Of the files, in lower case.
        wanted: What they are called in messages.

    Raises:
        UsageError: There are none.
    """
    path = source.local_path
    if path is None:
        raise UsageError(f"this source needs --data.path: {wanted}.")
    if not path.is_dir() and (fault := path_fault(path)):
        raise UsageError(f"{path} {fault}: --data.path takes {wanted}.")
    if path.is_file():
        if uncompressed_suffix(path) in suffixes:
            return {"train": [path]}
        raise UsageError(f"{path} is not {wanted}{source.suggest_source(path, suffixes)}.")
    files: dict[str, list[Path]] = {}
    for file in regular_files(
        path, source.reject, lambda file: uncompressed_suffix(file) in suffixes
    ):
        split = split_of(file.relative_to(path))
        if split is not None:
            files.setdefault(split, []).append(file)
    if not files:
        hint = source.suggest_source(path, suffixes)
        raise UsageError(f"{path} does not hold {wanted}{hint}.")
    return files


def as_text(cell: Any) -> str | None:
    """A cell of JSON as text; None where it is neither text nor a whole number."""
    if type(cell) is int:
        return str(cell)
    return cell if isinstance(cell, str) else None


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the entries of objects as columns, too, such as translation.en."""
    flat = dict(row)
    for name, cell in row.items():
        if isinstance(cell, dict):
            flat |= {f"{name}.{key}": value for key, value in cell.items()}
    return flat


def features_of(table: pa.Table) -> dict[str, Any]:
    """The hub's description of each column; empty where there is none.

    Raises:
        DataError: It is damaged.
    """
    description = (table.schema.metadata or {}).get(b"huggingface")
    if not description:
        return {}
    try:
        features = json.loads(description)["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            "the hub's description of the columns is damaged: fetch or write the file again."
        ) from error


def download(options: Any) -> dict[str, pa.Table]:
    """The splits of a data set of the hub, by our names of splits.

    Raises:
        DataError: The hub cannot be reached, or does not have it.
    """
    from datasets import load_dataset

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # silences its retries
    try:
        splits = load_dataset(options.name, options.subset)
    except Exception as error:  # a dozen kinds, from sockets to the hub's own
        reason = (str(error) or "no reason given").splitlines()[0][:160]
        local = f", or set TESSERA_DATA to a folder that holds {options.local}/"
        raise DataError(
            f"could not get {options.name} from the Hugging Face hub ({type(error).__name__}: "
            f"{reason}); without network, put its parquet files into a folder and name it with "
            f"--data.path FOLDER{local if options.local else ''}."
        ) from error
    tables = {}
    for name, part in splits.items():
        split = split_of(Path(str(name)))
        if split is not None:
            metadata = part.features.arrow_schema.metadata
            tables[split] = part.data.table.replace_schema_metadata(metadata)
    return tables
