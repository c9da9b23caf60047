"""Configs of timm's `VisionTransformer`, `VisionTransformerDistilled` and `MlpMixer`, as arguments.

A model is read only if timm's own class, built from the config that was read, equals it in all
parts.
"""

import math
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from modules.config import FeedForwardName, PoolName, StackConfig, require
from modules.models.vit import VIT_PRESETS, ViTConfig
from modules.pretrained.settings import check_feedforward, check_fixed_options, check_heads
from modules.pretrained.timm_mixer import (
    STEM,
    config_from_mixer_state,
    mixer_arguments,
    mlp_ratio,
    nearest_mixer,
)
from modules.pretrained.timm_parallel import (
    PARALLEL_ARCHITECTURE,
    TIMM_NORMS,
    block_parts,
    is_parallel,
    to_plain_blocks,
)
from modules.pretrained.timm_parts import check_parts, require_class
from modules.pretrained.vit import TIMM, count_prefix_positions
from modules.pretrained.weights import State

# Dimensions of the weights whose shapes tell sizes; those in `REQUIRED` are in every file.
DIMENSIONS = {
    "patch_embed.proj.weight": 4,
    "pos_embed": 3,
    "patch_embed.backbone.conv.weight": 4,
    "cls_token": 3,
    "dist_token": 3,
    "reg_token": 3,
    "blocks.0.attn.qkv.weight": 2,
    "blocks.0.mlp.fc1.weight": 2,
    "head.bias": 1,
}
CLASSES = (  # of timm, which are read here or refused with the part that ours lacks
    "VisionTransformer",
    "VisionTransformerDistilled",
    "VisionTransformerRelPos",
    "MlpMixer",
)
REQUIRED = (
    "patch_embed.proj.weight",
    "pos_embed",
    "blocks.0.attn.qkv.weight",
    "blocks.0.mlp.fc1.weight",
)
# Options of a stack that do not follow from shapes, nor does the pool.
NOT_IN_SHAPES = ("heads", "feedforward", "norm_eps", "order")
POOLS: dict[PoolName, str] = {"cls": "token", "mean": "avg", "max": "max"}
ACTIVATIONS: dict[str, FeedForwardName] = {
    "GELU()": "gelu",
    "GELU(approximate='none')": "gelu",
    "GELUTanh()": "gelu_tanh",
    "GELU(approximate='tanh')": "gelu_tanh",
    "SiLU()": "silu",
    "ReLU()": "relu",
}
STRIDES = {"patch": 1, "hybrid": 4}  # of our stem before its patches are taken
# What all models of timm's class have.
COMMON = {
    "position": "learned",
    "attention": "dot",
    "bias": True,
    "mlp_bias": True,
}
HYBRID_STEM = """Sequential(
  (conv): StdConv2dSame({channels}, 64, kernel_size=(7, 7), stride=(2, 2), bias=False)
  (norm): GroupNormAct(
    32, 64, eps=1e-05, affine=True, bias=True
    (drop): Identity()
    (act): ReLU(inplace=True)
  )
  (pool): MaxPool2dSame(kernel_size=(3, 3), stride=(2, 2), padding=(0, 0), dilation=(1, 1), \
ceil_mode=False)
)"""


def config_from_timm_state(
    state: State, known: ViTConfig, prefix_positions: bool | None = None
) -> ViTConfig:
    """Returns the config of a timm ViT or Mixer from its `state_dict()`.

    Sizes follow from shapes; `known` has the rest: pool, `NOT_IN_SHAPES`, and the initial value of
    layer scale. `prefix_positions` as in `ViTFamily`. Raises `ValueError` if these are not weights
    of a plain timm ViT or Mixer, or do not fit `known`.
    """
    if STEM in state:
        return config_from_mixer_state(state, known)
    order = "parallel" if is_parallel(state) else known.stack.order
    state = to_plain_blocks(state)
    for name in REQUIRED:
        require(name in state, f"{name} is missing: these are not weights of a plain timm ViT.")
    for name, count in DIMENSIONS.items():
        fits = name not in state or state[name].dim() == count
        require(fits, f"{name} does not have {count} dimensions.")
    width, channels, patch, other = state["patch_embed.proj.weight"].shape
    require(patch == other, f"Patches of {patch} x {other} pixels are not square.")
    is_hybrid = "patch_embed.backbone.conv.weight" in state
    if is_hybrid:
        channels = state["patch_embed.backbone.conv.weight"].shape[1]
        patch *= 4
    class_token = "cls_token" in state
    distillation = "dist_token" in state
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    positions = state["pos_embed"].shape[1]
    covered = count_prefix_positions(
        "pos_embed", positions, class_token + distillation + registers, prefix_positions
    )
    hidden = len(state["blocks.0.mlp.fc1.weight"])
    blocks = [re.match(r"blocks\.(\d{1,9})\.", name) for name in state]
    has_norm = "norm.weight" in state or "fc_norm.weight" in state
    has_scale = "blocks.0.ls1.gamma" in state
    stack = replace(
        known.stack,
        order=order,
        width=width,
        depth=1 + max(int(block[1]) for block in blocks if block),
        mlp_width=None if hidden == 4 * width else hidden,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        layer_scale=(known.stack.layer_scale or 1e-5) if has_scale else None,
        final_norm=None if has_norm else False,
    )
    return replace(
        known,
        image_size=patch * math.isqrt(positions - covered),
        patch_size=patch,
        stem="hybrid" if is_hybrid else "patch",
        channels=channels,
        num_classes=len(state["head.bias"]) if "head.bias" in state else 1,
        class_token=None if class_token == (known.pool == "cls") else class_token,
        distillation_token=distillation,
        register_tokens=registers,
        norm_after_pool="fc_norm.weight" in state,
        stack=stack,
    )


