"""RandAugment (Cubuk 2020) on a batch: each image draws its operations and their signs, each operation runs once.

The fourteen operations, their strengths and their arithmetic are those of `torchvision.transforms.v2.RandAugment`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MAX_MAGNITUDE = 30


def move_pixels(images: Tensor, columns: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> Tensor:
    """Affine map of each image, nearest neighbour, black where nothing lands.

    Args:
        images: uint8 (B, C, Y, X).
        columns: (a, b, t), each (B,): output pixel (u, v), from the centre, comes from column a u + b v + t,
        rows: (c, d, s): and from row c u + d v + s.
    """
    b, _, y, x = images.shape
    u = torch.arange(x, device=images.device) - (x - 1) / 2
    v = (torch.arange(y, device=images.device) - (y - 1) / 2)[:, None]
    sources = []
    for numbers, side in ((columns, x), (rows, y)):
        of_u, of_v, shift = (n[:, None, None] for n in numbers)
        sources.append((of_u * u + of_v * v + shift + (side - 1) / 2).round())  # (B, Y, X)
    column, row = sources
    inside = (column >= 0) & (column < x) & (row >= 0) & (row < y)
    # one index per pixel for all channels: (B, Y, X) -> (B, 1, Y * X)
    index = (row * x + column).long().masked_fill_(~inside, 0).flatten(1)[:, None]
    # (B, C, Y * X) -> (B, C, Y, X)
    moved = (
        images.flatten(2).gather(2, index.expand(b, images.shape[1], y * x)).reshape(images.shape)
    )
    return moved * inside[:, None]


def blend(images: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """factor images + (1 - factor) other, cut to [0, 255]: uint8 (B, C, Y, X), factor (B,)."""
    factor = factor[:, None, None, None]
    return (images * factor + other * (1 - factor)).clamp_(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """Luminance, whole numbers: uint8 (B, C, Y, X) -> float (B, 1, Y, X)."""
    if images.shape[1] == 1:
        return images.float()
    red, green, blue = images.split(1, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114).floor_()


def shear_x(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return move_pixels(images, (one, strength, strength * images.shape[2] / 2), (zero, one, zero))


def shear_y(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return move_pixels(images, (one, zero, zero), (strength, one, strength * images.shape[3] / 2))


def translate_x(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return move_pixels(images, (one, zero, -strength.trunc()), (zero, one, zero))


def translate_y(images: Tensor, strength: Tensor) -> Tensor:
    one, zero = torch.ones_like(strength), torch.zeros_like(strength)
    return move_pixels(images, (one, zero, zero), (zero, one, -strength.trunc()))


def rotate(images: Tensor, strength: Tensor) -> Tensor:
    sin, cos, zero = strength.deg2rad().sin(), strength.deg2rad().cos(), torch.zeros_like(strength)
    return move_pixels(images, (cos, -sin, zero), (sin, cos, zero))


def brightness(images: Tensor, strength: Tensor) -> Tensor:
    return (images * (1 + strength)[:, None, None, None]).clamp_(0, 255).to(torch.uint8)


def colour(images: Tensor, strength: Tensor) -> Tensor:
    return blend(images, grey(images), 1 + strength) if images.shape[1] == 3 else images


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    return blend(images, grey(images).mean((1, 2, 3), keepdim=True), 1 + strength)


def sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Blends the inner pixels with a blur whose 3 x 3 weights are 1, and 5 in the middle, over 13."""
    if min(images.shape[2:]) <= 2:
        return images
    pixels = images.float()
    triples = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
    nines = triples[..., :-2, :] + triples[..., 1:-1, :] + triples[..., 2:, :]
    middle = pixels[..., 1:-1, 1:-1]
    out = images.clone()
    out[..., 1:-1, 1:-1] = blend(
        middle, nines.add_(middle, alpha=4).div_(13).round_(), 1 + strength
    )
    return out


