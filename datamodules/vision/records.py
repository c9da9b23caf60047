"""Labelled images that are not decoded yet: files, bytes in tables, or plain pixels."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.files import printable, read_bytes
from datamodules.vision.decoding import ResizeAndCrop, TooManyPixels, count_channels, decode

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")


@dataclass(frozen=True)
class Records:
    """The S images of one split, not decoded: sample i is `items[rows[i]]`."""

    items: Any  # all images of the files
    labels: Tensor  # int64 (S,), or float32 (S, K) for several labels, (S,) for numbers
    rows: Tensor  # (S,) int64, into `items`
    where: str = ""  # name of the table in messages
    names: Sequence[str] = ()  # of all images, as a table has them; empty: their paths

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, keep: Tensor | list[int]) -> "Records":
        """The samples with these indices, in this order."""
        return replace(self, labels=self.labels[keep], rows=self.rows[keep])

    def name(self, i: int) -> str:
        """The name of sample i in a message."""
        return printable(self.items[int(self.rows[i])])

    def identifiers(self) -> tuple[str, list[Any]]:
        """A column that tells the samples apart, its name first: their names or paths."""
        if self.names:
            return "path", [self.names[row] for row in self.rows.tolist()]
        return "path", [self.name(i) for i in range(len(self))]

    def read(self, i: int) -> bytes:
        """Encoded image i."""
        return read_bytes(self.items[int(self.rows[i])])

    def image(self, i: int, channels: int) -> Tensor:
        """Decoded image i, uint8 (C, H, W)."""
        return decode(self.read(i), channels)

    def prepared(
        self, i: int, channels: int, prepare: ResizeAndCrop, any_size: bool = True
    ) -> Tensor:
        """Decoded image i, uint8 (C, size, size).

        Raises `DataError` if the file is corrupt, missing or not an image; the sentence names it;
        without `any_size`, `UsageError` if the file has another size.
        """
        size = prepare.size
        try:
            image = self.image(i, channels)
            h, w = image.shape[-2:]
            if any_size or (h, w) == (size, size):
                return prepare(image)
        except Exception as error:  # each decoder has its own kinds
            fault = f"is not a readable image ({reason_of(error)}): remove it"
            if isinstance(error, TooManyPixels):
                fault = f"{error}, remove it"
            elif isinstance(error, FileNotFoundError) and self.where:
                fault = (
                    f"does not exist, but {self.where} names it, whose paths are relative to its "
                    "folder: correct the name, remove the row"
                )
            if len(self) > 1:
                fault += ", or leave such files out with --data.skip_bad true"
            raise DataError(f"{self.name(i)} {fault}.") from error
        raise UsageError(
            f"{self.name(i)} is {w} x {h} pixels, not {size} x {size}: add --data.image_size N."
        )

    def common_size(self, channels: int, skip_bad: bool) -> int:
        """Side of the first readable image, for data whose images all have one size.

        Raises `UsageError` if it is not square; `DataError` if it is unreadable; with
        `skip_bad`, only if all are.
        """
        for i in range(len(self)):
            try:
                h, w = self.image(i, channels).shape[-2:]
            except Exception:
                if skip_bad:
                    continue
                self.prepared(i, channels, ResizeAndCrop(1))  # fails again, and says why
                raise
            if h != w:
                raise UsageError(
                    f"{self.name(i)} is {w} x {h} pixels, not square: add --data.image_size N."
                )
            return h
        raise DataError(f"none of the {len(self)} image files can be read, such as {self.name(0)}.")

    def unreadable(self) -> list[str]:
        """Names of the images that are corrupt, missing or of no known format."""
        names = []
        for i in range(len(self)):
            try:
                self.image(i, channels=3)
            except Exception:  # each decoder has its own kinds
                names.append(self.name(i))
        return names

    def channels(self) -> int:
        """1 if 16 to 31 images from all over the data are grey, else 3."""
        counts = []
        for i in range(0, len(self), max(1, len(self) // 16)):
            try:
                counts.append(count_channels(self.read(i)))
            except Exception:  # a bad file is reported when it is decoded
                continue
        return max(counts, default=3)


def unlabelled(paths: Sequence[Path], where: str = "", names: Sequence[str] = ()) -> Records:
    """Records of image files, without classes: label 0 for each; the others as in `Records`."""
    index = torch.arange(len(paths))
    return Records(paths, torch.zeros_like(index), index, where, names)


class NumberedRecords(Records):
    """Images that are not files of their own."""

    def identifiers(self) -> tuple[str, list[Any]]:
        """A column that tells the samples apart, its name first: their rows in the data."""
        return "index", self.rows.tolist()


class PixelRecords(NumberedRecords):
    """Images that need no decoding: items is uint8 (all images, C, H, W)."""

    def name(self, i: int) -> str:
        return f"image {int(self.rows[i])}"

    def image(self, i: int, channels: int) -> Tensor:
        image = self.items[self.rows[i]]
        if channels == len(image):
            return image
        if channels == 3:
            return image.expand(3, -1, -1)
        return image.float().mean(0, keepdim=True).round().to(torch.uint8)

    def channels(self) -> int:
        return self.items.shape[1]


@dataclass(frozen=True)
class TableRecords(NumberedRecords):
    """Images in a column of an Arrow table: bytes, or structs of "bytes" and "path".

    Args:
        roots: Folders that files named in the table must lie in; paths are relative to the first.
    """

    roots: tuple[Path, ...] = ()

    def name(self, i: int) -> str:
        return f"row {int(self.rows[i])} of {self.where}"

    def read(self, i: int) -> bytes:
        cell = self.items[int(self.rows[i])].as_py()
        if isinstance(cell, dict):
            cell = cell.get("bytes") or (cell.get("path") and self._read_file(cell["path"]))
        if not isinstance(cell, bytes):
            raise ValueError("it holds no image")
        return cell

    def _read_file(self, path: str) -> bytes:
        """Content of a file that a row names; the row may come from anybody."""
        file = (self.roots[0] / path).resolve()
        if any(file.is_relative_to(root.resolve()) for root in self.roots):
            return read_bytes(file, follow=False)
        raise ValueError(f"its file {path} lies outside of the data")


def reason_of(error: Exception) -> str:
    """What the system or a decoder says, without file names and lines of torch's source."""
    said = str(getattr(error, "strerror", None) or error).strip()
    if not said or "BytesIO" in said:
        return type(error).__name__
    line = re.sub(r"\S*/\S+:\d+,? ?", "", said).partition("\n")[0]
    return line[:120] or type(error).__name__
