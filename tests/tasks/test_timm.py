"""timm's models: each loads with the same outputs or is refused, and so does what goes back to timm."""

import json
from dataclasses import asdict, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import (
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import nn

from modules.config import StackConfig
from modules.models.vit import ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model
from modules.pretrained.vit import FAMILIES
from modules.schema import from_dict
from tasks.errors import UsageError
from tasks.vit.architectures import (
    check_described,
    known_model,
    load_pretrained,
    pretrained_options,
)
from tasks.vit.export import write_timm
from tests.modules.test_parity_vit import difference, shake
from tests.tasks.command import SHORT, run, write_images
from tests.tasks.test_export import UNTOLD

PATTERNS = ("vit_*", "deit*", "eva_*", "eva02*", "flexivit*", "test_vit*")
REGISTERED = sorted({name for pattern in PATTERNS for name in timm.list_models(pattern)})
LOADED = [  # which once loaded wrongly: other widths of heads, tanh GELU, no norm at the end
    "vit_huge_patch14_224",
    "vit_giant_patch14_224",
    "vit_gigantic_patch14_224",
    "vit_so400m_patch14_siglip_gap_224",
    "vit_base_patch16_gap_224",
    "deit3_huge_patch14_224",
    "test_vit",
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
METADATA = {"class_names": ["a", "b", "c", "d", "e"], "mean": [0.5], "std": [0.5]}


def meta(name: str, **options: Any) -> Any:
    """A model of timm's without weights."""
    with torch.device("meta"):
        return timm.create_model(name, **options)


def loads(name: str, source: str) -> bool:
    """Whether a registered model loads, with equal logits then: two of its blocks with small images, all else as is."""
    try:
        found = known_model(source)
    except UsageError as error:
        assert source in str(error)
        return False
    assert found is not None
    config, size = found.config, 3 * found.config.patch_size
    theirs = shake(meta(name, depth=2, img_size=size))
    small = replace(config, image_size=size, stack=replace(config.stack, depth=2))
    assert config_from_timm_model(theirs) == small
    with torch.device("meta"):
        net = ViT(small).eval()
    if isinstance(theirs.head, nn.Identity):  # it gives features, whose size without a norm is any
        theirs.head = net.head.linear = nn.LayerNorm(config.stack.width, elementwise_affine=False)  # type: ignore
    net.load_state_dict(
        FAMILIES["timm"].weights_from_external(theirs.state_dict(), small, found.prefix_positions),
        assign=True,
    )
    assert difference(net, theirs, size) <= 1e-4
    return True


@pytest.mark.parametrize("name", [*LOADED, *REFUSED])
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


def tiny(**options: Any) -> Any:
    """A small model of timm's class with random weights."""
    sizes = {
        "img_size": 32,
        "patch_size": 8,
        "num_classes": 5,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 4,
    }
    with torch.device("meta"):
        model = VisionTransformer(**{**sizes, **options})  # type: ignore[arg-type]
    return shake(model)


class Negative(timm.layers.PatchEmbed):
    """An embedding that no name or shape of weights tells from timm's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -super().forward(x)


def large_eps(*sizes: Any, **options: Any) -> nn.Module:
    """A norm of timm's with another eps."""
    return timm.layers.LayerNorm(*sizes, eps=0.1, **options)


AVG = {"global_pool": "avg"}
SAME: dict[str, list[dict[str, Any]]] = {  # values of each argument of timm's that our ViT has, too
    "img_size": [{"img_size": 40}],
    "patch_size": [{"patch_size": 16}],
    "in_chans": [{"in_chans": 1}],
    "num_classes": [{"num_classes": 7}],
    "global_pool": [{"global_pool": "avg"}, {"global_pool": "max"}],
    "embed_dim": [{"embed_dim": 64}],
    "depth": [{"depth": 1}],
    "num_heads": [{"num_heads": 1}, {"num_heads": 2}, {"num_heads": 6}],
    "mlp_ratio": [{"mlp_ratio": 2.7}],
    "qkv_bias": [{"qkv_bias": False}],
    "qk_norm": [{"qk_norm": True}],
    "init_values": [{"init_values": 0.1}],
    "class_token": [{"class_token": False, **AVG}, {"class_token": False, "global_pool": "max"}],
    "no_embed_class": [{"no_embed_class": True}],
    "reg_tokens": [{"reg_tokens": 2}, {"reg_tokens": 2, "no_embed_class": True}],
    "final_norm": [{"final_norm": False}, {"final_norm": False, **AVG}],
    "fc_norm": [{"fc_norm": True}, {"fc_norm": False, **AVG}],
    "dynamic_img_size": [{"dynamic_img_size": True}],
    "weight_init": [{"weight_init": "jax"}],
    "fix_init": [{"fix_init": True}],
    "norm_layer": [{"norm_layer": "layernorm"}, {"norm_layer": large_eps}],
    "act_layer": [{"act_layer": name} for name in ("gelu", "gelu_tanh", "silu", "relu", nn.GELU)],
    "device": [{"device": "meta"}],
    "dtype": [{"dtype": torch.float32}],
}
OTHER: dict[str, list[dict[str, Any]]] = {  # those that it does not have
    "img_size": [{"img_size": (32, 40)}, {"img_size": 36}],
    "patch_size": [{"patch_size": (8, 16)}],
    "global_pool": [{"global_pool": name} for name in ("avgmax", "map", "prr", "")],
    "qk_norm": [
        {"qk_norm": True, "norm_layer": "rmsnorm"},
        {"qk_norm": True, "norm_layer": "simplenorm"},
    ],
    "scale_attn_norm": [{"scale_attn_norm": True}],
    "scale_mlp_norm": [{"scale_mlp_norm": True}],
    "proj_bias": [{"proj_bias": False}],
    "pos_embed": [{"pos_embed": "none"}],
    "pre_norm": [{"pre_norm": True}],
    "pool_include_prefix": [{"pool_include_prefix": True, **AVG}],
    "dynamic_img_pad": [{"dynamic_img_pad": True}, {"dynamic_img_pad": True, "img_size": 36}],
    "drop_rate": [{"drop_rate": 0.1}],
    "pos_drop_rate": [{"pos_drop_rate": 0.1}],
    "patch_drop_rate": [{"patch_drop_rate": 0.1}],
    "proj_drop_rate": [{"proj_drop_rate": 0.1}],
    "attn_drop_rate": [{"attn_drop_rate": 0.1}],
    "drop_path_rate": [{"drop_path_rate": 0.1}],
    "embed_layer": [{"embed_layer": Negative}],
    "embed_norm_layer": [{"embed_norm_layer": "layernorm"}],
    "norm_layer": [{"norm_layer": name} for name in ("rmsnorm", "simplenorm", "layernormfp32")],
    "act_layer": [
        {"act_layer": name} for name in ("quick_gelu", "tanh", "leaky_relu", "hard_swish", "relu6")
    ],
    "block_fn": [
        {"block_fn": kind} for kind in (ResPostBlock, ParallelScalingBlock, ParallelThingsBlock)
    ],
    "mlp_layer": [
        {"mlp_layer": kind}
        for kind in (timm.layers.SwiGLUPacked, timm.layers.SwiGLU, timm.layers.GluMlp)
    ],
    "attn_layer": [{"attn_layer": "diff"}],
}


def flattened(table: dict[str, list[Any]]) -> list[Any]:
    """The values of a table as test cases."""
    return [
        pytest.param(one, id=f"{name}-{i}")
        for name, some in table.items()
        for i, one in enumerate(some)
    ]


def test_each_argument_of_timms_is_tried() -> None:
    assert SAME.keys() | OTHER.keys() == signature(VisionTransformer).parameters.keys()


@pytest.mark.parametrize("options", flattened(SAME))
def test_what_our_vit_has_too_gives_equal_logits(options: dict[str, Any]) -> None:
    theirs = tiny(**options)
    config = config_from_timm_model(theirs)
    net = ViT(config).eval()
    net.load_state_dict(
        FAMILIES["timm"].weights_from_external(
            theirs.state_dict(), config, not theirs.no_embed_class
        )
    )
    assert difference(net, theirs, config.image_size, theirs.in_chans) <= 1e-5


@pytest.mark.parametrize("options", flattened(OTHER))
def test_what_our_vit_does_not_have_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="timm|ViT|Patches|grid"):
        config_from_timm_model(tiny(**options))


@pytest.mark.parametrize(
    ("part", "attribute", "value"),
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


# Files --------------------------------------------------------------------------------------------------------------


def started(source: str, class_names: list[str], **changes: Any) -> ViT:
    """The network that training from a file begins with."""
    options = pretrained_options(source)["model"]["net"] | {
        "num_classes": len(class_names),
        **changes,
    }
    net = ViT(from_dict(ViTConfig, options)).eval()
    load_pretrained(net, source, {"class_names": class_names})
    return net


def save(model: nn.Module, file: str) -> None:
    """A state file, as timm's own."""
    Path(file).parent.mkdir(exist_ok=True)
    save_file(model.state_dict(), file)


def features_differ(net: ViT, theirs: Any) -> float:
    """Largest difference of what the classifiers see."""
    images = torch.rand(2, 3, net.config.image_size, net.config.image_size) * 2 - 1
    with torch.inference_mode():
        expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        return (net.head.norm(net.features(images)) - expected).abs().max().item()


@pytest.mark.parametrize(
    ("name", "file", "settings", "options"),
    [
        (
            "test_vit",
            "test_vit.safetensors",
            None,
            {},
        ),  # 2 heads of 32, where 64 wide ones would be 1
        (
            "test_vit",
            "test_vit.r160_in1k.safetensors",
            {"license": "mit"},
            {"num_classes": 3, "img_size": 96},
        ),
        (
            "test_vit2",
            "model/model.safetensors",
            {"architecture": "test_vit2", "global_pool": "avg"},
            {},
        ),
        (
            "test_vit2",
            "model/model.safetensors",
            {"architecture": "test_vit2", "model_args": {"img_size": 64}},
            {},
        ),
        (
            "test_vit",
            "model/test_vit.safetensors",
            {"architecture": "test_vit", "pretrained_cfg": {}},
            {"in_chans": 3},
        ),
    ],
)
def test_a_file_of_a_known_model(
    name: str, file: str, settings: Any, options: dict[str, Any]
) -> None:
    theirs = shake(meta(name, **options))
    save(theirs, file)
    if settings is not None:
        Path(file).with_name("config.json").write_text(json.dumps(settings))
    assert features_differ(started(file, ["a", "b"]), theirs) <= 1e-4
    check_described(file, ())


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("model/model.safetensors", {"architecture": "test_vit", "global_pool": "avg"}),
        (
            "model/model.safetensors",
            {"architecture": "test_vit", "model_args": {"act_layer": "relu"}},
        ),
        (
            "model/model.safetensors",
            {"architecture": "test_vit", "model_args": {"pretrained": True}},
        ),
        ("model/model.safetensors", {"architecture": "vit_of_tomorrow"}),
        ("model/test_vit.safetensors", {"architecture": "vit_tiny_patch16_224"}),
        ("model/test_vit.safetensors", {"architecture": "vit_of_tomorrow"}),
        ("weights.safetensors", None),
    ],
)
def test_a_file_that_does_not_say_which_model_it_is(
    file: str, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save(shake(meta("test_vit")), file)
    if settings is not None:
        Path(file).with_name("config.json").write_text(json.dumps(settings))
    write_images(Path("images"))
    line = f"fit --model.pretrained {file} --data.source folder --data.path images --run_dir r"
    names = UNTOLD.split()[::2]
    for some in (names, names[1:], names[-1:]):
        typed = UNTOLD[: UNTOLD.index(some[0])]
        assert run(f"{line} {typed}") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and all((name in error) == (name in some) for name in names)
    assert not Path("r").exists()


@pytest.mark.parametrize("content", ["[]", "{", "[" * 10**5, '{"model_args": 3}'])
def test_a_damaged_config_beside_a_file(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    save(tiny(), "weights.safetensors")
    Path("config.json").write_text(content)
    assert run("fit --model.pretrained weights.safetensors") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "config.json" in error


def test_a_file_of_another_model_than_its_name_says(capsys: pytest.CaptureFixture[str]) -> None:
    save(shake(meta("test_vit")), "vit_tiny_patch16_224.safetensors")
    save(shake(meta("test_vit", depth=3)), "test_vit.safetensors")
    save(shake(meta("test_vit")), "eva02_tiny_patch14_224.safetensors")
    for name, wrong in {
        "vit_tiny_patch16_224": "width",
        "test_vit": "depth",
        "eva02_tiny_patch14_224": "Eva",
    }.items():
        assert run(f"fit --model.pretrained {name}.safetensors") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and wrong in error


# Export -------------------------------------------------------------------------------------------------------------

PLAIN = ViTConfig(32, 8, 3, 5, stack=StackConfig(width=48, depth=2, heads=4))
GOES = {  # option: values that timm has, too
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
STAYS = {  # option: values that it does not have
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
NEVER = {
    "position_options",
    "stack",
    "stack.causal",
    "stack.cross_attention",
    "stack.context_width",
}  # no ViT has these


def changed(option: str, value: Any) -> ViT:
    """A random network that differs from `PLAIN` in one option."""
    own = option.removeprefix("stack.")
    stack = replace(PLAIN.stack, **{own: value}) if own != option else PLAIN.stack
    torch.manual_seed(0)
    return ViT(replace(PLAIN, stack=stack, **({} if own != option else {option: value}))).eval()


def test_each_option_of_ours_is_tried() -> None:
    options = {field.name for field in fields(ViTConfig)} | {
        f"stack.{field.name}" for field in fields(StackConfig)
    }
    assert GOES.keys() | STAYS.keys() | NEVER == options


@pytest.mark.parametrize(
    ("option", "value"), [(name, value) for name, some in GOES.items() for value in some]
)
def test_what_timm_has_too_goes_there_and_comes_back(option: str, value: Any) -> None:
    net = shake(changed(option, value))
    names = [str(number) for number in range(net.config.num_classes or 0)]
    hint = write_timm(net, {"class_names": names}, Path("out.safetensors"))
    theirs = eval(hint.format(file="out.safetensors")).eval()  # as a user would paste it
    size, channels = net.config.image_size, net.config.channels or 0
    assert difference(net, theirs, size, channels) <= 1e-5
    back = started("out.safetensors", names)
    assert difference(back, theirs, size, channels) <= 1e-5
    check_described("out.safetensors", ())
    assert config_from_timm_model(theirs) == back.config


@pytest.mark.parametrize(
    ("option", "value"), [(name, value) for name, some in STAYS.items() for value in some]
)
def test_what_timm_does_not_have_is_not_exported(option: str, value: Any) -> None:
    with pytest.raises(UsageError, match=option.removeprefix("stack.").partition("_")[0]):
        write_timm(changed(option, value), METADATA, Path("out.safetensors"))
    assert not Path("out.safetensors").exists()


def test_the_command_refuses_to_export_what_timm_cannot_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in ("head_dim 8", "mlp_bias false"):
        assert (
            run(
                f"fit --preset cifar_tiny {SHORT} --model.net.stack.{option} --run_dir {option[:4]}"
            )
            == 0
        )
        capsys.readouterr()
        assert (
            run(
                f"export --ckpt_path {option[:4]}/checkpoints/last.ckpt --format timm --output out.safetensors"
            )
            == 2
        )
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "safetensors" in error and option.split("_")[0] in error
        assert not Path("out.safetensors").exists()


@pytest.mark.parametrize(
    ("header", "wrong"),
    [
        ({"config": "{"}, "header"),
        ({"config": "[]"}, "header"),
        ({"config": "[" * 10**5}, "header"),
        ({"config": json.dumps({"stack": {"heads": "three"}})}, "heads"),
        ({"config": json.dumps({"layers": 3})}, "layers"),
        (
            {"config": json.dumps(asdict(PLAIN)), "metadata": json.dumps({"class_names": [1]})},
            "class_names",
        ),
    ],
)
def test_a_damaged_header(
    header: dict[str, str], wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(tiny().state_dict(), "out.safetensors", header)
    assert run("fit --model.pretrained out.safetensors") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and wrong in error


# Classes ------------------------------------------------------------------------------------------------------------


def test_rows_of_the_classifier_go_by_the_names_in_the_header(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = changed("stack.depth", 2)
    write_timm(net, METADATA, Path("out.safetensors"))
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        expected = net(images)
        found = started("out.safetensors", ["e", "b", "a", "d", "c"])(images)
        torch.testing.assert_close(found, expected[:, [4, 1, 0, 3, 2]], atol=1e-5, rtol=0)
    assert "anew" not in capsys.readouterr().out
    for names in (["a", "b", "c", "d", "x"], ["a", "b", "c", "d"], ["0", "1", "2", "3", "4"]):
        other = started("out.safetensors", names)
        assert "anew" in capsys.readouterr().out
        if len(names) == 5:
            assert (other.head.linear.weight - net.head.linear.weight).abs().mean() > 0.001


def test_rows_of_imagenets_classifiers_go_by_synsets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, create = shake(meta("test_vit")), timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained: theirs if pretrained else create(name)
    )
    names = timm.data.ImageNetInfo("imagenet-1k").label_names()
    other = started("timm/test_vit", [str(number) for number in range(1000)])
    assert "anew" in capsys.readouterr().out
    assert (other.head.linear.bias - theirs.head.bias).abs().mean() > 0.001  # type: ignore[operator, union-attr]
    net = started("timm/test_vit", names[::-1])
    assert "anew" not in capsys.readouterr().out
    assert torch.equal(net.head.linear.bias, theirs.head.bias.flip(0))  # type: ignore[operator, union-attr]
