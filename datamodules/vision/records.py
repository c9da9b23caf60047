"""Labelled images that are not decoded yet: files, bytes in tables, or plain pixels."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.utils.files import printable, read_bytes
from datamodules.vision.decoding import count_channels, decode

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
        return printable(self.items[int(self.rows[i])])

    def read(self, i: int) -> bytes:
        """Encoded image i."""
        return read_bytes(self.items[int(self.rows[i])])

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
        return (
            image.expand(3, -1, -1)
            if channels == 3
            else image.float().mean(0, keepdim=True).round().to(torch.uint8)
        )

    def channels(self) -> int:
        return self.items.shape[1]


@dataclass(frozen=True)
class TableRecords(Records):
    """Images in a column of an Arrow table, as bytes or as paths.

    Args:
        roots: Folders that files which rows name must lie in; a path is seen from the first.
    """

    roots: tuple[Path, ...] = ()

    def name(self, i: int) -> str:
        return f"row {int(self.rows[i])} of {self.where}"

    def read(self, i: int) -> bytes:
        cell = self.items[int(self.rows[i])].as_py()
        if isinstance(cell, dict):
            cell = cell.get("bytes") or (cell.get("path") and self._file(cell["path"]))
        if not isinstance(cell, bytes):
            raise ValueError("it holds no image")
        return cell

    def _file(self, path: str) -> bytes:
        """What a file holds that a row names, which may be anybody's words."""
        for root in self.roots:
            file = (self.roots[0] / path).resolve()
            if file.is_relative_to(root.resolve()):
                return read_bytes(file, follow=False)
        raise ValueError(f"its file {path} lies outside of the data")
