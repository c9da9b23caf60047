"""Vision Transformer (Dosovitskiy 2021): patches -> tokens -> stack -> pooled vector -> classes."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache
from modules.config import (
    PoolName,
    StackConfig,
    StemName,
    check_rates,
    check_sizes,
    default,
    require,
    variant,
)
from modules.heads import ClassifierHead
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.masks import NO_MASK
from modules.norm import norm_factory
from modules.patch_embedding import PatchEmbedding, PrefixTokens
from modules.pooling import POOLINGS
from modules.position import build_position, check_position, grid_positions
from modules.transformer import Stack


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and variants of a Vision Transformer (Dosovitskiy 2021).

    Args:
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch, in pixels; must divide `image_size`.
        channels: Colour channels of the images: 3 for colour, 1 for grey; null: to be filled in
            from the data.
        num_classes: Number of classes; null: to be filled in from the data.
        pool: How tokens become one vector: the class token, their mean, their max, or attention
            from a learned query.
        class_token: Prepend a class token; null: only if `pool` is "cls".
        register_tokens: Number of extra learned tokens (Darcet 2024).
        position: Position encoding of the patches, an entry of `POSITIONS` in modules/position.py,
            such as learned, sincos2d or rotary2d; class and register tokens have none.
        position_options: Options of that encoding, such as {base: 100}.
        stem: Patches by one linear map ("patch"), by 3x3 convolutions of stride 2 ("conv",
            Xiao 2021), by 3x3 convolutions and max pools ("convpool", Hassani 2021), or by these
            with a residual convolution after each ("resnet", He 2016).
        norm_after_pool: Put the final norm after the pooling instead of before it.
        head_dropout: Probability of dropping values before the classifier.
        stack: The Transformer blocks.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int | None = 3
    num_classes: int | None = 1000
    pool: PoolName = "cls"
    class_token: bool | None = None
    register_tokens: int = 0
    position: str = "learned"
    position_options: dict[str, Any] = field(default_factory=dict)
    stem: StemName = "patch"
    norm_after_pool: bool = False
    head_dropout: float = 0.0
    stack: StackConfig = field(default_factory=StackConfig)

    def __post_init__(self) -> None:
        check_sizes(self, "image_size", "patch_size", "channels", "num_classes")
        require(
            self.image_size % self.patch_size == 0,
            f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}; "
            "change one of them.",
        )
        require(
            self.register_tokens >= 0,
            f"register_tokens is {self.register_tokens}; it cannot be negative.",
        )
        require(
            self.pool != "cls" or self.class_token is not False,
            'pool "cls" needs the class token; leave class_token out or choose another pool.',
        )
        power_of_two = self.patch_size > 1 and self.patch_size & (self.patch_size - 1) == 0
        require(
            self.stem == "patch" or power_of_two,
            f'stem "{self.stem}" halves the image step by step, so patch_size {self.patch_size} '
            "must be 2, 4, 8, ...",
        )
        require(
            not (self.stack.causal or self.stack.cross_attention),
            "A ViT needs stack.causal and stack.cross_attention off.",
        )
        check_rates(self, "head_dropout")
        check_position(self.position, self.position_options, self.stack, self.grid)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along height and width."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def has_class_token(self) -> bool:
        """Whether a class token comes first."""
        return default(self.class_token, self.pool == "cls")

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches: class token, then registers."""
        return int(self.has_class_token) + self.register_tokens


class ViT(nn.Module):
    """Images to class scores. Raises `ValueError` if `channels` or `num_classes` is null."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.channels is None or config.num_classes is None:
            raise ValueError("channels or num_classes is null; fill both in from the data first.")
        self.config = config
        stack = config.stack
        norm = None
        if config.norm_after_pool:
            norm = norm_factory(stack)
            stack = replace(stack, final_norm=False)
        self.embed = PatchEmbedding(
            config.image_size, config.patch_size, config.channels, stack.width, config.stem
        )
        self.position = build_position(config.position, config.position_options, stack, config.grid)
        prefix = config.prefix_tokens
        self.prefix = PrefixTokens(prefix, stack.width) if prefix else nn.Identity()
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack)
        self.pool = variant("pool", config.pool, POOLINGS)(stack.width, stack.heads)
        self.head = ClassifierHead(stack.width, config.num_classes, norm, config.head_dropout)
        for part in (self.embed, self.pool, self.head):  # the stack has initialised itself
            initialise(part, stack.init, stack.depth)

    def forward(self, images: Tensor, record: StackCache = NO_CACHE) -> Tensor:
        """(B, C, H, W) -> logits (B, classes); `record`: a recorder of attention weights."""
        return self.head(self.features(images, record))

    def features(self, images: Tensor, record: StackCache = NO_CACHE) -> Tensor:
        """(B, C, H, W) -> pooled vectors (B, E), the input of the classifier."""
        prefix = self.config.prefix_tokens
        images = images.to(next(self.embed.parameters()).dtype)
        positions = grid_positions(self.config.grid, images.device)  # (1, N, 2)
        rotary = self.position.rotate(positions)
        if rotary is not None:
            rotary = rotary.after_prefix(prefix)
        bias = self.position.bias(positions, positions)
        if bias is not None:
            bias = F.pad(bias, (prefix, 0, prefix, 0))  # (1, H, P + N, P + N)
        x = self.prefix(self.position.embed(self.embed(images)))  # (B, P + N, E)
        x = self.stack(self.dropout(x), NO_MASK.with_bias(bias), rotary, cache=record)
        return self.pool(x[:, prefix:] if self.pool.patches_only else x)  # (B, E)


def _preset(width: int, depth: int, heads: int, **options: object) -> ViTConfig:
    return ViTConfig(stack=StackConfig(width=width, depth=depth, heads=heads), **options)  # type: ignore[arg-type]


VIT_PRESETS: dict[str, ViTConfig] = {
    "digits": ViTConfig(
        image_size=8,
        patch_size=2,
        channels=1,
        num_classes=10,
        pool="mean",
        position="rotary2d",
        stem="conv",
        stack=StackConfig(64, 4, 4, init="xavier"),
    ),
    "tiny": _preset(192, 12, 3),
    "small": _preset(384, 12, 6),
    "base": _preset(768, 12, 12),
    "cifar_tiny": _preset(192, 9, 3, image_size=32, patch_size=4, num_classes=10),
    "cifar_small": _preset(256, 7, 4, image_size=32, patch_size=4, num_classes=10),
    "cifar_cpu": ViTConfig(
        image_size=32,
        patch_size=8,
        channels=3,
        num_classes=10,
        pool="mean",
        position="rotary2d",
        stem="resnet",
        stack=StackConfig(256, 2, 4, init="xavier"),
    ),
}
