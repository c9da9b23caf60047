"""Random changes to a whole batch at once, on its device, where each image draws numbers of its own.

All draws come from torch's global generator of the batch's device: whoever seeds it before a batch fixes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datamodules.vision.rand_augment import MAX_MAGNITUDE, RandAugment


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images; zero turns a part off.

    Args:
        resized_crop: Smallest share of the area that a random crop keeps before it is resized back, in (0, 1).
        crop_padding: Pixels of black added on each side before a random crop of the old size.
        flip: Probability of a left-right flip.
        rand_augment_ops: Operations of RandAugment per image (Cubuk 2020).
        rand_augment_magnitude: Their strength, 0 to 30.
        erase: Probability that a rectangle is set to the mean colour (Zhong 2020).
        mixup: Alpha of the Beta distribution of the mixing weight (Zhang 2018); 0.2 to 1.
        cutmix: The same for pasted rectangles (Yun 2019); with both on, each image takes one of them.

    Raises:
        ValueError: A value out of its range.
    """

    resized_crop: float = 0.0
    crop_padding: int = 0
    flip: float = 0.0
    rand_augment_ops: int = 0
    rand_augment_magnitude: int = 9
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("resized_crop", "flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must lie between 0 and 1.")
        for name in (
            "crop_padding",
            "rand_augment_ops",
            "rand_augment_magnitude",
            "mixup",
            "cutmix",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must not be negative.")
        if self.rand_augment_magnitude > MAX_MAGNITUDE:
            raise ValueError(
                f"rand_augment_magnitude is {self.rand_augment_magnitude}, but ends at {MAX_MAGNITUDE}."
            )


class ResizedCrop(nn.Module):
    """Crops a random share of the area, aspect ratio 3/4 to 4/3, and resizes it back, bilinearly (Szegedy 2015)."""

    def __init__(self, config: AugmentConfig) -> None:
        super().__init__()
        self.smallest = config.resized_crop

    @staticmethod
    def wanted(config: AugmentConfig) -> bool:
        return config.resized_crop > 0

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, Y, X) -> uint8 (B, C, Y, X)."""
        draws = torch.rand(4, len(images), device=images.device)
        area = self.smallest + (1 - self.smallest) * draws[0]
        stretch = (4 / 3) ** (draws[1] - 0.5)  # square root of the aspect ratio
        height, width = (area.sqrt() / stretch).clamp(max=1), (area.sqrt() * stretch).clamp(max=1)
        # Centre of the crop in [-1, 1], such that it stays inside: offsets in units of half the image.
        down, right = (1 - height) * (2 * draws[2] - 1), (1 - width) * (2 * draws[3] - 1)
        zero = torch.zeros_like(width)
        # rows of the matrix: (B, 6) -> (B, 2, 3)
        theta = torch.stack([width, zero, right, zero, height, down], dim=1).reshape(-1, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        out = F.grid_sample(
            images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False
        )
        return out.round_().to(torch.uint8)


class Crop(nn.Module):
    """Pads with black, then crops each image at its own place."""

    def __init__(self, config: AugmentConfig) -> None:
        super().__init__()
        self.padding = config.crop_padding

    @staticmethod
    def wanted(config: AugmentConfig) -> bool:
        return config.crop_padding > 0

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, Y, X) -> uint8 (B, C, Y, X)."""
        b, c, y, x = images.shape
        down, right = torch.randint(2 * self.padding + 1, (2, b, 1, 1), device=images.device)
        rows = down + torch.arange(y, device=images.device)[:, None]
        columns = right + torch.arange(x, device=images.device)
        # places in the padded image, one for all channels: (B, Y, X) -> (B, C, Y * X)
        places = (rows * (x + 2 * self.padding) + columns).reshape(b, 1, -1).expand(-1, c, -1)
        # (B, C, Y * X) -> (B, C, Y, X)
        return F.pad(images, [self.padding] * 4).flatten(2).gather(2, places).reshape(b, c, y, x)


