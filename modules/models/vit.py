"""Vision Transformer (Dosovitskiy 2021): patches -> tokens -> stack -> pooled vector -> classes."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.cache import NO_CACHE, StackCache
from modules.config import (
    ImageArchitectureName,
    PoolName,
    StackConfig,
    StemName,
    check_rates,
    check_sizes,
    default,
    require,
)
from modules.heads import ClassifierHead
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.masks import NO_MASK
from modules.norm import norm_factory
from modules.patch_embedding import PatchEmbedding, PrefixTokens, check_patches, take
from modules.pooling import POOLINGS, check_pool
from modules.position import Position, build_position, check_position, grid_positions
from modules.transformer import Stack, check_variants


@dataclass(frozen=True)
class ViTConfig:
    """Sizes and variants of a Vision Transformer (Dosovitskiy 2021).

    Args:
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch, in pixels; must divide `image_size`.
        channels: Colour channels of the images: 3 for colour, 1 for grey; null: to be filled in
            from the data.
        num_classes: Number of classes; null: to be filled in from the data.
        pool: How tokens become one vector: the class token, their mean, their max, attention from
            a learned query, a mean by learned weights ("sequence", Hassani 2021), or a linear map
            of all patches, one after the other ("flatten").
        class_token: Prepend a class token; null: only if `pool` is "cls".
        distillation_token: Add a token after the class token, with a head of its own, which learns
            from a teacher; predictions are the mean of both heads (Touvron 2021).
        register_tokens: Number of extra learned tokens (Darcet 2024).
        position: Position encoding of the patches; an entry of `POSITIONS` in modules/position.py:
            none, learned, sinusoidal, sincos2d, rotary, rotary2d, alibi or t5. The tokens before
            the patches have none.
        position_options: Options of that encoding, such as {base: 100}.
        stem: Patches by one linear map ("patch"), by 3x3 convolutions of stride 2 ("conv",
            Xiao 2021), by 3x3 convolutions and max pools ("convpool"; "cct" as Hassani 2021), by
            these with a residual convolution after each ("resnet", He 2016), or from the first
            layers of a ResNet-v2 ("hybrid", Dosovitskiy 2021).
        norm_after_pool: Put the final norm after the pooling instead of before it.
        head_dropout: Probability of dropping values before the classifier.
        stack: The Transformer blocks.
        architecture: The network, an entry of `ARCHITECTURES` in modules/models/images.py.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int | None = 3
    num_classes: int | None = 1000
    pool: PoolName = "cls"
    class_token: bool | None = None
    distillation_token: bool = False
    register_tokens: int = 0
    position: str = "learned"
    position_options: dict[str, Any] = field(default_factory=dict)
    stem: StemName = "patch"
    norm_after_pool: bool = False
    head_dropout: float = 0.0
    stack: StackConfig = field(default_factory=StackConfig)
    architecture: ImageArchitectureName = "vit"

    def __post_init__(self) -> None:
        require(self.architecture == "vit", "architecture of a ViT is vit.")
        check_sizes(self, "image_size", "patch_size", "channels", "num_classes")
        check_patches(self.image_size, self.patch_size, self.stem)
        require(
            self.register_tokens >= 0,
            f"register_tokens is {self.register_tokens}; it cannot be negative.",
        )
        require(
            self.pool != "cls" or self.class_token is not False,
            'pool "cls" needs the class token; leave class_token out or choose another pool.',
        )
        require(
            self.pool == "cls" or not self.distillation_token,
            f'distillation_token needs pool "cls", not "{self.pool}"; its head goes with '
            "that of the class token.",
        )
        require(
            not (self.stack.causal or self.stack.cross_attention),
            "A ViT needs stack.causal and stack.cross_attention off.",
        )
        check_rates(self, "head_dropout")
        check_pool(self.pool, self.stack)
        check_variants(self.stack, any_length=False)
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
        """Number of tokens before the patches: class token, distillation token, registers."""
        return sum(self.prefix_counts)

    @property
    def prefix_counts(self) -> tuple[int, int, int]:
        """Number of class tokens, distillation tokens and registers."""
        return int(self.has_class_token), int(self.distillation_token), self.register_tokens

    @property
    def num_read(self) -> int | None:
        """Number of leading tokens that the heads use; None: all."""
        pooling = POOLINGS[self.pool]
        if pooling.num_read is None:
            return None
        before = self.prefix_tokens if pooling.patches_only else int(self.distillation_token)
        return before + pooling.num_read


