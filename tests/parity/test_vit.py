"""ViT of timm, torchvision and transformers: equal logits or refused, there and back."""

from collections.abc import Iterator
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from safetensors.torch import load_file
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import nn

from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import FAMILIES, TIMM
from modules.schema import from_dict
from tasks.errors import UsageError
from tasks.vit.architectures import (
    check_described,
    known_model,
    load_pretrained,
    pretrained_options,
)
from tasks.vit.export import write_timm
from tests.helpers.marks import slow_except
from tests.parity.vit import difference, on_meta, our_vit, randomise, timm_model

PATTERNS = ("vit_*", "deit*", "eva_*", "eva02*", "flexivit*", "test_vit*")
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
    "vit_tiny_r_s16_p8_224",
    "vit_relpos_small_patch16_rpn_224",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "test_vit3",
    "test_vit4",
]


def loads(name: str, source: str) -> bool:
    """Whether a registered model loads, with equal logits then: two blocks and small images."""
    try:
        found = known_model(source)
    except UsageError as error:
        assert source in str(error)
        return False
    assert found is not None
    size = 3 * found.config.patch_size
    theirs = timm_model(name, depth=2, img_size=size)
    small = replace(found.config, image_size=size, stack=replace(found.config.stack, depth=2))
    assert config_from_timm_model(theirs) == small
    if isinstance(theirs.head, nn.Identity):  # it gives features, whose size without a norm is any
        theirs.head = nn.LayerNorm(small.stack.width, elementwise_affine=False)
    net = ViT(small).eval()
    state = TIMM.weights_from_external(theirs.state_dict(), small, found.prefix_positions)
    if "head.linear.weight" not in state:
        net.head.linear = theirs.head
    net.load_state_dict(state)
    assert difference(net, theirs) <= 1e-4
    return True


@pytest.mark.parametrize("name", slow_except([*LOADED[:5], *REFUSED[:5]], LOADED + REFUSED))
def test_models_by_name(name: str) -> None:
    Path(f"{name}.pth").touch()
    assert loads(name, f"{name}.pth") == (name in LOADED)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTERED)
def test_every_registered_model_loads_with_equal_logits_or_is_refused(name: str) -> None:
    Path(f"{name}.some_tag.pth").touch()
    plain = loads(name, f"{name}.some_tag.pth")
    assert plain or name not in LOADED
    assert loads(name, f"timm/{name}") == plain


# Arguments of timm --------------------------------------------------------------------------------


class Negative(timm.layers.PatchEmbed):
    """An embedding that no name or shape of weights tells from timm's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def large_eps(*sizes: Any, **options: Any) -> nn.Module:
    """A norm of timm's with another eps."""
    return timm.layers.LayerNorm(*sizes, eps=0.1, **options)


def tiny(**options: Any) -> Any:
    """A small model of timm's class with random weights."""
    sizes: Any = {
        "img_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
    }
    return randomise(on_meta(VisionTransformer, **{**sizes, **options}))


AVG = {"global_pool": "avg"}
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
    "block_fn": [ResPostBlock, ParallelScalingBlock, ParallelThingsBlock],
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


@pytest.mark.parametrize("options", flattened(SAME))
def test_arguments_that_our_vit_has_too_give_equal_logits(options: dict[str, Any]) -> None:
    theirs = tiny(**options)
    config = config_from_timm_model(theirs)
    net = our_vit(theirs, config, prefix_positions=not theirs.no_embed_class)
    assert difference(net, theirs) <= 1e-5


@pytest.mark.parametrize("options", flattened(OTHER))
def test_arguments_that_our_vit_does_not_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="timm|ViT|Patches|grid"):
        config_from_timm_model(tiny(**options))


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
    model = tiny()
    setattr(model.get_submodule(part), attribute, value)
    with pytest.raises(ValueError, match=attribute):
        config_from_timm_model(model)


# Options of ours ----------------------------------------------------------------------------------

