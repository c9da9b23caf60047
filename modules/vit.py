"""Vision Transformer (Dosovitskiy 2021): patches -> tokens -> stack -> pooled vector -> classes."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import FREE
from modules.config import PositionConfig, StackConfig, ViTConfig
from modules.embedding import PatchEmbedding, PrefixTokens
from modules.heads import ClassifierHead
from modules.init import initialise
from modules.norm import norm_factory
from modules.pooling import POOLINGS
from modules.position import POSITIONS, grid_coordinates
from modules.transformer import AttentionRecord, Stack


class ViT(nn.Module):
    """Images to class scores.

    Args:
        config: Sizes and variants.

    Raises:
        ValueError: A position encoding does not fit the sizes, or the data's numbers are not filled in.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.channels is None or config.num_classes is None:
            raise ValueError("channels and num_classes are null; fill them in from the data before building a ViT.")
        self.config = config
        stack = replace(config.stack, final_norm=False) if config.norm_after_pool else config.stack
        norm = norm_factory(stack.norm, stack.norm_eps, stack.bias)
        self.embed = PatchEmbedding(config.image_size, config.patch_size, config.channels, stack.width, config.stem)
        self.position = POSITIONS[config.position](position_config(config))
        self.prefix = PrefixTokens(config.prefix_tokens, stack.width) if config.prefix_tokens else nn.Identity()
        self.dropout = nn.Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)
        self.pool = POOLINGS[config.pool](stack.width, stack.heads)
        after = norm if config.norm_after_pool else None
        self.head = ClassifierHead(stack.width, config.num_classes, after, config.head_dropout)
        for part in (self.embed, self.pool, self.head):  # the stack has initialised itself
            initialise(part, stack.init, stack.depth)

    def forward(self, images: Tensor, record: AttentionRecord | None = None) -> Tensor:
        """(B, C, Y, X) -> logits (B, classes); `record` collects attention weights."""
        return self.head(self.features(images, record))

    def features(self, images: Tensor, record: AttentionRecord | None = None) -> Tensor:
        """(B, C, Y, X) -> pooled vectors (B, E), what the classifier sees."""
        x = self.tokens(images, record)
        return self.pool(x[:, self.config.prefix_tokens :] if self.pool.patches_only else x)

    def tokens(self, images: Tensor, record: AttentionRecord | None = None) -> Tensor:
        """(B, C, Y, X) -> (B, P + N, E): class token, registers, patches row by row, after the last block."""
        prefix = self.config.prefix_tokens
        coords = grid_coordinates(self.config.grid, images.device)  # (1, N, 2)
        rotation, bias = self.position.rotate(coords), self.position.bias(coords, coords)
        if rotation is not None:
            rotation = rotation.after_prefix(prefix)
        if bias is not None:
            bias = F.pad(bias, (prefix, 0, prefix, 0))  # (1, H, P + N, P + N)
        x = self.dropout(self.prefix(self.position.embed(self.embed(images))))  # (B, P + N, E)
        return self.stack(x, FREE.with_bias(bias), rotation, None, record)


def position_config(config: ViTConfig) -> PositionConfig:
    """What the position encoding of this ViT needs to know."""
    stack = config.stack
    base = config.position_base or (100.0 if config.position == "rotary2d" else 10000.0)
    return PositionConfig(stack.width, stack.heads, stack.head_width, config.grid, base, config.rotary_fraction)


def _preset(width: int, depth: int, heads: int, **options: object) -> ViTConfig:
    return ViTConfig(stack=StackConfig(width=width, depth=depth, heads=heads), **options)  # type: ignore[arg-type]


VIT_PRESETS: dict[str, ViTConfig] = {
    "digits": ViTConfig(
        8, 2, 1, 10, pool="mean", position="rotary2d", stem="conv", stack=StackConfig(64, 4, 4, init="xavier")
    ),
    "tiny": _preset(192, 12, 3),
    "small": _preset(384, 12, 6),
    "base": _preset(768, 12, 12),
    "cifar_tiny": _preset(192, 9, 3, image_size=32, patch_size=4, num_classes=10),
    "cifar_small": _preset(256, 7, 4, image_size=32, patch_size=4, num_classes=10),
    "cifar_cpu": ViTConfig(
        32, 8, 3, 10, pool="mean", position="rotary2d", stem="convpool", stack=StackConfig(192, 4, 4, init="xavier")
    ),
}
