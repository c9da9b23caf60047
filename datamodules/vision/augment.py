"""Random augmentation of a whole batch at once, on its device, with random numbers for each image.

They come from torch's global generator of that device. (The transforms of torchvision sample
once for a whole batch.)
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from datamodules.utils.errors import UsageError


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images; zero turns a part off.

    Args:
        resized_crop: Smallest fraction of the area that a random crop keeps before it is resized
            back, up to 1.
        crop_padding: Pixels of black added on each side before a random crop of the old size.
        flip: Probability of a left-right flip.
        rand_augment_ops: Operations of RandAugment per image (Cubuk 2020).
        rand_augment_magnitude: Their strength, 0 to 30.
        erase: Probability that a rectangle is set to the mean colour (Zhong 2020).
        mixup: Alpha of the Beta distribution of the mixing weight (Zhang 2018); 0.2 to 1.
        cutmix: The same for pasted rectangles (Yun 2019); with both on, each image takes one.
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
        limits = {"resized_crop": 1, "flip": 1, "erase": 1, "rand_augment_magnitude": 30}
        for name, value in asdict(self).items():
            if name in limits and not 0 <= value <= limits[name]:
                raise UsageError(
                    f"--model.augment.{name} is {value}, but must lie between 0 and {limits[name]}."
                )
            if value < 0:
                raise UsageError(f"--model.augment.{name} is {value}, but must not be negative.")

    @property
    def in_use(self) -> list[str]:
        """Names of the parts that are on."""
        values = asdict(self)
        del values["rand_augment_magnitude"]  # without operations it does nothing
        return [name for name, value in values.items() if value]


class RandomResizedCrop(nn.Module):
    """Crops a random part, aspect ratio 3/4 to 4/3, and resizes it back (Szegedy 2015)."""

    def __init__(self, min_area: float) -> None:
        super().__init__()
        self.min_area = min_area

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> uint8 (B, C, H, W)."""
        random = torch.rand(4, len(images), device=images.device, dtype=torch.float32)
        area = self.min_area + (1 - self.min_area) * random[0]
        side = area.sqrt()
        stretch = (4 / 3) ** (random[1] - 0.5)  # square root of the aspect ratio
        stretch = stretch.clamp(side, 1 / side)  # such that the crop fits into the image
        height = side / stretch
        width = side * stretch
        # Centre of the crop in [-1, 1], such that it stays inside.
        down = (1 - height) * (2 * random[2] - 1)
        right = (1 - width) * (2 * random[3] - 1)
        zero = torch.zeros_like(width)
        # rows of the matrix: (B, 6) -> (B, 2, 3)
        theta = torch.stack([width, zero, right, zero, height, down], dim=1).reshape(-1, 2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        out = F.grid_sample(
            images.float(), grid, mode="bilinear", padding_mode="reflection", align_corners=False
        )
        return out.round_().to(torch.uint8)


class RandomCrop(nn.Module):
    """Pads with black, then crops each image at its own place."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> uint8 (B, C, H, W)."""
        b, c, h, w = images.shape
        down, right = torch.randint(2 * self.padding + 1, (2, b, 1, 1), device=images.device)
        rows = down + torch.arange(h, device=images.device)[:, None]
        columns = right + torch.arange(w, device=images.device)
        # indices into the padded image, one for all channels: (B, H, W) -> (B, C, H * W)
        index = (rows * (w + 2 * self.padding) + columns).reshape(b, 1, -1).expand(-1, c, -1)
        padded = F.pad(images, [self.padding] * 4).flatten(2)  # (B, C, H', W') -> (B, C, H' * W')
        return padded.gather(2, index).reshape(b, c, h, w)  # (B, C, H * W) -> (B, C, H, W)


class RandomFlip(nn.Module):
    """Mirrors images left to right."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) -> uint8 (B, C, H, W)."""
        b = len(images)
        flipped = torch.rand(b, device=images.device) < self.probability
        index = torch.arange(b, device=images.device) + b * flipped
        # Selecting whole images from both kinds is five times as fast as a choice for each pixel.
        return torch.cat([images, images.flip(-1)]).index_select(0, index)


def pixel_augmentations(config: AugmentConfig) -> list[nn.Module]:
    """The augmentations of uint8 pixels that a config turns on, in their order."""
    steps: list[nn.Module] = []
    if config.resized_crop > 0:
        steps.append(RandomResizedCrop(config.resized_crop))
    if config.crop_padding > 0:
        steps.append(RandomCrop(config.crop_padding))
    if config.flip > 0:
        steps.append(RandomFlip(config.flip))
    if config.rand_augment_ops > 0:
        from datamodules.vision.rand_augment import RandAugment

        steps.append(RandAugment(config.rand_augment_ops, config.rand_augment_magnitude))
    return steps


def normalise(images: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """uint8 (B, C, H, W) -> float32 (B, C, H, W): (value / 255 - mean) / std in each channel.

    float32 images are changed in place.
    """
    scales = [1 / (255 * s) for s in std]
    shifts = [-m / s for m, s in zip(mean, std, strict=True)]
    factors = torch.tensor([scales, shifts])[..., None, None]  # (2, C, 1, 1)
    scale, shift = factors.to(images.device, non_blocking=True)  # does not wait for a GPU
    return images.float().mul_(scale).add_(shift)


def denormalise(images: Tensor, mean: list[float], std: list[float]) -> Tensor:
    """Inverse of `normalise`, without rounding: float (B, C, H, W) -> float32 (B, C, H, W)."""
    factors = 255 * torch.tensor([std, mean])[..., None, None]  # (2, C, 1, 1)
    scale, shift = factors.to(images.device, non_blocking=True)
    return images.float() * scale + shift


def random_boxes(area: Tensor, ratio: Tensor, height: int, width: int) -> Tensor:
    """A rectangle in each of B images, centred anywhere inside it and cropped at its borders.

    Its fraction of the image (B,) and height over width (B,) -> bool (B, 1, H, W), true inside.
    """
    inside = []
    for fraction, size in (((area * ratio).sqrt(), height), ((area / ratio).sqrt(), width)):
        length = (fraction * size).round().clamp(max=size)
        centre = (torch.rand_like(area) * size).floor()
        start = (centre - (length / 2).floor())[:, None]  # (B,) -> (B, 1)
        pixel = torch.arange(size, device=area.device)
        inside.append((pixel >= start) & (pixel < start + length[:, None]))
    # (B, H) and (B, W) -> (B, 1, H, W)
    return inside[0][:, None, :, None] & inside[1][:, None, None, :]


class Augment(nn.Module):
    """The augmentations of a config: `forward` on pixels, then `normalise`, `erase` and `mix`."""

    def __init__(self, config: AugmentConfig) -> None:
        super().__init__()
        self.config = config
        self.steps = nn.Sequential(*pixel_augmentations(config))

    def forward(self, images: Tensor) -> Tensor:
        """Geometry and colour: uint8 (B, C, H, W) -> uint8 (B, C, H, W)."""
        with torch.autocast(images.device.type, enabled=False):  # coordinates need float32
            return self.steps(images)

    def erase(self, images: Tensor) -> Tensor:
        """Sets a rectangle to the mean, zero: normalised (B, C, H, W).

        It has 2 to 33 % of the area before it is cut at the borders.
        """
        if self.config.erase == 0:
            return images
        random, area, ratio = torch.rand(3, len(images), device=images.device)
        boxes = random_boxes(0.02 + 0.31 * area, (10 / 3) ** (2 * ratio - 1), *images.shape[-2:])
        erased = (random < self.config.erase)[:, None, None, None]  # (B,) -> (B, 1, 1, 1)
        return images.masked_fill(boxes & erased, 0.0)

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup and CutMix of each image, float (B, C, H, W), with another of the batch.

        Returns images, and targets float32 (B, K), mixed like the pixels.
        """
        if self.config.mixup == self.config.cutmix == 0:
            return images, targets
        weight = self._own_weight(images)
        partner = torch.randperm(len(images), device=images.device)
        mixed = torch.lerp(images[partner], images, weight.to(images.dtype))
        label_weight = weight.float().mean((2, 3))  # (B, 1, H, W) -> (B, 1)
        return mixed, torch.lerp(targets[partner], targets, label_weight)

    def _own_weight(self, images: Tensor) -> Tensor:
        """Weight of each pixel's own image: (B, 1, H, W), 0 or 1 for CutMix."""
        b, _, height, width = images.shape
        ones = torch.ones(b, device=images.device)

        def sample_beta(alpha: float) -> Tensor:  # (B,)
            # Validation of the arguments would wait for the device.
            return torch.distributions.Beta(
                ones * alpha, ones * alpha, validate_args=False
            ).sample()

        mixup_weight = sample_beta(self.config.mixup or 1)
        pasted_area = 1 - sample_beta(self.config.cutmix or 1)
        both = self.config.mixup > 0 and self.config.cutmix > 0
        cutmix_probability = 0.5 if both else float(self.config.cutmix > 0)
        uses_cutmix = torch.rand(b, device=images.device) < cutmix_probability
        boxes = random_boxes(pasted_area, ones, height, width)
        # (B,) -> (B, 1, 1, 1)
        return torch.where(
            uses_cutmix[:, None, None, None], (~boxes).float(), mixup_weight[:, None, None, None]
        )
