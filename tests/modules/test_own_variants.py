"""Entries of one's own in the dictionaries of blocks, and options that would have no effect."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from modules.attention import ATTENTIONS, MultiHeadAttention
from modules.init import INITS
from modules.models.bert import BertConfig
from modules.models.swin import SwinConfig
from modules.models.vit import ViT, ViTConfig
from modules.pooling import POOLINGS
from modules.transformer import Stack
from tests.helpers.command import Patch
from tests.helpers.tiny_models import STACK, random_tokens, tiny


class BoundedAttention(MultiHeadAttention):
    """softmax(tanh(q k)) v; the gradient of tanh needs its result."""

    takes_rotary = False

    def score_fn(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, N, D), (B, H, M, D) -> (B, H, N, M)."""
        return torch.tanh(q @ k.mT)


@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_scores_of_your_own_learn(kind: str, monkeypatch: Patch) -> None:
    """The gradient is the derivative, also with masks."""
    monkeypatch.setitem(ATTENTIONS, "bounded", BoundedAttention)
    net = tiny(kind, attention="bounded", position="none")
    tokens = random_tokens()
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, :3] = False  # on the left, as a decoder has it

    def loss() -> Tensor:
        out = net(tokens, mask)
        return (out if kind == "bert" else out[mask]).square().mean()

    loss().backward()
    net.double()
    weight = next(p for name, p in net.named_parameters() if name.endswith("qkv.weight"))
    step = 1e-5 * weight.grad / weight.grad.norm()
    with torch.no_grad():
        weight += step
        higher = loss()
        weight -= 2 * step
        slope = (higher - loss()) / 2e-5
    torch.testing.assert_close(slope, weight.grad.norm(), rtol=1e-3, atol=0)


def test_initial_values_of_your_own(monkeypatch: Patch) -> None:
    def constant(weight: Tensor, residual_scale: float) -> None:
        weight.fill_(residual_scale)

    monkeypatch.setitem(INITS, "constant", constant)
    stack = Stack(replace(STACK, init="constant"))  # 2 blocks
    for name, parameter in stack.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            assert (parameter == 0.5).all()
        elif name.endswith("weight") and "norm" not in name:
            assert (parameter == 1).all()


def test_pooling_is_no_residual_layer() -> None:
    """With zeros there, the network would not learn at first."""
    stack = replace(STACK, init="zero_residual")
    net = ViT(ViTConfig(8, 2, 1, 3, pool="attention", stack=stack))
    assert net.pool.attention.output.weight.std() > 0
    assert not any(block.attention.output.weight.any() for block in net.stack.blocks)


def test_a_pooling_that_does_not_say_what_it_reads(monkeypatch: Patch) -> None:
    for entry in (nn.Module, lambda width, heads, length: nn.Identity()):
        monkeypatch.setitem(POOLINGS, "mine", entry)
        for config in (BertConfig, ViTConfig):
            with pytest.raises(ValueError, match='pool "mine" must be a subclass'):
                config(pool="mine", stack=STACK)


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="pooler_dropout"):
        BertConfig(pooler_dropout=0.5)
    BertConfig(pooler_dropout=0.5, pooler="tanh")
    windows = (7, 7, 7, 7)
    with pytest.raises(ValueError, match="pretrained_windows"):
        SwinConfig(pretrained_windows=windows)
    SwinConfig(pretrained_windows=windows, relative_bias="mlp")