class Flip(nn.Module):
    """Mirrors images left to right."""

    def __init__(self, config: AugmentConfig) -> None:
        super().__init__()
        self.probability = config.flip

    @staticmethod
    def wanted(config: AugmentConfig) -> bool:
        return config.flip > 0

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, Y, X) -> uint8 (B, C, Y, X)."""
        b = len(images)
        chosen = torch.rand(b, device=images.device) < self.probability
        # picking whole images from both kinds is five times as fast as a choice for each pixel
        return torch.cat([images, images.flip(-1)]).index_select(
            0, torch.arange(b, device=images.device) + b * chosen
        )


class RandomOps(RandAugment):
    """RandAugment as configured."""

    def __init__(self, config: AugmentConfig) -> None:
        super().__init__(config.rand_augment_ops, config.rand_augment_magnitude)

    @staticmethod
    def wanted(config: AugmentConfig) -> bool:
        return config.rand_augment_ops > 0


AUGMENTATIONS: dict[str, type[ResizedCrop] | type[Crop] | type[Flip] | type[RandomOps]] = {
    "resized_crop": ResizedCrop,
    "crop": Crop,
    "flip": Flip,
    "rand_augment": RandomOps,
}


def normalise(images: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """uint8 (B, C, Y, X) -> float32 (B, C, Y, X): (value / 255 - mean) / std in each channel."""
    # one number per channel: (C,) -> (C, 1, 1)
    scale = torch.tensor([1 / (255 * s) for s in std], device=images.device).reshape(-1, 1, 1)
    shift = torch.tensor(
        [-m / s for m, s in zip(mean, std, strict=True)], device=images.device
    ).reshape(-1, 1, 1)
    return images.float().mul_(scale).add_(shift)


def random_boxes(area: Tensor, ratio: Tensor, y: int, x: int) -> Tensor:
    """A rectangle in each of B images, centred anywhere inside it and cut off at its borders.

    Args:
        area: (B,) share of the image.
        ratio: (B,) height over width.
        y, x: Size of the images in pixels.

    Returns:
        bool (B, 1, Y, X), true inside.
    """
    masks = []
    for side, length in (((area * ratio).sqrt(), y), ((area / ratio).sqrt(), x)):
        half = (side * length).round().clamp(max=length)
        start = (torch.rand_like(area) * length).floor() - (half / 2).floor()
        place = torch.arange(length, device=area.device)
        masks.append((place >= start[:, None]) & (place < (start + half)[:, None]))
    # (B, Y) and (B, X) -> (B, 1, Y, X)
    return masks[0][:, None, :, None] & masks[1][:, None, None, :]


class Augment(nn.Module):
    """The augmentations of a config in order: `forward` on pixels, then `normalise`, `erase` and `mix`.

    Args:
        config: What to do; the default does nothing.
    """

    def __init__(self, config: AugmentConfig) -> None:
        super().__init__()
        self.config = config
        self.steps = nn.Sequential(
            *(step(config) for step in AUGMENTATIONS.values() if step.wanted(config))
        )

    def forward(self, images: Tensor) -> Tensor:
        """Geometry and colour: uint8 (B, C, Y, X) -> uint8 (B, C, Y, X)."""
        with torch.autocast(
            images.device.type, enabled=False
        ):  # places of pixels need all their digits
            return self.steps(images)

    normalise = staticmethod(normalise)

    def erase(self, images: Tensor) -> Tensor:
        """Sets a rectangle, 2 to 33 % of the area, to zero (the mean): normalised float (B, C, Y, X), same out."""
        if self.config.erase == 0:
            return images
        chosen, area, ratio = torch.rand(3, len(images), device=images.device)
        boxes = random_boxes(0.02 + 0.31 * area, (10 / 3) ** (2 * ratio - 1), *images.shape[-2:])
        return images.masked_fill(boxes & (chosen < self.config.erase)[:, None, None, None], 0.0)

    def mix(self, images: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Mixup and CutMix of each image with another of the batch.

        Args:
            images: float (B, C, Y, X).
            labels: int64 (B,).
            num_classes: K.

        Returns:
            Images (B, C, Y, X), and targets float32 (B, K): the share of each class in the pixels, which sums to 1.
        """
        targets = F.one_hot(labels, num_classes).float()
        alphas = self.config.mixup, self.config.cutmix
        if not any(alphas):
            return images, targets
        keep = self._kept(images, *alphas)
        partner = torch.randperm(len(images), device=images.device)
        # share of the own label: (B, 1, Y, X) -> (B, 1)
        share = keep.float().mean((2, 3))
        return torch.lerp(images[partner], images, keep.to(images.dtype)), torch.lerp(
            targets[partner], targets, share
        )

    @staticmethod
    def _kept(images: Tensor, mixup: float, cutmix: float) -> Tensor:
        """How much of each pixel stays: (B, 1, Y, X) in [0, 1], constant for mixup, 0 or 1 for CutMix."""
        b, _, y, x = images.shape
        ones = torch.ones(b, device=images.device)

        def share(alpha: float) -> Tensor:  # (B,); checking the arguments would wait for the device
            return torch.distributions.Beta(
                ones * alpha, ones * alpha, validate_args=False
            ).sample()

        mixed, pasted = share(mixup or 1), 1 - share(cutmix or 1)
        use_cutmix = torch.rand(b, device=images.device) < (cutmix > 0) / (
            (cutmix > 0) + (mixup > 0)
        )
        boxes = random_boxes(pasted, ones, y, x)
        # (B,) -> (B, 1, 1, 1)
        return torch.where(
            use_cutmix[:, None, None, None], (~boxes).float(), mixed[:, None, None, None]
        )
