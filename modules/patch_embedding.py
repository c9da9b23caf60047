"""From pixels to vectors."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from modules.config import StemName, require, variant
from modules.kernels.linear import linear


class PatchStem(nn.Module):
    """One linear map of each P x P patch, kept as a Conv2d of stride P (Dosovitskiy 2021)."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, E), as one matrix product: faster than a convolution."""
        size = self.conv.stride[0]
        patches = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))  # (B, C, H', P, W', P)
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # (B, H', W', C, P, P)
        rows = patches.flatten(3).flatten(1, 2)  # (B, N, C P P)
        return linear(rows, self.conv.weight.flatten(1), self.conv.bias)  # weight: (E, C P P)


def channel_steps(channels: int, width: int, patch: int) -> list[int]:
    """Channels before and after each of the log2(patch) steps that halve the image."""
    steps = int(math.log2(patch))
    return [channels] + [max(8, width // 2 ** (steps - step)) for step in range(1, steps + 1)]


class ConvStem(nn.Module):
    """3 x 3 convolutions with GroupNorm and ReLU, each of which halves the image.

    By stride 2, with a last 1 x 1 convolution (Xiao 2021), or with `pool` by 2 x 2 max pools
    (Hassani 2021). Channels double at each step, up to E; `patch`, the pixels between tokens, is a
    power of two.
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


STEMS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "patch": PatchStem,
    "conv": ConvStem,
    "convpool": partial(ConvStem, pool=True),
    "resnet": ResidualStem,
}


class PatchEmbedding(nn.Module):
    """Square images of C channels to vectors of size E, by an entry of `STEMS`; sizes in pixels."""

    def __init__(
        self, image_size: int, patch_size: int, channels: int, width: int, stem: StemName = "patch"
    ) -> None:
        super().__init__()
        self.shape = (channels, image_size, image_size)
        self.stem = variant("stem", stem, STEMS)(channels, width, patch_size)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, E), row by row; `ValueError` for images of another size."""
        require(
            tuple(images.shape[1:]) == self.shape,
            f"Images are {tuple(images.shape[1:])} (channels, height, width), but the model takes "
            f"{self.shape}; resize them or build the model for that size.",
        )
        return self.stem(images)


class PrefixTokens(nn.Module):
    """P learned vectors before the others: class token first, then registers (Darcet 2024)."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(count, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, P + N, E)."""
        return torch.cat((self.vectors.expand(len(x), -1, -1).to(x.dtype), x), dim=1)
