"""Data sets of the Hugging Face hub, over the network or from a local copy of their files."""

import json
import logging
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from datamodules.errors import DataError, UsageError
from datamodules.records import Records, TableRecords
from datamodules.sources.base import SPLITS, Source


class Hub(Source):
    """A data set of the Hugging Face hub, or a local folder of the same schema (parquet or arrow, named by split)."""

    @cached_property
    def folder(self) -> Path | None:
        """The local folder to read instead of the hub, if there is one."""
        if self.path is not None:
            folder = Path(self.path)
            if not folder.is_dir():
                raise UsageError(
                    f"{folder} {'is a file' if folder.exists() else 'does not exist'}: --data.path takes a folder of "
                    "parquet files named by split, such as train-00000-of-00001.parquet."
                )
            return folder
        at_hand = os.environ.get("TESSERA_DATA")
        if at_hand and self.options.local and (Path(at_hand) / self.options.local).is_dir():
            return Path(at_hand) / self.options.local
        if self.options.name is None:
            raise UsageError("the source hub needs --data.dataset.name ID (uoft-cs/cifar10) or --data.path FOLDER.")
        return None

    @cached_property
    def tables(self) -> dict[str, Any]:
        """Arrow table of each split that exists; the columns keep the hub's description in their schema."""
        if self.folder is not None:
            return _local_tables(self.folder)
        return _downloaded_tables(self.options.name or "", self.options.local)

    def has(self, split: str) -> bool:
        return split in self.tables

    @property
    def origin(self) -> str:
        return str(self.folder or self.options.name)

    def prepare(self) -> None:
        if self.folder is None:
            self.tables  # noqa: B018  downloads

    def records(self, split: str) -> Records | None:
        table = self.tables.get(split)
        if table is None:
            return None
        image, label = self._columns(table)
        cells = table.column(label)
        if self._features(table).get(label, {}).get("_type") == "ClassLabel" or _is_integer(cells):
            labels = torch.tensor(cells.to_pylist(), dtype=torch.int64)
        else:
            index = {name: i for i, name in enumerate(self.class_names)}
            labels = torch.tensor([index[str(value)] for value in cells.to_pylist()], dtype=torch.int64)
        where = f"the {split} split of {self.folder or self.options.name}"
        if len(labels) == 0:
            raise DataError(f"{where} is empty.")
        if int(labels.min()) < 0 or int(labels.max()) >= len(self.class_names):
            low, high = int(labels.min()), int(labels.max())
            raise DataError(f"{where} has labels from {low} to {high}, outside its {len(self.class_names)} classes.")
        return TableRecords(_encoded(table.column(image)), labels, torch.arange(len(labels)), where)

    @cached_property
    def class_names(self) -> list[str]:
        if "train" not in self.tables and self.known_names:
            return self.known_names
        if "train" not in self.tables:
            raise UsageError(f"{self.folder or self.options.name} has no train split, only {', '.join(self.tables)}.")
        table = self.tables["train"]
        _, label = self._columns(table)
        names = self._features(table).get(label, {}).get("names")
        if names:
            return [str(name) for name in names]
        cells = table.column(label)
        if _is_integer(cells):
            return [str(i) for i in range(max(cells.to_pylist()) + 1)]
        return sorted({str(value) for value in cells.to_pylist()})

    def _columns(self, table: Any) -> tuple[str, str]:
        """Names of the image and of the label column."""
        features, names = self._features(table), table.column_names
        images = [n for n in names if features.get(n, {}).get("_type") == "Image"] or [
            n for n in names if str(table.schema.field(n).type).startswith(("struct<bytes", "binary", "large_binary"))
        ]
        labels = [n for n in ("label", "labels") if n in names] or [
            n for n in names if features.get(n, {}).get("_type") == "ClassLabel"
        ]
        chosen = []
        for option, given, found in (
            ("image_column", self.options.image_column, images),
            ("label_column", self.options.label_column, labels),
        ):
            if given is None and not found or given is not None and given not in names:
                raise UsageError(
                    f"no column {given or option.removesuffix('_column')} in {self.folder or self.options.name}: "
                    f"set --data.dataset.{option} to one of {', '.join(names)}."
                )
            chosen.append(given or found[0])
        return chosen[0], chosen[1]

    @staticmethod
    def _features(table: Any) -> dict[str, Any]:
        described = (table.schema.metadata or {}).get(b"huggingface")
        return json.loads(described)["info"]["features"] if described else {}


def _is_integer(cells: Any) -> bool:
    return "int" in str(cells.type)


def _encoded(cells: Any) -> Any:
    """The bytes of an image column alone, which are read ten times as fast; paths where it holds no bytes."""
    import pyarrow.compute as pc

    if not str(cells.type).startswith("struct"):
        return cells
    encoded = pc.struct_field(cells, "bytes")
    return encoded if encoded.null_count == 0 else cells


def _split_of(path: Path) -> str | None:
    """Which split a file belongs to, by the first part of its path that begins with the name of one."""
    for part in path.parts:
        for split, names in SPLITS.items():
            if re.match(rf"({'|'.join(names)})([-_.]|$)", part.lower()):
                return split
    return None


def _local_tables(folder: Path) -> dict[str, Any]:
    import pyarrow as pa
    from pyarrow import parquet

    parts: dict[str, list[Any]] = {}
    for path in sorted([*folder.rglob("*.parquet"), *folder.rglob("*.arrow")]):
        if split := _split_of(path.relative_to(folder)):
            try:
                table = parquet.read_table(path) if path.suffix == ".parquet" else _read_arrow(path)
            except (pa.ArrowException, OSError) as error:
                raise DataError(
                    f"{path} cannot be read ({str(error).splitlines()[0][:99]}): fetch it again."
                ) from error
            parts.setdefault(split, []).append(table)
    if not parts:
        raise UsageError(
            f"{folder} holds no parquet or arrow files named by split, such as train-00000-of-00001.parquet."
        )
    return {split: pa.concat_tables(tables) for split, tables in parts.items()}


def _read_arrow(path: Path) -> Any:
    import pyarrow as pa

    with pa.memory_map(str(path)) as file:
        try:
            return pa.ipc.open_stream(file).read_all()
        except pa.ArrowInvalid:
            return pa.ipc.open_file(file).read_all()


def _downloaded_tables(name: str, local: str | None) -> dict[str, Any]:
    from datasets import load_dataset

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # not a line for each of its retries
    try:
        splits = load_dataset(name)
    except Exception as error:  # a dozen kinds, from sockets to the hub's own
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else 'no reason given'}"
        where = f", or set TESSERA_DATA to a folder that holds {local}/" if local else ""
        raise DataError(
            f"could not get {name} from the Hugging Face hub ({reason}); without network, put its parquet files into a "
            f"folder and name it with --data.path FOLDER{where}."
        ) from error
    tables = {}
    for key, part in splits.items():
        if split := _split_of(Path(str(key))):
            tables[split] = part.data.table.replace_schema_metadata(part.features.arrow_schema.metadata)
    return tables
