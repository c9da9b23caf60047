"""Vision Transformer (Dosovitskiy 2021): patches -> tokens -> stack -> pooled vector -> classes."""

from dataclasses import dataclass, field, replace

import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import FREE
from modules.config import (
    PoolName,
    PositionConfig,
    PositionName,
    StackConfig,
    StemName,
    check_rates,
    require,
)
from modules.embedding import PatchEmbedding, PrefixTokens
from modules.heads import ClassifierHead
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.memory import AttentionRecord
from modules.norm import norm_factory
from modules.pooling import POOLINGS
from modules.position import POSITIONS, grid_coordinates
from modules.transformer import FORGETFUL, Stack


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and variants of a Vision Transformer (Dosovitskiy 2021).

    Args:
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch, in pixels; must divide `image_size`.
        channels: Colour channels of the images: 3 for colour, 1 for grey; null: to be filled in from the data.
        num_classes: Number of classes; null: to be filled in from the data.
        pool: How tokens become one vector: the class token, their mean, their max, or attention from a learned query.
        class_token: Prepend a class token; null: only where `pool` is "cls".
        register_tokens: Number of extra learned tokens (Darcet 2024).
        position: Position encoding of the patches; class and register tokens have none.
        position_base: Slowest wavelength of sinusoidal and rotary positions; null: 100 if rotary2d, 10000 otherwise.
        rotary_fraction: Share of each head's channels that rotary positions turn.
        stem: Patches by one linear map ("patch"), by 3x3 convolutions of stride 2 ("conv", Xiao 2021), or by 3x3
            convolutions and max pools ("convpool", Hassani 2021).
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
    position: PositionName = "learned"
    position_base: float | None = None
    rotary_fraction: float = 1.0
    stem: StemName = "patch"
    norm_after_pool: bool = False
    head_dropout: float = 0.0
    stack: StackConfig = field(default_factory=StackConfig)

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "num_classes"):
            require(
                getattr(self, name) is None or getattr(self, name) >= 1,
                f"{name} is {getattr(self, name)}; it must be at least 1.",
            )
        require(
            self.image_size % self.patch_size == 0,
            f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}; change one of them.",
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
            f'stem "{self.stem}" halves the image step by step, so patch_size {self.patch_size} must be 2, 4, 8, ...',
        )
        require(
            not (self.position.startswith("rotary") and self.stack.attention == "additive"),
            f'position "{self.position}" works on dot products; use attention "dot" or another position.',
        )
        require(
            not (self.stack.causal or self.stack.cross_attention),
            "A ViT sees the whole image and nothing else; leave stack.causal and stack.cross_attention off.",
        )
        require(
            0 < self.rotary_fraction <= 1,
            f"rotary_fraction is {self.rotary_fraction}; give a share from 0 to 1.",
        )
        check_rates(self, "head_dropout")

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along height and width."""
        return self.image_size // self.patch_size, self.image_size // self.patch_size

    @property
    def has_class_token(self) -> bool:
        """Whether a class token stands first."""
        return self.pool == "cls" if self.class_token is None else self.class_token

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens before the patches: class token, then registers."""
        return int(self.has_class_token) + self.register_tokens


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
            raise ValueError(
                "channels and num_classes are null; fill them in from the data before building a ViT."
            )
        self.config = config
        stack = replace(config.stack, final_norm=False) if config.norm_after_pool else config.stack
        norm = norm_factory(stack.norm, stack.norm_eps, stack.bias)
        self.embed = PatchEmbedding(
            config.image_size, config.patch_size, config.channels, stack.width, config.stem
        )
        self.position = POSITIONS[config.position](position_config(config))
        self.prefix = (
            PrefixTokens(config.prefix_tokens, stack.width)
            if config.prefix_tokens
            else nn.Identity()
        )
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
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
        prefix, images = self.config.prefix_tokens, images.to(next(self.embed.parameters()).dtype)
        coords = grid_coordinates(self.config.grid, images.device)  # (1, N, 2)
        rotation, bias = self.position.rotate(coords), self.position.bias(coords, coords)
        if rotation is not None:
            rotation = rotation.after_prefix(prefix)
        if bias is not None:
            bias = F.pad(bias, (prefix, 0, prefix, 0))  # (1, H, P + N, P + N)
        x = self.dropout(self.prefix(self.position.embed(self.embed(images))))  # (B, P + N, E)
        return self.stack(x, FREE.with_bias(bias), rotation, None, record or FORGETFUL)


def position_config(config: ViTConfig) -> PositionConfig:
    """What the position encoding of this ViT needs to know."""
    stack = config.stack
    base = config.position_base or (100.0 if config.position == "rotary2d" else 10000.0)
    return PositionConfig(
        stack.width, stack.heads, stack.head_width, config.grid, base, config.rotary_fraction
    )


def _preset(width: int, depth: int, heads: int, **options: object) -> ViTConfig:
    return ViTConfig(stack=StackConfig(width=width, depth=depth, heads=heads), **options)  # type: ignore[arg-type]


VIT_PRESETS: dict[str, ViTConfig] = {
    "digits": ViTConfig(
        8,
        2,
        1,
        10,
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
        32,
        8,
        3,
        10,
        pool="mean",
        position="rotary2d",
        stem="convpool",
        stack=StackConfig(192, 4, 4, init="xavier"),
    ),
}
