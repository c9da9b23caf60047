"""Options: those that exclude each other, and those that must work though they are rare."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

from modules.config import StackConfig
from modules.generation.sampling import GenerationConfig
from modules.models.vit import ViT, ViTConfig
from modules.position import POSITIONS, Position
from modules.rotary_scaling import RotaryScaling
from modules.transformer import Stack
from tasks.errors import UsageError
from tasks.training.optim import OptimConfig, build
from tests.helpers.tiny_models import STACK, VOCAB, tiny

ZERO_STARTS: dict[str, list[Any]] = {
    "order": ["pre", "post", "parallel", "res_post"],
    "init": ["trunc_normal", "zero_residual"],
    "layer_scale": [None, 0.0, 1.0],
}


@pytest.mark.parametrize("kind", [GenerationConfig, RotaryScaling, OptimConfig])
def test_unknown_names_are_refused(kind: Any) -> None:
    names = [name for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal]
    assert names
    for name in names:
        choices = get_args(get_type_hints(kind)[name])
        with pytest.raises(ValueError, match=choices[0]):
            kind(**{name: "nosuch"})
    with pytest.raises(ValueError, match="first"):
        GenerationConfig(beams=2, early_stopping=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", [*product(*ZERO_STARTS.values())], ids=str)
def test_every_matrix_learns_or_the_options_are_refused(chosen: tuple[Any, ...]) -> None:
    options = dict(zip(ZERO_STARTS, chosen, strict=True))
    zeros = [chosen[0] == "res_post", chosen[1] == "zero_residual", chosen[2] == 0.0]
    if sum(zeros) > 1:
        with pytest.raises(ValueError, match="without gradients"):
            StackConfig(16, 2, 2, **options)
        return
    net = Stack(StackConfig(16, 2, 2, **options))
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    x, y = torch.randn(2, 8, 5, 16)
    for _ in range(5):
        optimizer.zero_grad()
        (net(x) - y).square().mean().backward()
        optimizer.step()
    for name, weight in net.named_parameters():
        assert not torch.equal(weight, before[name]), name


def test_a_rate_of_muon_needs_muon() -> None:
    with pytest.raises(UsageError, match="muon_lr is 0.1"):
        build(tiny("gpt"), OptimConfig(muon_lr=0.1), 5)


def test_blocks_without_residual_sums_need_a_scale() -> None:
    with pytest.raises(ValueError, match="layer_scale 0"):
        replace(STACK, order="no_residual", layer_scale=0.0)


def test_a_mixer_of_any_width_needs_no_heads() -> None:
    stack = StackConfig(128, 1, order="mixer")
    config = ViTConfig(8, 2, 1, 3, pool="mean", position="none", stack=stack)
    assert ViT(config)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


@pytest.mark.parametrize("stem", ["conv", "convpool", "resnet"])
@pytest.mark.parametrize("width", [4, 6, 7])
def test_stems_of_narrow_networks(stem: Any, width: int) -> None:
    net = ViT(ViTConfig(32, 4, 1, 3, stem=stem, stack=StackConfig(width, 1, 1)))
    assert net(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


@torch.no_grad()
def test_tokens_beyond_the_sliding_window_are_refused() -> None:
    net = tiny("gpt", position="rotary", max_length=4, sliding_window=4)
    tokens = torch.randint(VOCAB, (1, 5))
    assert net(tokens[:, :4], cache=net.make_cache(1, 4)).shape[1] == 4
    for call in (lambda: net(tokens), lambda: net.make_cache(1, 5)):
        with pytest.raises(ValueError, match="sliding_window 4"):
            call()


def test_segments_without_vectors_are_refused() -> None:
    tokens = torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="segments 0 to 1"):
        tiny("bert")(tokens, None, 2 * tokens)


class OwnPosition(Position):
    """Of a module whose annotations are strings, as this one's are."""

    dims = (2,)

    def __init__(self, stack: StackConfig, grid: tuple[int, ...], std: float = 0.02) -> None:
        super().__init__(stack, grid)
        self.std = std


def test_positions_of_ones_own_have_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POSITIONS, "own", OwnPosition)
    config = ViTConfig(8, 2, 1, 3, position="own", position_options={"std": 0.1}, stack=STACK)
    assert ViT(config).position.std == 0.1
    with pytest.raises(ValueError, match="position_options.std"):
        replace(config, position_options={"std": "wide"})


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"distillation_token": True}, {"register_tokens": 2}])
def test_exported_networks_take_any_number_of_images(options: dict[str, Any]) -> None:
    net = tiny("vit", **options).eval()
    sizes = ({0: torch.export.Dim("images", min=2, max=64)},)
    images = torch.randn(5, 1, 8, 8)
    exported = torch.export.export(net, (images[:2],), dynamic_shapes=sizes).module()
    torch.testing.assert_close(exported(images), net(images))


@pytest.mark.parametrize("options", [{}, {"conv_kernel": 3}], ids=str)
def test_no_gradient_flows_through_a_cache(options: dict[str, Any]) -> None:
    net = tiny("gpt", **options)
    tokens = torch.randint(VOCAB, (2, 6))
    cache = net.make_cache(2, 6)
    pieces = [net(tokens[:, place : place + 1], cache=cache) for place in range(6)]
    torch.testing.assert_close(torch.cat(pieces, 1), net(tokens))
    assert not cache.keys.requires_grad and not cache.conv_inputs.requires_grad
