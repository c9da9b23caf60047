"""From pixels to vectors."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StemName, check_choice, require, variant
from modules.kernels.linear import linear


def cut_patches(images: Tensor, size: int) -> Tensor:
    """Pixels of P x P patches, row by row: (B, C, H, W) -> (B, N, C P P), with P = `size`."""
    patches = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, C, H', P, W', P)
    patches = patches.permute(0, 2, 4, 1, 3, 5)  # (B, H', W', C, P, P)
    return patches.flatten(3).flatten(1, 2)  # (B, N, C P P)


def join_patches(patches: Tensor, grid: tuple[int, int], size: int) -> Tensor:
    """Undoes `cut_patches`: (B, N, C P P) -> (B, C, H, W)."""
    pixels = patches.unflatten(2, (-1, size, size)).unflatten(1, grid)  # (B, H', W', C, P, P)
    pixels = pixels.permute(0, 3, 1, 4, 2, 5)  # (B, C, H', P, W', P)
    return pixels.flatten(4).flatten(2, 3)  # (B, C, H, W)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of each sample: (B, N, E), indices (B, K) -> (B, K, E)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))  # (B, K, E)


class PatchStem(nn.Module):
    """One linear map of each P x P patch, kept as a Conv2d of stride P (Dosovitskiy 2021)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, N, E), as one matrix product: faster than a convolution.

        With `kept`, indices (B, K) of patches, only these, in that order: (B, K, E).
        """
        # The same: self.conv(images).flatten(2).mT  # (B, E, H', W') -> (B, N, E)
        rows = cut_patches(images, self.conv.stride[0])  # (B, N, C P P)
        if kept is not None:
            rows = take(rows, kept)  # (B, K, C P P)
        return linear(rows, self.conv.weight.flatten(1), self.conv.bias)  # weight: (E, C P P)


def resize_patches(weight: Tensor, size: int) -> Tensor:
    """Filters for patches of another size: (E, C, P, P) -> (E, C, size, size).

    If larger patches are the old ones resized by bicubic interpolation, their products with the new
    filters equal the old products; with smaller patches as nearly as possible (FlexiViT, Beyer
    2023, section 3.4).
    """
    old = weight.shape[-1]
    if old == size:
        return weight
    pixels = torch.eye(old * old, dtype=torch.float32).unflatten(1, (1, old, old))  # (P², 1, P, P)
    resized = F.interpolate(pixels, (size, size), mode="bicubic", antialias=True)
    inverse = torch.linalg.pinv(resized.flatten(1).T)  # of (size², P²): (P², size²)
    filters = weight.detach().cpu().float().flatten(2) @ inverse  # (E, C, size²)
    return filters.unflatten(2, (size, size)).to(weight)  # (E, C, size, size)


def check_patches(image_size: int, patch_size: int, stem: StemName) -> None:
    """Raises `ValueError` unless patches fill the images, and a stem can make them."""
    fitting = image_size // patch_size * patch_size
    choices = " or ".join(str(size) for size in (fitting, fitting + patch_size) if size)
    require(
        image_size == fitting,
        f"image_size {image_size} is not a multiple of patch_size {patch_size}; {choices} would "
        "fit.",
    )
    check_choice("stem", stem, STEMS)
    power_of_two = patch_size > 1 and patch_size & (patch_size - 1) == 0
    require(
        stem not in HALVING or power_of_two,
        f'stem "{stem}" halves the image step by step, so patch_size {patch_size} must be 2, 4, 8, '
        "...",
    )
    require(
        stem != "hybrid" or patch_size % 4 == 0,
        f'stem "hybrid" makes the image 4 times smaller first, so patch_size {patch_size} must be '
        "4, 8, 12, ...",
    )


def channel_steps(channels: int, width: int, patch: int) -> list[int]:
    """Channels before and after each of the log2(patch) steps that halve the image."""
    steps = int(math.log2(patch))
    inner = [max(8, width // 2 ** (steps - step)) for step in range(1, steps)]
    return [channels, *inner, width]


class ConvStem(nn.Module):
    """3 x 3 convolutions with GroupNorm and ReLU, each of which halves the image.

    By stride 2, with a last 1 x 1 convolution (Xiao 2021, who have BatchNorm), or with `pool` by
    2 x 2 max pools. Channels double at each step, up to E; `patch`, the stride of the whole stem in
    pixels, is a power of two.
    """

    def __init__(self, channels: int, width: int, patch: int, pool: bool = False) -> None:
        super().__init__()
        self.pool = pool
        layers: list[nn.Module] = []
        for before, after in pairwise(channel_steps(channels, width, patch)):
            stride = 1 if pool else 2
            layers.append(nn.Conv2d(before, after, 3, stride, padding=1, bias=False))
            if pool:
                layers.append(nn.MaxPool2d(2))
            layers += [nn.GroupNorm(1, after), nn.ReLU()]
        if not pool:
            layers.append(nn.Conv2d(after, width, 1))
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, E)."""
        if self.pool:  # channels last in memory halve the time on CPUs
            images = images.contiguous(memory_format=torch.channels_last)
        return self.layers(images).flatten(2).mT  # (B, E, H', W') -> (B, N, E)


