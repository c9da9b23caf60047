"""Images for classification: decoded once into memory if they fit, else streamed by workers."""

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from datamodules.base import (
    BatchedDataset,
    ResumableDataModule,
)
from datamodules.sources import (
    IMAGE_TABLES,
    SOURCES,
    UNLABELLED_SOURCES,
    DatasetOptions,
    LabelledSource,
    open_source,
)
from datamodules.sources.images import ImageTables
from datamodules.sources.labelled import require_same_targets, target_metadata
from datamodules.sources.readers.folders import files_below
from datamodules.sources.readers.labels import LabelledTables
from datamodules.utils.cache import content_key
from datamodules.utils.cores import usable_cores
from datamodules.utils.errors import DataError, UsageError, require_same
from datamodules.utils.files import natural_key, path_fault, printable
from datamodules.vision.decoding import ResizeAndCrop, resizing
from datamodules.vision.image_datasets import (
    MemoryImages,
    StreamedImages,
    channel_statistics,
    decode_all,
)
from datamodules.vision.records import IMAGE_ENDINGS, Records, unlabelled

MUCH_LARGER = 4  # times; images so much smaller than `image_size` hold no detail for it
INPUT = "an image, a folder of images, or a table (CSV, JSON Lines, Parquet) that names them"


@dataclass(frozen=True)
class LoadingOptions:
    """How batches reach the model.

    Args:
        eval_batch_size: Images per batch in validation, test and prediction.
        num_workers: Processes that decode images that do not fit into `memory_limit_mb`; null: one
            per core.
        memory_limit_mb: Decoded images up to this size, in MiB per split, are kept in memory.
        seed: Seed of the order of the training images.
    """

    eval_batch_size: int = 256
    num_workers: int | None = None
    memory_limit_mb: int = 4096
    seed: int = 0


