"""The embedded data set: real handwritten digits, no download."""

import torch

from datamodules.sources.base import Source
from datamodules.utils.errors import UsageError
from datamodules.utils.splits import stratified_split
from datamodules.vision.records import PixelRecords, Records


class Digits(Source[Records]):
    """The 1,797 handwritten digits, 8 x 8 grey, of scikit-learn (Alpaydin & Kaynak 1998); a fixed 20 % is test."""

    unused = {"name", "subset", "local", "label_column", "image_column"}

    def prepare(self) -> None:
        """Nothing to download.

        Raises:
            UsageError: a path is named, which these data do not have.
        """
        if self.path is not None:
            raise UsageError(
                f"--data.path {self.path} says where, not what: add --data.source folder (or hub)"
            )

    @property
    def class_names(self) -> list[str]:
        return [str(digit) for digit in range(10)]

    def has(self, split: str) -> bool:
        return split != "val"

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        # values 0..16 -> 0..255; (S, 64) -> (S, C, Y, X)
        pixels = torch.from_numpy(images).mul(255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(labels).long()
        train, test = stratified_split(labels, 0.2, seed=0)
        return PixelRecords(pixels, labels, torch.arange(len(pixels))).select(
            train if split == "train" else test
        )
