"""Swin weights and configs of timm, converted both ways, for other window sizes, too."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modules.config import StackConfig, require
from modules.models.swin import Swin, SwinConfig
from modules.pretrained.family import Family
from modules.pretrained.settings import check_fixed_options, check_heads
from modules.pretrained.timm import write_settings
from modules.pretrained.timm_mixer import mlp_ratio
from modules.pretrained.timm_parts import check_parts, require_class
from modules.pretrained.vit import fitting_patches, resize_stem
from modules.pretrained.weights import Layers, Names, State, drop_other_classifier, weight_names

TABLE = re.compile(r"stages\.(\d+)\..*\.bias\.table")  # our name of a bias of each offset
# {s} and {p} stand for the numbers of a stage and of the one before it, {i} for that of a block in
# the stage, {norm} for our name of the norm of patch merging, which the first stage does not have.
BLOCK = "stages.{s}.stack.blocks.{i}"
MERGE = "stages.{s}.merge"
THEIRS = "layers.{s}.blocks.{i}"
LAYERS: Layers = {
    "embed.stem.conv": "patch_embed.proj",
    "embed_norm": "patch_embed.norm",
    f"{MERGE}.{{norm}}": "layers.{s}.downsample.norm",
    f"{MERGE}.reduction": "layers.{s}.downsample.reduction",
    f"{BLOCK}.norm1": f"{THEIRS}.norm1",
    f"{BLOCK}.attention.attention.qkv": f"{THEIRS}.attn.qkv",
    f"{BLOCK}.attention.attention.output": f"{THEIRS}.attn.proj",
    f"{BLOCK}.norm2": f"{THEIRS}.norm2",
    f"{BLOCK}.feedforward.up": f"{THEIRS}.mlp.fc1",
    f"{BLOCK}.feedforward.down": f"{THEIRS}.mlp.fc2",
    "norm": "norm",
    "head.linear": "head.fc",
}
TENSORS = {  # of each block; a version has the first or the others
    f"{BLOCK}.attention.bias.table": f"{THEIRS}.attn.relative_position_bias_table",
    f"{BLOCK}.attention.bias.up": f"{THEIRS}.attn.cpb_mlp.0.weight",
    f"{BLOCK}.attention.bias.up_bias": f"{THEIRS}.attn.cpb_mlp.0.bias",
    f"{BLOCK}.attention.bias.down": f"{THEIRS}.attn.cpb_mlp.2.weight",
    f"{BLOCK}.attention.attention.log_scale": f"{THEIRS}.attn.logit_scale",
    f"{BLOCK}.attention.attention.qkv.q_bias": f"{THEIRS}.attn.q_bias",
    f"{BLOCK}.attention.attention.qkv.v_bias": f"{THEIRS}.attn.v_bias",
}
COMMON = {  # what all published Swins have
    "stem": "patch",
    "feedforward": "gelu",
    "norm": "layernorm",
    "bias": True,
    "mlp_bias": True,
    "qk_norm": False,
    "layer_scale": None,
}
FIRST_VERSION = {"attention": "dot", "order": "pre", "relative_bias": "table"}  # Liu 2021
SECOND_VERSION = {"attention": "cosine", "order": "res_post", "relative_bias": "mlp"}  # Liu 2022
VERSIONS: dict[str, dict[str, Any]] = {
    "SwinTransformer": FIRST_VERSION,
    "SwinTransformerV2": SECOND_VERSION,
}


def resize_offsets(table: Tensor, size: int) -> Tensor:
    """Resizes a bias of each offset to windows of side Z, `size`.

    (2S-1, 2S-1, H) -> (2Z-1, 2Z-1, H)

    Linear between offsets that lie farther and farther apart, by a ratio with which the farthest
    ones meet (Bao 2022), as timm does it.
    """
    old = len(table) // 2  # the farthest offset
    new = size - 1
    if old == 0:
        return table.expand(2 * size - 1, 2 * size - 1, -1)
    if old == new:
        return table
    low, high = 1.01, 1.5
    while high - low > 1e-6:
        ratio = (low + high) / 2
        is_large = (1 - ratio**old) / (1 - ratio) > new
        low, high = (low, ratio) if is_large else (ratio, high)
    half = (ratio ** torch.arange(old, dtype=torch.float64)).cumsum(0)
    places = torch.cat((-half.flip(0), torch.zeros(1), half)).float()  # (2S-1,)
    wanted = torch.arange(-new, new + 1.0)  # (2Z-1,)
    right = torch.bucketize(wanted, places).clamp(1, 2 * old)
    left = places[right - 1]
    weight = ((wanted - left) / (places[right] - left)).clamp(0, 1)[:, None, None]
    resized = table.float().cpu()
    for _ in range(2):  # rows, then columns
        resized = resized[right - 1].lerp(resized[right], weight).transpose(0, 1)
    return resized.to(table)


def resize_swin(state: State, saved: SwinConfig, config: SwinConfig) -> State:
    """Returns weights of a config under our names for the windows and patches of another."""
    state = {name: resize_table(name, value, config) for name, value in state.items()}
    return resize_stem(state, saved, config)


def resize_table(name: str, value: Tensor, config: SwinConfig) -> Tensor:
    """Returns one of our weights, resized if it is a table of offsets, (2S-1, 2S-1, H)."""
    found = TABLE.fullmatch(name)
    if found is None or int(found[1]) >= len(config.depths) or config.relative_bias != "table":
        return value
    return resize_offsets(value, config.window_sizes[int(found[1])])


@dataclass(frozen=True, kw_only=True)
class SwinFamily(Family[SwinConfig]):
    """How timm, or a library with other `layers` and `tensors`, names the weights of a Swin."""

    name: str = "timm"
    layers: Layers = field(default_factory=lambda: LAYERS)
    tensors: dict[str, str] = field(default_factory=lambda: TENSORS)
    unused: str = r"relative_position_index|relative_coords_table|attn_mask"
    optional: tuple[str, ...] = ("head.linear.",)

    def names(self, config: SwinConfig) -> Names:
        norm = "last_norm" if config.stack.order == "res_post" else "norm"
        keys_have_bias = config.stack.attention != "cosine"  # which has q_bias and v_bias instead
        names: Names = {}
        for stage, depth in enumerate(config.depths):
            parts = {"{s}": f"{stage}", "{p}": f"{stage - 1}", "{norm}": norm}
            for ours, theirs in weight_names(self.layers, depth, self.tensors).items():
                if keys_have_bias or not ours.endswith("qkv.bias"):
                    names[fill(ours, parts)] = tuple(fill(name, parts) for name in theirs)
        return names

    def networks(self, config: SwinConfig) -> list[nn.Module]:
        return [Swin(replace(config, num_classes=config.num_classes or 1))]

    def check(self, config: SwinConfig) -> None:
        timm_class(config)

    def import_tensor(self, name: str, value: Tensor, config: SwinConfig) -> Tensor:
        """As in the base class, resized to the windows and patches of `config`."""
        if not TABLE.fullmatch(name):
            return fitting_patches(name, value, config)
        side = math.isqrt(len(value))
        return resize_table(name, value.unflatten(0, (side, side)), config)

    def export_tensor(self, name: str, value: Tensor, config: SwinConfig) -> Tensor:
        return value.flatten(0, 1) if TABLE.fullmatch(name) else value

    def weights_from_external(self, state: State, config: SwinConfig) -> State:
        """As in the base class; a classifier for another number of classes is left out."""
        return drop_other_classifier(
            super().weights_from_external(state, config), config.num_classes
        )


def fill(name: str, parts: Mapping[str, str]) -> str:
    """Returns a name with its placeholders replaced."""
    for placeholder, part in parts.items():
        name = name.replace(placeholder, part)
    return name


TIMM_SWIN = SwinFamily()


def timm_class(config: SwinConfig) -> str:
    """Returns timm's class that has the same model; `ValueError` if none has, with the option."""
    check_fixed_options("timm", config, COMMON)
    check_heads("timm", config.stack)
    name = "SwinTransformer" if config.relative_bias == "table" else "SwinTransformerV2"
    check_fixed_options("timm", config, VERSIONS[name])
    return name