class ImageData(ResumableDataModule):
    """Batches of images: {"image": uint8 (B, C, H, W), "label": int64 (B,), "index": int64 (B,)}.

    Labels are float32 (B, K) unless each image has one class. For prediction, of the files at the
    attribute `predict_path`, "path" (B names) takes the place of "label". Images are not augmented
    and not normalised here: that is done on the batch, on the device, as in
    `datamodules.vision.augment`.

    Args:
        source: Format of the data; null: as the path shows, or digits without a path; digits: 1,797
            embedded handwritten digits; folder: your own images in train/CLASS/, or only in CLASS/,
            of which a part is then held out for validation; csv, jsonl: files that name your images
            and their targets; hub: a data set of the Hugging Face Hub, or Parquet files named by
            split.
        path: File or folder to read, or a data set of the hub.
        image_size: Side in pixels: the shorter side is resized to it, then the centre is cropped;
            null: the images' own size, which must be the same for all.
        batch_size: Training images per step and device. The last batch of an epoch is dropped if it
            is smaller, unless it is the only one; each epoch has another order.
        skip_bad: Skip and count files that are corrupt or not images; else the first one stops the
            run.
        balanced: Draw each class equally often, with replacement; else an epoch takes every
            image once.
        label_fraction: Part of each class to learn from; at least one image of each, chosen by
            `loading.seed`. Validation and test stay whole.
        dataset: Options of the data set (not the data set itself): hub id, columns, validation
            fraction.
        loading: Sizes of evaluation batches, workers, memory, and seed of the order.
    """

    sources: Mapping[str, type[LabelledSource[Records]]] = SOURCES
    needs_classes = True  # whether each class must have a training image
    source: LabelledSource[Records]
    noun = "images"
    loading_section = "loading."
    crops_training = False  # True: training images are prepared as those of evaluation

    def __init__(
        self,
        source: Literal["digits", "folder", "csv", "jsonl", "hub"] | str | None = None,
        path: str | None = None,
        image_size: int | None = None,
        batch_size: int = 64,
        skip_bad: bool = False,
        balanced: bool = False,
        label_fraction: float = 1.0,
        dataset: DatasetOptions = DatasetOptions(),
        loading: LoadingOptions = LoadingOptions(),
    ) -> None:
        workers = usable_cores() if loading.num_workers is None else loading.num_workers
        super().__init__(batch_size, loading.eval_batch_size, workers, loading.seed)
        if image_size is not None and image_size < 1:
            raise UsageError(f"--data.image_size is {image_size}, but must be at least 1.")
        crop_pct = dataset.crop_pct
        if crop_pct is not None and not 0 < crop_pct <= 1:
            raise UsageError(
                f"--data.dataset.crop_pct is {crop_pct}, but must be above 0 and at most 1."
            )
        if dataset.channels not in (None, 1, 3):
            raise UsageError(
                f"--model.net.channels is {dataset.channels}, but images are read as 1 (grey) or 3 "
                "(RGB)."
            )
        self.image_size = image_size
        self.skip_bad = skip_bad
        self.options = dataset
        self.loading = loading
        self.balanced = balanced
        self.source = open_source(self.sources, source, path, dataset, skip_bad=skip_bad)
        self.source.keep_labels(label_fraction, loading.seed)
        self._records: dict[str, Records] = {}
        self._skipped: list[str] = []
        self._predict_source: ImageTables | None = None

    # Metadata.

    @cached_property
    def _layout(self) -> dict[str, Any]:
        """The metadata that are known before any training image is decoded."""
        targets = target_metadata(self.source)
        train = self._split("train")
        channels = self.options.channels or train.channels()
        given = {name: value for name, value in asdict(self.options).items() if value is not None}
        return {
            **targets,
            "channels": channels,
            "image_size": self.image_size or train.common_size(channels, self.skip_bad),
            **resizing(given),
        }

    def measure_metadata(self) -> dict[str, Any]:
        """Primitives that a checkpoint keeps.

        Returns:
            those of `target_metadata`, channels, image_size (pixels), interpolation, crop_pct,
            mean and std (per channel, in [0, 1]).
        """
        channels = self._layout["channels"]
        mean = self.options.mean
        std = self.options.std
        if mean is None or std is None:
            measured = channel_statistics(self.dataset("train"))
            mean = mean or measured[0]
            std = std or measured[1]
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != channels:
                raise UsageError(
                    f"--data.dataset.{name} is {values}, but must have a number for each of the "
                    f"{channels} channels."
                )
        if not all(map(math.isfinite, [*mean, *std])) or min(std) <= 0:
            raise UsageError(
                f"--data.dataset.mean is {mean} and std is {std}; all must be finite, and "
                "every std above 0."
            )
        return {**self._layout, "mean": mean, "std": std}

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Uses the metadata of a checkpoint: prediction then needs no data set.

        Raises `UsageError` if the options name other values.
        """
        require_same("image_size", self.image_size, metadata["image_size"])
        channels, trained = self.options.channels, metadata["channels"]
        if channels not in (None, trained):
            raise UsageError(
                f"channels is {channels}, but the model was trained with {trained}: leave it out."
            )
        require_same_targets(self.options, metadata)
        stored = {"mean": metadata["mean"], "std": metadata["std"], **resizing(metadata)}
        for name, value in stored.items():
            require_same(f"dataset.{name}", getattr(self.options, name), value)
        self._metadata = dict(metadata)
        self._layout = self._metadata  # in place of the cached property's
        self.image_size = metadata["image_size"]
        self.source.use_checkpoint(metadata)
        self._records = {}
        self._datasets = {}

    @property
    def skipped(self) -> list[str]:
        """Files left out because of `skip_bad`, so far."""
        return sorted({*self._skipped, *self.source.skipped}, key=natural_key)

    # Splits.

    def prepare_data(self) -> None:
        """Downloads on one process; prediction needs no data set."""
        if self.trainer is None or self.trainer.state.fn != "predict":
            self.source.prepare()

    def setup(self, stage: str) -> None:
        """As in the base class; classes that are not the checkpoint's are refused first."""
        self.source.needs_every_class = stage == "fit"
        if stage != "predict" and self.needs_classes and self._metadata.get("class_names"):
            self.source.require_classes(self._metadata["class_names"])
        super().setup(stage)
        if stage == "fit":
            if self.needs_classes and self.options.problem_type == "single_label_classification":
                self.source.require_every_class(self._split("train").labels)
            self._warn_enlarged()

    def _warn_enlarged(self) -> None:
        """Warns if the first training image is far smaller than `image_size`: a model wastes time.

        A file that cannot be read is reported when it is decoded for training.
        """
        sides = [self.image_size or 0]
        with suppress(Exception):  # each decoder has its own kinds
            sides = [*self._split("train").image(0, channels=1).shape[-2:]]
        if self.image_size and self.image_size >= MUCH_LARGER * min(sides):
            h, w = sides
            self.source.warn_once(
                f"the first image has {w} x {h} pixels and is enlarged to {self.image_size}: "
                "choose a preset for small images (digits, cifar_small, swin_cifar), or set "
                "--model.net.image_size and --model.net.patch_size."
            )

    def _split(self, split: str) -> Records:
        if split not in self._records:
            is_predict = split == "predict"
            records = self._files_to_predict() if is_predict else self.source.split(split)
            self._records[split] = records
        return self._records[split]

    def _files_to_predict(self) -> Records:
        if self.predict_path is None:
            raise UsageError(f"predict needs --input: {INPUT}.")
        path = Path(self.predict_path)
        fault = None if path.is_dir() else path_fault(path)
        if fault:
            raise UsageError(f"{path} {fault}: --input takes {INPUT}.")
        records = self._records_at(path)
        if len(records) == 0:
            raise UsageError(f"{path} holds no images.")
        return records

    def _records_at(self, path: Path) -> Records:
        """An image, those below a folder, or those that a table names, which needs no labels."""
        if path.is_dir():
            return unlabelled(files_below(path, IMAGE_ENDINGS, self.source.reject))
        for kind in IMAGE_TABLES:
            if kind.reads(Path(path.name)):
                source = kind(str(path), self.options, self.skip_bad)
                source.labelled = False
                source.path_option = "--input"
                source.skipped = self.source.skipped
                self._predict_source = source
                return source.files("train")
        return unlabelled([path])

    @property
    def predicts_one_image(self) -> bool:
        """Whether `predict_path` is an image itself, not a folder or a table."""
        path = Path(self.predict_path or "")
        return path.is_file() and not any(kind.reads(Path(path.name)) for kind in IMAGE_TABLES)

    def other_columns(self, split: str, indices: list[int]) -> dict[str, list[Any]]:
        is_predict = split == "predict"
        source = self._predict_source if is_predict else self.source
        if not isinstance(source, LabelledTables):
            return {}
        origin = "train" if is_predict else source.split_in_data(split)
        return source.other_columns(origin, self._split(split).rows[indices])

    @property
    def predict_samples(self) -> list[str]:
        """Paths of the images to predict, or names in a table; "index" in a batch counts them."""
        return self.dataset("predict").names

    def predict_state(self) -> Iterable[str]:
        """Paths, sizes and times of all files."""
        for path in self._split("predict").items:
            yield printable(path)
            with suppress(OSError):  # a table may name a file that is missing
                status = os.stat(path)
                yield f"{status.st_size} {status.st_mtime_ns}"

    def load(self, split: str) -> BatchedDataset:
        """In memory if the decoded images fit, else a stream."""
        records = self._split(split)
        labelled = split != "predict"
        channels = self._layout["channels"]
        size = self._layout["image_size"]
        any_size = self.image_size is not None
        prepare = ResizeAndCrop.of(self._layout)
        if split == "train" and not self.crops_training:
            prepare = replace(prepare, crop_pct=1.0)
        if len(records) * channels * size**2 > self.loading.memory_limit_mb * 2**20:
            return StreamedImages(records, labelled, channels, prepare, self.skip_bad, any_size)
        pixels, good = decode_all(records, channels, prepare, any_size, self.skip_bad)
        if not good:
            raise DataError(
                f"none of the {len(records)} image files can be read, such as {records.name(0)}."
            )
        bad = sorted({*range(len(records))}.difference(good))
        if bad:
            rejected = records.select(bad)
            named = [rejected.name(i) for i in range(len(bad))]
            self._skipped += named if labelled else rejected.identifiers()[1]
            records = records.select(good)
            self._records[split] = records
        if labelled:
            return MemoryImages(pixels, records.labels)
        return MemoryImages(pixels, None, records.identifiers()[1])

    def sample_names(self, split: str) -> tuple[str, list[Any]]:
        """A column that tells the samples of a split apart, in the order of "index"; its name."""
        return self._split(split).identifiers()

    def training_key(self) -> str:
        """As in the base class, of paths relative to the folder of the data, which may be moved."""
        folder = f"{self.source.local_path}{os.sep}"
        names = self.source.split("train").identifiers()[1]
        return content_key(*(str(name).removeprefix(folder) for name in names))

    def on_before_batch_transfer(
        self, batch: dict[str, Any], dataloader_idx: int
    ) -> dict[str, Any]:
        """Passes on what a worker reports: an error is raised here, skipped files are counted."""
        if "error" in batch:
            raise batch["error"]
        self._skipped += batch.pop("skipped", [])
        return batch


class UnlabelledImageData(ImageData):
    """Batches of images as `ImageData`, for tasks without labels: also from a folder of images.

    Such images, the source `images`, have no classes and label 0. A part is held out for
    validation, unless there are folders train/ and val/. Images of a single class folder are read
    so, too.

    Args:
        source: Format of the data; null: as the path shows, or digits without a path; digits: 1,797
            embedded handwritten digits; folder: images in train/CLASS/, or only in CLASS/; images:
            images at any depth of a folder, without classes; csv, jsonl: files that name your
            images; hub: a data set of the Hugging Face Hub, or Parquet files named by split.
        kwargs: Those of `ImageData`.
    """

    sources = UNLABELLED_SOURCES
    needs_classes = False

    def __init__(
        self,
        source: Literal["digits", "folder", "images", "csv", "jsonl", "hub"] | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(source=source, **kwargs)
        self.source.problem_option = "--data.dataset.problem_type"
