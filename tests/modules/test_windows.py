"""Attention in windows: what each token sees, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.attention import MultiHeadAttention
from modules.config import StackConfig
from modules.models.swin import Swin, SwinConfig, second_version
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.record import WeightRecorder
from modules.windows import TableBias, WindowAttention, Windows
from tests.helpers.tiny_models import assert_all_learn, shaken

TINY = SwinConfig(
    *(8, 1, 1, 3, (1, 2), 3), stack=StackConfig(8, 3, 2, drop_path=0.2, norm_eps=1e-5)
)
SECOND = second_version(TINY)


@pytest.mark.parametrize("grid, size, shift", [(6, 3, 0), (6, 3, 1), (7, 3, 1), (2, 2, 0)])
def test_tokens_see_the_neighbours_in_their_window(grid: int, size: int, shift: int) -> None:
    torch.manual_seed(0)
    net = shaken(
        WindowAttention(MultiHeadAttention(8, 2), Windows(grid, size, shift), TableBias(2, size))
    )
    x = torch.randn(1, grid * grid, 8, requires_grad=True)
    seen = []
    for token in range(grid * grid):
        (grad,) = torch.autograd.grad(net(x)[0, token].sum(), x)
        seen.append(grad[0].abs().amax(-1) > 1e-6)
    row, column = torch.arange(grid * grid) // grid, torch.arange(grid * grid) % grid
    same = [(a - shift).div(size, rounding_mode="floor") for a in (row, column)]
    # Rows above the first whole window are those that the shift moves around.
    expected = torch.stack(same)
    assert torch.equal(torch.stack(seen), (expected[:, :, None] == expected[:, None]).all(0))


def test_recorded_weights_are_those_of_windows() -> None:
    net = shaken(WindowAttention(MultiHeadAttention(8, 2), Windows(6, 3, 1), TableBias(2, 3)))
    weights: list[Tensor] = []
    x = torch.randn(2, 36, 8)
    torch.testing.assert_close(net(x, cache=WeightRecorder(weights)), net(x))
    assert weights[0].shape == (2, 4 * 2, 9, 9)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 8, 9))


@pytest.mark.parametrize("config", [TINY, SECOND], ids=["first", "second"])
def test_every_weight_learns_and_positions_have_no_weight_decay(config: SwinConfig) -> None:
    net = shaken(Swin(config))
    assert_all_learn(net, net(torch.rand(2, 1, 8, 8)).square().sum())
    roles, depths = parameter_roles(net), parameter_depths(net)
    biases = [name for name in roles if ".attention.bias." in name or "log_scale" in name]
    assert biases and {roles[name] for name in biases} == {"scalar"}
    assert roles["stages.1.merge.reduction.weight"] == "matrix"
    assert depths["stages.1.merge.reduction.weight"] == 2  # with the first block after it
    assert depths["stages.1.stack.blocks.1.norm1.weight"] == 3
    assert depths["head.linear.weight"] == 4


def test_activations_recomputed_and_16_bits() -> None:
    torch.manual_seed(0)
    config = replace(TINY, stack=replace(TINY.stack, drop_path=0.0))
    net = shaken(Swin(config))
    again = Swin(replace(config, stack=replace(config.stack, checkpoint_activations=True)))
    again.load_state_dict(net.state_dict())
    images = torch.rand(2, 1, 8, 8)
    for one in (net, again):
        one(images).square().sum().backward()
    for ours, theirs in zip(net.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for kind in (config, second_version(config)):
        plain = shaken(Swin(kind))
        expected = plain(images)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(plain(images), expected, atol=0.1, rtol=0.1)
        found = plain.bfloat16()(images)
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    "options, named",
    [
        ({"image_size": 30, "patch_size": 4}, "28 or 32"),
        ({"depths": (2, 2)}, "stack.depth"),
        ({"depths": ()}, "depths"),
        ({"depths": (0, 3)}, "depths"),
        ({"window_size": 0}, "window_size"),
        ({"pretrained_windows": (3,)}, "pretrained_windows"),
        ({"relative_bias": "tables"}, "relative_bias .*table, mlp"),
        ({"stem": "cone"}, "stem .*conv"),
        ({"head_dropout": 1.0}, "head_dropout"),
        ({"stack": StackConfig(8, 3, 2, causal=True)}, "stack.causal"),
        ({"stack": StackConfig(8, 3, 2, conv_kernel=3)}, "stack.conv_kernel"),
        ({"stack": StackConfig(8, 3, 2, attention="additive")}, "additive"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(TINY, **options)
