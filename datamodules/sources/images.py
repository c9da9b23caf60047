"""Images: embedded digits, data sets of the Hugging Face hub, and folders of the user's own."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch

from datamodules.sources.labelled import LabelledSource, SourceOptions
from datamodules.sources.readers.folders import ClassFolders
from datamodules.sources.readers.labels import LabelledTables
from datamodules.sources.readers.tables import ARROW, described_columns
from datamodules.utils.splits import stratified_split
from datamodules.vision.records import IMAGE_ENDINGS, PixelRecords, Records, TableRecords

IMAGE_SOURCES = {**dict.fromkeys(IMAGE_ENDINGS, "folder"), **dict.fromkeys(ARROW, "hub")}


@dataclass(frozen=True)
class DatasetOptions(SourceOptions):
    """What to know about a data set of images that its files do not say.

    Args:
        image_column: Column with the images; None: the first that holds images.
        channels: Colour channels that images are converted to, 1 or 3; None: as the data are.
        mean: Of each channel, in [0, 1]; None: measured on the training images.
        std: Standard deviation of each channel, likewise.
    """

    image_column: str | None = None
    channels: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None


class Digits(LabelledSource[Records]):
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 grey; a fixed 20 % is test."""

    noun = "digits"
    sources_by_suffix = IMAGE_SOURCES
    embedded = True
    unused_options = {"name", "subset", "local", "label_column", "image_column"}
    class_names = [str(digit) for digit in range(10)]

    def has(self, split: str) -> bool:
        return split != "val"

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        # values 0..16 -> 0..255; (S, 64) -> (S, C, H, W)
        pixels = torch.from_numpy(images).mul(255 / 16).round().to(torch.uint8).reshape(-1, 1, 8, 8)
        labels = torch.from_numpy(labels).long()
        train, test = stratified_split(labels, 0.2, seed=0)
        records = PixelRecords(pixels, labels, torch.arange(len(pixels)))
        return records.select(train if split == "train" else test)


class ImageHub(LabelledTables[Records]):
    """A data set of the Hugging Face hub, or a local copy of its files."""

    sources_by_suffix = IMAGE_SOURCES

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        table = self.table(split)
        images = encoded_images(table.columns.column(self._image_column(table.columns.schema)))
        where = f"the {split} split of {self.origin}"
        return TableRecords(images, self.labels(split), table.rows, where, self._roots())

    def _roots(self) -> tuple[Path, ...]:
        """Where files may lie that rows name: the data folder, or the folders of downloads."""
        if self.local_path is not None:
            return (self.local_path,)
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        folders = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
        return tuple(Path(folder) for folder in folders)

    def _image_column(self, schema: pa.Schema) -> str:
        given = self.options.image_column
        fitting = [field.name for field in schema if holds_images(field.type)]
        candidates = [given] if given else described_columns(schema, "Image") + fitting
        return self.find_column(schema, "image_column", candidates, holds_images, "images")


class ImageFolder(ClassFolders[Records]):
    """The user's own images: `train/CLASS/*.jpg`, at any depth; likewise val/ and test/."""

    sources_by_suffix = IMAGE_SOURCES
    suffixes = IMAGE_ENDINGS
    example = "*.jpg"

    def records(self, split: str) -> Records | None:
        folder = self.split_folder(split)
        if folder is None:
            return None
        paths, labels = self.labelled_files(folder)
        return Records(paths, labels, torch.arange(len(paths)))


def holds_images(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of encoded images."""
    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def encoded_images(images: pa.ChunkedArray) -> pa.ChunkedArray:
    """Only the bytes of images, which are read ten times as fast, unless some have only a path."""
    import pyarrow.compute as pc

    if not pa.types.is_struct(images.type):
        return images
    encoded = pc.struct_field(images, "bytes")
    return encoded if encoded.null_count == 0 else images
