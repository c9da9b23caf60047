"""Images per second that reach a training step: batched on tensors in memory, against torchvision in a `DataLoader`.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.input

CIFAR-10, batches of 128: crop + flip + normalise, then the same with RandAugment (2 operations, magnitude 9) added.
torchvision works as its users run it: PIL images, transforms of one image at a time, two workers. Both start from
decoded images, and both are measured in turns (A B A B ...); the ratio is that of the medians. Ours runs in the
training process, in `--threads` threads, two by default as there are two workers.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules.images import ImageData
from datamodules.vision.augment import Augment, AugmentConfig, normalise

BATCH = 128
RECIPES = {
    "crop + flip + normalise": AugmentConfig(crop_padding=4, flip=0.5),
    "with RandAugment": AugmentConfig(crop_padding=4, flip=0.5, rand_augment_ops=2),
}


class PilImages(Dataset):
    """Decoded PIL images and a transform for each, as torchvision's own CIFAR10 gives them."""

    def __init__(self, images: list[Any], transform: Callable[[Any], Tensor]) -> None:
        self.images, self.transform = images, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Tensor:
        return self.transform(self.images[i])


def torchvision_batches(data: ImageData, config: AugmentConfig) -> Callable[[], Iterator[Tensor]]:
    """The same augmentations as torchvision's `transforms`, in two workers."""
    from torchvision import transforms

    metadata, train = data.metadata(), data.dataset("train")
    pixels = train[list(range(len(train)))]["image"]
    to_pil = transforms.ToPILImage()
    steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    if config.rand_augment_ops:
        steps.append(transforms.RandAugment(config.rand_augment_ops, config.rand_augment_magnitude))
    steps += [transforms.ToTensor(), transforms.Normalize(metadata["mean"], metadata["std"])]
    images = PilImages([to_pil(image) for image in pixels], transforms.Compose(steps))
    loader = DataLoader(
        images, BATCH, shuffle=True, num_workers=2, persistent_workers=True, drop_last=True
    )
    return lambda: iter(loader)


def our_batches(data: ImageData, config: AugmentConfig) -> Callable[[], Iterator[Tensor]]:
    """The datamodule's loader and batched augmentation, in this process."""
    metadata, augment, loader = data.metadata(), Augment(config), data.train_dataloader()

    def batches() -> Iterator[Tensor]:
        for batch in loader:
            yield normalise(augment(batch["image"]), metadata["mean"], metadata["std"])

    return batches


def images_per_second(batches: Callable[[], Iterator[Tensor]], seconds: float) -> float:
    """Speed of one pass, or of its first `seconds`; counted from the first batch on, when workers are up."""
    iterator = batches()
    next(iterator)
    count, start = 0, time.perf_counter()
    for batch in iterator:
        count += len(batch)
        if time.perf_counter() - start > seconds:
            break
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each, after one that is not counted"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn at most")
    parser.add_argument("--threads", type=int, default=2, help="of our side")
    options = parser.parse_args()
    folder = os.environ.get("TESSERA_DATA")
    if not folder:
        raise SystemExit("TESSERA_DATA is not set: it names the folder that holds cifar10_jpeg/.")
    torch.set_num_threads(options.threads)
    data = ImageData("hub", str(Path(folder) / "cifar10_jpeg"), batch_size=BATCH)
    start = time.perf_counter()
    data.setup("fit")
    print(f"50,000 images read, decoded and measured in {time.perf_counter() - start:.1f} s\n")
    print(
        f"{'images per second, medians':<28}{'torchvision':>12}{'ours':>10}{'ratio':>8}{'   range of ours':>18}"
    )
    for name, config in RECIPES.items():
        contenders = torchvision_batches(data, config), our_batches(data, config)
        turns = [
            [images_per_second(c, options.seconds) for c in contenders]
            for _ in range(options.rounds + 1)
        ][1:]
        theirs, ours = ([turn[i] for turn in turns] for i in (0, 1))
        ratio = median(ours) / median(theirs)
        spread = f"{min(ours):,.0f} to {max(ours):,.0f}"
        print(
            f"{name:<28}{median(theirs):>12,.0f}{median(ours):>10,.0f}{ratio:>8.1f}{spread:>18}",
            flush=True,
        )


if __name__ == "__main__":
    main()
