"""Masked autoencoders of transformers: equal loss and gradients for equal masks, there and back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modules.config import StackConfig
from modules.models.mae import MAE_PRESETS, MAEConfig, MaskedAutoencoder
from modules.pretrained.mae import MAE
from tests.parity.vit import on_meta, randomise

SIZES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "decoder_hidden_size": 24,
    "decoder_num_hidden_layers": 3,
    "decoder_num_attention_heads": 4,
    "decoder_intermediate_size": 40,
}
CLASS_POSITION = "decoder.decoder_pos_embed"


def their_model(architecture: str = "ViTMAEForPreTraining", **options: Any) -> Any:
    """A random model; the class token has no position in the decoder, as in all published ones."""
    config = transformers.ViTMAEConfig(**SIZES | options)
    model = randomise(on_meta(getattr(transformers, architecture), config))
    if architecture == "ViTMAEForPreTraining":
        model.decoder.decoder_pos_embed.data[:, 0] = 0
    return model


def ours(model: Any) -> MaskedAutoencoder:
    """The same model here."""
    config = MAE.config_from_external(model.config.to_dict())
    net = MaskedAutoencoder(config).eval()
    # Names in memory are newer than those in files.
    model.save_pretrained("theirs")
    net.load_state_dict(MAE.weights_from_external(load_file("theirs/model.safetensors"), config))
    return net


def loaded(net: MaskedAutoencoder) -> Any:
    """Our network as transformers reads it from a folder."""
    Path("out").mkdir()
    state = MAE.weights_to_external(net.state_dict(), net.config)
    save_file(state, "out/model.safetensors", {"format": "pt"})
    Path("out/config.json").write_text(json.dumps(MAE.config_to_external(net.config)))
    model, info = transformers.ViTMAEForPreTraining.from_pretrained("out", output_loading_info=True)
    assert not any(info.values())
    return model.eval()


@pytest.mark.parametrize("options", [{}, {"norm_pix_loss": True}, {"mask_ratio": 0.4}])
def test_loss_and_gradients(options: dict[str, Any]) -> None:
    model = their_model(**options)
    net = ours(model)
    images = torch.randn(3, 3, 16, 16)
    noise = torch.rand(3, 16)
    expected = model(images, noise=noise)
    kept, masked = net.split(noise)
    assert torch.equal(torch.zeros(3, 16).scatter(1, masked, 1.0), expected.mask)
    predicted = net(images, kept, masked)
    loss = net.loss(predicted, images, masked)
    torch.testing.assert_close(loss, expected.loss)
    pixels = model.unpatchify(expected.logits)
    if not model.config.norm_pix_loss:
        found = net.reconstruct(images, predicted, masked) - net.hide(images, masked)
        hidden = net.hide(torch.ones_like(images), masked) == 0
        torch.testing.assert_close(found * hidden, pixels * hidden, atol=1e-5, rtol=0)
    expected.loss.backward()
    loss.backward()
    with torch.no_grad():  # their gradients under our names: the conversion is linear
        for model_or_net in (model, net):
            for parameter in model_or_net.parameters():
                if parameter.grad is None:  # their positions are not trained
                    parameter.grad = torch.zeros_like(parameter)
                parameter.copy_(parameter.grad)
    compared = 0
    theirs = ours(model).state_dict()
    for name, gradient in net.state_dict().items():
        if "position" not in name:
            compared += 1
            torch.testing.assert_close(gradient, theirs[name], atol=1e-6, rtol=1e-4, msg=name)
    assert compared > 60


def test_there_and_back() -> None:
    model = their_model()
    net = ours(model)
    again = loaded(net)
    weights = again.state_dict()
    for name, value in model.state_dict().items():
        if "embeddings.cls_token" not in name and "embeddings.position" not in name:
            assert torch.equal(weights[name], value), name
    first, first_again = (  # the position of the class token is a part of it here
        one.vit.embeddings.cls_token + one.vit.embeddings.position_embeddings[:, :1]
        for one in (model, again)
    )
    assert torch.equal(first, first_again)
    assert MAE.config_from_external(again.config.to_dict()) == net.config


@pytest.mark.parametrize("position", ["sincos2d", "none"])
def test_fixed_positions_become_tables(position: str) -> None:
    stacks = {"stack": StackConfig(32, 2, 2), "decoder": StackConfig(24, 1, 2)}
    config = MAEConfig(16, 4, 3, position=position, **stacks)
    net = randomise(MaskedAutoencoder(config))
    images = torch.randn(3, 3, 16, 16)
    noise = torch.rand(3, 16)
    kept, masked = net.split(noise)
    with torch.no_grad():
        expected = net.loss(net(images, kept, masked), images, masked)
        torch.testing.assert_close(loaded(net)(images, noise=noise).loss, expected)


def test_positions_are_resized_to_larger_images() -> None:
    model = their_model()
    net = ours(model)
    larger = replace(net.config, image_size=24)
    state = MAE.weights_from_external(load_file("theirs/model.safetensors"), larger)
    MaskedAutoencoder(larger).load_state_dict(state)
    assert state["decoder.position.table"].shape == (6, 6, 24)


def test_presets_have_the_published_sizes() -> None:
    sizes = transformers.ViTMAEConfig()  # vit-mae-base
    theirs = on_meta(transformers.ViTMAEForPreTraining, sizes)
    net = on_meta(MaskedAutoencoder, MAE_PRESETS["base"])
    tables = 197 * (768 + 512)  # of positions, which are computed here
    count = sum(p.numel() for p in theirs.parameters()) - tables
    assert sum(p.numel() for p in net.parameters()) == count


@pytest.mark.parametrize(
    "options, named",
    [
        ({"position": "rotary2d"}, "position"),
        ({"class_token": False, "pool": "mean"}, "class_token"),
        ({"stem": "conv"}, "stem"),
        ({"decoder": StackConfig(24, 1, 2, norm_eps=1e-5)}, "norm_eps"),
        ({"stack": StackConfig(32, 2, 2, qk_norm=True)}, "qk_norm"),
        ({"stack": StackConfig(32, 2, 2, order="post")}, "order"),
    ],
)
def test_what_they_lack_is_refused(options: dict[str, Any], named: str) -> None:
    config = MAEConfig(16, 4, 3, stack=StackConfig(32, 2, 2), decoder=StackConfig(24, 1, 2))
    config = replace(config, **options)
    state = MaskedAutoencoder(config).state_dict()
    with pytest.raises(ValueError, match=named):
        MAE.config_to_external(config)
    with pytest.raises(ValueError, match=named):
        MAE.weights_to_external(state, config)


def test_what_we_lack_is_refused() -> None:
    model = their_model()
    config = MAE.config_from_external(model.config.to_dict())
    model.save_pretrained("theirs")
    state = load_file("theirs/model.safetensors")
    table = state[CLASS_POSITION].clone()
    table[:, 0] = 1
    for value, named in ((table, "class token"), (table[:, :3], "rows x columns")):
        with pytest.raises(ValueError, match=named):
            MAE.weights_from_external({**state, CLASS_POSITION: value}, config)
    with pytest.raises(ValueError, match="decoder_hidden_size"):
        MAE.config_from_external({**model.config.to_dict(), "decoder_hidden_size": None})