PLAIN = ViTConfig(32, 8, 3, 5, stack=StackConfig(width=48, depth=2, heads=4))
EXPORTED: dict[str, list[Any]] = {  # option: values that timm has, too
    "image_size": [40],
    "patch_size": [16],
    "channels": [1],
    "num_classes": [7],
    "pool": ["mean", "max"],
    "class_token": [True],
    "register_tokens": [3],
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
    "pool": ["attention"],
    "position": ["none", "sinusoidal", "sincos2d", "rotary2d", "alibi", "t5"],
    "stem": ["conv", "convpool"],
    "stack.kv_heads": [2],
    "stack.head_dim": [8],
    "stack.attention": ["additive"],
    "stack.feedforward": ["swiglu", "geglu", "geglu_tanh"],
    "stack.norm": ["rmsnorm"],
    "stack.norm_eps": [1e-5],
    "stack.order": ["post", "parallel"],
    "stack.bias": [False],
    "stack.mlp_bias": [False],
}
NEVER = {  # no ViT has these
    "position_options",
    "stack",
    "stack.causal",
    "stack.cross_attention",
    "stack.context_width",
}


def changed(option: str, value: Any) -> ViT:
    """A random network that differs from `PLAIN` in one option."""
    torch.manual_seed(0)
    own = option.removeprefix("stack.")
    if own == option:
        return ViT(replace(PLAIN, **{option: value})).eval()
    return ViT(replace(PLAIN, stack=replace(PLAIN.stack, **{own: value}))).eval()


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def test_each_option_of_ours_is_tried() -> None:
    options = {field.name for field in fields(ViTConfig)}
    options |= {f"stack.{field.name}" for field in fields(StackConfig)}
    assert EXPORTED.keys() | NOT_EXPORTED.keys() | NEVER == options


@pytest.mark.parametrize("option, value", pairs(EXPORTED))
def test_an_export_to_timm_loads_there_and_here(option: str, value: Any) -> None:
    net = randomise(changed(option, value))
    names = [str(number) for number in range(net.config.num_classes or 0)]
    hint = write_timm(net, {"class_names": names}, Path("out.safetensors"))
    theirs = eval(hint.format(file="out.safetensors")).eval()  # as a user would paste it
    assert difference(net, theirs) <= 1e-5
    options = pretrained_options("out.safetensors")["model"]["net"] | {"num_classes": len(names)}
    back = ViT(from_dict(ViTConfig, options)).eval()
    load_pretrained(back, "out.safetensors", {"class_names": names})
    assert difference(back, theirs) <= 1e-5
    check_described("out.safetensors", ())
    assert config_from_timm_model(theirs) == back.config


@pytest.mark.parametrize("option, value", pairs(NOT_EXPORTED))
def test_what_timm_does_not_have_is_not_exported(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option.removeprefix("stack.").partition("_")[0]):
        write_timm(changed(option, value), {"class_names": []}, Path("out.safetensors"))
    assert not Path("out.safetensors").exists()


# Other libraries, sizes and weights ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_presets_have_the_published_sizes(name: str) -> None:
    theirs = on_meta(timm.create_model, f"vit_{name}_patch16_224")
    net = on_meta(ViT, VIT_PRESETS[name])
    assert config_from_timm_model(theirs) == VIT_PRESETS[name]
    # The position of timm's class token is the one vector that we do not have.
    count = sum(p.numel() for p in theirs.parameters()) - VIT_PRESETS[name].stack.width
    assert count == sum(p.numel() for p in net.parameters())


def test_torchvision() -> None:
    theirs = randomise(on_meta(torchvision.models.VisionTransformer, 32, 8, 2, 4, 48, 80))
    stack = StackConfig(width=48, depth=2, heads=4, mlp_width=80)
    net = our_vit(theirs, ViTConfig(32, 8, 3, 1000, stack=stack), "torchvision")
    assert difference(net, theirs) <= 1e-5
    back = FAMILIES["torchvision"].weights_to_external(net.state_dict(), net.config)
    theirs.load_state_dict(back)
    assert difference(net, theirs) <= 1e-5