def timm_arguments(config: ViTConfig) -> dict[str, Any]:
    """Returns the arguments of timm's class for the same model, but eps of norms and stem.

    Raises `ValueError` if there is no such model, with the option.
    """
    stack = config.stack
    if stack.order == "mixer":
        return mixer_arguments(config)
    require(config.stem in STRIDES, f'timm models have no stem "{config.stem}".')
    check_fixed_options("timm", config, COMMON)
    if stack.order == "parallel":
        check_fixed_options(
            "timm's parallel", config, {"stem": "patch", "distillation_token": False}
        )
        require(stack.norm in TIMM_NORMS.values(), f'timm models have no norm "{stack.norm}".')
    else:
        check_fixed_options("timm", config, {"order": "pre", "norm": "layernorm"})
    require(
        not (config.distillation_token and config.register_tokens),
        "timm models with a distillation_token have no register_tokens.",
    )
    check_heads("timm", stack)
    check_feedforward("timm", config, ACTIVATIONS)
    require(config.pool in POOLS, f'timm models have no pool "{config.pool}".')
    sizes = stack.resolved
    scale = stack.layer_scale
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size // STRIDES[config.stem],
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "embed_dim": stack.width,
        "depth": stack.depth,
        "num_heads": stack.heads,
        "mlp_ratio": mlp_ratio(sizes.mlp_width, stack.width),
        "global_pool": POOLS[config.pool],
        "class_token": config.has_class_token,
        "reg_tokens": config.register_tokens,
        "qkv_bias": stack.qkv_bias,
        "no_embed_class": config.register_tokens > 0,
        "final_norm": config.norm_after_pool or sizes.final_norm,
        "fc_norm": config.norm_after_pool,
        "qk_norm": stack.qk_norm,
        "init_values": None if scale is None else scale or 1e-5,  # 0 means none there
        "act_layer": stack.feedforward,
    }


# What timm's config.json may say of a model that ours can equal.
ARGUMENTS = timm_arguments(ViTConfig()).keys() | {"dynamic_img_size", "pre_norm", "norm_layer"}
ARGUMENTS |= timm_arguments(VIT_PRESETS["mixer_base"]).keys()


