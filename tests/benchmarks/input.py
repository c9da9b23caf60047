"""Images per second that reach a training step: batched on tensors, against torchvision.

    TESSERA_DATA=FOLDER python -m tests.benchmarks.input

CIFAR-10, batches of 128: crop + flip + normalise, then with RandAugment (2 operations, magnitude
9). torchvision works as its users run it: PIL images, transforms of one image at a time, two
workers of a `DataLoader`. Both start from decoded images, in turns. Ours runs in the training
process, in two threads.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.images import ImageData
from datamodules.vision.augment import Augment, AugmentConfig, normalise
from tests.benchmarks import _compare
from tests.benchmarks.cifar_peer import PilImages

BATCH = 128
RECIPES = {
    "crop + flip + normalise": AugmentConfig(crop_padding=4, flip=0.5),
    "with RandAugment": AugmentConfig(crop_padding=4, flip=0.5, rand_augment_ops=2),
}
Batches = Callable[[], Iterator[Tensor]]


def torchvision_batches(data: ImageData, config: AugmentConfig) -> Batches:
    """The same augmentations as torchvision's `transforms`, in two workers."""
    from torchvision import transforms

    metadata = data.metadata()
    steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    if config.rand_augment_ops:
        steps.append(transforms.RandAugment(config.rand_augment_ops, config.rand_augment_magnitude))
    steps += [transforms.ToTensor(), transforms.Normalize(metadata["mean"], metadata["std"])]
    images = PilImages(_compare.data_folder("cifar10_jpeg"), "train", transforms.Compose(steps))
    workers = {"num_workers": 2, "persistent_workers": True}
    loader = DataLoader(images, BATCH, shuffle=True, drop_last=True, **workers)
    return lambda: (batch for batch, _ in loader)


def our_batches(data: ImageData, config: AugmentConfig) -> Batches:
    """The datamodule's loader and batched augmentation, in this process."""
    metadata = data.metadata()
    augment = Augment(config)
    loader = data.train_dataloader()
    mean, std = metadata["mean"], metadata["std"]
    return lambda: (normalise(augment(batch["image"]), mean, std) for batch in loader)


def images_per_second(batches: Batches, seconds: float) -> float:
    """Speed of an epoch, or of its first `seconds`, after the first batch: workers are up then."""
    iterator = batches()
    next(iterator)
    count = 0
    start = time.perf_counter()
    for batch in iterator:
        count += len(batch)
        if time.perf_counter() - start > seconds:
            break
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measures and prints a table for each recipe."""
    parser = _compare.arguments(__doc__, 5)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round at most")
    options = parser.parse_args()
    torch.set_num_threads(2)
    data = ImageData("hub", str(_compare.data_folder("cifar10_jpeg")), batch_size=BATCH)
    start = time.perf_counter()
    data.setup("fit")
    print(f"50,000 images read, decoded and measured in {time.perf_counter() - start:.1f} s")
    for name, config in RECIPES.items():
        batches = {
            "torchvision": torchvision_batches(data, config),
            "tessera": our_batches(data, config),
        }
        results = {side: _compare.Result() for side in batches}
        for number in range(options.rounds + 1):
            for side, result in results.items():
                rate = images_per_second(batches[side], options.seconds)
                if number or not options.rounds:
                    result.rounds.append({"rate": rate})
        print(f"\n{name}\n{_compare.table(results, 'images/s')}", flush=True)


if __name__ == "__main__":
    main()
