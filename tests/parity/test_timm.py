"""Models of timm, by name and by argument: equal logits, or refused."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import nn

from modules.models.vit import ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model
from modules.pretrained.vit import TIMM
from tasks.errors import UsageError
from tasks.vit.pretrained import find_model
from tasks.vit.pretrained_timm import TimmFiles, TimmModel
from tests.parity.vit import difference, our_vit, timm_model, tiny_timm

PATTERNS = ("vit_*", "deit*", "eva_*", "eva02*", "flexivit*", "test_vit*", "mixer_s*")
REGISTERED = sorted({name for pattern in PATTERNS for name in timm.list_models(pattern)})
# Among them: registers, average pooling, layer scale, other widths of heads, tanh GELU.
LOADED = [
    "vit_tiny_patch16_224",
    "vit_base_patch16_224",
    "vit_medium_patch16_reg4_gap_256",
    "test_vit",
    "deit3_small_patch16_224",
    "vit_huge_patch14_224",
    "vit_so400m_patch14_siglip_gap_224",
    "vit_base_patch16_gap_224",
    "vit_base_patch32_siglip_gap_256",
    "vit_small_patch14_reg4_dinov2",
    "vit_wee_patch16_reg1_gap_256",
    "vit_intern300m_patch14_448",
    "vit_tiny_r_s16_p8_224",
    "deit_tiny_distilled_patch16_224",
    "mixer_s16_224",
]
REFUSED = [
    "vit_base_patch16_rpn_224",
    "vit_base_patch16_xp_224",
    "vit_small_patch16_18x2_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_base_patch16_siglip_224",
    "vit_giant_patch14_dinov2",
    "vit_dwee_patch16_reg1_gap_256",
    "vit_small_r26_s32_224",
    "vit_relpos_small_patch16_rpn_224",
    "eva02_tiny_patch14_224",
    "test_vit3",
    "test_vit4",
]


Known = tuple[ViTConfig, dict[str, Any]]  # a model's config and how its weights are laid out


def known(source: str) -> Known | None:
    """What is known of a registered model; None: it is refused."""
    try:
        found = find_model(source)
    except UsageError as error:
        assert source in str(error)
        return None
    assert isinstance(found, TimmModel | TimmFiles) and isinstance(found.base, ViTConfig)
    return found.base, found.layout


def check_logits(name: str, config: ViTConfig, layout: dict[str, Any]) -> None:
    """Ours and timm's give equal logits, here with few blocks and small images."""
    size = 3 * config.patch_size
    is_mixer = name.startswith("mixer")  # of which timm builds no other depth
    depth = config.stack.depth if is_mixer else 2
    options = {} if is_mixer else {"depth": depth}
    theirs = timm_model(name, img_size=size, **options)
    small = replace(config, image_size=size, stack=replace(config.stack, depth=depth))
    assert config_from_timm_model(theirs) == small
    if isinstance(theirs.head, nn.Identity):  # it gives features, whose size without a norm is any
        theirs.head = nn.LayerNorm(small.stack.width, elementwise_affine=False)
    net = ViT(small).eval()
    state = TIMM.weights_from_external(theirs.state_dict(), small, **layout)
    if "head.linear.weight" not in state:
        net.head.linear = theirs.head
    net.load_state_dict(state)
    assert difference(net, theirs) <= 1e-4


@pytest.mark.parametrize("name", [*LOADED[:5], *REFUSED[:5]])
def test_models_by_name(name: str) -> None:
    file = Path(f"{name}.pth")
    file.touch()
    found = known(str(file))
    assert (found is not None) == (name in LOADED)
    if found:
        check_logits(name, *found)


@pytest.mark.slow
@pytest.mark.exhaustive_except(*LOADED, *REFUSED)
@pytest.mark.parametrize("name", REGISTERED)
def test_every_registered_model_loads_with_equal_logits_or_is_refused(name: str) -> None:
    file = Path(f"{name}.some_tag.pth")
    file.touch()
    found = known(str(file))
    assert found is not None or name not in LOADED
    assert found is None or name not in REFUSED
    assert known(f"timm/{name}") == found
    if found:
        check_logits(name, *found)


class Negative(timm.layers.PatchEmbed):
    """An embedding that no name or shape of weights tells from timm's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def large_eps(*sizes: Any, **options: Any) -> nn.Module:
    """A norm of timm's with another eps."""
    return timm.layers.LayerNorm(*sizes, eps=0.1, **options)


