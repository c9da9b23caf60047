"""Swin Transformer (Liu 2021, Liu 2022): attention in windows, in stages of ever fewer tokens."""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import ATTENTIONS
from modules.config import (
    ImageArchitectureName,
    StackConfig,
    StemName,
    check_choice,
    check_rates,
    check_sizes,
    require,
    variant,
)
from modules.heads import ClassifierHead
from modules.init import initialise
from modules.kernels.dropout import Dropout
from modules.kernels.linear import Linear
from modules.norm import norm_factory
from modules.patch_embedding import PatchEmbedding, check_patches
from modules.pooling import MeanPooling
from modules.transformer import Stack, check_variants, drop_path_rates
from modules.windows import RELATIVE_BIASES, WindowAttention, Windows


@dataclass(frozen=True)
class SwinConfig:
    """Sizes and variants of a Swin Transformer (Liu 2021, Liu 2022).

    The second version has stack.attention "cosine", stack.order "res_post" and relative_bias "mlp".

    Args:
        image_size: Height and width of the images, in pixels.
        patch_size: Height and width of a patch, in pixels; must divide `image_size`.
        channels: Colour channels of the images: 3 for colour, 1 for grey; null: to be filled in
            from the data.
        num_classes: Number of classes; null: to be filled in from the data.
        depths: Number of blocks of each stage. Before each stage but the first, 2 x 2 tokens become
            one, twice as wide.
        window_size: Height and width of a window, in tokens. If the grid of a stage is smaller, the
            window is the grid. A grid that windows do not divide is padded.
        relative_bias: Bias of the scores for each offset in a window, an entry of `RELATIVE_BIASES`
            in modules/windows.py: a learned "table", or computed by an "mlp" (Liu 2022).
        pretrained_windows: Window size of each stage with which the weights were first trained, for
            "mlp"; null: `window_size`.
        stem: From pixels to tokens, an entry of `STEMS` in modules/patch_embedding.py.
        head_dropout: Probability of dropping values before the classifier.
        stack: The Transformer blocks: depth of all stages together; `width`, `heads`, `kv_heads`
            and `mlp_width` of the first, which double at each stage.
        architecture: The network, an entry of `ARCHITECTURES` in modules/models/images.py.
    """

    image_size: int = 224
    patch_size: int = 4
    channels: int | None = 3
    num_classes: int | None = 1000
    depths: tuple[int, ...] = (2, 2, 6, 2)
    window_size: int = 7
    relative_bias: str = "table"
    pretrained_windows: tuple[int, ...] | None = None
    stem: StemName = "patch"
    head_dropout: float = 0.0
    stack: StackConfig = field(default_factory=lambda: StackConfig(96, 12, 3, norm_eps=1e-5))
    architecture: ImageArchitectureName = "swin"

    def __post_init__(self) -> None:
        require(self.architecture == "swin", "architecture of a Swin is swin.")
        check_sizes(self, "image_size", "patch_size", "channels", "num_classes", "window_size")
        check_patches(self.image_size, self.patch_size, self.stem)
        require(
            len(self.depths) > 0 and min(self.depths) >= 1,
            f"depths is {[*self.depths]}; give at least one stage, each of at least one block.",
        )
        require(
            sum(self.depths) == self.stack.depth,
            f"stack.depth is {self.stack.depth}, but depths {[*self.depths]} are "
            f"{sum(self.depths)} blocks; change one of them.",
        )
        windows = self.pretrained_windows
        if windows is not None:
            require(
                len(windows) == len(self.depths) and min(windows) >= 1,
                f"pretrained_windows is {[*windows]}; give {len(self.depths)}, one for each stage.",
            )
        require(
            windows is None or self.relative_bias != "table",
            "pretrained_windows has no effect with relative_bias table; leave it out, or set "
            "relative_bias to mlp.",
        )
        require(
            self.stack.conv_kernel is None
            and not (self.stack.causal or self.stack.cross_attention),
            "A Swin needs stack.causal, stack.cross_attention and stack.conv_kernel off.",
        )
        require(
            self.stack.final_norm is not False,
            "A Swin has a norm after its last block; leave stack.final_norm out.",
        )
        check_rates(self, "head_dropout")
        check_choice("relative_bias", self.relative_bias, RELATIVE_BIASES)
        require(
            self.stack.order != "mixer",
            'A Swin attends within windows, which stack.order "mixer" does not; choose another.',
        )
        check_variants(self.stack)
        require(
            ATTENTIONS[self.stack.attention].score_fn is None,
            f'A Swin needs dot products; stack.attention "{self.stack.attention}" has none.',
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along height and width."""
        side = self.image_size // self.patch_size
        return side, side

    @property
    def grids(self) -> list[int]:
        """Side of the grid of tokens in each stage, rounded up where 2 x 2 do not fit."""
        return [-(-self.grid[0] // 2**stage) for stage in range(len(self.depths))]

    @property
    def window_sizes(self) -> list[int]:
        """Side of the windows in each stage, which is at most that of its grid."""
        return [min(grid, self.window_size) for grid in self.grids]

    def stage(self, index: int) -> StackConfig:
        """The blocks of a stage, from 0."""
        factor = 2**index
        stack = self.stack
        return replace(
            stack,
            width=stack.width * factor,
            depth=self.depths[index],
            heads=stack.heads * factor,
            kv_heads=None if stack.kv_heads is None else stack.kv_heads * factor,
            mlp_width=None if stack.mlp_width is None else stack.mlp_width * factor,
            final_norm=False,
        )


class PatchMerging(nn.Module):
    """2 x 2 tokens of width E are concatenated, normalised and mapped to 2 E (Liu 2021).

    After blocks of the order "res_post", they are mapped and then normalised (Liu 2022). A grid of
    odd side is padded with zeros.
    """

    def __init__(self, grid: int, config: StackConfig) -> None:
        super().__init__()
        self.grid = grid
        width = config.width  # E
        norm = norm_factory(config)
        norm_is_last = config.order == "res_post"
        self.norm = nn.Identity() if norm_is_last else norm(4 * width)
        self.reduction = Linear(4 * width, 2 * width, bias=False)
        self.last_norm = norm(2 * width) if norm_is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, G G, E) -> (B, G' G', 2 E) with G' = ceil(G / 2)."""
        x = x.unflatten(1, (self.grid, self.grid))  # (B, G, G, E)
        if self.grid % 2:
            x = F.pad(x, (0, 0, 0, 1, 0, 1))
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, G', 2, G', 2, E)
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)  # (B, G' G', 4 E)
        return self.last_norm(self.reduction(self.norm(x)))


