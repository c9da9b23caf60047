"""Teachers of image classifiers: our networks, any classifier of timm, those of torchvision."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.vision.augment import denormalise, normalise
from tasks.errors import UsageError
from tasks.training.distillation import TEACHER, Teacher, check_problem, match_rows
from tasks.vit.architectures import described_network, find_described
from tasks.vit.other_classifiers import Found, find_other


class ImageTeacher(Teacher):
    """A teacher with its own normalisation and image size.

    Args:
        source: See `load_teacher`.
        found: The network.
        metadata: Of the student's data: `class_names`, `channels`, `mean` and `std`.
    """

    def __init__(self, source: str, found: Found, metadata: Mapping[str, Any]) -> None:
        super().__init__(
            found.net, match_rows(source, found.names, found.num_classes, metadata["class_names"])
        )
        self.found = found
        self.channels, *self.size = found.shape
        self.mean = metadata["mean"]
        self.std = metadata["std"]
        if metadata["channels"] not in (1, self.channels):
            raise UsageError(
                f"{TEACHER} {source} reads images of {self.channels} channels, and the data have "
                f"{metadata['channels']}: give another teacher"
            )

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (B, K) of pixels (B, C, H, W) that the student's mean and std have normalised."""
        images = denormalise(pixels, self.mean, self.std)
        if images.shape[-2:] != tuple(self.size):
            images = F.interpolate(images, self.size, mode="bilinear", antialias=True)
        # Grey ones in each channel, with memory of their own, as `normalise` writes into them.
        images = images.expand(-1, self.channels, -1, -1).contiguous()
        return self.in_order(self.net(normalise(images, self.found.mean, self.found.std)))


def load_teacher(source: str, metadata: Mapping[str, Any]) -> ImageTeacher:
    """Loads a teacher.

    Args:
        source: See `TeacherConfig.path`.
        metadata: Of the student's data.

    Raises:
        UsageError: There is no such model, it is of another task, has other classes or cannot read
            the images, or its file holds code.
        DataError: It cannot be downloaded.
    """
    found = find_other(source, TEACHER) or find_ours(source)
    check_problem(source, found.targets)
    return ImageTeacher(source, found, metadata)


def find_ours(source: str) -> Found:
    """Finds what `--model.pretrained` takes."""
    model = find_described(source, TEACHER)
    net, metadata = described_network(model)
    size = net.config.image_size
    shape = (metadata["channels"], size, size)
    names = [list(names) for names in (model.class_names, model.titles) if names]
    classes = len(metadata["class_names"])
    mean, std = metadata["mean"], metadata["std"]
    return Found(net, names, classes, shape, mean, std, model.resizing, model.targets)