AVG = {"global_pool": "avg"}
PARALLEL: list[dict[str, Any]] = [  # of models of such blocks
    {},
    {"qkv_bias": False, "qk_norm": True},
    {"init_values": 0.1, "mlp_ratio": 2.7},
    {"qkv_bias": False, "qk_norm": True, "norm_layer": "rmsnorm", **AVG},
    {"class_token": False, "reg_tokens": 1, "no_embed_class": True, "act_layer": "relu", **AVG},
]
# Values of each argument of timm that our ViT has, too; a dict also changes other arguments.
SAME: dict[str, list[Any]] = {
    "img_size": [40],
    "patch_size": [16],
    "in_chans": [1],
    "num_classes": [7],
    "global_pool": ["avg", "max"],
    "embed_dim": [64],
    "depth": [1],
    "num_heads": [1, 2, 6],
    "mlp_ratio": [2.7],
    "qkv_bias": [False],
    "qk_norm": [True],
    "init_values": [0.1],
    "class_token": [{"class_token": False, **AVG}, {"class_token": False, "global_pool": "max"}],
    "no_embed_class": [True],
    "reg_tokens": [2, {"reg_tokens": 2, "no_embed_class": True}],
    "final_norm": [False, {"final_norm": False, **AVG}],
    "fc_norm": [True, {"fc_norm": False, **AVG}],
    "dynamic_img_size": [True],
    "weight_init": ["jax"],
    "fix_init": [True],
    "norm_layer": ["layernorm", large_eps],
    "act_layer": ["gelu", "gelu_tanh", "silu", "relu", nn.GELU],
    "block_fn": [{"block_fn": ParallelScalingBlock, **more} for more in PARALLEL],
    "device": ["meta"],
    "dtype": [torch.float32],
}
OTHER: dict[str, list[Any]] = {  # those that it does not have
    "img_size": [(32, 40), 36],
    "patch_size": [(8, 16)],
    "global_pool": ["avgmax", "map", "prr", ""],
    "qk_norm": [{"qk_norm": True, "norm_layer": name} for name in ("rmsnorm", "simplenorm")],
    "scale_attn_norm": [True],
    "scale_mlp_norm": [True],
    "proj_bias": [False],
    "pos_embed": ["none"],
    "pre_norm": [True],
    "pool_include_prefix": [{"pool_include_prefix": True, **AVG}],
    "dynamic_img_pad": [True, {"dynamic_img_pad": True, "img_size": 36}],
    "drop_rate": [0.1],
    "pos_drop_rate": [0.1],
    "patch_drop_rate": [0.1],
    "proj_drop_rate": [0.1],
    "attn_drop_rate": [0.1],
    "drop_path_rate": [0.1],
    "embed_layer": [Negative],
    "embed_norm_layer": ["layernorm"],
    "norm_layer": ["rmsnorm", "simplenorm", "layernormfp32"],
    "act_layer": ["quick_gelu", "tanh", "leaky_relu", "hard_swish", "relu6"],
    "block_fn": [ResPostBlock, ParallelThingsBlock],
    "mlp_layer": [timm.layers.SwiGLUPacked, timm.layers.SwiGLU, timm.layers.GluMlp],
    "attn_layer": ["diff"],
}


def flattened(table: dict[str, list[Any]]) -> Iterator[Any]:
    """The values of a table as test cases."""
    for name, values in table.items():
        for i, value in enumerate(values):
            options = value if isinstance(value, dict) else {name: value}
            yield pytest.param(options, id=f"{name}-{i}")


def test_each_argument_of_timm_is_tried() -> None:
    assert SAME.keys() | OTHER.keys() == signature(VisionTransformer).parameters.keys()


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("options", flattened(SAME))
def test_arguments_that_our_vit_has_too_give_equal_logits(options: dict[str, Any]) -> None:
    theirs = tiny_timm(**options)
    config = config_from_timm_model(theirs)
    net = our_vit(theirs, config, prefix_positions=not theirs.no_embed_class)
    assert difference(net, theirs) <= 1e-5


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("options", flattened(OTHER))
def test_arguments_that_our_vit_does_not_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="timm|ViT|Patches|grid"):
        config_from_timm_model(tiny_timm(**options))


@pytest.mark.parametrize(
    "part, attribute, value",
    [
        ("blocks.1.norm1", "eps", 0.1),
        ("norm", "eps", 0.1),
        ("blocks.1.attn", "num_heads", 2),
        ("blocks.1.attn", "scale", 1.0),
        ("blocks.1.mlp", "act", nn.ReLU()),
        ("blocks.1", "ls1", timm.layers.LayerScale(48)),
        ("", "norm_pre", nn.Tanh()),
        ("", "new_argument", True),
    ],
)
def test_a_model_that_differs_in_one_part_is_refused(part: str, attribute: str, value: Any) -> None:
    model = tiny_timm()
    setattr(model.get_submodule(part), attribute, value)
    with pytest.raises(ValueError, match=attribute):
        config_from_timm_model(model)