def window_stack(config: SwinConfig, index: int, rates: list[float]) -> Stack:
    """The blocks of a stage, from 0: attention in windows, which every second block shifts."""
    stack = Stack(config.stage(index), rates=rates)
    grid = config.grids[index]
    size = config.window_sizes[index]
    pretrained = config.pretrained_windows
    bias = variant("relative_bias", config.relative_bias, RELATIVE_BIASES)
    pretrained_size = None if pretrained is None else pretrained[index]
    block: Any
    for number, block in enumerate(stack.blocks):
        windows = Windows(grid, size, size // 2 if number % 2 and size < grid else 0)
        relative_bias = bias(stack.config.heads, size, pretrained_size)
        block.attention = WindowAttention(block.attention, windows, relative_bias)
    return stack


class Swin(nn.Module):
    """Images to class scores. Raises `ValueError` if `channels` or `num_classes` is null."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        if config.channels is None or config.num_classes is None:
            raise ValueError("channels or num_classes is null; fill both in from the data first.")
        self.config = config
        stack = config.stack
        norm = norm_factory(stack)
        self.embed = PatchEmbedding(
            config.image_size, config.patch_size, config.channels, stack.width, config.stem
        )
        self.embed_norm = norm(stack.width)
        self.dropout = Dropout(stack.dropout) if stack.dropout else nn.Identity()
        rates = iter(drop_path_rates(stack))
        self.stages = nn.ModuleList()
        for index, depth in enumerate(config.depths):
            stage = OrderedDict[str, nn.Module]()
            if index:
                stage["merge"] = PatchMerging(config.grids[index - 1], config.stage(index - 1))
            stage["stack"] = window_stack(config, index, [next(rates) for _ in range(depth)])
            self.stages.append(nn.Sequential(stage))
        width = config.stage(len(config.depths) - 1).width
        self.norm = norm(width)
        self.pool = MeanPooling(width, stack.heads, config.grids[-1] ** 2)
        self.head = ClassifierHead(width, config.num_classes, dropout=config.head_dropout)
        initialise(self, stack.init, stack.depth)

    def forward(self, images: Tensor, each_head: bool = False) -> Tensor:
        """(B, C, H, W) -> logits (B, K), with `each_head` (1, B, K) as in `ViT`."""
        logits = self.head(self.features(images))
        return logits[None] if each_head else logits

    def features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> pooled vectors (B, E), the input of the classifier."""
        images = images.to(next(self.embed.parameters()).dtype)
        x = self.dropout(self.embed_norm(self.embed(images)))  # (B, N, E)
        for stage in self.stages:
            x = stage(x)  # (B, G G, E) -> (B, G' G', 2 E), but for the first
        return self.pool(self.norm(x))  # (B, E)


def _preset(
    width: int, depths: tuple[int, ...], heads: int, drop_path: float = 0.1, **options: object
) -> SwinConfig:
    stack = StackConfig(width, sum(depths), heads, norm_eps=1e-5, drop_path=drop_path)
    return SwinConfig(stack=stack, depths=depths, **options)  # type: ignore[arg-type]


def second_version(config: SwinConfig) -> SwinConfig:
    """Swin v2 (Liu 2022) of the same sizes."""
    stack = replace(config.stack, attention="cosine", order="res_post")
    return replace(config, relative_bias="mlp", stack=stack)


_FIRST = {
    "tiny": _preset(96, (2, 2, 6, 2), 3),
    "small": _preset(96, (2, 2, 18, 2), 3),
    "base": _preset(128, (2, 2, 18, 2), 4),
    "large": _preset(192, (2, 2, 18, 2), 6),
}
SWIN_PRESETS: dict[str, SwinConfig] = {
    **{f"swin_{name}": config for name, config in _FIRST.items()},
    **{
        f"swinv2_{name}": replace(second_version(config), image_size=256, window_size=8)
        for name, config in _FIRST.items()
    },
    "swin_cifar": _preset(
        64,
        (2, 4, 2),
        heads=2,
        drop_path=0.0,
        image_size=32,
        patch_size=2,
        window_size=4,
        num_classes=10,
    ),
    "swin_cifar_cpu": SwinConfig(
        image_size=32,
        num_classes=10,
        depths=(2, 2, 2),
        window_size=4,
        stem="resnet",
        stack=StackConfig(96, 6, 3, norm_eps=1e-5, init="xavier"),
    ),
}
