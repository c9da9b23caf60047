"""What tasks on images share: augmentation and normalisation."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from datamodules.vision.augment import Augment, AugmentConfig, normalise
from tasks.base import Task


class ImageTask(Task):
    """A task whose data are images.

    Args:
        augment: Random augmentation of training images.
        kwargs: Those of `Task`.
    """

    needed_metadata: Sequence[str] = ("channels", "mean", "std")

    def __init__(self, augment: AugmentConfig = AugmentConfig(), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.augment = Augment(augment)

    def normalised(self, images: Tensor) -> Tensor:
        """Normalises uint8 images (B, C, H, W) with the mean and std of the training data."""
        return normalise(images, self.metadata["mean"], self.metadata["std"])
