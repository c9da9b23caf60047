"""Tables for tests in every format that is read."""

import csv
import gzip
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

Row = dict[str, Any]


def table_bytes(rows: Sequence[Row], suffix: str, features: Any = None) -> bytes:
    """Rows as CSV, TSV without quotes, JSON Lines, Parquet or an Arrow stream.

    Args:
        rows: Cells by column.
        suffix: Such as ".csv".
        features: The hub's description of the columns, for Parquet.
    """
    if suffix == ".jsonl":  # half of the lines escape what is not ASCII
        lines = [json.dumps(row, ensure_ascii=bool(i % 2)) for i, row in enumerate(rows)]
        return "".join(f"{line}\n" for line in lines).encode()
    if suffix == ".tsv":
        cells = [rows[0].keys(), *(row.values() for row in rows)]
        return "".join("\t".join(map(str, row)) + "\r\n" for row in cells).encode()
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    table = pa.Table.from_pylist(list(rows))
    if features is not None:
        table = table.cast(features.arrow_schema)
    file = pa.BufferOutputStream()
    if suffix == ".parquet":
        parquet.write_table(table, file, row_group_size=1000)
    else:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return file.getvalue().to_pybytes()


def compressed(content: bytes, suffix: str) -> bytes:
    """The content as a .gz or .zst file, or as it is."""
    if suffix == ".gz":
        return gzip.compress(content)
    return pa.compress(content, "zstd", asbytes=True) if suffix == ".zst" else content


def write(path: Path, content: bytes | str | Sequence[Row], features: Any = None) -> Path:
    """Writes a file in the format that its name says; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    codec = path.suffix if path.suffix in (".gz", ".zst") else ""
    if isinstance(content, str):
        content = content.encode()
    if not isinstance(content, bytes):
        suffix = path.with_suffix("").suffix if codec else path.suffix
        content = table_bytes(content, suffix, features)
        content = compressed(content, codec)
    path.write_bytes(content)
    return path
