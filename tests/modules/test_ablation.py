"""What is left of a network without a layer, for every order of blocks and every network."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from modules.activations import (
    ablation,
    activation_names,
    attention_parts,
    changed,
    patch,
    patching,
    recorded,
)
from modules.config import StackConfig
from modules.models.mae import MAEConfig, MaskedAutoencoder
from modules.models.swin import Swin, SwinConfig
from modules.models.vit import ViT, ViTConfig
from modules.transformer import ORDERS
from tests.helpers.tiny_models import MODELS, close, shaken, tiny
from tests.modules.test_activations import outputs


def image_net(order: str, **options: Any) -> ViT:
    stack = StackConfig(24, 2, 4, mlp_width=20, order=order, **options)
    return shaken(ViT(ViTConfig(8, 2, 1, 3, stack=stack))).eval()


def swin(order: str) -> Swin:
    stack = StackConfig(16, 4, 2, order=order)
    config = SwinConfig(8, 2, 1, 3, depths=(2, 2), window_size=2, stack=stack)
    return shaken(Swin(config)).eval()


def autoencoder(order: str) -> MaskedAutoencoder:
    stack = StackConfig(24, 2, 4, order=order)
    config = MAEConfig(8, 2, 1, stack=stack, decoder=replace(stack, width=16))
    return shaken(MaskedAutoencoder(config)).eval()


def check_ablated_layers(net: Any, compute: Callable[[], Any]) -> None:
    """Of each stack, one layer alone and both together."""
    for part, (prefix, name) in attention_parts(net).items():
        if name == "cross_attention":
            continue
        one = ablation(net, 1, None, part)
        for changes in (one, {**ablation(net, 0, None, part), **one}):
            with changed(net, changes), recorded(net, f"{prefix}*") as found:
                compute()
            start = f"{prefix}blocks.0" if changes is one else f"{prefix}embedding"
            assert torch.equal(found[f"{prefix}blocks.1"], found[start])
        with recorded(net, f"{prefix}blocks.*") as found:
            compute()
        assert not torch.allclose(found[f"{prefix}blocks.1"], found[f"{prefix}blocks.0"])


@pytest.mark.parametrize("order", ORDERS)
def test_an_ablated_layer_leaves_the_residual_stream_as_it_is(order: str) -> None:
    images = torch.randn(2, 1, 8, 8)
    net = image_net(order)
    check_ablated_layers(net, lambda: net(images))
    if order == "mixer":
        return
    for kind in MODELS:
        text_net = tiny(kind, order=order)
        check_ablated_layers(text_net, partial(outputs, text_net))
    windows = swin(order)
    check_ablated_layers(windows, lambda: windows(images))
    encoder = autoencoder(order)
    patches = encoder.split(torch.rand(2, encoder.config.num_patches))
    check_ablated_layers(encoder, lambda: encoder(images, *patches))


@pytest.mark.parametrize("order", ["pre", "parallel", "res_post", "mixer"])
def test_sub_layers_are_all_that_a_block_adds(order: str) -> None:
    """Where no norm is on the residual stream itself."""
    net = image_net(order)
    first = "token_mixing" if order == "mixer" else "attention"
    parts = [f"blocks.0.{first}", "blocks.0.feedforward"]
    assert [name for name in activation_names(net) if name in parts] == parts
    with recorded(net, "*") as other:
        outputs(net, 1)
    with recorded(net, "*") as found:
        outputs(net)
    assert found[parts[0]].shape == found["embedding"].shape
    close(found["blocks.0"], found["embedding"] + found[parts[0]] + found[parts[1]])
    added = other["blocks.0"] - other["embedding"]
    with changed(net, patching(net, other, 0)), recorded(net, "*") as patched:
        outputs(net)
    close(patched["blocks.0"], found["embedding"] + added)
    with changed(net, dict.fromkeys(parts, patch(0.0))), recorded(net, "*") as found:
        outputs(net)
    assert torch.equal(found["blocks.0"], found["embedding"])


def test_ablated_cross_attention_adds_no_bias_of_its_norm() -> None:
    net = tiny("encoder_decoder", order="res_post")
    with changed(net, ablation(net, 1, None, "cross")):
        without = outputs(net)
    assert not torch.allclose(without, outputs(net))
    norm = net.decoder.stack.blocks[1].cross_norm
    nn.init.zeros_(norm.weight)
    nn.init.zeros_(norm.bias)
    close(without, outputs(net))
