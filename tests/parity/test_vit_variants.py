"""MLP-Mixer and hybrid of timm, CCT and ViT-22B: equal logits and gradients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import ParallelScalingBlock, checkpoint_filter_fn
from torch import Tensor, nn

from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.patch_embedding import resize_patches
from modules.pretrained.timm import config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import TIMM
from modules.transformer import Stack
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.vit.architectures import load_pretrained, pretrained_options
from tasks.vit.export import write_timm
from tests.benchmarks.cifar_peer import CCT
from tests.helpers.tiny_models import close, shaken
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

TARGETS = external_targets("single_label_classification")
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_blocks": 2}


def tiny_mixer(**options: Any) -> Any:
    """A small Mixer of timm's class with random weights."""
    return randomise(on_meta(MlpMixer, **{"num_classes": 5, **TINY, **options}))


def gradients(net: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Gradients of the cross entropy by name."""
    net.zero_grad()
    F.cross_entropy(net(images), labels).backward()
    return {name: value.grad for name, value in net.named_parameters() if value.grad is not None}


def assert_same_gradients(net: ViT, theirs: nn.Module) -> None:
    """Compares those of all weights, ours under their names."""
    size = net.config.image_size
    images, labels = torch.randn(3, 3, size, size), torch.tensor([0, 2, 4])
    ours = TIMM.weights_to_external(gradients(net.requires_grad_(), images, labels), net.config)
    expected = gradients(theirs, images, labels)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if name == "pos_embed":  # ours has no position of the class token
            ours[name], value = ours[name][:, 1:], value[:, 1:]
        close(ours[name], value, atol=1e-5, rtol=1e-4)


# MLP-Mixer and hybrid of timm --------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, preset",
    [
        ("mixer_s16_224", "mixer_small"),
        ("mixer_b16_224", "mixer_base"),
        ("mixer_l16_224", "mixer_large"),
        ("vit_tiny_r_s16_p8_224", "hybrid_tiny"),
    ],
)
def test_presets_are_timms(name: str, preset: str) -> None:
    theirs = on_meta(timm.create_model, name)
    assert config_from_timm_model(theirs) == VIT_PRESETS[preset]
    count = sum(p.numel() for p in theirs.parameters())
    count -= VIT_PRESETS[preset].stack.width * (preset == "hybrid_tiny")  # position of its class
    assert count == sum(p.numel() for p in on_meta(ViT, VIT_PRESETS[preset]).parameters())


@pytest.mark.parametrize(
    "options",
    [{}, {"mlp_ratio": (0.7, 2.6)}, {"img_size": 40, "num_blocks": 1}, {"num_classes": 7}],
    ids=str,
)
def test_mixers_of_timm_come_here_and_go_back(options: dict[str, Any]) -> None:
    theirs = tiny_mixer(**options)
    config = config_from_timm_model(theirs)
    net = our_vit(theirs, config)
    assert difference(net, theirs) <= 1e-5
    assert_same_gradients(net, theirs)
    back = TIMM.weights_to_external(net.state_dict(), config)
    assert all(torch.equal(back[name], value) for name, value in theirs.state_dict().items())
    found = config_from_timm_state(theirs.state_dict(), ViTConfig(stack=StackConfig(heads=1)))
    assert found == config


def test_the_hybrid_of_timm_comes_here_and_goes_back() -> None:
    theirs = timm_model("vit_tiny_r_s16_p8_224", depth=2, img_size=96, num_classes=5)
    net = our_vit(theirs, config_from_timm_model(theirs))
    assert difference(net, theirs) <= 1e-5
    assert_same_gradients(net, theirs)
    theirs.load_state_dict(TIMM.weights_to_external(net.state_dict(), net.config))
    assert difference(net, theirs) <= 1e-5
    theirs.patch_embed.backbone.conv.eps = 0.1
    with pytest.raises(ValueError, match="patch_embed.backbone"):
        config_from_timm_model(theirs)


@pytest.mark.parametrize(
    "options",
    [
        {"stem_norm": True},
        {"mlp_layer": timm.layers.GluMlp},
        {"act_layer": nn.ReLU},
        {"norm_layer": timm.layers.RmsNorm},
        {"block_layer": timm.models.mlp_mixer.ResBlock, "mlp_ratio": 4},
        {"drop_rate": 0.1},
        {"global_pool": ""},
    ],
    ids=str,
)
def test_other_perceptrons_of_timm_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="timm"):
        config_from_timm_model(tiny_mixer(**options))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"stem.proj.weight": torch.zeros(3)}, "stem.proj.weight"),
        ({"stem.proj.weight": torch.zeros(48, 3, 8, 4)}, "square"),
        ({"blocks.0.mlp_tokens.fc1.weight": torch.zeros(24, 15)}, "square"),
        ({"blocks.0.mlp_channels.fc1.weight": torch.zeros(3)}, "mlp_channels"),
    ],
)
def test_weights_of_no_mixer_are_named(changes: dict[str, Tensor], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config_from_timm_state(tiny_mixer().state_dict() | changes, PLAIN)


def mixer(**options: Any) -> ViT:
    """A Mixer-S/16 with narrow perceptrons, and its options changed."""
    config = replace(VIT_PRESETS["mixer_small"], image_size=32, num_classes=5)
    stack = replace(config.stack, token_mlp_width=7, mlp_width=33)
    own = {name: options.pop(name) for name in [*options] if hasattr(config, name)}
    return ViT(replace(config, stack=replace(stack, **options), **own)).eval()


@pytest.mark.parametrize("patch", [16, 32])
def test_an_exported_mixer_loads_in_timm_and_here(patch: int) -> None:
    net = randomise(mixer(patch_size=patch))
    names = [*"abcde"]
    metadata = {**TARGETS, "class_names": names, "mean": [0.25] * 3, "std": [0.5] * 3}
    Path("out").mkdir()
    hint = write_timm(net, metadata, Path("out"))
    theirs = eval(hint.format(file="out"), {"timm": timm}).eval()
    assert isinstance(theirs, MlpMixer)
    assert difference(net, theirs) <= 1e-5
    options = pretrained_options("out")["model"]["net"]
    stack = StackConfig(**options.pop("stack"))
    back = ViT(ViTConfig(**options | {"num_classes": 5, "stack": stack})).eval()
    assert back.config == net.config
    load_pretrained(back, "out", {**TARGETS, "class_names": names})
    assert difference(back, theirs) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"depth": 2},
        {"patch_size": 8},
        {"position": "learned"},
        {"pool": "max"},
        {"stem": "conv"},
        {"layer_scale": 0.1},
        {"feedforward": "relu"},
        {"norm": "rmsnorm"},
        {"bias": False},
        {"register_tokens": 1},
    ],
    ids=str,
)
def test_mixers_that_timm_does_not_have_are_not_exported(options: dict[str, Any]) -> None:
    metadata = {**TARGETS, "class_names": [*"abcde"], "mean": [0.5] * 3, "std": [0.5] * 3}
    with pytest.raises(UsageError, match=next(iter(options)).partition("_")[0]):
        write_timm(mixer(**options), metadata, Path())
    assert not any(Path().iterdir())


# Another patch size ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 7, 8, 16])
def test_filters_of_patches_are_resized_as_timms(size: int) -> None:
    weight = torch.randn(5, 3, 8, 8)
    close(resize_patches(weight, size), timm.layers.resample_patch_embed(weight, [size, size]))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_filters_are_resized_in_their_own_type(default: torch.dtype) -> None:
    weight = torch.randn(5, 3, 8, 8)
    expected = resize_patches(weight, 12)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(resize_patches(weight, 12), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_resized_filters_give_the_same_vectors_of_resized_patches() -> None:
    weight, patch = torch.randn(5, 3, 8, 8), torch.randn(1, 3, 8, 8)
    large = F.interpolate(patch, (12, 12), mode="bicubic", antialias=True)
    close(F.conv2d(large, resize_patches(weight, 12)), F.conv2d(patch, weight), atol=1e-4)


@pytest.mark.parametrize("image, patch", [(32, 4), (48, 16), (64, 8), (35, 7)])
def test_another_image_and_patch_size_as_in_timm(image: int, patch: int) -> None:
    theirs, other = tiny_timm(), tiny_timm(img_size=image, patch_size=patch)
    config = config_from_timm_model(other)
    expected = checkpoint_filter_fn(theirs.state_dict(), other)
    other.load_state_dict(expected)
    net = our_vit(theirs, config)
    close(net.position.table.flatten(0, 1), expected["pos_embed"][0, 1:])
    assert difference(net, other) <= 1e-5


def test_a_mixer_takes_larger_patches_of_larger_images() -> None:
    theirs, other = tiny_mixer(), tiny_mixer(img_size=64, patch_size=16)
    state = theirs.state_dict()
    weight = timm.layers.resample_patch_embed(state["stem.proj.weight"], [16, 16])
    other.load_state_dict(state | {"stem.proj.weight": weight})
    assert difference(our_vit(theirs, config_from_timm_model(other)), other) <= 1e-5


# CCT and ViT-22B ---------------------------------------------------------------------------------


def test_cct_is_the_authors() -> None:
    """Against `cifar_peer`, after the code of Hassani (2021)."""
    theirs = randomise(CCT())
    net = ViT(VIT_PRESETS["cct_2_3x2"]).eval()
    names = {"embed.stem.layers.0": "stem.0", "embed.stem.layers.3": "stem.3"}
    names |= {"stack.norm": "norm", "pool.score": "pool", "head.linear": "head"}
    for i in range(2):
        parts = {"norm1": "pre_norm", "norm2": "norm", "attention.qkv": "qkv"}
        parts |= {"attention.output": "proj", "feedforward.up": "up", "feedforward.down": "down"}
        names |= {f"stack.blocks.{i}.{ours}": f"layers.{i}.{own}" for ours, own in parts.items()}

    def translated(values: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, own in net.named_parameters():
            layer, _, end = name.rpartition(".")
            other = "position" if layer == "position" else f"{names[layer]}.{end}"
            found[name] = values[other].view_as(own)
        return found

    net.load_state_dict(translated(dict(theirs.named_parameters())))
    assert difference(net, theirs) <= 1e-5
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([1, 5, 9])
    expected = translated(gradients(theirs, images, labels))
    found = gradients(net, images, labels)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        close(value, expected[name], atol=1e-5, rtol=1e-4)


def test_vit_22b_has_the_published_number_of_parameters() -> None:
    net = on_meta(ViT, VIT_PRESETS["22b"])
    blocks = sum(p.numel() for p in net.stack.parameters() if p.dim() > 1)
    assert round(blocks / 1e6) == 21743  # Dehghani 2023, table 1


def test_blocks_of_vit_22b_are_timms() -> None:
    width, heads = 48, 4
    stack = replace(VIT_PRESETS["22b"].stack, width=width, heads=heads, depth=1, final_norm=False)
    net = shaken(Stack(stack))
    block = net.blocks[0]
    theirs = ParallelScalingBlock(
        width, heads, qk_norm=True, norm_layer=lambda size, **_: nn.RMSNorm(size, eps=1e-6)
    )
    projections = (block.feedforward.up.weight, block.attention.qkv.weight)
    theirs.load_state_dict(
        {
            "mlp_bias": block.feedforward.up.bias,
            "in_norm.weight": block.norm1.weight,
            "in_proj.weight": torch.cat(projections),
            "q_norm.weight": block.attention.q_norm.weight,
            "k_norm.weight": block.attention.k_norm.weight,
            **{f"attn_out_proj.{n}": p for n, p in block.attention.output.named_parameters()},
            **{f"mlp_out_proj.{n}": p for n, p in block.feedforward.down.named_parameters()},
        }
    )
    x, direction = torch.randn(2, 3, 7, width)
    ours, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    close(net(ours), theirs(expected))
    net(ours).backward(direction)
    theirs(expected).backward(direction)
    close(ours.grad, expected.grad)
    weights = [part.weight.grad for part in (block.feedforward.up, block.attention.qkv)]
    close(torch.cat(weights), theirs.in_proj.weight.grad, atol=1e-4)


def test_a_mixer_differs_from_a_vit_in_its_token_mixing_only() -> None:
    vit, mixed = ViT(PLAIN), changed("stack.order", "mixer")
    only = {name for name in mixed.state_dict() if name not in vit.state_dict()}
    assert all(".token_mixing." in name for name in only)
    assert {n.split(".")[3] for n in vit.state_dict() if n not in mixed.state_dict()} == {
        "attention"
    }
