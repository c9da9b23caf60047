"""Swin of transformers, both versions: equal logits there and back, or one sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tessera
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    SwinForImageClassification,
    SwinForMaskedImageModeling,
    SwinModel,
    Swinv2ForImageClassification,
    Swinv2Model,
)

from modules.config import StackConfig
from modules.models.images import config_class
from modules.models.swin import SWIN_PRESETS, Swin, SwinConfig, second_version
from modules.pretrained.swin import resize_swin
from modules.pretrained.swin_transformers import BY_MODEL_TYPE
from modules.schema import from_dict
from tasks.errors import UsageError
from tasks.vit.architectures import load_pretrained, pretrained_options, with_weights
from tasks.vit.export import write_hf
from tests.helpers.marks import slow_except
from tests.helpers.tiny_models import shaken
from tests.parity.test_vit_to_huggingface import metadata_of
from tests.parity.vit import on_meta, randomise

KINDS: tuple[Any, ...] = (SwinForImageClassification, Swinv2ForImageClassification)
STACK = StackConfig(12, 3, 2, norm_eps=1e-5)
TINY = SwinConfig(32, 2, 3, 5, depths=(1, 2), window_size=4, stack=STACK)
EXPORTED: dict[str, list[Any]] = {  # option: values that transformers has, too
    "image_size": [16, 30, 48],
    "patch_size": [4],
    "channels": [1],
    "num_classes": [7],
    "window_size": [2, 8],
    "head_dropout": [0.1],
    "stack.heads": [1, 6],
    "stack.mlp_width": [24, 30],
    "stack.feedforward": ["relu", "gelu_tanh", "silu"],
    "stack.qkv_bias": [False],
    "stack.dropout": [0.1],
    "stack.drop_path": [0.1],
}
NOT_EXPORTED: dict[str, list[Any]] = {  # option: values that it does not have
    "image_size": [36],
    "window_size": [3],
    "stem": ["conv"],
    "stack.feedforward": ["swiglu"],
    "stack.norm": ["rmsnorm"],
    "stack.norm_eps": [1e-6],
    "stack.kv_heads": [1],
    "stack.qk_norm": [True],
    "stack.layer_scale": [0.1],
    "stack.order": ["post"],
}
every_version = pytest.mark.parametrize("version", [1, 2])


def pairs(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table.items() for value in values]


def changed(version: int, option: str, value: Any) -> Swin:
    """A random network that differs from `TINY` in one option."""
    config = TINY if version == 1 else second_version(TINY)
    own = option.removeprefix("stack.")
    if own == option:
        config = replace(config, **{option: value})
    else:
        config = replace(config, stack=replace(config.stack, **{own: value}))
    return shaken(Swin(config)).eval()


def assert_equal(net: Any, theirs: Any) -> None:
    """Compares logits."""
    config = net.config
    images = torch.rand(2, config.channels, config.image_size, config.image_size) * 2 - 1
    with torch.inference_mode():
        torch.testing.assert_close(net(images), theirs(images).logits, atol=1e-5, rtol=0)


@every_version
@pytest.mark.parametrize("option, value", pairs(EXPORTED))
def test_an_export_loads_there_and_here(version: int, option: str, value: Any) -> None:
    net = changed(version, option, value)
    metadata = metadata_of(net.config) | {"crop_pct": 1.0}
    theirs = exported(net)
    assert type(theirs) is KINDS[version - 1]
    assert_equal(net, theirs)
    assert [*theirs.config.id2label.values()] == metadata["class_names"]
    back, found = with_weights("out", "--option")
    assert_equal(back.eval(), theirs)
    assert metadata.items() <= found.items()


@every_version
@pytest.mark.parametrize("option, value", pairs(NOT_EXPORTED))
def test_what_transformers_does_not_have_is_not_exported(
    version: int, option: str, value: Any
) -> None:
    name = option.removeprefix("stack.").replace("image", "window")
    net = changed(version, option, value)
    with pytest.raises(UsageError, match=rf"{name}.*--format .*onnx or safetensors"):
        write_hf(net, metadata_of(net.config), Path())
    assert not any(Path().iterdir())


def test_windows_larger_than_a_stage() -> None:
    """The first version of theirs has tables for the full window only, and fails."""
    net = changed(2, "window_size", 20)
    assert_equal(net, exported(net))
    with pytest.raises(UsageError, match="window_size 20 is larger than the 16 tokens"):
        exported(changed(1, "window_size", 20))


@pytest.mark.parametrize("window", [8, 20])
def test_windows_of_odd_grids(window: int) -> None:
    """The second version of theirs takes half of 15 tokens as 7, where 8 follow from padding."""
    config = replace(second_version(TINY), image_size=30, window_size=window)
    with pytest.raises(UsageError, match="has windows of 7 for the 8 tokens of a side of stage 1"):
        exported(Swin(config))
    their_folder(KINDS[1], image_size=30, window_size=window)
    with pytest.raises(UsageError, match="has windows of 7"):
        tessera.load("theirs")


PUBLISHED: dict[str, dict[str, Any]] = {  # what config.json of microsoft's says, at the least
    "swin-tiny-patch4-window7-224": {"path_norm": True, "hidden_size": 768, "num_layers": 4},
    "swinv2-tiny-patch4-window16-256": {
        "image_size": 256,
        "window_size": 16,
        "pretrained_window_sizes": [0, 0, 0, 0],
    },
    "swinv2-large-patch4-window12to16-192to256-22kto1k-ft": {
        "image_size": 256,
        "window_size": 16,
        "embed_dim": 192,
        "num_heads": [6, 12, 24, 48],
        "depths": [2, 2, 18, 2],
        "pretrained_window_sizes": [12, 12, 12, 6],
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str) -> None:
    settings = {
        **{"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24]},
        **{"image_size": 224, "patch_size": 4, "num_channels": 3, "window_size": 7},
        **{"mlp_ratio": 4.0, "qkv_bias": True, "hidden_act": "gelu", "drop_path_rate": 0.1},
        **{"use_absolute_embeddings": False, "layer_norm_eps": 1e-5, "num_labels": 1000},
        "model_type": name.partition("-")[0],
        **PUBLISHED[name],
    }
    family = BY_MODEL_TYPE[settings["model_type"]]
    settings["architectures"] = [f"{family.architecture}ForImageClassification"]
    config = family.config_from_external(settings)
    given = settings.get("pretrained_window_sizes", [0])
    assert config.pretrained_windows == (tuple(given) if any(given) else None)
    if settings["window_size"] == 16:
        assert config.window_sizes == [16, 16, 16, 8]
    preset = SWIN_PRESETS[name.replace("-", "_").partition("_patch4")[0]]
    assert config.depths == preset.depths
    assert config.stack == replace(preset.stack, mlp_dropout=0.0)
    theirs = on_meta(KINDS[family.architecture == "Swinv2"], family_config(family, settings))
    net = on_meta(Swin, config)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in net.parameters())


def family_config(family: Any, settings: dict[str, Any]) -> Any:
    """Their config of a config.json."""
    return KINDS[family.architecture == "Swinv2"].config_class.from_dict(settings)


def test_windows_of_the_first_training() -> None:
    """A stage without one was trained with its own."""
    theirs = their_folder(KINDS[1], pretrained_window_sizes=[6, 0])
    model = tessera.load("theirs", kind=tessera.ImageClassifier)
    assert model.net.config.pretrained_windows == (6, 4)
    assert_equal(model.net, theirs)


@pytest.mark.parametrize("kind", [SwinModel, SwinForMaskedImageModeling, Swinv2Model])
def test_models_without_a_classifier_start_a_training(kind: Any) -> None:
    theirs = their_folder(kind)
    with pytest.raises(UsageError, match="train one from it with --model.pretrained"):
        tessera.load("theirs")
    saved = pretrained_options("theirs")["model"]["net"] | {"num_classes": 5}
    net = Swin(from_dict(config_class(saved), saved)).eval()
    load_pretrained(net, "theirs", metadata_of(net.config))
    images = torch.rand(2, 3, 32, 32)
    base = getattr(theirs, "swin", theirs)
    with torch.inference_mode():
        expected = base(images).last_hidden_state.mean(1)
        torch.testing.assert_close(net.features(images), expected, atol=1e-5, rtol=0)


def exported(net: Swin) -> Any:
    """Theirs with our weights, loaded as a user would do it."""
    Path("out").mkdir(exist_ok=True)
    hint = write_hf(net, metadata_of(net.config) | {"crop_pct": 1.0}, Path("out"))
    return eval(hint.format(file="out"), {"transformers": transformers}).eval()


def their_folder(kind: Any, **options: Any) -> Any:
    """A small model of theirs with random weights, saved in the folder `theirs`."""
    sizes: Any = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "window_size": 4}
    sizes |= {"depths": [1, 2], "num_heads": [2, 4], "num_labels": 5}
    model = randomise(kind(kind.config_class(**{**sizes, **options})))
    model.save_pretrained("theirs")
    settings = {"image_mean": [0.25] * 3, "image_std": [0.5] * 3}
    Path("theirs/preprocessor_config.json").write_text(json.dumps(settings))
    return model


def test_a_folder_that_has_only_the_number_of_classes() -> None:
    theirs = their_folder(KINDS[0])
    file = Path("theirs/config.json")
    settings = json.loads(file.read_text())
    del settings["id2label"], settings["label2id"]
    file.write_text(json.dumps(settings | {"num_labels": 5}))
    model = tessera.load("theirs", kind=tessera.ImageClassifier)
    assert model.class_names == [f"LABEL_{number}" for number in range(5)]
    assert_equal(model.net, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_theirs_in_python_and_for_other_sizes(kind: Any) -> None:
    theirs = their_folder(kind, qkv_bias=kind is KINDS[1], mlp_ratio=2.0)
    model = tessera.load("theirs", kind=tessera.ImageClassifier)
    assert (model.metadata["mean"], model.metadata["std"]) == ([0.25] * 3, [0.5] * 3)
    assert_equal(model.net, theirs)
    assert model.class_names == [f"LABEL_{number}" for number in range(5)]
    saved = pretrained_options("theirs")["model"]["net"] | {"num_classes": 5}
    assert saved["pretrained_windows"] == (None if kind is KINDS[0] else (4, 4))
    larger = Swin(from_dict(config_class(saved), saved | {"image_size": 48, "window_size": 6}))
    load_pretrained(larger.eval(), "theirs", model.metadata)
    images = torch.rand(2, 3, 48, 48)
    own: Any = model.net
    expected = Swin(larger.config).eval()
    expected.load_state_dict(resize_swin(own.state_dict(), own.config, larger.config))
    with torch.inference_mode():
        assert torch.equal(larger(images), expected(images))
    if kind is KINDS[1]:  # its bias is computed for any window
        theirs = kind.from_pretrained(
            "theirs", image_size=48, window_size=6, pretrained_window_sizes=[4, 4]
        )
        with torch.inference_mode():
            expected = theirs.eval()(images).logits
            torch.testing.assert_close(larger(images), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", slow_except(["swin_tiny", "swinv2_tiny"], [*SWIN_PRESETS][:-2]))
def test_configs_of_presets_go_there_and_back(name: str) -> None:
    config = SWIN_PRESETS[name]
    family = BY_MODEL_TYPE["swin" if config.relative_bias == "table" else "swinv2"]
    settings = family.config_to_external(config) | {"num_labels": config.num_classes}
    kind = KINDS[family.architecture == "Swinv2"]
    theirs = on_meta(kind, kind.config_class.from_dict(settings))
    net = on_meta(Swin, config)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in net.parameters())
    assert family.config_from_external(settings) == replace(
        config, stack=replace(config.stack, mlp_dropout=0.0)
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_heads": [2, 2]}, "num_heads is [2, 2]; give 2 numbers, each twice the one before"),
        ({"num_heads": [2]}, "num_heads is [2]; give 2 numbers, each twice the one before"),
        ({"num_heads": []}, "num_heads is []; give 2 numbers, each twice the one before"),
        ({"num_heads": "2, 4"}, "num_heads"),
        ({"embed_dim": None}, "config.json lacks embed_dim"),
        ({"embed_dim": 10**12}, "embed_dim"),
        ({"depths": [], "num_heads": []}, "depths is []; give the number of blocks"),
        ({"depths": 3}, "depths"),
        ({"use_absolute_embeddings": True}, "use_absolute_embeddings"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps"),
        ({"mlp_ratio": "4"}, "mlp_ratio is '4', but must be"),
        ({"mlp_ratio": 1e30}, "mlp_ratio is 1e+30, which is beyond any model"),
        ({"patch_size": 4, "image_size": 64}, "has patches of (2, 2), but patch_size is 4"),
        ({"mlp_ratio": 2.7}, "feedforward.up"),
        ({"window_size": 8}, "relative_position_bias_table has 49 rows, but 225 by config.json"),
        ({"window_size": 5}, "window_size 5 does not divide the 8 tokens of a side of stage 1"),
        ({"image_size": 33}, "image_size"),
    ],
    ids=str,
)
def test_a_config_that_does_not_fit(change: dict[str, Any], says: str) -> None:
    their_folder(SwinForImageClassification)
    file = Path("theirs/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UsageError) as error:
        tessera.load("theirs")
    assert says in str(error.value)


def test_a_missing_weight_is_named() -> None:
    their_folder(Swinv2ForImageClassification)
    file = Path("theirs/model.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("1.blocks.1.attention.self.logit_scale"))
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UsageError, match=r"lack stages.1.stack.blocks.1.*log_scale"):
        tessera.load("theirs")
