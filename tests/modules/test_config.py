"""Configs: primitives that survive YAML and checkpoints, and sentences for what cannot be built."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from modules.attention import AdditiveAttention, MultiHeadAttention
from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.position import POSITIONS, build_position, grid_positions
from modules.transformer import Stack


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_config_round_trip(name: str, tmp_path: Any) -> None:
    preset = VIT_PRESETS[name]
    data = json.loads(json.dumps(asdict(preset)))
    assert ViTConfig(**{**data, "stack": StackConfig(**data["stack"])}) == preset
    torch.save(asdict(preset), tmp_path / "config.pt")
    assert torch.load(tmp_path / "config.pt", weights_only=True) == asdict(preset)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"width": 10, "heads": 3}, "width 10 cannot be split into 3 heads"),
        ({"depth": 0}, "depth is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"kv_heads": 2}, "kv_heads 2 does not divide heads 3"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"mlp_width": 0}, "mlp_width is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1"),
        ({"drop_path": 2.0}, "drop_path is 2.0"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"context_width": 8}, "cross_attention is off"),
    ],
)
def test_stacks_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StackConfig(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"image_size": 30, "patch_size": 4}, "image_size 30 is not a multiple of patch_size 4"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"register_tokens": -1}, "register_tokens is -1"),
        ({"class_token": False}, "needs the class token"),
        ({"stem": "conv", "patch_size": 7}, "must be 2, 4, 8"),
        ({"position": "rotary", "stack": StackConfig(attention="additive")}, "dot products"),
        ({"stack": StackConfig(causal=True)}, "whole image"),
        ({"position": "rotary", "position_options": {"fraction": 0.0}}, "fraction is 0.0"),
        ({"position": "rotary", "position_options": {"basis": 9}}, 'no option "basis"; .* base'),
        ({"position": "rotary", "position_options": {"base": "9"}}, "position_options.base is '9'"),
        ({"position": "nowhere"}, "choose one of none, learned"),
        ({"head_dropout": 1.5}, "head_dropout is 1.5"),
    ],
)
def test_vits_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ViTConfig(**options)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("sincos2d", {"stack": StackConfig(width=6, heads=3)}, "width that 4 divides, not 6"),
        ("rotary", {"stack": StackConfig(width=9, heads=3)}, "2 must divide"),
        ("rotary2d", {"stack": StackConfig(width=18, heads=3)}, "4 must divide"),
        ("rotary", {"position_options": {"fraction": 0.01}}, "rotate 1 of 64"),
    ],
)
def test_positions_that_do_not_fit(name: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ViT(replace(VIT_PRESETS["cifar_tiny"], position=name, **options))


def test_wrong_inputs_are_named() -> None:
    net = ViT(VIT_PRESETS["digits"])
    with pytest.raises(ValueError, match=r"Images are \(1, 9, 9\)"):
        net(torch.zeros(1, 1, 9, 9))
    with pytest.raises(ValueError, match="do not fit width"):
        Stack(StackConfig(depth=1))(torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="context"):
        MultiHeadAttention(StackConfig(8, heads=2))(torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="needs a context"):
        Stack(StackConfig(depth=1, cross_attention=True))(torch.zeros(1, 2, 192))
    stack = VIT_PRESETS["digits"].stack
    for name in ("sincos2d", "rotary2d"):
        with pytest.raises(ValueError, match="for images"):
            build_position(name, {}, stack, (9,))
    with pytest.raises(ValueError, match="even number"):
        build_position("t5", {"buckets": 3}, stack, (9,))
    with pytest.raises(ValueError, match="17 tokens are more than the 16"):
        POSITIONS["learned"](stack, (4, 4)).embed(torch.zeros(1, 17, 64))
    rotation = POSITIONS["rotary"](stack, (4, 4)).rotate(grid_positions((1, 2)))
    with pytest.raises(ValueError, match="additive"):
        AdditiveAttention(StackConfig(8, heads=2))(torch.zeros(1, 2, 8), rotary=rotation)
