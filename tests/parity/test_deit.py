"""DeiT: a ViT with a distillation token and a second head, as in timm and transformers."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file
from timm.models.deit import VisionTransformerDistilled

from modules.config import StackConfig
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.pretrained.timm import config_from_timm_model, config_from_timm_state
from modules.pretrained.vit import TIMM
from modules.pretrained.vit_transformers import FAMILIES
from tasks.problems import external_targets
from tasks.vit.architectures import load_pretrained, with_weights
from tests.helpers.tiny_models import close
from tests.parity.vit import PLAIN, difference, on_meta, our_vit, randomise, timm_model, tiny_timm

TINY = {"img_size": 32, "patch_size": 8, "num_classes": 5, "embed_dim": 48}


def tiny_deit(**options: Any) -> Any:
    """A small distilled model of timm's class with random weights."""
    sizes = {**TINY, "depth": 2, "num_heads": 4, **options}
    return randomise(on_meta(VisionTransformerDistilled, **sizes))


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_presets_are_timms(size: str) -> None:
    theirs = on_meta(timm.create_model, f"deit_{size}_distilled_patch16_224")
    preset = VIT_PRESETS[f"deit_{size}"]
    assert config_from_timm_model(theirs) == preset
    count = sum(p.numel() for p in theirs.parameters()) - 2 * preset.stack.width  # two positions
    assert count == sum(p.numel() for p in on_meta(ViT, preset).parameters())


def test_both_heads_and_their_gradients_are_timms() -> None:
    theirs = timm_model("deit_tiny_distilled_patch16_224", depth=2, num_classes=5)
    net = our_vit(theirs, config_from_timm_model(theirs)).requires_grad_()
    assert difference(net, theirs) <= 1e-5  # the mean, in evaluation
    images = torch.randn(2, 3, 224, 224)
    theirs.set_distilled_training(True)
    ours, expected = net.train()(images, each_head=True), torch.stack(theirs.train()(images))
    close(ours, expected)
    close(net(images), expected.mean(0))
    direction = torch.randn_like(expected)
    ours.backward(direction)
    expected.backward(direction)
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    found = TIMM.weights_to_external(found, net.config)
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        value, wanted = found[name], parameter.grad
        if name == "pos_embed":  # ours has no positions of both tokens
            value, wanted = value[:, 2:], wanted[:, 2:]
        close(value, wanted, atol=1e-4)


def test_weights_of_timm_come_here_and_go_back() -> None:
    theirs = tiny_deit()
    net = our_vit(theirs, config_from_timm_model(theirs))
    assert config_from_timm_state(theirs.state_dict(), PLAIN) == net.config
    theirs.load_state_dict(TIMM.weights_to_external(net.state_dict(), net.config))
    assert difference(net, theirs) <= 1e-5


def test_positions_are_resized_beside_two_tokens() -> None:
    theirs, other = tiny_deit(), tiny_deit(img_size=64)
    table = theirs.state_dict()["pos_embed"]
    resized = timm.layers.resample_abs_pos_embed(table, (8, 8), num_prefix_tokens=2)
    other.load_state_dict(theirs.state_dict() | {"pos_embed": resized})
    config = config_from_timm_model(other)
    net = ViT(config).eval()
    net.load_state_dict(TIMM.weights_from_external(theirs.state_dict(), config))
    assert difference(net, other) <= 1e-5


def test_heads_of_other_classes_are_both_left_out() -> None:
    theirs = tiny_deit()
    config = replace(config_from_timm_model(theirs), num_classes=3)
    state = TIMM.weights_from_external(theirs.state_dict(), config)
    missing = ViT(config).load_state_dict(state, strict=False).missing_keys
    ends = ("weight", "bias")
    assert set(missing) == {
        f"{head}.linear.{end}" for head in ("head", "distillation_head") for end in ends
    }


def test_a_network_with_one_head_has_its_logits_once() -> None:
    net = ViT(PLAIN).eval()
    images = torch.randn(2, 3, 32, 32)
    close(net(images, each_head=True), net(images)[None])


@pytest.mark.parametrize("old, new", [("deit", "deit5")])
def test_transformers_in_memory_and_in_files(old: str, new: str) -> None:
    sizes = transformers.DeiTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    theirs = randomise(on_meta(transformers.DeiTForImageClassificationWithTeacher, sizes))
    stack = StackConfig(width=64, depth=2, heads=2, mlp_width=96, norm_eps=1e-12)
    config = ViTConfig(32, 8, 3, 3, distillation_token=True, stack=stack)
    net = our_vit(theirs, config, new)
    assert difference(net, theirs) <= 1e-5
    images = torch.randn(2, 3, 32, 32)
    both = theirs(images)
    close(net(images, each_head=True)[0], both.cls_logits)
    close(net(images, each_head=True)[1], both.distillation_logits)
    theirs.load_state_dict(FAMILIES[new].weights_to_external(net.state_dict(), config))
    assert difference(net, theirs) <= 1e-5
    theirs.save_pretrained("saved")
    transformers.DeiTImageProcessorPil().save_pretrained("saved")
    state = load_file("saved/model.safetensors")
    assert FAMILIES[old].weights_to_external(net.state_dict(), config).keys() == state.keys()
    read, _ = with_weights("saved", "--option")
    assert (read.config.distillation_token, read.config.num_classes) == (True, 3)
    close(read.eval()(images), both.logits)


def test_what_has_no_distillation_token_is_not_loaded_into_one() -> None:
    config = replace(config_from_timm_model(tiny_timm()), distillation_token=True)
    with pytest.raises(ValueError, match=r"prefix\.vectors"):
        TIMM.weights_from_external(tiny_timm().state_dict(), config)
    net = ViT(config)
    for name in ("torchvision", "huggingface"):
        with pytest.raises(ValueError, match="distillation"):
            FAMILIES[name].weights_to_external(net.state_dict(), config)
    with pytest.raises(ValueError, match="distillation_token"):
        replace(PLAIN, pool="mean", distillation_token=True)


def test_a_file_of_timm_starts_a_network_of_other_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = timm_model("deit_tiny_distilled_patch16_224", depth=12)
    torch.save(theirs.state_dict(), "deit_tiny_distilled_patch16_224.pth")
    net = ViT(replace(VIT_PRESETS["deit_tiny"], num_classes=2, image_size=32))
    metadata = {**external_targets("single_label_classification"), "class_names": ["a", "b"]}
    load_pretrained(net, "deit_tiny_distilled_patch16_224.pth", metadata)
    assert capsys.readouterr().out.count("initialised anew") == 1
    close(
        net.prefix.vectors,
        theirs.state_dict()["pos_embed"][0, :2]
        + torch.cat((theirs.cls_token[0], theirs.dist_token[0])),
    )
