"""Masked autoencoder (He 2022): some patches -> encoder -> decoder -> pixels of the others."""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from modules.config import StackConfig, require
from modules.heads import PixelHead
from modules.init import initialise
from modules.kernels.linear import Linear
from modules.kernels.upcast import upcast
from modules.models.vit import ViTConfig, ViTEncoder, run_blocks
from modules.patch_embedding import cut_patches, join_patches, take
from modules.position import build_position, check_position, grid_positions
from modules.transformer import Stack, check_variants

VARIANCE_EPS = 1e-6  # of patches of one colour (He 2022, the authors' code)


@dataclass(frozen=True)
class MAEConfig(ViTConfig):
    """Sizes and variants of a masked autoencoder (He 2022): a ViT as encoder, and a decoder.

    The encoder has the options of `ViTConfig`; `num_classes`, `pool` and `head_dropout` are for a
    classifier that starts from its weights.

    Args:
        mask_ratio: Fraction of the patches that the encoder does not see.
        norm_pixels: Predict pixels normalised by mean and variance of their patch.
        decoder: The decoder's blocks; its positions are of the encoder's kind.
    """

    num_classes: int | None = None
    position: str = "sincos2d"
    mask_ratio: float = 0.75
    norm_pixels: bool = True
    decoder: StackConfig = field(default_factory=lambda: StackConfig(512, 8, 16))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_variants(self.stack)
        check_variants(self.decoder, "decoder")
        require(
            not (self.decoder.causal or self.decoder.cross_attention),
            "A masked autoencoder needs decoder.causal and decoder.cross_attention off.",
        )
        require(
            self.stack.conv_kernel is None and self.decoder.conv_kernel is None,
            "A masked autoencoder reads patches in no order, so it has no convolutions over them; "
            "leave stack.conv_kernel and decoder.conv_kernel out.",
        )
        check_position(self.position, self.position_options, self.decoder, self.grid)
        require(
            0 < self.mask_ratio < 1,
            f"mask_ratio is {self.mask_ratio}; it must lie between 0 and 1, as 0.75.",
        )
        require(
            0 < self.visible_patches < self.num_patches,
            f"mask_ratio {self.mask_ratio} leaves {self.visible_patches} of {self.num_patches} "
            "patches visible; at least one must be visible and one masked: choose another "
            "mask_ratio, or a smaller patch_size.",
        )
        require(
            not (self.norm_pixels and self.channels == self.patch_size == 1),
            "A patch of one grey pixel has no variance; set norm_pixels to false, or choose a "
            "larger patch_size.",
        )

    @property
    def encoder(self) -> ViTConfig:
        """The classifier that starts from the encoder's weights."""
        return ViTConfig(**{one.name: getattr(self, one.name) for one in fields(ViTConfig)})

    @property
    def num_patches(self) -> int:
        """Number N of patches of an image."""
        rows, columns = self.grid
        return rows * columns

    @property
    def visible_patches(self) -> int:
        """Number K of patches that the encoder sees, rounded down as by the authors."""
        return int(self.num_patches * (1 - self.mask_ratio))


class PixelDecoder(nn.Module):
    """Vectors of visible patches to pixels of masked ones (He 2022, section 3)."""

    def __init__(self, config: MAEConfig, channels: int) -> None:
        super().__init__()
        stack = config.decoder
        self.grid = config.grid
        self.project = Linear(config.stack.width, stack.width)
        self.mask_token = nn.Parameter(torch.randn(stack.width) * 0.02)
        self.position = build_position(config.position, config.position_options, stack, config.grid)
        self.stack = Stack(stack)
        self.head = PixelHead(stack.width, channels * config.patch_size**2)
        for part in (self.project, self.head):  # the stack has initialised itself
            initialise(part, stack.init, stack.depth)

    def forward(self, x: Tensor, kept: Tensor, masked: Tensor) -> Tensor:
        """(B, R + K, E), indices (B, K) and (B, M) of patches -> pixels (B, M, C P P).

        R prefix tokens, K visible patches, M masked ones; the decoder is D wide.
        """
        x = self.project(x)  # (B, R + K, D)
        prefix = x.shape[1] - kept.shape[1]
        hidden = self.mask_token.to(x.dtype).expand(*masked.shape, -1)  # (B, M, D)
        # Masked patches come first, so that the last block can skip the visible ones.
        patches = torch.cat((hidden, x[:, prefix:]), dim=1)  # (B, N, D)
        order = torch.cat((masked, kept), dim=1)  # (B, N)
        grid = grid_positions(self.grid, x.device)  # (1, N, 2)
        positions = take(grid.expand(x.shape[0], -1, -1), order)  # (B, N, 2)
        patches = self.position.embed(patches, positions)
        x = torch.cat((x[:, :prefix], patches), dim=1)  # (B, R + N, D)
        num_outputs = prefix + masked.shape[1]
        x = run_blocks(self.stack, self.position, x, positions, num_outputs=num_outputs)
        return self.head(x[:, prefix:])  # (B, R + M, D) -> (B, M, C P P)