def swin_arguments(config: SwinConfig) -> dict[str, Any]:
    """Returns the arguments of timm's class for the same model, but eps of norms.

    Raises `ValueError` if there is no such model, with the option.
    """
    name = timm_class(config)
    stack = config.stack
    arguments = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "global_pool": "avg",
        "embed_dim": stack.width,
        "depths": config.depths,
        "num_heads": tuple(config.stage(i).heads for i in range(len(config.depths))),
        "window_size": config.window_size,
        "mlp_ratio": mlp_ratio(stack.resolved.mlp_width, stack.width),
        "qkv_bias": stack.qkv_bias,
        "drop_rate": config.head_dropout,
        "proj_drop_rate": stack.dropout,
        "attn_drop_rate": stack.attention_dropout,
        "drop_path_rate": stack.drop_path,
    }
    if name == "SwinTransformerV2":
        windows = config.pretrained_windows
        arguments["pretrained_window_sizes"] = windows or (0,) * len(config.depths)
    return arguments


# What timm's config.json may say of a model that ours can equal.
SWIN_ARGUMENTS = {*swin_arguments(SwinConfig()), "pretrained_window_sizes", "strict_img_size"}


def swin_settings(config: SwinConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of timm for the same model; arguments and errors as for a ViT."""
    eps = config.stack.norm_eps
    require(
        eps == 1e-5,
        f"its models have norm_eps 1e-05, this one {eps}: train with "
        "--model.net.stack.norm_eps 1e-5",
    )
    name = timm_class(config)
    architecture = "swin_tiny_patch4_window7_224"
    if name == "SwinTransformerV2":
        architecture = "swinv2_tiny_window8_256"
    width = config.stage(len(config.depths) - 1).width
    arguments = swin_arguments(config)
    layers = ("patch_embed.proj", "head.fc")
    return write_settings(architecture, config, metadata, arguments, width, "avg", layers)


def config_from_timm_swin(model: nn.Module) -> SwinConfig:
    """Returns the config of a timm `SwinTransformer` or `SwinTransformerV2`.

    Raises `ValueError` if the model has parts that ours lacks, by name.
    """
    timm: Any = model
    blocks = [block for stage in timm.layers for block in stage.blocks]
    version = VERSIONS[type(model).__name__]
    norm: Any = type(blocks[0].norm1)
    require_class(norm.__name__, "LayerNorm", "is not supported; choose a model with LayerNorm")
    width = timm.patch_embed.proj.out_channels
    hidden = blocks[0].mlp.fc1.out_features
    stack = StackConfig(
        width=width,
        depth=len(blocks),
        heads=blocks[0].attn.num_heads,
        mlp_width=None if hidden == 4 * width else hidden,
        attention=version["attention"],
        order=version["order"],
        norm_eps=blocks[0].norm1.eps,
        qkv_bias="q_bias" in dict(blocks[0].attn.named_parameters())
        or blocks[0].attn.qkv.bias is not None,
        dropout=blocks[0].attn.proj_drop.p,
        attention_dropout=blocks[0].attn.attn_drop.p,
        drop_path=round(getattr(blocks[-1].drop_path1, "drop_prob", 0.0), 6),
    )
    reach = [getattr(stage.blocks[0].attn, "pretrained_window_size", (0,)) for stage in timm.layers]
    pretrained = tuple(size[0] for size in reach)
    config = SwinConfig(
        image_size=timm.patch_embed.img_size[0],
        patch_size=timm.patch_embed.patch_size[0],
        channels=timm.patch_embed.proj.in_channels,
        num_classes=timm.num_classes or 1,
        depths=tuple(len(stage.blocks) for stage in timm.layers),
        window_size=max(block.window_size[0] for block in blocks),
        relative_bias=version["relative_bias"],
        pretrained_windows=pretrained if all(pretrained) else None,
        head_dropout=timm.head.drop.p,
        stack=stack,
    )
    check_parts(
        model,
        swin_arguments(config)
        | {
            "num_classes": timm.num_classes,  # 0: there is no classifier
            "strict_img_size": not timm.dynamic_img_size,  # makes no difference at its own size
            "norm_layer": partial(norm, eps=stack.norm_eps),
        },
    )
    return config


def config_from_swin_state(state: State, known: SwinConfig) -> SwinConfig:
    """Returns the config of weights of the timm model of a config, with their channels and classes.

    Raises `ValueError` if they are not those of a Swin.
    """
    patches = state.get("patch_embed.proj.weight")
    require(patches is not None and patches.dim() == 4, "these are not weights of a Swin.")
    classes = len(state["head.fc.bias"]) if "head.fc.bias" in state else 1
    return replace(known, channels=state["patch_embed.proj.weight"].shape[1], num_classes=classes)
