"""Our ViT as transformers': each option gives equal logits there and back, or is not exported."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import transformers

from modules.config import StackConfig
from modules.models.images import IMAGE_PRESETS
from modules.models.vit import ViTConfig
from modules.pretrained.vit_transformers import HUGGINGFACE
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.vit.architectures import with_weights
from tasks.vit.export import write_hf
from tests.parity.vit import changed, difference, randomise

EXPORTED: dict[str, list[Any]] = {  # option: values that transformers has, too
    "image_size": [40],
    "patch_size": [16],
    "channels": [1],
    "num_classes": [7],
    "class_token": [True],
    "distillation_token": [True],
    "position": ["none", "sinusoidal", "sincos2d"],
    "head_dropout": [0.1],
    "stack.width": [64],
    "stack.depth": [1],
    "stack.heads": [1, 2, 6],
    "stack.kv_heads": [4],
    "stack.head_dim": [12],
    "stack.value_dim": [12],
    "stack.mlp_width": [1, 100, 192],
    "stack.feedforward": ["relu", "gelu_tanh", "quick_gelu", "silu"],
    "stack.final_norm": [True],
    "stack.norm_eps": [1e-2],
    "stack.mlp_bias": [True],
    "stack.qkv_bias": [False],
    "stack.dropout": [0.1],
    "stack.mlp_dropout": [0.1],
    "stack.attention_dropout": [0.1],
    "stack.drop_path": [0.1],
    "stack.checkpoint_activations": [True],
    "stack.init": ["xavier"],
}
NOT_EXPORTED: dict[str, list[Any]] = {  # option: values that it does not have
    "pool": ["mean", "max", "attention", "sequence", "flatten"],
    "register_tokens": [3],
    "position": ["rotary2d", "alibi", "t5"],
    "stem": ["conv", "convpool", "cct", "resnet", "hybrid"],
    "norm_after_pool": [True],
    "stack.kv_heads": [2],
    "stack.head_dim": [8],
    "stack.value_dim": [8],
    "stack.attention": ["unscaled", "bilinear", "additive", "cosine"],
    "stack.conv_kernel": [3],
    "stack.feedforward": ["relu2", "swiglu", "geglu", "geglu_tanh"],
    "stack.final_norm": [False],
    "stack.layer_scale": [0.1],
    "stack.norm": ["rmsnorm", "batchnorm", "none"],
    "stack.order": ["post", "parallel", "res_post", "no_residual", "cct"],
    "stack.bias": [False],
    "stack.mlp_bias": [False],
    "stack.qk_norm": [True],
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


def metadata_of(config: Any) -> dict[str, Any]:
    """Metadata of the pictures of a network."""
    channels = config.channels
    return {
        **external_targets("single_label_classification"),
        "class_names": ["a", *(f"c{number}" for number in range(1, config.num_classes))],
        "mean": [0.25, 0.4, 0.3][:channels],
        "std": [0.5, 0.2, 0.3][:channels],
        "channels": channels,
        "image_size": config.image_size,
        "interpolation": "bilinear",
        "crop_pct": 0.8,
    }


def test_each_option_of_ours_is_tried() -> None:
    options = {field.name for field in fields(ViTConfig)}
    options |= {f"stack.{field.name}" for field in fields(StackConfig)}
    assert EXPORTED.keys() | NOT_EXPORTED.keys() | NEVER == options


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("option, value", pairs(EXPORTED))
def test_an_export_loads_there_and_here(option: str, value: Any) -> None:
    net = randomise(changed(option, value))
    metadata = metadata_of(net.config)
    Path("out").mkdir()
    hint = write_hf(net, metadata, Path("out"))
    code = hint.format(file="out")  # as a user would paste it
    theirs = eval(code, {"transformers": transformers}).eval()
    auto = transformers.AutoModelForImageClassification.from_pretrained("out").eval()
    assert type(auto) is type(theirs)
    assert difference(net, theirs) <= 1e-5
    assert list(theirs.config.id2label.values()) == metadata["class_names"]
    assert theirs.config.problem_type == metadata["problem_type"]
    back, found = with_weights("out", "--option")
    assert difference(back.eval(), theirs) <= 1e-5
    assert metadata.items() <= found.items()


TIMM_HAS = (
    "register_tokens",
    "norm_after_pool",
    "stack.qk_norm",
    "stack.final_norm",
    "stack.layer_scale",
)


@pytest.mark.parametrize("option, value", pairs(NOT_EXPORTED))
def test_what_transformers_does_not_have_is_not_exported(option: str, value: Any) -> None:
    net = changed(option, value)
    name = option.removeprefix("stack.").partition("_")[0]
    with pytest.raises(UsageError, match=rf"{name}.*--format .*onnx or safetensors") as error:
        write_hf(net, metadata_of(net.config), Path())
    assert not any(Path().iterdir())
    has_timm = option in TIMM_HAS or value in ("mean", "max", "hybrid", "parallel")
    assert ("--format timm" in str(error.value)) == has_timm


def test_a_mixer_is_not_exported() -> None:
    with pytest.raises(ValueError, match="ViT models have order"):
        HUGGINGFACE.config_to_external(IMAGE_PRESETS["mixer_small"])