class MaskedAutoencoder(ViTEncoder):
    """Images to the pixels of their masked patches. Raises `ValueError` if `channels` is null."""

    def __init__(self, config: MAEConfig) -> None:
        super().__init__(config)
        self.decoder = PixelDecoder(config, self.embed.shape[0])
        initialise(self.embed, config.stack.init, config.stack.depth)

    def split(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses which patches are visible: those with the smallest noise.

        (B, N) -> indices (B, K) of visible patches and (B, M) of masked ones.
        """
        order = noise.argsort(1)  # (B, N)
        visible = self.config.visible_patches
        return order[:, :visible], order[:, visible:]

    def forward(self, images: Tensor, kept: Tensor, masked: Tensor) -> Tensor:
        """Predicts masked patches, with `norm_pixels` normalised ones.

        Args:
            images: (B, C, H, W); masked patches have no influence.
            kept: Indices (B, K) of visible patches.
            masked: Indices (B, M) of masked patches.

        Returns:
            (B, M, C P P).
        """
        if self.config.stem != "patch":  # whose filters would see beyond the visible patches
            images = self.hide(images, masked)
        return self.decoder(self.tokens(images, kept=kept), kept, masked)

    def loss(self, predicted: Tensor, images: Tensor, masked: Tensor) -> Tensor:
        """Mean squared error () of predictions (B, M, C P P) for masked patches (B, M)."""
        patches = take(cut_patches(images, self.config.patch_size), masked)  # (B, M, C P P)
        if self.config.norm_pixels:
            mean, std = moments(patches)
            patches = (patches - mean) / std
        return (upcast(predicted) - patches).square().mean()

    def hide(self, images: Tensor, masked: Tensor) -> Tensor:
        """Sets the pixels of masked patches (B, M) to zero: (B, C, H, W) -> (B, C, H, W)."""
        return self.replaced(images, masked, images.new_zeros(()))

    def reconstruct(self, images: Tensor, predicted: Tensor, masked: Tensor) -> Tensor:
        """Puts predictions (B, M, C P P) for masked patches into images (B, C, H, W).

        With `norm_pixels`, mean and variance of a patch, which are not predicted, are its own.
        """
        predicted = upcast(predicted)
        if self.config.norm_pixels:
            mean, std = moments(take(cut_patches(images, self.config.patch_size), masked))
            predicted = predicted * std + mean
        return self.replaced(images, masked, predicted)

    def replaced(self, images: Tensor, masked: Tensor, pixels: Tensor) -> Tensor:
        """Images (B, C, H, W) with other pixels, () or (B, M, C P P), in masked patches (B, M)."""
        patches = cut_patches(images, self.config.patch_size)  # (B, N, C P P)
        index = masked[..., None].expand(-1, -1, patches.shape[-1])  # (B, M, C P P)
        patches = patches.scatter(1, index, pixels.to(patches).expand_as(index))
        return join_patches(patches, self.config.grid, self.config.patch_size)


def moments(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the pixels of each patch: (B, M, C P P) -> (B, M, 1) twice.

    As in the authors' code, the variance is the unbiased one, plus 1e-6.
    """
    variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
    return mean, (variance + VARIANCE_EPS).sqrt()


def _preset(width: int, depth: int, heads: int, patch_size: int = 16) -> MAEConfig:
    """An encoder of the paper, with its decoder of 8 blocks, 512 wide (He 2022, table 1)."""
    return MAEConfig(patch_size=patch_size, stack=StackConfig(width, depth, heads))


MAE_PRESETS: dict[str, MAEConfig] = {
    "digits": MAEConfig(
        image_size=8,
        patch_size=2,
        channels=1,
        pool="mean",
        stack=StackConfig(64, 4, 4, init="xavier"),
        decoder=StackConfig(64, 2, 4, init="xavier"),
    ),
    "base": _preset(768, 12, 12),
    "large": _preset(1024, 24, 16),
    "huge": _preset(1280, 32, 16, patch_size=14),
    "cifar_cpu": MAEConfig(
        image_size=32,
        patch_size=4,
        channels=3,
        pool="mean",
        stack=StackConfig(192, 6, 6, init="xavier"),
        decoder=StackConfig(96, 1, 3, init="xavier"),
    ),
}
