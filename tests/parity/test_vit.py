"""ViT of timm, torchvision and transformers: equal logits or refused, there and back."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from safetensors.torch import load_file

from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import TIMM
from modules.pretrained.vit_transformers import FAMILIES
from tests.parity.vit import (
    PLAIN,
    changed,
    difference,
    on_meta,
    our_vit,
    randomise,
    timm_model,
    tiny_timm,
)


@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_presets_have_the_published_sizes(name: str) -> None:
    theirs = on_meta(timm.create_model, f"vit_{name}_patch16_224")
    net = on_meta(ViT, VIT_PRESETS[name])
    assert config_from_timm_model(theirs) == VIT_PRESETS[name]
    # The position of timm's class token is the one vector that we do not have.
    count = sum(p.numel() for p in theirs.parameters()) - VIT_PRESETS[name].stack.width
    assert count == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """The position of the class token is added to it."""
    theirs = tiny_timm().to(dtype)
    config = config_from_timm_model(theirs)
    net = ViT(config).eval()
    net.load_state_dict(TIMM.weights_from_external(theirs.state_dict(), config))
    assert difference(net, theirs.float()) <= 1e-5


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
    theirs = tiny_timm(img_size=48, patch_size=16, reg_tokens=4, no_embed_class=True)
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
    theirs = tiny_timm()
    config = config_from_timm_model(theirs)
    config = replace(config, stack=replace(config.stack, **options))
    state = {
        key: v for key, v in theirs.state_dict().items() if not left_out or left_out not in key
    }
    with pytest.raises(ValueError, match=named):
        TIMM.weights_from_external(state | added, config)


def test_other_weights_than_those_of_a_vit() -> None:
    for state in ({}, {**tiny_timm().state_dict(), "pos_embed": torch.zeros(3)}):
        with pytest.raises(ValueError, match="pos_embed" if state else "patch_embed"):
            config_from_timm_state(state, PLAIN)
    registers = ViT(replace(PLAIN, register_tokens=2))
    gated = changed("stack.feedforward", "swiglu")
    for family, net, named in (("torchvision", registers, "register"), ("timm", gated, "gate")):
        with pytest.raises(ValueError, match=named):
            FAMILIES[family].weights_to_external(net.state_dict(), net.config)
