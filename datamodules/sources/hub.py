"""Images of the Hugging Face hub, over the network or from a local copy of their files."""

from typing import Any

import torch

from datamodules.records import Records, TableRecords
from datamodules.sources.tables import TableSource, features_of


class Hub(TableSource[Records]):
    """A data set of the Hugging Face hub, or a local folder of the same schema (parquet or arrow, named by split)."""

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        table = self.tables.table(split)
        image, labels = self._image_column(table), self.labels(split)
        return TableRecords(_encoded(table.column(image)), labels, torch.arange(len(labels)), self.tables.where(split))

    def _image_column(self, table: Any) -> str:
        features, names = features_of(table), table.column_names
        images = [n for n in names if features.get(n, {}).get("_type") == "Image"] or [
            n for n in names if str(table.schema.field(n).type).startswith(("struct<bytes", "binary", "large_binary"))
        ]
        return self.column(table, "image_column", images)


def _encoded(cells: Any) -> Any:
    """The bytes of an image column alone, which are read ten times as fast; paths where it holds no bytes."""
    import pyarrow.compute as pc

    if not str(cells.type).startswith("struct"):
        return cells
    encoded = pc.struct_field(cells, "bytes")
    return encoded if encoded.null_count == 0 else cells