class ViTEncoder(nn.Module):
    """Images to vectors of their patches: what classifiers and `MaskedAutoencoder` share.

    Subclasses give `embed` its initial values. Raises `ValueError` if `channels` is null.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.channels is None:
            raise ValueError("channels is null; fill it in from the data first.")
        self.config: Any = config
        stack = config.stack
        if config.norm_after_pool:
            stack = replace(stack, final_norm=False)
        self.embed = PatchEmbedding(
            config.image_size, config.patch_size, config.channels, stack.width, config.stem
        )
        self.position = build_position(config.position, config.position_options, stack, config.grid)
        prefix = config.prefix_tokens
        self.prefix = PrefixTokens(prefix, stack.width) if prefix else nn.Identity()
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        self.stack = Stack(stack, prefix + math.prod(config.grid))

    def tokens(
        self,
        images: Tensor,
        record: StackCache = NO_CACHE,
        kept: Tensor | None = None,
        num_outputs: int | None = None,
    ) -> Tensor:
        """Runs embeddings and blocks.

        Args:
            images: (B, C, H, W).
            record: A recorder of attention weights.
            kept: Indices (B, K) of the patches that are read; None: all.
            num_outputs: Return the first `num_outputs` vectors only; None: all.

        Returns:
            (B, P + K or `num_outputs`, E): class token, distillation token and registers, then the
            patches in the order of `kept`.
        """
        images = images.to(next(self.embed.parameters()).dtype)
        positions = grid_positions(self.config.grid, images.device)  # (1, N, 2)
        if kept is not None:
            positions = take(positions.expand(images.shape[0], -1, -1), kept)  # (B, K, 2)
        x = self.embed(images, kept)  # (B, N, E), or (B, K, E)
        x = self.position.embed(x, None if kept is None else positions)
        x = self.dropout(self.prefix(x))  # (B, P + N, E), or (B, P + K, E)
        return run_blocks(self.stack, self.position, x, positions, record, num_outputs)


def run_blocks(
    stack: Stack,
    position: Position,
    x: Tensor,
    positions: Tensor,
    record: StackCache = NO_CACHE,
    num_outputs: int | None = None,
) -> Tensor:
    """Runs blocks over P tokens without positions, then N patches, which have positions.

    (B, P + N, E) -> (B, P + N or `num_outputs`, E). `positions` are those of the patches,
    (B or 1, N, 2); `record` and `num_outputs` are those of `Stack.forward`.
    """
    prefix = x.shape[1] - positions.shape[1]
    rotary = position.rotate(positions)
    if rotary is not None:
        rotary = rotary.after_prefix(prefix)
    bias = position.bias(positions, positions)
    if bias is not None:
        bias = F.pad(bias, (prefix, 0, prefix, 0))  # (B or 1, H, P + N, P + N)
    mask = NO_MASK.with_bias(bias).with_outputs(num_outputs)
    return stack(x, mask, rotary, cache=record)


class ViT(ViTEncoder):
    """Images to class scores. Raises `ValueError` if `channels` or `num_classes` is null."""

    def __init__(self, config: ViTConfig) -> None:
        if config.channels is None or config.num_classes is None:
            raise ValueError("channels or num_classes is null; fill both in from the data first.")
        super().__init__(config)
        stack = config.stack
        norm = norm_factory(stack) if config.norm_after_pool else None
        self.pool = POOLINGS[config.pool](stack.width, stack.heads, math.prod(config.grid))
        self.head = ClassifierHead(stack.width, config.num_classes, norm, config.head_dropout)
        self.distillation_head = None
        if config.distillation_token:
            self.distillation_head = ClassifierHead(
                stack.width, config.num_classes, norm, config.head_dropout
            )
        for part in (self.embed, self.pool, self.head, self.distillation_head):
            if part is not None:  # the stack has initialised itself
                initialise(part, stack.init, stack.depth)

    def forward(
        self, images: Tensor, record: StackCache = NO_CACHE, each_head: bool = False
    ) -> Tensor:
        """Scores of classes.

        Args:
            images: (B, C, H, W).
            record: A recorder of attention weights.
            each_head: Keep the logits of the two heads of a network with a distillation token
                apart; otherwise they are averaged (Touvron 2021).

        Returns:
            Logits (B, K); with `each_head` (heads, B, K), those for labels first and those for the
            teacher last; (1, B, K) of a network with one head.
        """
        num_read = self.config.num_read
        x = self.tokens(images, record, num_outputs=num_read)  # (B, P + N or `num_read`, E)
        logits = self.head(self.pooled(x))  # (B, K)
        if self.distillation_head is None:
            return logits[None] if each_head else logits  # (1, B, K) or (B, K)
        both = torch.stack((logits, self.distillation_head(x[:, 1])))  # (2, B, K)
        return both if each_head else both.mean(0)

    def features(self, images: Tensor, record: StackCache = NO_CACHE) -> Tensor:
        """(B, C, H, W) -> pooled vectors (B, E), the input of the classifier."""
        return self.pooled(self.tokens(images, record, num_outputs=self.config.num_read))

    def pooled(self, x: Tensor) -> Tensor:
        """(B, P + N, E) -> (B, E)."""
        return self.pool(x[:, self.config.prefix_tokens :] if self.pool.patches_only else x)


def _preset(
    width: int, depth: int, heads: int, mlp_width: int | None = None, **options: object
) -> ViTConfig:
    stack = StackConfig(width, depth, heads, mlp_width=mlp_width)
    return ViTConfig(stack=stack, **options)  # type: ignore[arg-type]


def _mixer(width: int, depth: int) -> ViTConfig:
    stack = StackConfig(width, depth, heads=1, order="mixer")
    return ViTConfig(pool="mean", position="none", stack=stack)


def _cct(width: int, depth: int, heads: int, mlp_width: int, patch_size: int) -> ViTConfig:
    stack = StackConfig(
        width, depth, heads, mlp_width=mlp_width, order="cct", norm_eps=1e-5, qkv_bias=False
    )
    options: dict[str, Any] = {"image_size": 32, "num_classes": 10, "stem": "cct"}
    return ViTConfig(patch_size=patch_size, pool="sequence", stack=stack, **options)


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
    "large": _preset(1024, 24, 16),
    "huge": _preset(1280, 32, 16, patch_size=14),
    "giant": _preset(1408, 40, 16, mlp_width=6144, patch_size=14, pool="mean"),  # Zhai 2022
    "gigantic": _preset(1664, 48, 16, mlp_width=8192, patch_size=14, pool="mean"),
    "22b": ViTConfig(  # Dehghani 2023; pooled by attention there
        patch_size=14,
        pool="mean",
        stack=StackConfig(
            6144, 48, 48, norm="rmsnorm", order="parallel", qkv_bias=False, qk_norm=True
        ),
    ),
    "deit_tiny": _preset(192, 12, 3, distillation_token=True),  # Touvron 2021
    "deit_small": _preset(384, 12, 6, distillation_token=True),
    "deit_base": _preset(768, 12, 12, distillation_token=True),
    "mixer_small": _mixer(512, 8),  # Tolstikhin 2021, table 1
    "mixer_base": _mixer(768, 12),
    "mixer_large": _mixer(1024, 24),
    "mixer_cifar": ViTConfig(
        image_size=32,
        patch_size=4,
        num_classes=10,
        pool="mean",
        position="none",
        stem="resnet",
        stack=StackConfig(128, 4, 1, order="mixer", init="xavier"),
    ),
    "cct_2_3x2": _cct(128, 2, 2, 128, patch_size=4),  # Hassani 2021: layers, kernel x convolutions
    "cct_7_3x1": _cct(256, 7, 4, 512, patch_size=2),
    "hybrid_tiny": _preset(192, 12, 3, patch_size=32, stem="hybrid"),  # Steiner 2021, R+Ti/16
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
