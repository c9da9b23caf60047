"""Labelled images that are not decoded yet: files, bytes in tables, or plain pixels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.decoding import count_channels, decode
from datamodules.errors import DataError, UsageError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
CLUTTER = ("thumbs.db", "desktop.ini")  # and everything that begins with a dot


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
        return Path(cell["path"]).read_bytes() if isinstance(cell, dict) else cell


def file_records(paths: Sequence[Path], labels: Sequence[int]) -> Records:
    """Image files as a split."""
    return Records(list(paths), torch.tensor(labels, dtype=torch.int64), torch.arange(len(paths)))


def image_files(folder: Path, skip_bad: bool, skipped: list[str]) -> list[Path]:
    """All image files below a folder at any depth, sorted; hidden files are passed over.

    Raises:
        DataError: Some other file lies there (with `skip_bad` it is added to `skipped`).
    """
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or path.name.lower() in CLUTTER:
            continue
        if path.suffix.lower() in EXTENSIONS:
            files.append(path)
        elif skip_bad:
            skipped.append(str(path))
        else:
            raise DataError(
                f"{path} is not an image ({', '.join(e[1:] for e in EXTENSIONS)}): remove it, or leave such files out "
                "with --data.skip_bad true."
            )
    return files


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Splits sample indices so that each class gives the same share.

    Args:
        labels: (S,) int64.
        fraction: Share of the second part; from two samples of a class on, each part gets at least one.
        seed: Of the draw.

    Returns:
        Indices of the first and of the second part, each sorted.

    Raises:
        UsageError: The fraction is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"val_fraction is {fraction}, but must lie between 0 and 1.")
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    held = []
    for members in by_class.split(labels.bincount().tolist()):
        n = len(members)
        held.append(members[: min(max(round(n * fraction), 1), n - 1)] if n > 1 else members[:0])
    second = torch.cat(held).sort().values
    first = torch.ones(len(labels), dtype=torch.bool)
    first[second] = False
    return first.nonzero().flatten(), second
