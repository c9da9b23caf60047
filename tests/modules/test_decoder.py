"""Decoders: what must hold whatever the weights, and what is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.config import StackConfig
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.gpt import DECODER_PRESETS, Decoder, DecoderConfig
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.rotary_scaling import RotaryScaling
from tests.modules.test_cache import PLACES, VARIANTS, T, V, close, decoder, name_of


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_no_token_sees_a_later_one(options: dict[str, Any]) -> None:
    net, tokens = decoder(**options), torch.randint(V, (2, T))
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % V
    one, two = net(tokens), net(changed)
    assert torch.equal(one[:, :9], two[:, :9])
    assert ((one[:, 9:] - two[:, 9:]).abs().amax(-1) > 1e-6).all()  # all later ones see it


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_packed_documents_cost_what_each_costs_alone(options: dict[str, Any]) -> None:
    net, lengths = decoder(**options), (7, 1, 8)
    tokens, targets = torch.randint(V, (2, T)), torch.randint(V, (2, T))
    ids = torch.arange(3).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    hidden = net(tokens, positions=positions, documents=ids)
    packed, right = net.loss(hidden, targets)
    alone = [
        (net(part), target)
        for part, target in zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)
    ]
    close(hidden, torch.cat([vectors for vectors, _ in alone], 1))
    costs = [net.loss(*pair) for pair in alone]
    total = sum(cost * length for (cost, _), length in zip(costs, lengths, strict=True))
    close(packed * T, total)
    assert right == sum(right for _, right in costs)
    params = [*net.parameters()]
    close_all(torch.autograd.grad(packed * T, params), torch.autograd.grad(total, params))


def peak(length: int, position: str, path: Path) -> int:
    """Bytes of a training step's tensors, where they are most."""
    stack = StackConfig(64, 2, 2, causal=True)
    net, (tokens, targets) = (
        Decoder(DecoderConfig(V, length, position, stack=stack)),
        torch.randint(V, (2, 1, length)),
    )
    with torch.profiler.profile(profile_memory=True) as profile:
        net.loss(net(tokens), targets)[0].backward()
    profile.export_chrome_trace(str(path))
    events = [
        event["args"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event["name"] == "[memory]"
    ]
    total, most = 0, 0
    for event in events:
        total += event["Bytes"]
        most = max(most, total)
    return most


@pytest.mark.parametrize("position", ["rotary", "learned", "none"])
def test_memory_of_training_is_in_proportion_to_the_length(position: str, tmp_path: Path) -> None:
    peaks = [peak(length, position, tmp_path / "trace.json") for length in (512, 1024, 2048, 4096)]
    fixed = 2 * peaks[0] - peaks[1]  # gradients
    for longer, before in zip(peaks[1:], peaks, strict=False):
        assert (longer - fixed) / (before - fixed) == pytest.approx(2, abs=0.05)


def close_all(ones: Any, twos: Any) -> None:
    for one, two in zip(ones, twos, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.01)])
def test_loss_and_gradients_are_those_of_all_logits(
    tied: bool, smoothing: float, z_loss: float
) -> None:
    net, tokens, targets = decoder(tied=tied), torch.randint(V, (3, T)), torch.randint(V, (3, T))
    targets[0, :5] = targets[2, 3] = IGNORE_INDEX
    hidden = net(tokens)
    logits = net.logits(hidden).flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing)
    plain = plain + z_loss * logits.logsumexp(1)[targets.flatten() != IGNORE_INDEX].square().mean()
    ours, right = net.loss(hidden, targets, smoothing, z_loss)
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    assert right == (logits.argmax(1) == targets.flatten()).sum()
    params = [*net.parameters()]
    close_all(
        torch.autograd.grad(ours, params, retain_graph=True), torch.autograd.grad(plain, params)
    )


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_every_parameter_gets_a_gradient_a_role_and_a_depth(options: dict[str, Any]) -> None:
    net = decoder(**options).train()
    net.loss(net(torch.randint(V, (2, T))), torch.randint(V, (2, T)))[0].backward()
    names = [name for name, _ in net.named_parameters()]
    assert not [
        name for name, p in net.named_parameters() if p.grad is None or p.grad.abs().sum() == 0
    ]
    roles, depths = parameter_roles(net), parameter_depths(net)
    assert list(roles) == list(depths) == names
    tables = {name for name, role in roles.items() if role == "table"}
    assert tables == {name for name in names if name.endswith("embed.weight")}


