"""Swin of timm, both versions: equal logits and gradients, other sizes, there and back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor
from transformers import SwinModel, Swinv2Model

from modules.config import StackConfig
from modules.models.images import config_class
from modules.models.swin import SWIN_PRESETS, Swin, SwinConfig, second_version
from modules.pretrained.swin import (
    TIMM_SWIN,
    config_from_timm_swin,
    resize_swin,
    swin_arguments,
)
from modules.pretrained.swin_transformers import SWIN, SWINV2
from modules.schema import from_dict
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.vit.architectures import load_pretrained, pretrained_options
from tasks.vit.export import write_timm
from tasks.vit.pretrained import find_model
from tests.helpers.marks import slow_except
from tests.helpers.tiny_models import shaken
from tests.parity.vit import on_meta, randomise

CLASSES = (SwinTransformer, SwinTransformerV2)
TINY: Any = {
    **{"img_size": 32, "patch_size": 2, "window_size": 4, "num_classes": 5},
    **{"embed_dim": 12, "depths": (2, 2, 1), "num_heads": (2, 4, 8)},
}
SIZES = [  # windows that fit, two that do not, odd grids, grids smaller than a window
    {},
    {"img_size": 36},
    {"img_size": 28, "window_size": 5},
    {"img_size": 44, "patch_size": 4, "window_size": 3},
    {"img_size": 32, "patch_size": 4, "in_chans": 1, "window_size": 7},
]
METADATA = {
    **external_targets("single_label_classification"),
    **{"class_names": [*"abcde"], "mean": [0.25] * 3, "std": [0.5] * 3},
}
SIZE_NAMES = ("tiny", "small", "base", "large")
every_class = pytest.mark.parametrize("kind", CLASSES)


def tiny_timm(kind: Any, **options: Any) -> Any:
    """A small model of timm with random weights."""
    return randomise(kind(**{**TINY, **options}))


def our_swin(theirs: Any) -> Swin:
    """Our model with the weights of theirs."""
    config = config_from_timm_swin(theirs)
    net = Swin(config).eval()
    net.load_state_dict(TIMM_SWIN.weights_from_external(theirs.state_dict(), config))
    return net


def pictures(config: SwinConfig, count: int = 2) -> Tensor:
    size = config.image_size
    return torch.rand(count, config.channels or 0, size, size) * 2 - 1


def assert_equal(net: Swin, theirs: Any) -> None:
    """Compares logits."""
    images = pictures(net.config)
    with torch.inference_mode():
        torch.testing.assert_close(net(images), theirs(images), atol=1e-5, rtol=0)


PUBLISHED = {f"swin_{size}": f"swin_{size}_patch4_window7_224" for size in SIZE_NAMES} | {
    f"swinv2_{size}": f"swinv2_{size}_window8_256" for size in SIZE_NAMES[:3]
}


@pytest.mark.parametrize("kind", [SwinModel, Swinv2Model])
@pytest.mark.parametrize("depths", [(1, 2), (2, 1)], ids=str)
def test_attention_is_hugging_faces(kind: Any, depths: tuple[int, int]) -> None:
    """Which has that of the last block of each stage; the second block of stage 0 is shifted."""
    stack = StackConfig(8, 3, 2, norm_eps=1e-5)
    config = SwinConfig(12, 2, 1, 5, depths=depths, window_size=3, stack=stack)
    net = randomise(Swin(config if kind is SwinModel else second_version(config)))
    family = SWIN if kind is SwinModel else SWINV2
    sizes: Any = {"image_size": 12, "patch_size": 2, "num_channels": 1, "embed_dim": 8}
    sizes |= {"depths": depths, "num_heads": (2, 4), "window_size": 3}
    theirs, report = kind.from_pretrained(
        None,
        config=kind.config_class(**sizes),
        state_dict=family.weights_to_external(net.state_dict(), net.config),
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    metadata = {**METADATA, "channels": 1, "mean": [0.5], "std": [0.5], "image_size": 12}
    model = tessera.ImageClassifier(net, metadata, "swin")
    image = torch.randint(0, 256, (1, 12, 12), dtype=torch.uint8)
    with torch.no_grad():
        pixels = (image[None] / 255 - 0.5) / 0.5
        expected = theirs(pixels, output_attentions=True).attentions
    assert len(expected) == 2
    for stage, windows in enumerate(expected):  # (W, H, A, A)
        weights, queries, keys = model.attention(image, stage)
        side = 6 // 2**stage
        assert queries == keys and queries[side + 1] == "2,2"
        place = (torch.arange(side) + int(stage == 0 and depths[0] == 2)) % side
        tokens = place[:, None] * side + place  # (G, G), as the windows are cut
        parts = [part.flatten() for rows in tokens.split(3) for part in rows.split(3, 1)]
        placed = torch.zeros(len(windows[0]), side**2, side**2)
        for part, one in zip(parts, windows, strict=True):
            placed[:, part[:, None], part] = one
        assert len(weights) == depths[stage]
        torch.testing.assert_close(weights[-1], placed, atol=1e-5, rtol=0)
    last = model.attention(image)
    assert torch.equal(last.weights, weights) and last.queries == queries
    with pytest.raises(UsageError, match="stage is 2"):
        model.attention(image, 2)


@pytest.mark.parametrize("name", slow_except(["swin_tiny", "swinv2_tiny"], PUBLISHED))
def test_presets_have_the_published_sizes(name: str) -> None:
    theirs = on_meta(timm.create_model, PUBLISHED[name])
    net = on_meta(Swin, SWIN_PRESETS[name])
    assert config_from_timm_swin(theirs) == SWIN_PRESETS[name]
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in net.parameters())


@every_class
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logits_and_gradients_are_timms(kind: Any, sizes: dict[str, Any]) -> None:
    theirs = tiny_timm(kind, **sizes)
    net = our_swin(theirs)
    images = pictures(net.config, 3)
    found, expected = net(images), theirs(images)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = torch.randn_like(found)
    for logits in (found, expected):
        (logits * weights).sum().backward()
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    grads = TIMM_SWIN.weights_to_external(grads, net.config)
    for name, parameter in theirs.named_parameters():
        size = parameter.grad.abs().max()
        assert size > 0 and (grads[name] - parameter.grad).abs().max() <= 1e-4 * size, name
    back = TIMM_SWIN.weights_to_external(net.state_dict(), net.config)
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, back[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    "sizes", [(48, 6, 2), (24, 2, 2), (20, 3, 2), (64, 7, 2), (8, 4, 2), (64, 4, 4)], ids=str
)
def test_weights_move_to_other_images_windows_and_patches_as_in_timm(
    sizes: tuple[int, int, int],
) -> None:
    theirs = tiny_timm(SwinTransformer)
    state = theirs.state_dict()
    own = our_swin(theirs)
    image, window, patch = sizes
    config = replace(own.config, image_size=image, window_size=window, patch_size=patch)
    theirs.set_input_size(image, patch_size=patch, window_size=window)
    for weights in (
        TIMM_SWIN.weights_from_external(state, config),
        resize_swin(own.state_dict(), own.config, config),
    ):
        net = Swin(config).eval()
        net.load_state_dict(weights)
        assert_equal(net, theirs)


def test_the_second_version_computes_its_bias_for_other_windows_as_timm() -> None:
    theirs = tiny_timm(SwinTransformerV2)
    moved = {"img_size": 48, "window_size": 6, "pretrained_window_sizes": (4, 4, 4)}
    larger = SwinTransformerV2(**{**TINY, **moved}).eval()
    larger.load_state_dict(theirs.state_dict())
    config = config_from_timm_swin(larger)
    assert config.pretrained_windows == (4, 4, 4)
    net = Swin(config).eval()
    own = our_swin(theirs)
    net.load_state_dict(resize_swin(own.state_dict(), own.config, config))
    assert_equal(net, larger)


@every_class
@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": False},
        {"mlp_ratio": 2.5},
        {"window_size": 16},
        {"num_heads": (1, 2, 4)},
        {"depths": (1, 3), "num_heads": (2, 4)},
        {"drop_path_rate": 0.3, "proj_drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_rate": 0.4},
        {"strict_img_size": False},
    ],
    ids=str,
)
def test_arguments_of_timm(kind: Any, options: dict[str, Any]) -> None:
    theirs = tiny_timm(kind, **options)
    net = our_swin(theirs)
    assert_equal(net, theirs)
    arguments = swin_arguments(net.config)
    assert all(arguments.get(name, value) == value for name, value in options.items())


@every_class
@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": (2, 2, 2)},
        {"mlp_ratio": 2.7},  # of which 12, 24 and 48 have no equal multiples
        {"window_size": (4, 3)},
        {"window_size": (4, 2, 4)},
        {"global_pool": "max"},
        {"always_partition": True, "window_size": 7},
        {"norm_layer": timm.layers.LayerNormFp32},
        {"img_size": (32, 40)},
    ],
    ids=str,
)
def test_arguments_of_timm_that_we_do_not_have_are_refused(
    kind: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="timm's"):
        config_from_timm_swin(kind(**{**TINY, **options}))


@pytest.mark.parametrize(
    "name", ["swin_tiny_patch4_window7_224", "swin_s3_tiny_224", "swinv2_cr_tiny_224"]
)
def test_models_by_name(name: str) -> None:
    if name.startswith("swin_tiny"):
        found = find_model(f"timm/{name}")
        assert found.config() == SWIN_PRESETS["swin_tiny"]
        assert found.class_names and len(found.class_names) == 1000
        return
    with pytest.raises(UsageError, match=name):
        find_model(f"timm/{name}").config()


STACK = replace(SWIN_PRESETS["swin_cifar"].stack, width=12, depth=3)


def tiny_preset(version: int, **options: Any) -> Any:
    """A small config."""
    small = {"depths": (1, 2), "num_classes": 5, "window_size": 3, **options}
    config = replace(SWIN_PRESETS["swin_cifar"], **{**small, "stack": STACK})
    return config if version == 1 else second_version(config)


@pytest.mark.parametrize("version", [1, 2])
def test_an_export_to_timm_loads_there_and_here(version: int) -> None:
    net = shaken(Swin(tiny_preset(version))).eval()
    Path("out").mkdir()
    code = write_timm(net, METADATA, Path("out")).format(file="out")  # as a user would paste it
    theirs = eval(code, {"timm": timm}).eval()
    assert_equal(net, theirs)
    assert [*theirs.pretrained_cfg["label_names"]] == METADATA["class_names"]
    options = pretrained_options("out")
    known = {"mean": METADATA["mean"], "std": METADATA["std"]}
    known |= {"interpolation": "bilinear", "crop_pct": 1.0}
    assert options["data"]["dataset"] == known
    saved = options["model"]["net"] | {"num_classes": 5}
    assert saved["pretrained_windows"] == (None if version == 1 else (3, 3))
    for size in ({}, {"image_size": 20, "window_size": 4}):
        back = Swin(from_dict(config_class(saved), saved | size)).eval()
        load_pretrained(back, "out", METADATA)
        if not size:
            assert_equal(back, theirs)


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_a_folder_that_timm_wrote(name: str) -> None:
    sizes: Any = {"embed_dim": 12, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 4, 8)}
    theirs = randomise(timm.create_model(name, **sizes, num_classes=5))
    arguments = {**sizes, "global_pool": "avg"}  # as in their own models' files
    timm.models.save_for_hf(theirs, "theirs", model_args=arguments, safe_serialization=True)
    model = tessera.load("theirs")
    images = torch.randn(2, 3, model.net.config.image_size, model.net.config.image_size)
    with torch.no_grad():
        torch.testing.assert_close(model.net(images), theirs(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "option, value",
    [
        ("stem", "conv"),
        ("attention", "cosine"),
        ("order", "post"),
        ("feedforward", "relu"),
        ("norm", "rmsnorm"),
        ("norm_eps", 1e-6),
        ("kv_heads", 1),
        ("qk_norm", True),
        ("layer_scale", 0.1),
    ],
)
def test_what_timm_does_not_have_is_not_exported(option: str, value: Any) -> None:
    config = tiny_preset(1)
    if hasattr(config, option):
        config = replace(config, **{option: value})
    else:
        config = replace(config, stack=replace(config.stack, **{option: value}))
    with pytest.raises(UsageError, match=option.partition("_")[0]):
        write_timm(Swin(config), METADATA, Path())
    assert not any(Path().iterdir())