class CCTStem(nn.Module):
    """3 x 3 convolutions, each with ReLU and a 3 x 3 max pool of stride 2 (Hassani 2021).

    There are log2(`patch`), without biases; all have 64 channels but the last, which has E.
    `patch`, the stride of the whole stem in pixels, is a power of two.
    """

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        steps = int(math.log2(patch))
        layers: list[nn.Module] = []
        for before, after in pairwise([channels, *[64] * (steps - 1), width]):
            layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))
            layers += [nn.MaxPool2d(3, 2, padding=1), nn.ReLU()]  # = pool of ReLU, but faster
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, E)."""
        images = images.contiguous(memory_format=torch.channels_last)  # faster on CPUs
        return self.layers(images).flatten(2).mT  # (B, E, H', W') -> (B, N, E)


class ResidualConv(nn.Module):
    """x + GELU(BatchNorm(3 x 3 convolution of x)), C channels (He 2016)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        return x + self.activation(self.norm(self.conv(x)))


class ResidualStem(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm and GELU for each halving of the image.

    The first is followed by a 2 x 2 max pool, the second is a `ResidualConv`. Channels and `patch`
    are as in `ConvStem`. Each process has its own batch statistics, unless
    `--trainer.sync_batchnorm true`.
    """

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(channel_steps(channels, width, patch)):
            layers += [
                nn.Conv2d(before, after, 3, padding=1, bias=False),
                nn.MaxPool2d(2),
                nn.BatchNorm2d(after),
                nn.GELU(),
                ResidualConv(after),
            ]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, E)."""
        images = images.contiguous(memory_format=torch.channels_last)  # faster on CPUs
        return self.layers(images).flatten(2).mT  # (B, E, H', W') -> (B, N, E)


class StandardizedConv(nn.Conv2d):
    """A convolution whose filters are normalised to mean 0 and variance 1 (Qiao 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H', W')."""
        filters = self.weight.flatten(1)  # (C', C K K)
        filters = F.layer_norm(filters, filters.shape[1:], eps=1e-8).view_as(self.weight)
        return F.conv2d(x, filters, self.bias, self.stride, self.padding)


class HybridStem(nn.Module):
    """The first layers of a ResNet-v2, then patches of what they give (Dosovitskiy 2021).

    A 7 x 7 convolution of stride 2, GroupNorm, ReLU and a 3 x 3 max pool of stride 2 (Kolesnikov
    2020), padded as TensorFlow does, by one more on the right and below. `patch`, the stride of
    the whole stem in pixels, is a multiple of 4.
    """

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.first = StandardizedConv(channels, 64, 7, stride=2, bias=False)
        self.norm = nn.GroupNorm(32, 64)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)  # the last windows are cut
        self.conv = nn.Conv2d(64, width, patch // 4, stride=patch // 4)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, E)."""
        images = F.pad(images, (2, 3, 2, 3))  # (B, C, H + 5, W + 5)
        images = images.contiguous(memory_format=torch.channels_last)  # faster on CPUs
        x = self.first(images)  # (B, 64, H / 2, W / 2)
        x = F.relu(self.pool(self.norm(x)))  # (B, 64, H / 4, W / 4); = pool of ReLU
        return self.conv(x).flatten(2).mT  # (B, E, H', W') -> (B, N, E)


HALVING = ("conv", "convpool", "cct", "resnet")  # stems that halve the image step by step
STEMS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "patch": PatchStem,
    "conv": ConvStem,
    "convpool": partial(ConvStem, pool=True),
    "cct": CCTStem,
    "resnet": ResidualStem,
    "hybrid": HybridStem,
}


class PatchEmbedding(nn.Module):
    """Square images of C channels to vectors of size E, by an entry of `STEMS`; sizes in pixels."""

    def __init__(
        self, image_size: int, patch_size: int, channels: int, width: int, stem: StemName = "patch"
    ) -> None:
        super().__init__()
        self.shape = (channels, image_size, image_size)
        self.stem = variant("stem", stem, STEMS)(channels, width, patch_size)

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, N, E), row by row.

        With `kept`, indices (B, K) of patches, only these, in that order: (B, K, E). Raises
        `ValueError` for images of another size.
        """
        require(
            tuple(images.shape[1:]) == self.shape,
            f"Images are {tuple(images.shape[1:])} (channels, height, width), but the model takes "
            f"{self.shape}; resize them or build the model for that size.",
        )
        if kept is None:
            return self.stem(images)
        if isinstance(self.stem, PatchStem):
            return self.stem(images, kept)
        return take(self.stem(images), kept)  # (B, N, E) -> (B, K, E)


class PrefixTokens(nn.Module):
    """P learned vectors before the others: class token, distillation token, registers."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(count, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, P + N, E)."""
        # (B, P, E); len(x) would fix B in a graph
        vectors = self.vectors.expand(x.shape[0], -1, -1)
        return torch.cat((vectors.to(x.dtype), x), dim=1)