def posterize(images: Tensor, strength: Tensor) -> Tensor:
    dropped = 2 ** (8 - strength)  # strength is the number of bits to keep
    return images & (256 - dropped).clamp(max=255).to(torch.uint8)[:, None, None, None]


def solarize(images: Tensor, strength: Tensor) -> Tensor:
    return images ^ (
        (images >= 255 * strength[:, None, None, None]) * torch.tensor(255, dtype=torch.uint8)
    )  # 255 - value


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    from torchvision.transforms.v2.functional import autocontrast

    return autocontrast(images)


def equalize(images: Tensor, strength: Tensor) -> Tensor:
    from torchvision.transforms.v2.functional import equalize

    return equalize(images)


@dataclass(frozen=True)
class RandOp:
    """An operation of RandAugment.

    Args:
        apply: From the images that drew it, uint8 (B, C, Y, X), and their strengths, float (B,), to uint8 (B, C, Y, X).
        strength: From the magnitude in [0, 1] and the side of the images in pixels to the strength.
        signed: Whether each image draws the sign of the strength.
    """

    apply: Callable[[Tensor, Tensor], Tensor]
    strength: Callable[[float, int], float] = lambda level, side: 0.0
    signed: bool = False


RAND_AUGMENT_OPS: dict[str, RandOp] = {
    "Identity": RandOp(lambda images, strength: images),
    "ShearX": RandOp(shear_x, lambda level, side: 0.3 * level, signed=True),
    "ShearY": RandOp(shear_y, lambda level, side: 0.3 * level, signed=True),
    "TranslateX": RandOp(translate_x, lambda level, side: 150 / 331 * side * level, signed=True),
    "TranslateY": RandOp(translate_y, lambda level, side: 150 / 331 * side * level, signed=True),
    "Rotate": RandOp(rotate, lambda level, side: 30 * level, signed=True),
    "Brightness": RandOp(brightness, lambda level, side: 0.9 * level, signed=True),
    "Color": RandOp(colour, lambda level, side: 0.9 * level, signed=True),
    "Contrast": RandOp(contrast, lambda level, side: 0.9 * level, signed=True),
    "Sharpness": RandOp(sharpness, lambda level, side: 0.9 * level, signed=True),
    "Posterize": RandOp(posterize, lambda level, side: round(8 - 4 * level)),
    "Solarize": RandOp(solarize, lambda level, side: 1 - level),
    "AutoContrast": RandOp(autocontrast),
    "Equalize": RandOp(equalize),
}


class RandAugment(nn.Module):
    """Applies `num_ops` operations to each image, one after another, each drawn from all of `RAND_AUGMENT_OPS`.

    Args:
        num_ops: Operations per image.
        magnitude: Strength, 0 to 30.
    """

    def __init__(self, num_ops: int, magnitude: int) -> None:
        super().__init__()
        self.num_ops, self.level = num_ops, magnitude / MAX_MAGNITUDE

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, Y, X) -> uint8 (B, C, Y, X)."""
        for _ in range(self.num_ops):
            images = self._once(images)
        return images

    def _once(self, images: Tensor) -> Tensor:
        drawn = torch.randint(len(RAND_AUGMENT_OPS), (len(images),), device=images.device)
        sign = torch.randint(2, (len(images),), device=images.device) * 2.0 - 1
        counts = drawn.bincount(minlength=len(RAND_AUGMENT_OPS)).tolist()
        order = drawn.argsort(stable=True)  # images of one operation side by side
        groups = zip(
            images.index_select(0, order).split(counts), sign[order].split(counts), strict=True
        )
        done = []
        for op, (group, signs) in zip(RAND_AUGMENT_OPS.values(), groups, strict=True):
            if len(group):
                signs = signs if op.signed else torch.ones_like(signs)
                done.append(op.apply(group, signs * op.strength(self.level, images.shape[-1])))
        return torch.cat(done).index_select(0, order.argsort())