def test_the_head_is_the_table_or_its_own() -> None:
    tied, own = decoder(), decoder(tied=False)
    x = torch.randn(2, 24)
    close(tied.logits(x), x @ tied.embed.weight.T)
    close(own.logits(x), x @ own.unembed.weight.T)
    assert "unembed.weight" in own.state_dict() and "unembed.weight" not in tied.state_dict()
    assert not torch.equal(own.embed.weight, own.unembed.weight)


def test_published_sizes() -> None:
    with torch.device("meta"):
        net = Decoder(replace(DECODER_PRESETS["gpt2"], vocabulary=50257))
    assert sum(p.numel() for p in net.parameters()) == 124_439_808
    for preset in DECODER_PRESETS.values():
        assert preset.stack.causal and preset.max_length and preset.vocabulary is None


@pytest.mark.parametrize("name", DECODER_PRESETS)
def test_config_round_trip(name: str) -> None:
    preset = replace(
        DECODER_PRESETS[name],
        position="rotary",
        position_options={"scaling": {"kind": "llama3", "factor": 8.0}},
    )
    data = json.loads(json.dumps(asdict(preset)))
    assert DecoderConfig(**data | {"stack": StackConfig(**data["stack"])}) == preset


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_scaled_rotary_positions_turn_slower(kind: Any) -> None:
    plain = decoder(position="rotary", head_dim=32)
    scaled = decoder(
        position="rotary",
        head_dim=32,
        position_options={"scaling": RotaryScaling(kind, 4.0, 1.0, 4.0, 64)},
    )
    places = torch.tensor([[1, 7, 30]])[..., None]
    one, two = (net.position.rotate(places) for net in (plain, scaled))
    wavelength = 2 * torch.pi * 10000 ** (torch.arange(16) / 16)
    kept = ((64 / wavelength - 1) / 3).clamp(0, 1) if kind == "llama3" else torch.zeros(16)
    angle = places.float() / wavelength * 2 * torch.pi * (kept + (1 - kept) / 4)
    torch.testing.assert_close(two.cos[0, 0, :, :16], angle.cos()[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(two.sin[0, 0, :, 16:], angle.sin()[0], atol=1e-5, rtol=0)
    if kind == "llama3":
        fast = wavelength < 16
        assert fast.any() and torch.equal(
            one.cos[..., :16][..., fast], two.cos[..., :16][..., fast]
        )


@pytest.mark.parametrize(
    "options, words",
    [
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"position": "sincos2d"}, "for images"),
        ({"stack": StackConfig()}, "set stack.causal"),
        ({"stack": StackConfig(causal=True, cross_attention=True)}, "cross_attention off"),
        (
            {"position": "rotary", "stack": StackConfig(causal=True, attention="additive")},
            "dot products",
        ),
        ({"position": "rotary", "position_options": {"fraction": 1.5}}, "fraction is 1.5"),
        ({"position_options": {"scaling": {}}}, 'position "learned" has no option "scaling"'),
    ],
)
def test_decoders_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecoderConfig(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"factor": 0.5}, "factor of rotary scaling is 0.5"),
        ({"low_freq_factor": 4.0}, "below high_freq_factor 4.0"),
        ({"original_max_length": 0}, "original_max_length of rotary scaling is 0"),
    ],
)
def test_scalings_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RotaryScaling(**options)


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(ValueError, match="fill both in"):
        Decoder(DecoderConfig(vocabulary=5))
    with pytest.raises(ValueError, match="17 tokens are more than the 16 learned positions"):
        decoder()(torch.zeros(1, 17, dtype=torch.int64))


@pytest.mark.parametrize("position", PLACES)
def test_recomputed_activations_change_nothing(position: str) -> None:
    net, tokens = decoder(position=position, checkpoint_activations=True), torch.randint(V, (2, T))
    with torch.no_grad():
        plain: Tensor = net(tokens)
    torch.testing.assert_close(net(tokens), plain)
    net.loss(net(tokens), tokens)[0].backward()
    assert all(p.grad is not None for p in net.parameters())