def test_transformers_in_memory_and_in_files() -> None:
    sizes = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
    )
    theirs = randomise(on_meta(transformers.ViTForImageClassification, sizes))
    stack = StackConfig(width=64, depth=2, heads=2, mlp_width=96, norm_eps=1e-12)
    config = ViTConfig(32, 8, 3, 2, stack=stack)
    net = our_vit(theirs, config, "huggingface5")
    assert difference(net, theirs) <= 1e-5
    theirs.load_state_dict(FAMILIES["huggingface5"].weights_to_external(net.state_dict(), config))
    assert difference(net, theirs) <= 1e-5
    theirs.save_pretrained("saved")
    state = load_file("saved/model.safetensors")
    found = FAMILIES["huggingface"].weights_from_external(state, config)
    assert all(torch.equal(value, found[name]) for name, value in net.state_dict().items())
    back = FAMILIES["huggingface"].weights_to_external(net.state_dict(), config)
    assert back.keys() == state.keys()


def test_another_image_size_and_head() -> None:
    theirs = timm_model("vit_tiny_patch16_224", depth=2)
    config = replace(config_from_timm_model(theirs), image_size=96, num_classes=3)
    net = ViT(config).eval()
    state = TIMM.weights_from_external(theirs.state_dict(), config)
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert sorted(missing) == ["head.linear.bias", "head.linear.weight"]
    assert not unexpected
    table = theirs.state_dict()["pos_embed"]
    resized = timm.layers.resample_abs_pos_embed(table, (6, 6), num_prefix_tokens=1)[0, 1:]
    torch.testing.assert_close(net.position.table.flatten(0, 1), resized, atol=1e-6, rtol=0)


def test_positions_that_form_a_grid_with_and_without_other_tokens() -> None:
    # 9 patches, 5 other tokens
    theirs = tiny(img_size=48, patch_size=16, reg_tokens=4, no_embed_class=True)
    config = config_from_timm_model(theirs)
    assert config.image_size == 48
    for convert in (config_from_timm_state, TIMM.weights_from_external):
        with pytest.raises(ValueError, match="with and without 5 tokens"):
            convert(theirs.state_dict(), config)
    assert difference(our_vit(theirs, config, prefix_positions=False), theirs) <= 1e-5


@pytest.mark.parametrize(
    "left_out, added, options, named",
    [
        (None, {"surprise": torch.zeros(1)}, {}, "surprise"),
        ("qkv.weight", {}, {}, "attention.qkv.weight"),
        (None, {}, {"bias": False}, "norm1"),
        (None, {}, {"mlp_width": 100}, "feedforward.up"),
        ("pos_embed", {}, {}, "pos_embed"),
        (None, {"pos_embed": torch.zeros(1, 6, 48)}, {}, "square grid"),
    ],
)
def test_weights_that_do_not_fit(left_out: Any, added: Any, options: Any, named: str) -> None:
    theirs = tiny()
    config = config_from_timm_model(theirs)
    config = replace(config, stack=replace(config.stack, **options))
    state = {
        key: v for key, v in theirs.state_dict().items() if not left_out or left_out not in key
    }
    with pytest.raises(ValueError, match=named):
        TIMM.weights_from_external(state | added, config)


def test_other_weights_than_those_of_a_vit() -> None:
    for state in ({}, {**tiny().state_dict(), "pos_embed": torch.zeros(3)}):
        with pytest.raises(ValueError, match="pos_embed" if state else "patch_embed"):
            config_from_timm_state(state, PLAIN)
    registers = ViT(replace(PLAIN, register_tokens=2))
    gated = changed("stack.feedforward", "swiglu")
    for family, net, named in (("torchvision", registers, "register"), ("timm", gated, "gate")):
        with pytest.raises(ValueError, match=named):
            FAMILIES[family].weights_to_external(net.state_dict(), net.config)
