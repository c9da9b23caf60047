"""Images of the Hugging Face hub, over the network or from a local copy of their files."""

from pathlib import Path
from typing import Any

import torch

from datamodules.sources.tables import TableSource, features_of
from datamodules.utils.errors import UsageError
from datamodules.vision.records import Records, TableRecords


class Hub(TableSource[Records]):
    """A data set of the Hugging Face hub, or a local folder of the same schema (parquet or arrow, named by split)."""

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        table = self.tables.table(split)
        image, labels = self._image_column(table), self.labels(split)
        rows, where = torch.arange(len(labels)), self.tables.where(split)
        return TableRecords(_encoded(table.column(image)), labels, rows, where, self._roots())

    def _roots(self) -> tuple[Path, ...]:
        """Where files may lie that rows name: the data folder, or what was downloaded, without the hub's tokens."""
        if (folder := self.tables.folder) is not None:  # type: ignore[attr-defined]
            return (folder,)
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        return tuple(
            map(Path, (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE))
        )

    def _image_column(self, table: Any) -> str:
        features, names = features_of(table), table.column_names
        images = [n for n in names if features.get(n, {}).get("_type") == "Image"] or [
            n for n in names if _holds_images(table.schema.field(n).type)
        ]
        name = self.column(table, "image_column", images)
        if not _holds_images(kind := table.schema.field(name).type):
            raise UsageError(
                f"column {name} of {self.origin} holds {str(kind)[:40]}, not images: set {self.prefix}.image_column to "
                f"one of {', '.join(images) or 'those that hold images (there are none)'}."
            )
        return name


def _holds_images(kind: Any) -> bool:
    import pyarrow as pa

    encoded = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(encoded or pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def _encoded(cells: Any) -> Any:
    """The bytes of an image column alone, which are read ten times as fast; paths where it holds no bytes."""
    import pyarrow.compute as pc

    if not str(cells.type).startswith("struct"):
        return cells
    encoded = pc.struct_field(cells, "bytes")
    return encoded if encoded.null_count == 0 else cells
