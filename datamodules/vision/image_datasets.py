"""A split as whole batches of pixels: decoded into memory, or streamed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from datamodules.utils.batching import epoch_permutation
from datamodules.utils.cores import usable_cores
from datamodules.utils.errors import DataError, UsageError
from datamodules.utils.progress import progress_bar
from datamodules.vision.decoding import ResizeAndCrop
from datamodules.vision.records import Records

IMAGES_PER_JOB = 256  # that a thread decodes at a time
STATISTICS_SAMPLE = 2048  # images that mean and standard deviation of a stream are taken from


class MemoryImages:
    """A decoded split, uint8 (S, C, H, W): a batch is one indexing operation.

    With labels as in `Records`, or for prediction the names of files.
    """

    in_memory = True

    def __init__(self, pixels: Tensor, labels: Tensor | None, names: Sequence[str] = ()) -> None:
        self.pixels = pixels
        self.labels = labels
        self.names = names

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index = torch.tensor(indices)
        batch: dict[str, Any] = {"image": self.pixels.index_select(0, index), "index": index}
        return batch | _labels_or_paths(self.labels, self.names, index)


class StreamedImages:
    """A split that is decoded batch by batch, in workers; batches are those of `MemoryImages`.

    What a worker reports is part of the batch ("error", "skipped"): an exception would come with
    its traceback. Batches have labels if `labelled`, else paths, for prediction; other arguments as
    in `decode_all`.
    """

    in_memory = False

    def __init__(
        self,
        records: Records,
        labelled: bool,
        channels: int,
        prepare: ResizeAndCrop,
        skip_bad: bool,
        any_size: bool = True,
    ) -> None:
        self.records = records
        self.labels = records.labels if labelled else None
        self.names = [] if labelled else records.identifiers()[1]
        self.channels = channels
        self.prepare = prepare
        self.skip_bad = skip_bad
        self.any_size = any_size

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        size = self.prepare.size
        pixels = torch.empty(len(indices), self.channels, size, size, dtype=torch.uint8)
        good: list[int] = []
        skipped = []
        for i in indices:
            try:
                image = self.records.prepared(i, self.channels, self.prepare, self.any_size)
                pixels[len(good)] = image
                good.append(i)
            except (DataError, UsageError) as error:
                if not (self.skip_bad and isinstance(error, DataError)):
                    return failed(error)
                skipped.append(self.names[i] if self.names else self.records.name(i))
        if not good and self.labels is not None:  # training needs images, prediction does not
            some = f"none of {len(skipped)} images of a batch can be read, such as {skipped[0]}"
            return failed(DataError(f"{some}: remove them."))
        index = torch.tensor(good, dtype=torch.long)
        batch: dict[str, Any] = {"image": pixels[: len(good)], "index": index}
        if skipped:
            batch["skipped"] = skipped
        return batch | _labels_or_paths(self.labels, self.names, index)


def failed(error: Exception) -> dict[str, Any]:
    """Raises an error, or in a worker returns a batch that has it."""
    if get_worker_info() is None:
        raise error
    return {"error": error}


def _labels_or_paths(labels: Tensor | None, names: Sequence[str], index: Tensor) -> dict[str, Any]:
    if labels is None:
        return {"path": [names[i] for i in index.tolist()]}
    return {"label": labels[index]}


def decode_all(
    records: Records, channels: int, prepare: ResizeAndCrop, any_size: bool, skip_bad: bool
) -> tuple[Tensor, list[int]]:
    """Decodes a whole split in threads.

    Images of another size are resized, or without `any_size` refused; unreadable ones are left out
    with `skip_bad`, instead of stopping at the first.

    Returns:
        Pixels uint8 (S, C, size, size), and the indices of the S images that were read.
    """
    size = prepare.size
    pixels = torch.empty(len(records), channels, size, size, dtype=torch.uint8)
    bad: set[int] = set()

    def decode_some(indices: range) -> int:
        for i in indices:
            try:
                pixels[i] = records.prepared(i, channels, prepare, any_size)
            except DataError:
                if not skip_bad:
                    raise
                bad.add(i)
        return len(indices)

    indices = range(len(records))
    jobs = [indices[i : i + IMAGES_PER_JOB] for i in range(0, len(records), IMAGES_PER_JOB)]
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        progress_bar("decoding images", len(records)) as advance,
    ):
        for count in pool.map(decode_some, jobs):  # an error cancels the jobs that are left
            advance(count)
    good = [i for i in indices if i not in bad]
    return pixels[good] if bad else pixels, good


def channel_statistics(dataset: MemoryImages | StreamedImages) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel in [0, 1]; of a stream, only a sample is read."""
    order: Sequence[int] = range(len(dataset))
    if not dataset.in_memory:
        permutation = epoch_permutation(len(dataset), seed=0, epoch=0)
        order = permutation[:STATISTICS_SAMPLE].tolist()
    counts = []  # of each of the 256 values, per channel
    for start in range(0, len(order), 1024):
        images = dataset[list(order[start : start + 1024])]["image"]
        # each channel: (B, H, W) -> (B * H * W,) -> (256,)
        counts.append([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)])
    probability = torch.stack([torch.stack(some) for some in counts]).sum(0).double()  # (C, 256)
    probability /= probability.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = probability @ values
    variance = (probability @ values.square() - mean.square()).clamp(min=0)
    std = variance.sqrt().clamp(min=1 / 255)
    return [round(v, 4) for v in mean.tolist()], [round(v, 4) for v in std.tolist()]
