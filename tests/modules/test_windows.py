"""Attention in windows: what each token sees, and what is refused."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.activations import changed, patch, recorded
from modules.attention import MultiHeadAttention, with_length
from modules.config import StackConfig
from modules.models.swin import Swin, SwinConfig, second_version
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.record import WeightRecorder
from modules.windows import TableBias, WindowAttention, Windows
from tests.helpers.tiny_models import assert_all_learn, close, shaken

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


def plain_attention(net: WindowAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of all tokens (B, H, N, N) by one masked softmax, and what heads add (B, N, H, D)."""
    grid, size, shift = net.windows
    place = torch.arange(grid * grid)
    row, column = place // grid, place % grid
    offsets = [a[:, None] - a + size - 1 for a in (row, column)]
    near = torch.ones(grid * grid, grid * grid, dtype=torch.bool)
    for axis in (row, column):
        part = (axis - shift).div(size, rounding_mode="floor")  # -1: what the shift moves around
        near &= part[:, None] == part
    table = net.bias.offsets()  # (2S-1, 2S-1, H)
    found = table[[offset.clamp(0, 2 * size - 2) for offset in offsets]].permute(2, 0, 1)
    qkv = net.attention.qkv(x).unflatten(-1, (3, net.attention.heads, -1))  # (B, N, 3, H, D)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, N, D)
    scores = q @ k.mT / q.shape[-1] ** 0.5 + found
    weights = scores.masked_fill(~near, -torch.inf).softmax(-1)
    return weights, (weights @ v).transpose(1, 2)


@pytest.mark.parametrize("grid, size, shift", [(6, 3, 0), (6, 3, 1), (8, 4, 2), (2, 2, 0)])
def test_activations_are_those_of_the_whole_grid(grid: int, size: int, shift: int) -> None:
    stack = StackConfig(8, 2, 2)
    net = shaken(Swin(SwinConfig(grid, 1, 1, 3, (2,), size, stack=stack))).eval()
    block: Any = net.stages[0].stack.blocks[1]  # type: ignore[union-attr]
    attention = block.attention
    windows = Windows(grid, size, shift)
    block.attention = WindowAttention(attention.attention, windows, attention.bias)
    images = torch.randn(2, 1, grid, grid)
    with recorded(net, "blocks.*") as found:
        expected = net(images)
    x = block.norm1(found["blocks.0"])
    weights, heads = plain_attention(block.attention, x)
    torch.testing.assert_close(found["blocks.1.attention.weights"], weights)
    torch.testing.assert_close(found["blocks.1.attention.heads"], heads)
    for name in ("weights", "heads"):
        same = {f"blocks.1.attention.{name}": lambda x: x.clone()}
        with changed(net, same):
            torch.testing.assert_close(net(images), expected)
    with changed(net, {"blocks.1.attention.weights": torch.zeros_like}):
        without = net(images)
    with changed(net, {"blocks.1.attention.heads": patch(0.0)}):
        torch.testing.assert_close(net(images), without)
    assert not torch.allclose(without, expected)


def test_weights_of_windows_that_are_filled_up() -> None:
    """A token outside the grid is no key; what it is given is missing."""
    net = shaken(Swin(SwinConfig(4, 1, 1, 3, (1,), 3, stack=StackConfig(8, 1, 2)))).eval()
    images = torch.randn(1, 1, 4, 4)
    name = "blocks.0.attention.weights"
    with recorded(net, name) as found:
        expected = net(images)
    total = found[name].sum(-1).unflatten(-1, (4, 4))  # (B, H, 4, 4)
    torch.testing.assert_close(total[..., :3, :3], torch.ones(1, 2, 3, 3))
    assert (total[..., 3, :] < 0.99).all() and (total[..., :, 3] < 0.99).all()
    with changed(net, {name: lambda x: x.clone()}):
        torch.testing.assert_close(net(images), expected)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_vectors_of_any_size_get_their_length(dtype: torch.dtype) -> None:
    """As cosine attention needs it; under autocast, too."""
    sizes = torch.tensor([0.0, 1e-3, 1.0, 6e4])
    x = (torch.randn(4, 8).sign() * sizes[:, None] / 8**0.5).to(dtype).requires_grad_()
    for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            y = with_length(x, 3)
        assert y.dtype == dtype
        close(y.float().norm(dim=1), torch.tensor([0.0, 3, 3, 3]), rtol=1e-2)
        (grad,) = torch.autograd.grad(y.float().square().sum() + y.float().sum(), x)
        assert grad.isfinite().all()


def test_key_value_heads_and_hidden_widths_double_at_each_stage() -> None:
    stack = StackConfig(8, 3, 2, kv_heads=1, mlp_width=20)
    stage = SwinConfig(8, 1, 1, 3, (1, 2), 3, stack=stack).stage(1)
    assert (stage.kv_heads, stage.mlp_width) == (2, 40)
