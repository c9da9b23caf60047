"""Images: embedded digits, data sets of the hub, and the user's own in folders or by a table."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import torch

from datamodules.embedded import digits
from datamodules.sources.labelled import LabelledSource, SourceOptions
from datamodules.sources.readers.cells import is_text
from datamodules.sources.readers.folders import ClassFolders, files_by_split
from datamodules.sources.readers.labels import LabelledTables
from datamodules.sources.readers.tables import (
    ARROW,
    CSV,
    JSON_LINES,
    CellTypes,
    described_columns,
)
from datamodules.utils.errors import DataError
from datamodules.utils.files import printable
from datamodules.utils.splits import join_unlabelled, stratified_split
from datamodules.vision.decoding import InterpolationName
from datamodules.vision.records import (
    IMAGE_ENDINGS,
    PixelRecords,
    Records,
    TableRecords,
    unlabelled,
)


@dataclass(frozen=True)
class DatasetOptions(SourceOptions):
    """What to know about a data set of images that its files do not say.

    Args:
        image_column: Column with the images, or in CSV and JSON Lines files with the names of image
            files; null: the first that holds images, or file_name, image, path, file or filename.
        channels: Colour channels that images are converted to, 1 or 3; null: as the data are.
        mean: Mean of each channel, in [0, 1]; null: measured on the training images.
        std: Standard deviation of each channel, in [0, 1]; null: measured on the training images.
        interpolation: How images are resized; null: bilinear.
        crop_pct: In evaluation and prediction, the shorter side is resized to image_size /
            crop_pct, and image_size pixels in the centre are kept; null: 1.
    """

    image_column: str | None = None
    channels: int | None = None
    mean: list[float] | None = None
    std: list[float] | None = None
    interpolation: InterpolationName | None = None
    crop_pct: float | None = None


class Digits(LabelledSource[Records]):
    """The 1,797 embedded handwritten digits, 8 x 8 grey; a fixed 20 % is test."""

    noun = "digits"
    embedded = True
    unused_options = {"name", "subset", "local", "label_column", "image_column"}
    class_names = [str(digit) for digit in range(10)]

    def has(self, split: str) -> bool:
        return split != "val"

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        images, labels = (torch.from_numpy(array) for array in digits.load())
        # values 0..16 -> 0..255; (S, H, W) -> (S, C, H, W)
        pixels = images.mul(255 / 16).round().to(torch.uint8).unsqueeze(1)
        labels = labels.long()
        train, test = stratified_split(labels, 0.2, seed=0)
        records = PixelRecords(pixels, labels, torch.arange(len(pixels)))
        return records.select(train if split == "train" else test)


class ImageHub(LabelledTables[Records]):
    """A data set of the Hugging Face hub, or a local copy of its files."""

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        table = self.table(split)
        images = encoded_images(table.columns.column(self.sample_column(table.columns.schema)))
        where = f"the {split} split of {self.origin}"
        return TableRecords(images, self.labels(split), table.rows, where, roots=self._roots())

    def _roots(self) -> tuple[Path, ...]:
        """Where files may lie that rows name: the data folder, or the folders of downloads."""
        if self.local_path is not None:
            return (self.local_path,)
        from datasets import config
        from huggingface_hub.constants import HF_HUB_CACHE

        folders = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
        return tuple(Path(folder) for folder in folders)

    def sample_column(self, schema: pa.Schema) -> str:
        given = self.options.image_column
        fitting = [field.name for field in schema if holds_images(field.type)]
        candidates = [given] if given else described_columns(schema, "Image") + fitting
        more = self.no_labels(schema)
        if not fitting:
            more += "; a table that names image files must be CSV or JSON Lines"
        return self.find_column(schema, "image_column", candidates, holds_images, "images", more)


class ImageFolder(ClassFolders[Records]):
    """The user's own images: `train/CLASS/*.jpg`, or only `CLASS/*.jpg`; see `ClassFolders`."""

    suffixes = IMAGE_ENDINGS
    example = "CLASS/*.jpg or train/CLASS/*.jpg"
    table = "a table with the columns file_name and label, such as train.csv, beside the images"

    def records(self, split: str) -> Records | None:
        folder = self.split_folder(split)
        if folder is None:
            return None
        paths, labels = self.labelled_files(folder)
        return Records(paths, labels, torch.arange(len(paths)))


class ImageFiles(LabelledSource[Records]):
    """Images without labels, at any depth: `*.jpg`, or `train/*.jpg`; see `files_by_split`."""

    suffixes = IMAGE_ENDINGS
    example = "*.jpg"
    is_fallback = True
    unused_options = ClassFolders.unused_options | {"class_names"}
    class_names: list[str] = []

    @cached_property
    def files(self) -> dict[str, list[Path]]:
        """The files of each split; those of a split called unlabelled are training images."""
        root = self.require_path("a folder of images")
        return join_unlabelled(files_by_split(root, self.suffixes, self.reject))

    def has(self, split: str) -> bool:
        return split in self.files

    def records(self, split: str) -> Records | None:
        return unlabelled(self.files[split]) if self.has(split) else None

    def checked_class_names(self) -> list[str]:
        """None."""
        return []

    def require_classes(self, expected: list[str]) -> None:
        """Nothing: a model without labels takes images of any classes."""


class ImageTables(LabelledTables[Records]):
    """Base of tables that name image files, relative to the folder of the table, and their targets.

    Such as `metadata.csv` with the columns file_name and label in each of train/, val/ and test/.
    """

    unused_options = {"name", "subset", "local"}

    @property
    def cell_types(self) -> CellTypes:
        found: CellTypes = {self._image_columns: (str,)}
        return {**found, **self.label_cells} if self.labelled else found

    @property
    def _image_columns(self) -> tuple[str, ...]:
        """The columns that may hold the names of files."""
        given = self.options.image_column
        return (given,) if given else ("file_name", "image", "path", "file", "filename")

    def records(self, split: str) -> Records | None:
        if not self.has(split):
            return None
        return replace(self.files(split), labels=self.labels(split))

    def files(self, split: str) -> Records:
        """The image of each row, without labels. Raises `DataError` if a row names none."""
        table = self.table(split)
        name = self.sample_column(table.columns.schema)
        file = self.table_files[split][0]
        cells = table.columns.column(name).to_pylist()
        missing = [
            index for index, cell in enumerate(cells) if not cell
        ]  # in CSV files they are ""
        if missing:
            row = table.name(missing[0])
            raise DataError(f"{row} names no image file in column {name}: fix or remove it.")
        return unlabelled([file.parent / cell.strip() for cell in cells], printable(file), cells)

    def sample_column(self, schema: pa.Schema) -> str:
        names = self._image_columns
        more = self.no_labels(schema)
        return self.find_column(schema, "image_column", names, is_text, "names of files", more)


class ImageCsv(ImageTables):
    """Images named in CSV or TSV files."""

    suffixes = CSV
    kind = "CSV"
    example = "train.csv"


class ImageJson(ImageTables):
    """Images named in JSON Lines files."""

    suffixes = JSON_LINES
    kind = "JSON Lines"
    example = "train.jsonl"


class ImageParquet(ImageTables):
    """Images named in a Parquet or Arrow file, to predict; `ImageHub` reads encoded images."""

    suffixes = ARROW
    kind = "Parquet"


IMAGE_TABLES: tuple[type[ImageTables], ...] = (ImageCsv, ImageJson, ImageParquet)


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
