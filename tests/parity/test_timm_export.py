"""Our ViT as timm's: each option gives equal logits there, or is not exported."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import timm

from modules.config import StackConfig
from modules.models.vit import ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model
from modules.schema import from_dict
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.vit.architectures import check_described, load_pretrained, pretrained_options
from tasks.vit.export import write_timm
from tests.parity.vit import changed, difference, randomise

TARGETS = external_targets("single_label_classification")

EXPORTED: dict[str, list[Any]] = {  # option: values that timm has, too
    "image_size": [40],
    "patch_size": [16],
    "channels": [1],
    "num_classes": [7],
    "pool": ["mean", "max"],
    "class_token": [True],
    "distillation_token": [True],
    "register_tokens": [3],
    "stem": ["hybrid"],
    "norm_after_pool": [True],
    "head_dropout": [0.1],
    "stack.width": [64],
    "stack.depth": [1],
    "stack.heads": [1, 2, 6],
    "stack.kv_heads": [4],
    "stack.head_dim": [12],
    "stack.mlp_width": [1, 100, 131, 192],
    "stack.feedforward": ["relu", "gelu_tanh", "silu"],
    "stack.final_norm": [True, False],
    "stack.mlp_bias": [True],
    "stack.order": ["parallel"],
    "stack.qkv_bias": [False],
    "stack.qk_norm": [True],
    "stack.dropout": [0.1],
    "stack.mlp_dropout": [0.1],
    "stack.attention_dropout": [0.1],
    "stack.drop_path": [0.1],
    "stack.layer_scale": [0.1, 0.0],
    "stack.checkpoint_activations": [True],
    "stack.init": ["xavier"],
}
NOT_EXPORTED: dict[str, list[Any]] = {  # option: values that it does not have
    "pool": ["attention", "sequence", "flatten"],
    "position": ["none", "sinusoidal", "sincos2d", "rotary2d", "alibi", "t5"],
    "stem": ["conv", "convpool", "cct", "resnet"],
    "stack.kv_heads": [2],
    "stack.head_dim": [8],
    "stack.value_dim": [8],
    "stack.attention": ["unscaled", "bilinear", "additive", "cosine"],
    "stack.conv_kernel": [3],
    "stack.feedforward": ["relu2", "swiglu", "geglu", "geglu_tanh"],
    "stack.norm": ["rmsnorm", "batchnorm", "none"],
    "stack.norm_eps": [1e-5],
    "stack.order": ["post", "res_post", "no_residual", "cct"],
    "stack.bias": [False],
    "stack.mlp_bias": [False],
}
NEVER = {  # no ViT has these
    "architecture",
    "position_options",
    "stack",
    "stack.causal",
    "stack.cross_attention",
    "stack.context_width",
    "stack.token_mlp_width",
}


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_each_option_of_ours_is_tried() -> None:
    options = {field.name for field in fields(ViTConfig)}
    options |= {f"stack.{field.name}" for field in fields(StackConfig)}
    assert EXPORTED.keys() | NOT_EXPORTED.keys() | NEVER == options


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("option, value", pairs(EXPORTED))
def test_an_export_to_timm_loads_there_and_here(option: str, value: Any) -> None:
    net = randomise(changed(option, value))
    names = [str(number) for number in range(net.config.num_classes or 0)]
    channels = net.config.channels or 0
    data = {"mean": [0.25] * channels, "std": [0.5] * channels}
    data |= {"interpolation": "bicubic", "crop_pct": 0.8}
    metadata = {**TARGETS, **data, "class_names": names}
    Path("out").mkdir()
    hint = write_timm(net, metadata, Path("out"))
    code = hint.format(file="out")  # as a user would paste it
    theirs = eval(code, {"timm": timm}).eval()
    assert difference(net, theirs) <= 1e-5
    found = timm.data.resolve_model_data_config(theirs)
    assert found["input_size"] == (channels, net.config.image_size, net.config.image_size)
    assert [*found["mean"]] == data["mean"] and [*found["std"]] == data["std"]
    assert found["crop_pct"] == 0.8 and found["interpolation"] == "bicubic"
    assert [*theirs.pretrained_cfg["label_names"]] == names
    options = pretrained_options("out")
    assert options["data"]["dataset"] == data
    back = ViT(from_dict(ViTConfig, options["model"]["net"] | {"num_classes": len(names)})).eval()
    load_pretrained(back, "out", {**TARGETS, "class_names": names})
    assert difference(back, theirs) <= 1e-5
    check_described("out", ())
    assert config_from_timm_model(theirs) == back.config


@pytest.mark.parametrize("option, value", pairs(NOT_EXPORTED))
def test_what_timm_does_not_have_is_not_exported(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option.removeprefix("stack.").partition("_")[0]):
        metadata = {**TARGETS, "class_names": [], "mean": [0.5] * 3, "std": [0.5] * 3}
        write_timm(changed(option, value), metadata, Path())
    assert not any(Path().iterdir())
