"""Our ViT against timm, torchvision and Hugging Face, weights copied over."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import FAMILIES

TIMM = [
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_medium_patch16_reg4_gap_256",  # registers, no class token, average pooling, layer scale
    "vit_small_patch16_224.avg",  # no class token, average pooling, positions on all tokens
    "deit3_small_patch16_224",  # layer scale, no position on the class token
]


def timm_model(name: str, **options: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    if name.endswith(".avg"):
        name, options = name[:-4], {"class_token": False, "global_pool": "avg", **options}
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    return shake(model)


def shake(model: nn.Module) -> nn.Module:
    """Fills a model built on the meta device with weights among which no zeros or ones hide a mistake."""
    model = model.to_empty(device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            head = name.startswith(
                ("head", "classifier")
            )  # logits of size 1, so that differences are absolute
            parameter.normal_(std=0.02 if head else 0.05, generator=generator)
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter += 1.0  # norms and scales
    return model


def ours(family: str, theirs: nn.Module, config: ViTConfig) -> ViT:
    with torch.device("meta"):
        net = ViT(config).eval()
    net.load_state_dict(
        FAMILIES[family].weights_from_external(theirs.state_dict(), config), assign=True
    )
    return net


def difference(net: nn.Module, theirs: nn.Module, size: int, channels: int = 3) -> float:
    """Largest difference of logits."""
    images = torch.rand(2, channels, size, size) * 2 - 1
    with torch.inference_mode():
        expected, got = theirs(images), net(images)
    expected = getattr(expected, "logits", expected)
    assert got.shape == expected.shape
    return (got - expected).abs().max().item()


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    theirs = timm_model(name)
    config = config_from_timm_model(theirs)
    assert difference(ours("timm", theirs, config), theirs, config.image_size) <= 1e-4  # 12 layers


@pytest.mark.parametrize("name", TIMM)
def test_timm_one_layer_deep(name: str) -> None:
    theirs = timm_model(name, depth=1, num_classes=7)
    config = config_from_timm_model(theirs)
    assert config.num_classes == 7
    assert difference(ours("timm", theirs, config), theirs, config.image_size) <= 1e-5


@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_presets_have_the_published_sizes(name: str) -> None:
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        theirs, net = timm.create_model(f"vit_{name}_patch16_224"), ViT(VIT_PRESETS[name])
    assert config_from_timm_model(theirs) == VIT_PRESETS[name]
    # timm's position of the class token is the one vector that we do not have
    count = sum(p.numel() for p in theirs.parameters()) - VIT_PRESETS[name].stack.width
    assert count == sum(p.numel() for p in net.parameters())


def test_config_is_read_off_a_timm_file() -> None:
    for name in (
        "vit_tiny_patch16_224",
        "vit_medium_patch16_reg4_gap_256",
        "vit_small_patch16_224.avg",
    ):
        theirs = timm_model(name, depth=2)
        config = config_from_timm_model(theirs)
        known = ViTConfig(
            pool=config.pool, stack=StackConfig(heads=config.stack.heads, width=config.stack.width)
        )
        assert config_from_timm_state(theirs.state_dict(), known) == config


def test_positions_that_form_a_grid_with_and_without_other_tokens_are_not_guessed() -> None:
    options = {
        "img_size": 48,
        "depth": 1,
        "reg_tokens": 4,
        "no_embed_class": True,
    }  # 9 patches, 5 other tokens
    theirs = timm_model("vit_tiny_patch16_224", **options)
    config = config_from_timm_model(theirs)
    assert config.image_size == 48
    with pytest.raises(ValueError, match="with and without 5 tokens"):
        config_from_timm_state(theirs.state_dict(), ViTConfig())
    with pytest.raises(ValueError, match="with and without 5 tokens"):
        FAMILIES["timm"].weights_from_external(theirs.state_dict(), config)
    net = ViT(config).eval()
    net.load_state_dict(
        FAMILIES["timm"].weights_from_external(theirs.state_dict(), config, prefix_positions=False)
    )
    assert difference(net, theirs, 48) <= 1e-5


def test_torchvision() -> None:
    models = pytest.importorskip("torchvision.models")
    with torch.device("meta"):
        theirs = models.vit_b_16()
    shake(theirs)
    assert difference(ours("torchvision", theirs, VIT_PRESETS["base"]), theirs, 224) <= 1e-4


@pytest.mark.parametrize("depth, limit", [(2, 1e-5), (12, 1e-4)])
def test_hugging_face(depth: int, limit: float) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=depth,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=5,
    )
    with torch.device("meta"):
        theirs = transformers.ViTForImageClassification(sizes)
    shake(theirs)
    family = (
        "huggingface5" if "vit.layers.0.mlp.fc1.weight" in theirs.state_dict() else "huggingface"
    )
    stack = StackConfig(width=192, depth=depth, heads=3, norm_eps=1e-12)
    config = ViTConfig(num_classes=5, stack=stack)
    net = ours(family, theirs, config)
    assert difference(net, theirs, 224) <= limit
    back = FAMILIES[family].weights_to_external(net.state_dict(), config)
    theirs.load_state_dict(back)
    assert difference(net, theirs, 224) <= limit


def test_hugging_face_files(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    load_file = pytest.importorskip("safetensors.torch").load_file
    sizes = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
    )
    with torch.device("meta"):
        theirs = transformers.ViTForImageClassification(sizes)
    shake(theirs)
    theirs.save_pretrained(tmp_path)
    stack = StackConfig(width=64, depth=2, heads=2, mlp_width=96, norm_eps=1e-12)
    config = ViTConfig(image_size=32, patch_size=8, num_classes=2, stack=stack)
    net = ViT(config).eval()
    net.load_state_dict(
        FAMILIES["huggingface"].weights_from_external(
            load_file(tmp_path / "model.safetensors"), config
        )
    )
    assert difference(net, theirs, 32) <= 1e-5


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "vit_medium_patch16_reg4_gap_256", "deit3_small_patch16_224"]
)
def test_timm_and_back(name: str) -> None:
    options = {"depth": 2, "num_classes": 4}
    theirs, other = timm_model(name, **options), timm_model(name, **options)
    config = config_from_timm_model(theirs)
    with torch.device("meta"):
        net = ViT(config)
    shake(net)
    covers = theirs.state_dict()["pos_embed"].shape[1] != config.grid[0] * config.grid[1]
    other.load_state_dict(
        FAMILIES["timm"].weights_to_external(net.state_dict(), config, prefix_positions=covers)
    )
    assert difference(net, other, config.image_size) <= 1e-5
    again = FAMILIES["timm"].weights_from_external(other.state_dict(), config)
    assert all(torch.equal(value, again[key]) for key, value in net.state_dict().items())


def test_another_image_size_and_head() -> None:
    theirs = timm_model("vit_tiny_patch16_224", depth=2)
    config = replace(config_from_timm_model(theirs), image_size=96, num_classes=3)
    state = FAMILIES["timm"].weights_from_external(theirs.state_dict(), config)
    assert not any(name.startswith("head.linear") for name in state)
    net = ViT(config).eval()
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert sorted(missing) == ["head.linear.bias", "head.linear.weight"] and not unexpected
    from timm.layers import resample_abs_pos_embed

    resized = resample_abs_pos_embed(theirs.state_dict()["pos_embed"], (6, 6), num_prefix_tokens=1)[
        0, 1:
    ]
    torch.testing.assert_close(net.position.table.flatten(0, 1), resized, atol=1e-6, rtol=0)


def test_what_does_not_fit_is_refused_by_name() -> None:
    theirs = timm_model("vit_tiny_patch16_224", depth=1)
    config, state = config_from_timm_model(theirs), theirs.state_dict()
    with pytest.raises(ValueError, match="surprise"):
        FAMILIES["timm"].weights_from_external({**state, "surprise": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match="attention.qkv.weight"):
        FAMILIES["timm"].weights_from_external(
            {k: v for k, v in state.items() if "qkv.weight" not in k}, config
        )
    with pytest.raises(ValueError, match="norm1"):
        FAMILIES["timm"].weights_from_external(
            state, replace(config, stack=replace(config.stack, bias=False))
        )
    with pytest.raises(ValueError, match="feedforward.up"):
        FAMILIES["timm"].weights_from_external(
            state, replace(config, stack=replace(config.stack, mlp_width=100))
        )
    with pytest.raises(ValueError, match="patch_embed"):
        config_from_timm_state({}, config)
    with pytest.raises(ValueError, match="pos_embed"):
        config_from_timm_state({**state, "pos_embed": torch.zeros(3)}, config)
    with pytest.raises(ValueError, match="sincos2d"):
        FAMILIES["timm"].weights_to_external({}, replace(config, position="sincos2d"))
    with pytest.raises(ValueError, match="register"):
        registers = replace(config, register_tokens=2)
        FAMILIES["torchvision"].weights_to_external(ViT(registers).state_dict(), registers)
    with pytest.raises(ValueError, match="gate"):
        gated = replace(config, stack=replace(config.stack, feedforward="swiglu"))
        FAMILIES["timm"].weights_to_external(ViT(gated).state_dict(), gated)
    assert set(FAMILIES) == {"timm", "torchvision", "huggingface", "huggingface5"}
