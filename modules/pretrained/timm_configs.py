"""Configs of timm's `VisionTransformer`: read off a model or the shapes of its weights, and back to its arguments.

A model is only read if timm's own class, built from the config that was read, is the same in all its parts.
"""

import math
import re
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from modules.config import FeedForwardName, PoolName, StackConfig, require
from modules.models.vit import ViTConfig
from modules.pretrained.names import State
from modules.pretrained.settings import check_feedforward, check_heads, check_options
from modules.pretrained.vit import covered_tokens

RANKS = {  # of weights whose shapes tell sizes
    "patch_embed.proj.weight": 4,
    "pos_embed": 3,
    "cls_token": 3,
    "reg_token": 3,
    "blocks.0.attn.qkv.weight": 2,
    "blocks.0.mlp.fc1.weight": 2,
    "head.bias": 1,
}
UNTOLD = (
    "heads",
    "feedforward",
    "norm_eps",
    "order",
)  # options of a stack that no shape tells; nor does one the pool


def config_from_timm_state(
    state: State, known: ViTConfig, prefix_positions: bool | None = None
) -> ViTConfig:
    """The config of a timm ViT: sizes from the shapes of its weights, the rest from `known`.

    Args:
        state: timm's `state_dict()`.
        known: Says what shapes do not tell: pool, `UNTOLD`, and the start value of layer scale.
        prefix_positions: Whether pos_embed covers class and register tokens; None: as its length tells.

    Raises:
        ValueError: These are not weights of a plain timm ViT, or do not fit `known`.
    """
    needed = (
        "patch_embed.proj.weight",
        "pos_embed",
        "blocks.0.attn.qkv.weight",
        "blocks.0.mlp.fc1.weight",
    )
    for name, rank in RANKS.items():
        require(
            name in state or name not in needed,
            f"{name} is missing: these are not weights of a plain timm ViT.",
        )
        require(
            name not in state or state[name].dim() == rank,
            f"{name} does not have {rank} dimensions.",
        )
    width, channels, patch, other = state["patch_embed.proj.weight"].shape
    require(patch == other, f"Patches of {patch} x {other} pixels are not square.")
    class_token = "cls_token" in state
    registers = state["reg_token"].shape[1] if "reg_token" in state else 0
    covered = covered_tokens(
        "pos_embed", state["pos_embed"].shape[1], class_token + registers, prefix_positions
    )
    hidden = len(state["blocks.0.mlp.fc1.weight"])
    numbers = [
        int(found[1])
        for found in (re.match(r"blocks\.(\d{1,9})\.", name) for name in state)
        if found
    ]
    stack = replace(
        known.stack,
        width=width,
        depth=1 + max(numbers),
        mlp_width=None if hidden == 4 * width else hidden,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        qk_norm="blocks.0.attn.q_norm.weight" in state,
        layer_scale=(known.stack.layer_scale or 1e-5) if "blocks.0.ls1.gamma" in state else None,
        final_norm=None if "norm.weight" in state or "fc_norm.weight" in state else False,
    )
    return replace(
        known,
        image_size=patch * round((state["pos_embed"].shape[1] - covered) ** 0.5),
        patch_size=patch,
        channels=channels,
        num_classes=len(state["head.bias"]) if "head.bias" in state else 1,
        class_token=None if class_token == (known.pool == "cls") else class_token,
        register_tokens=registers,
        norm_after_pool="fc_norm.weight" in state,
        stack=stack,
    )


TIMM_POOLS: dict[PoolName, str] = {"cls": "token", "mean": "avg", "max": "max"}
TIMM_ACTIVATIONS: dict[str, FeedForwardName] = {
    "GELU()": "gelu",
    "GELU(approximate='none')": "gelu",
    "GELUTanh()": "gelu_tanh",
    "GELU(approximate='tanh')": "gelu_tanh",
    "SiLU()": "silu",
    "ReLU()": "relu",
}
TIMM_ALWAYS = {  # what no argument of timm's changes
    "position": "learned",
    "stem": "patch",
    "attention": "dot",
    "norm": "layernorm",
    "order": "pre",
    "bias": True,
    "mlp_bias": True,
}
START = (
    "training",
    "weight_init_mode",
    "fix_init",
    "pretrained_cfg",
    "default_cfg",
    "pretrained_model_args",
)


