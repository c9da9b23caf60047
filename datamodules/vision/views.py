"""Views of images for test-time augmentation: the outputs of a network are averaged over them."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

ViewsName = Literal["none", "flip", "ten_crop"]
ENLARGED = 8 / 7  # before crops: 256 pixels for 224


def flipped(images: Tensor) -> list[Tensor]:
    """The images mirrored left to right, and as they are (Simonyan 2015)."""
    return [images.flip(-1), images]


def ten_crops(images: Tensor) -> list[Tensor]:
    """Corners and centre of the enlarged images, and these mirrored (Krizhevsky 2012)."""
    from torchvision.transforms.functional import resize, ten_crop  # slow to import

    h, w = images.shape[-2:]
    larger = resize(images, [round(ENLARGED * h), round(ENLARGED * w)], antialias=True)
    crops = [*ten_crop(larger, [h, w])]
    return [*crops[:4], *crops[5:], crops[4]]


# From images (B, C, H, W) to views of the same shape. The last is the one that `PooledVectors`
# keeps: the images as they are, or their centre.
VIEWS: dict[ViewsName, Callable[[Tensor], list[Tensor]]] = {
    "none": lambda images: [images],
    "flip": flipped,
    "ten_crop": ten_crops,
}


def average_over_views(net: Callable[[Tensor], Tensor], images: Tensor, views: ViewsName) -> Tensor:
    """Mean of the logits (B, K) of a network over the views of images (B, C, H, W)."""
    first, *others = VIEWS[views](images)
    logits = net(first)
    for view in others:
        logits = logits + net(view)
    return logits / (1 + len(others)) if others else logits
