"""Whole models of timm with the parallel blocks of ViT-22B: converted both ways, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import ParallelScalingBlock

from modules.models.vit import VIT_PRESETS, ViT
from modules.pretrained.timm import config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import TIMM
from tasks.errors import UsageError
from tasks.problems import external_targets
from tasks.vit.architectures import with_weights
from tasks.vit.export import write_timm
from tests.helpers.tiny_models import close
from tests.parity.vit import PLAIN, difference, on_meta, our_vit, randomise, timm_model, tiny_timm

METADATA = {
    **external_targets("single_label_classification"),
    "class_names": list("abcde"),
    "mean": [0.5] * 3,
    "std": [0.25] * 3,
}
CASES: list[dict[str, Any]] = [
    {},
    {"qkv_bias": False},
    {"qkv_bias": False, "qk_norm": True, "norm_layer": "rmsnorm", "global_pool": "avg"},
    {"init_values": 0.1, "mlp_ratio": 2.7, "qk_norm": True},
    {"init_values": 0.1, "class_token": False, "reg_tokens": 1, "no_embed_class": True}
    | {"global_pool": "avg"},
]


def parallel_timm(**options: Any) -> Any:
    return tiny_timm(block_fn=ParallelScalingBlock, **options)


def converted(theirs: Any) -> ViT:
    """Our network with the weights of timm's."""
    config = config_from_timm_model(theirs)
    assert config.stack.order == "parallel"
    return our_vit(theirs, config, prefix_positions=not theirs.no_embed_class)


@pytest.mark.parametrize("options", CASES)
def test_weights_come_here_and_go_back(options: dict[str, Any]) -> None:
    theirs = parallel_timm(**options)
    net = converted(theirs)
    assert difference(net, theirs) <= 1e-5
    state = theirs.state_dict()
    assert config_from_timm_state(state, net.config, not theirs.no_embed_class) == net.config
    back = TIMM.weights_to_external(net.state_dict(), net.config)
    assert back.keys() == state.keys()
    for name in state.keys() - {"pos_embed", "cls_token"}:  # whose sum is the same
        assert torch.equal(back[name], state[name]), name
    other = randomise(parallel_timm(**options))
    other.load_state_dict(back)
    assert difference(net, other) <= 1e-5


@pytest.mark.parametrize("options", CASES)
def test_an_export_loads_there_and_here(options: dict[str, Any]) -> None:
    net = converted(parallel_timm(**options))
    Path("out").mkdir()
    write_timm(net, METADATA, Path("out"))
    theirs = timm.create_model("local-dir:out", pretrained=True).eval()
    assert type(theirs.blocks[0]) is ParallelScalingBlock
    assert difference(net, theirs) <= 1e-5
    back, _ = with_weights("out", "--option")
    assert difference(back.eval(), theirs) <= 1e-5
    assert back.config.stack.order == "parallel" and back.config.stack.norm == net.config.stack.norm


def test_scales_that_differ_become_part_of_the_projections() -> None:
    theirs = parallel_timm(init_values=0.1)
    net = converted(theirs)
    with torch.no_grad():
        for block in net.stack.blocks:
            block.residual2.scale.gamma.mul_(-0.7)
    assert difference(net, theirs) > 1e-3  # each has its own
    other = parallel_timm(init_values=0.1)
    other.load_state_dict(TIMM.weights_to_external(net.state_dict(), net.config))
    assert difference(net, other) <= 1e-5


def test_vit_22b_of_small_size_is_timms() -> None:
    preset = VIT_PRESETS["22b"]
    stack = replace(preset.stack, width=48, depth=2, heads=4)
    config = replace(preset, stack=stack, image_size=28, num_classes=5)
    net = randomise(ViT(config))
    Path("out").mkdir()
    write_timm(net, METADATA, Path("out"))
    theirs = timm.create_model("local-dir:out", pretrained=True).eval()
    assert difference(net, theirs) <= 1e-5
    assert config_from_timm_model(theirs) == config


def test_gradients_are_timms() -> None:
    theirs = parallel_timm(qkv_bias=False, qk_norm=True)
    net = converted(theirs).requires_grad_()
    images, direction = torch.randn(2, 3, 32, 32), torch.randn(2, 5)
    net(images).backward(direction)
    theirs(images).backward(direction)
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    grads = TIMM.weights_to_external(found, net.config)
    for name, parameter in theirs.named_parameters():
        if name != "pos_embed":  # ours has no position of the class token
            close(grads[name], parameter.grad, atol=1e-4)


def test_a_published_model_by_the_name_of_its_file() -> None:
    name = "vit_pwee_patch16_reg1_gap_256"
    theirs = timm_model(name)
    save_file(theirs.state_dict(), f"{name}.safetensors")
    net, _ = with_weights(f"{name}.safetensors", "--option")
    assert difference(net.eval(), theirs) <= 1e-5


def test_what_ours_lacks_is_refused() -> None:
    theirs = on_meta(timm.create_model, "vit_large_patch14_xp_224", depth=1)
    with pytest.raises(ValueError, match="norm_pre of timm's model is .*RmsNorm"):
        config_from_timm_model(theirs)
    with pytest.raises(ValueError, match="timm's RmsNorm is not supported"):
        config_from_timm_model(tiny_timm(norm_layer="rmsnorm"))
    with pytest.raises(ValueError, match=r"blocks\.0\.attn_out_proj\.bias"):
        config_from_timm_model(parallel_timm(proj_bias=False))


@pytest.mark.parametrize("option, value", [
    ("stem", "hybrid"),
    ("distillation_token", True),
    ("norm", "batchnorm"),
    ("bias", False),
])  # fmt: skip
def test_what_timms_parallel_models_lack_is_not_exported(option: str, value: Any) -> None:
    config = replace(PLAIN, stack=replace(PLAIN.stack, order="parallel"))
    if option in ("norm", "bias"):
        config = replace(config, stack=replace(config.stack, **{option: value}))
    else:
        config = replace(config, **{option: value})
    with pytest.raises(UsageError, match=rf"timm has no such model \(.*{option}"):
        write_timm(ViT(config), METADATA, Path())
    assert not any(Path().iterdir())


def test_weights_of_other_blocks_or_shapes_are_refused() -> None:
    theirs = parallel_timm()
    state = theirs.state_dict()
    with pytest.raises(ValueError, match="norm2"):
        TIMM.weights_from_external(state, PLAIN)
    parallel = config_from_timm_model(theirs)
    with pytest.raises(ValueError, match="norm2"):
        TIMM.weights_from_external(tiny_timm().state_dict(), parallel)
    state["blocks.0.in_proj.weight"] = state["blocks.0.in_proj.weight"][:100]
    with pytest.raises(ValueError, match=r"blocks\.0\.in_proj\.weight has 100 rows"):
        TIMM.weights_from_external(state, parallel)
