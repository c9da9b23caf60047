"""A split as whole batches of pixels: from memory, or decoded on the way."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from datamodules.base import BatchedDataset
from datamodules.utils.batching import epoch_order
from datamodules.utils.errors import DataError, UsageError
from datamodules.vision.decoding import read_image
from datamodules.vision.records import Records


class MemoryImages:
    """A decoded split: a batch is one indexing operation.

    Args:
        pixels: uint8 (S, C, Y, X).
        labels: int64 (S,), or None where there are none (prediction).
        names: Of the files, for prediction.
    """

    in_memory = True

    def __init__(self, pixels: Tensor, labels: Tensor | None, names: Sequence[str] = ()) -> None:
        self.pixels, self.labels, self.names = pixels, labels, names

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index = torch.tensor(indices)
        batch: dict[str, Any] = {"image": self.pixels.index_select(0, index), "index": index}
        return batch | _whose(self.labels, self.names, index)


class StreamedImages:
    """A split that is decoded batch by batch, in workers; the batches equal those of `MemoryImages`.

    What a worker has to report travels in the batch ("error", "skipped"): an exception would arrive as a page of text.
    """

    in_memory = False

    def __init__(
        self,
        pictures: Records,
        labelled: bool,
        channels: int,
        size: int,
        skip_bad: bool,
        resize: bool = True,
    ) -> None:
        self.resize = resize  # else an image of another size is bad
        self.pictures, self.labels = pictures, pictures.labels if labelled else None
        self.names: Sequence[str] = (
            () if labelled else [pictures.name(i) for i in range(len(pictures))]
        )
        self.channels, self.size, self.skip_bad = channels, size, skip_bad

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        images, good, skipped = [], [], []
        for i in indices:
            try:
                images.append(read_image(self.pictures, i, self.channels, self.size, self.resize))
                good.append(i)
            except (DataError, UsageError) as error:
                skipped.append(self.pictures.name(i))
                if (
                    not self.skip_bad
                    or isinstance(error, UsageError)
                    or len(skipped) == len(indices)
                ):
                    if get_worker_info() is None:
                        raise
                    return {"error": str(error)}
        batch: dict[str, Any] = {"image": torch.stack(images), "index": torch.tensor(good)}
        if skipped:
            batch["skipped"] = skipped
        return batch | _whose(self.labels, self.names, batch["index"])


def _whose(labels: Tensor | None, names: Sequence[str], index: Tensor) -> dict[str, Any]:
    return (
        {"label": labels[index]}
        if labels is not None
        else {"path": [names[i] for i in index.tolist()]}
    )


def channel_statistics(dataset: BatchedDataset) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel in [0, 1], four digits; of 2,048 drawn images of a stream."""
    order = (
        range(len(dataset))
        if dataset.in_memory
        else epoch_order(len(dataset), seed=0, epoch=0)[:2048]
    )
    counts: list[
        Tensor
    ] = []  # how often each of the 256 values occurs, per channel: exact, and fast on bytes
    for start in range(0, len(order), 1024):
        channels = dataset[list(order[start : start + 1024])]["image"].unbind(1)
        counts.append(
            torch.stack([channel.flatten().bincount(minlength=256) for channel in channels])
        )
    share = torch.stack(counts).sum(0).double()  # (C, 256)
    share /= share.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    std = (share @ values.square() - mean.square()).clamp(min=0).sqrt().clamp(min=1 / 255)
    return [round(v, 4) for v in mean.tolist()], [round(v, 4) for v in std.tolist()]
