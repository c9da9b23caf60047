"""RandAugment (Cubuk 2020) on a batch: operations and signs are sampled for each image.

Each operation runs once, on all images that have it. The fourteen operations and their strengths
are those of `torchvision.transforms.v2.RandAugment`, which applies one operation to a whole batch.
"""

from collections.abc import Callable
from math import atan, degrees
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

MAX_MAGNITUDE = 30


def sharpness(images: Tensor, change: float) -> Tensor:
    """As `adjust_sharpness(images, 1 + change)`, three times as fast, by sums of shifted images.

    The 3 x 3 weights of the blur are 1, and 5 in the middle, over 13; the border is kept.
    """
    if min(images.shape[2:]) <= 2:
        return images
    pixels = images.float()
    triples = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
    blurred = triples[..., :-2, :] + triples[..., 1:-1, :] + triples[..., 2:, :]
    inner = pixels[..., 1:-1, 1:-1]
    blurred = blurred.add_(inner, alpha=4).div_(13).round_()
    out = images.clone()
    sharper = inner * (1 + change) - blurred * change
    out[..., 1:-1, 1:-1] = sharper.clamp_(0, 255).to(torch.uint8)
    return out


def _affine(
    images: Tensor, translate: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0, 0)
) -> Tensor:
    """Translation in pixels, or shear by slopes, which keeps the top left corner in its place."""
    angles = [degrees(atan(slope)) for slope in shear]
    return F.affine(images, 0.0, list(translate), 1.0, angles, center=[0, 0])


class Operation(NamedTuple):
    """An operation of RandAugment, on uint8 (B, C, H, W)."""

    apply: Callable[[Tensor, float], Tensor]  # images, strength -> images
    strength: Callable[[float, int], float] = lambda level, side: 0.0  # from magnitude, pixels
    signed: bool = False  # whether the sign of the strength is random


def _slope(level: float, side: int) -> float:
    return 0.3 * level


def _pixels(level: float, side: int) -> float:
    return 150 / 331 * side * level


def _change(level: float, side: int) -> float:
    return 0.9 * level


OPERATIONS: dict[str, Operation] = {
    "Identity": Operation(lambda images, _: images),
    "ShearX": Operation(lambda images, s: _affine(images, shear=(s, 0)), _slope, True),
    "ShearY": Operation(lambda images, s: _affine(images, shear=(0, s)), _slope, True),
    "TranslateX": Operation(lambda images, s: _affine(images, (int(s), 0)), _pixels, True),
    "TranslateY": Operation(lambda images, s: _affine(images, (0, int(s))), _pixels, True),
    "Rotate": Operation(F.rotate, lambda level, side: 30 * level, True),
    "Brightness": Operation(lambda images, s: F.adjust_brightness(images, 1 + s), _change, True),
    "Color": Operation(lambda images, s: F.adjust_saturation(images, 1 + s), _change, True),
    "Contrast": Operation(lambda images, s: F.adjust_contrast(images, 1 + s), _change, True),
    "Sharpness": Operation(sharpness, _change, True),
    "Posterize": Operation(
        lambda images, bits: F.posterize(images, int(bits)),
        lambda level, side: round(8 - 4 * level),
    ),
    "Solarize": Operation(
        lambda images, s: torch.where(images >= 255 * s, 255 - images, images),
        lambda level, side: 1 - level,
    ),
    "AutoContrast": Operation(lambda images, _: F.autocontrast(images)),
    "Equalize": Operation(lambda images, _: F.equalize(images)),
}


class RandAugment(nn.Module):
    """Applies `num_ops` operations, sampled from `OPERATIONS`, to each image; magnitude 0 to 30."""

    def __init__(self, num_ops: int, magnitude: int) -> None:
        super().__init__()
        self.num_ops = num_ops
        self.level = magnitude / MAX_MAGNITUDE

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> uint8 (B, C, H, W)."""
        for _ in range(self.num_ops):
            images = self._apply_one(images)
        return images

    def _apply_one(self, images: Tensor) -> Tensor:
        operation = torch.randint(len(OPERATIONS), (len(images),), device=images.device)
        is_positive = torch.randint(2, (len(images),), device=images.device)
        signed = torch.tensor([op.signed for op in OPERATIONS.values()], device=images.device)
        # Images of one operation and one sign go through it together: they are sorted for it.
        group = 2 * operation + is_positive.where(signed[operation], 1)
        order = group.argsort(stable=True)
        sizes = group.bincount(minlength=2 * len(OPERATIONS)).tolist()
        groups = iter(images.index_select(0, order).split(sizes))
        done = []
        for op in OPERATIONS.values():
            strength = op.strength(self.level, images.shape[-1])
            for sign in (-1, 1):
                members = next(groups)
                if len(members):
                    done.append(op.apply(members, sign * strength))
        return torch.cat(done).index_select(0, order.argsort())
