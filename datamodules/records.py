"""Labelled images that are not decoded yet: files, bytes in tables, or plain pixels."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.decoding import count_channels, decode

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class Records:
    """One split, not decoded: sample i is `items[rows[i]]`, of class `labels[i]`.

    Args:
        items: All that the files hold.
        labels: (S,) int64.
        rows: (S,) int64, into `items`.
        where: What the items are part of, for messages.
    """

    items: Any
    labels: Tensor
    rows: Tensor
    where: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, keep: Tensor | list[int]) -> "Records":
        """The samples with these indices, in this order."""
        return replace(self, labels=self.labels[keep], rows=self.rows[keep])

    def name(self, i: int) -> str:
        """What to call sample i in a message."""
        return str(self.items[int(self.rows[i])])

    def read(self, i: int) -> bytes:
        """Encoded image i."""
        return Path(self.items[int(self.rows[i])]).read_bytes()

    def image(self, i: int, channels: int) -> Tensor:
        """Decoded image i, uint8 (C, Y, X)."""
        return decode(self.read(i), channels)

    def channels(self) -> int:
        """1 where 16 images from all over the data are grey, else 3."""
        counts = []
        for i in range(0, len(self), max(1, len(self) // 16)):
            try:
                counts.append(count_channels(self.read(i)))
            except Exception:  # a bad file is reported when it is decoded
                continue
        return max(counts, default=3)


class PixelRecords(Records):
    """Images that need no decoding: items is uint8 (S, C, Y, X)."""

    def name(self, i: int) -> str:
        return f"image {int(self.rows[i])}"

    def image(self, i: int, channels: int) -> Tensor:
        image = self.items[self.rows[i]]
        if channels == len(image):
            return image
        return image.expand(3, -1, -1) if channels == 3 else image.float().mean(0, keepdim=True).round().to(torch.uint8)

    def channels(self) -> int:
        return self.items.shape[1]


class TableRecords(Records):
    """Images in a column of an Arrow table, as bytes or as paths."""

    def name(self, i: int) -> str:
        return f"row {int(self.rows[i])} of {self.where}"

    def read(self, i: int) -> bytes:
        cell = self.items[int(self.rows[i])].as_py()
        return (cell["bytes"] or Path(cell["path"]).read_bytes()) if isinstance(cell, dict) else cell