def timm_arguments(config: ViTConfig) -> dict[str, Any]:
    """Arguments with which timm's `VisionTransformer` is the same model, the eps of its norms (1e-6) aside.

    Raises:
        ValueError: It cannot be, with the option.
    """
    stack = config.stack
    check_options("timm", config, TIMM_ALWAYS)
    check_heads("timm", stack)
    check_feedforward("timm", config, TIMM_ACTIVATIONS)
    require(config.pool in TIMM_POOLS, f'timm models have no pool "{config.pool}".')
    sizes = stack.resolved
    ratio = sizes.mlp_width / stack.width
    if int(stack.width * ratio) < sizes.mlp_width:  # timm rounds down
        ratio = math.nextafter(ratio, math.inf)
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "embed_dim": stack.width,
        "depth": stack.depth,
        "num_heads": stack.heads,
        "mlp_ratio": ratio,
        "global_pool": TIMM_POOLS[config.pool],
        "class_token": config.has_class_token,
        "reg_tokens": config.register_tokens,
        "qkv_bias": stack.qkv_bias,
        "no_embed_class": config.register_tokens > 0,
        "final_norm": config.norm_after_pool or sizes.final_norm,
        "fc_norm": config.norm_after_pool,
        "qk_norm": stack.qk_norm,
        "init_values": None
        if stack.layer_scale is None
        else stack.layer_scale or 1e-5,  # for 0 timm has none
        "act_layer": stack.feedforward,
    }


def config_from_timm_model(model: nn.Module) -> ViTConfig:
    """The config of a timm `VisionTransformer`.

    Raises:
        ValueError: The model has parts that this library does not, by name.
    """
    kind: Any = type(model)
    name = kind.__name__
    require(
        name == "VisionTransformer",
        f"timm's {name} is not a plain ViT; choose a vit_* or deit3_* model.",
    )
    pool = next((ours for ours, name in TIMM_POOLS.items() if name == model.global_pool), None)
    require(
        pool is not None,
        f'timm pooling "{model.global_pool}" is not supported; choose a model with token or avg.',
    )
    block: Any = model.blocks[0]  # type: ignore[index]
    name = type(block).__name__
    require(name == "Block", f"timm's {name} is not supported; choose a model of plain blocks.")
    act = repr(getattr(block.mlp, "act", None))
    require(
        act in TIMM_ACTIVATIONS,
        f"timm's activation {act} is not supported; choose a model with GELU.",
    )
    norm: Any = type(block.norm1)
    require(
        norm.__name__ == "LayerNorm",
        f"timm's {norm.__name__} is not supported; choose a model with LayerNorm.",
    )
    stack = StackConfig(
        width=model.embed_dim,  # type: ignore[arg-type]
        heads=block.attn.num_heads,
        feedforward=TIMM_ACTIVATIONS[act],
        norm_eps=block.norm1.eps,
        layer_scale=getattr(block.ls1, "init_values", None),
    )
    known = ViTConfig(pool=pool, stack=stack)  # type: ignore[arg-type]
    config = config_from_timm_state(model.state_dict(), known, not model.no_embed_class)
    arguments = timm_arguments(config) | {
        "num_classes": model.num_classes,  # 0: there is no classifier
        "no_embed_class": model.no_embed_class,
        "dynamic_img_size": model.dynamic_img_size,  # images of its own size are read alike
        "act_layer": lambda: deepcopy(block.mlp.act),
        "weight_init": "skip",
        "norm_layer": partial(norm, eps=block.norm1.eps),
    }
    with torch.device("meta"):
        plain = kind(**arguments)
    theirs, ours = anatomy(model), anatomy(plain)
    differ = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if differ:
        had, wanted = theirs.get(differ[0], "missing"), ours.get(differ[0], "nothing")
        raise ValueError(
            f"{differ[0].strip('.')} of timm's model is {had}, where only {wanted} is supported."
        )
    return config


def anatomy(model: nn.Module) -> dict[str, Any]:
    """All that makes up a model but the values of its weights: classes of its parts, shapes and plain attributes."""
    found: dict[str, Any] = {}
    for path, part in model.named_modules():
        found[f"{path}."] = f"{type(part).__module__}.{type(part).__qualname__}"
        attributes = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        found |= {
            f"{path}.{name}": value for name, value in attributes.items() if name not in START
        }
    return found | {name: tuple(value.shape) for name, value in model.state_dict().items()}