def timm_settings(config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of timm for the same model.

    Args:
        config: Of our model.
        metadata: Of its data: problem_type, class_names, mean and std of each channel in [0, 1],
            interpolation and crop_pct.

    Raises:
        ValueError: timm has no such model, with the option.
    """
    stack = config.stack
    arguments = timm_arguments(config)
    require(
        stack.norm_eps == 1e-6,
        f"its models have norm_eps 1e-06, this one {stack.norm_eps}: train with "
        "--model.net.stack.norm_eps 1e-6",
    )
    pool = arguments["global_pool"]
    if stack.order == "parallel":
        name = PARALLEL_ARCHITECTURE
        arguments |= {"pre_norm": False, "norm_layer": stack.norm}
        arguments = {name: value for name, value in arguments.items() if value is not None}
    else:
        name, nearest = nearest_model(config)
        defaults = timm_arguments(nearest) | {"fc_norm": config.pool != "cls"}
        arguments = {name: value for name, value in arguments.items() if value != defaults[name]}
    stem = "first" if config.stem == "hybrid" else "conv"
    (first,) = TIMM.names(config)[f"embed.stem.{stem}.weight"]
    classifier = ["head", "head_dist"] if config.distillation_token else "head"
    layers = (first.removesuffix(".weight"), classifier)
    return write_settings(name, config, metadata, arguments, stack.width, pool, layers)


def write_settings(
    architecture: str,
    config: Any,
    metadata: Mapping[str, Any],
    arguments: Mapping[str, Any],
    width: int,
    pool: str,
    layers: tuple[str, str | list[str]],
) -> dict[str, Any]:
    """Returns a config.json of timm.

    Args:
        architecture: A registered model.
        config, metadata: As of `timm_settings`.
        arguments: In which the model differs from the registered one.
        width: Of the pooled vector.
        pool: timm's name of the pooling.
        layers: timm's names of the first layer and the classifier, or classifiers.
    """
    first, classifier = layers
    return {
        "architecture": architecture,
        "num_classes": config.num_classes,
        "num_features": width,
        "global_pool": pool,
        "label_names": metadata["class_names"],
        "problem_type": metadata["problem_type"],
        "model_args": dict(arguments),
        "pretrained_cfg": {
            "num_classes": config.num_classes,
            "input_size": [config.channels, config.image_size, config.image_size],
            "fixed_input_size": True,
            "interpolation": metadata.get("interpolation", "bilinear"),
            "crop_pct": metadata.get("crop_pct", 1.0),
            "crop_mode": "center",
            "mean": metadata["mean"],
            "std": metadata["std"],
            "first_conv": first,
            "classifier": classifier,
        },
    }


def nearest_model(config: ViTConfig) -> tuple[str, ViTConfig]:
    """Returns the name of a timm model that arguments turn into ours, and its config.

    Raises `ValueError` if there is none.
    """
    stack = config.stack
    if stack.order == "mixer":
        return nearest_mixer(config)
    if config.stem == "hybrid":
        return "vit_tiny_r_s16_p8_224", VIT_PRESETS["hybrid_tiny"]
    size = {(192, 3): "tiny", (384, 6): "small"}.get((stack.width, stack.heads), "base")
    if config.distillation_token:
        return f"deit_{size}_distilled_patch16_224", VIT_PRESETS[f"deit_{size}"]
    return f"vit_{size}_patch16_224", VIT_PRESETS[size]


def config_from_timm_model(model: nn.Module) -> ViTConfig:
    """Returns the config of a timm `VisionTransformer` or `MlpMixer`.

    Raises `ValueError` if the model has parts that ours lacks, by name.
    """
    timm: Any = model
    if type(model).__name__ == "MlpMixer":
        return config_from_timm_mixer(timm)
    require(
        not type(model).__name__.endswith("RelPos"),
        "timm's model has relative positions, which Tessera does not have: choose another.",
    )
    pool = next((ours for ours, name in POOLS.items() if name == timm.global_pool), None)
    require(
        pool is not None,
        f'timm pooling "{timm.global_pool}" is not supported; choose a model with token or avg.',
    )
    state = timm.state_dict()
    parts = block_parts(timm.blocks[0])
    act = repr(parts.activation)
    require(act in ACTIVATIONS, f"timm's {act} is not supported; choose a model with GELU.")
    norm: Any = type(parts.norm)
    if norm.__name__ not in TIMM_NORMS or not is_parallel(state):
        require_class(norm.__name__, "LayerNorm", "is not supported; choose a model with LayerNorm")
    stack = StackConfig(
        width=timm.embed_dim,
        heads=parts.heads,
        feedforward=ACTIVATIONS[act],
        norm=TIMM_NORMS[norm.__name__],
        norm_eps=parts.norm.eps,
        layer_scale=getattr(parts.scale, "init_values", None),
    )
    known = ViTConfig(pool=pool, stack=stack)  # type: ignore[arg-type]
    config = config_from_timm_state(state, known, not timm.no_embed_class)
    arguments = timm_arguments(config) | {
        "num_classes": timm.num_classes,  # 0: there is no classifier
        "no_embed_class": timm.no_embed_class,
        "dynamic_img_size": timm.dynamic_img_size,  # makes no difference at its own size
        "act_layer": lambda: deepcopy(parts.activation),
        "block_fn": type(timm.blocks[0]),
        "weight_init": "skip",
        "norm_layer": partial(norm, eps=parts.norm.eps),
    }
    if config.stem == "hybrid":
        backbone = timm.patch_embed.backbone
        check_hybrid_stem(backbone, config.channels or 0)
        backbone = deepcopy(backbone).to("meta")
        embed_layer: Callable[..., Any] = type(timm.patch_embed)
        arguments["embed_layer"] = partial(embed_layer, backbone=backbone)
    check_parts(model, arguments)
    return config


def check_hybrid_stem(backbone: Any, channels: int) -> None:
    """Raises `ValueError` unless layers of timm's are those of `HybridStem`."""
    same = repr(backbone) == HYBRID_STEM.format(channels=channels)
    require(
        same and backbone.conv.same_pad and backbone.conv.eps == 1e-8,
        "patch_embed.backbone of timm's model is not supported; choose vit_tiny_r_s16_p8_224.",
    )


def config_from_timm_mixer(model: Any) -> ViTConfig:
    """Returns the config of a timm `MlpMixer`; raises `ValueError` as `config_from_timm_model`."""
    block = model.blocks[0]
    name = type(block).__name__
    require_class(name, "MixerBlock", "is not supported; choose a model of plain Mixer blocks")
    norm: Any = type(block.norm1)
    require_class(norm.__name__, "LayerNorm", "is not supported; choose a model with LayerNorm")
    known = ViTConfig(stack=StackConfig(heads=1, norm_eps=block.norm1.eps))
    config = config_from_mixer_state(model.state_dict(), known)
    arguments = {
        "num_classes": model.num_classes,  # 0: there is no classifier
        "norm_layer": partial(norm, eps=block.norm1.eps),
    }
    check_parts(model, mixer_arguments(config) | arguments)
    return config
