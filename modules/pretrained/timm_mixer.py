"""Configs of timm's `MlpMixer`, read from weights and written as arguments."""

import math
import re
from dataclasses import replace
from typing import Any

from modules.config import require
from modules.models.vit import VIT_PRESETS, ViTConfig
from modules.pretrained.settings import check_fixed_options
from modules.pretrained.vit import MIXER_OPTIONS
from modules.pretrained.weights import State

STEM = "stem.proj.weight"
TOKENS = "blocks.0.mlp_tokens.fc1.weight"
CHANNELS = "blocks.0.mlp_channels.fc1.weight"


def config_from_mixer_state(state: State, known: ViTConfig) -> ViTConfig:
    """Returns the config of a timm Mixer from its `state_dict()`.

    Sizes follow from shapes; `known` has the eps of norms. Raises `ValueError` if these are not
    weights of a Mixer for square images and patches.
    """
    for name, count in {STEM: 4, TOKENS: 2, CHANNELS: 2}.items():
        fits = name in state and state[name].dim() == count
        require(fits, f"{name} is missing or of another shape: these are not weights of a Mixer.")
    width, channels, patch, other = state[STEM].shape
    token_width, tokens = state[TOKENS].shape
    hidden = len(state[CHANNELS])
    side = math.isqrt(tokens)
    square = patch == other and side**2 == tokens
    require(square, f"{tokens} patches of {patch} x {other} pixels are not square.")
    blocks = [re.match(r"blocks\.(\d{1,9})\.", name) for name in state]
    stack = replace(
        known.stack,
        order="mixer",
        width=width,
        depth=1 + max(int(block[1]) for block in blocks if block),
        mlp_width=None if hidden == 4 * width else hidden,
        token_mlp_width=None if token_width == width // 2 else token_width,
    )
    return replace(
        known,
        image_size=patch * side,
        patch_size=patch,
        channels=channels,
        num_classes=len(state["head.bias"]) if "head.bias" in state else 1,
        pool="mean",
        position="none",
        stack=stack,
    )


def mixer_arguments(config: ViTConfig) -> dict[str, Any]:
    """Returns the arguments of timm's `MlpMixer` for the same model, but eps of norms.

    Raises `ValueError` if there is no such model, with the option.
    """
    check_fixed_options("timm Mixer", config, MIXER_OPTIONS)
    stack = config.stack
    sizes = stack.resolved
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.channels,
        "num_classes": config.num_classes,
        "num_blocks": stack.depth,
        "embed_dim": stack.width,
        "mlp_ratio": [
            mlp_ratio(sizes.token_mlp_width, stack.width),
            mlp_ratio(sizes.mlp_width, stack.width),
        ],
        "global_pool": "avg",
    }


def nearest_mixer(config: ViTConfig) -> tuple[str, ViTConfig]:
    """Returns the name of a timm Mixer that arguments turn into ours, and its config.

    Raises `ValueError` if there is none: by name, timm does not build Mixers of other widths,
    numbers of blocks and patch sizes.
    """
    for size in ("small", "base", "large"):
        nearest = replace(VIT_PRESETS[f"mixer_{size}"], patch_size=config.patch_size)
        same = (nearest.stack.width, nearest.stack.depth) == (
            config.stack.width,
            config.stack.depth,
        )
        if same and config.patch_size in (16, 32):
            return f"mixer_{size[0]}{config.patch_size}_224", nearest
    raise ValueError(
        "its Mixers have width 512 and depth 8, 768 and 12, or 1024 and 24, and patch_size 16 or 32"
    )


def mlp_ratio(hidden: int, width: int) -> float:
    """Returns the factor by which timm, which rounds down, makes a hidden size of a width."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)
