"""What parity in evaluation cannot show: dropout and stochastic depth, and initial values."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from modules.config import StackConfig
from modules.models.bert import BertClassifier
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.swin import Swin, SwinConfig
from modules.models.vit import ViT, ViTConfig
from modules.patch_embedding import PrefixTokens
from modules.transformer import Context, DropPath, Stack
from modules.windows import TableBias
from tests.helpers.tiny_models import BERT, DECODERS, random_tokens, shaken, tiny

RATES = {"dropout": 0.5, "mlp_dropout": 0.25, "attention_dropout": 0.125, "drop_path": 0.3}


def swin(*depths: int, head_dropout: float = 0.0, **stack: float) -> Swin:
    config = StackConfig(8, sum(depths), 2, **stack)  # type: ignore[arg-type]
    return Swin(SwinConfig(8, 1, 1, 3, depths, 3, head_dropout=head_dropout, stack=config))


# Dropout and stochastic depth --------------------------------------------------------------------


def test_rates_of_a_swin_rise_over_all_stages() -> None:
    net = swin(2, 2, head_dropout=0.4, **RATES)
    rates = [part.rate for part in net.modules() if isinstance(part, DropPath)]
    assert rates == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    dropouts = [part.p for part in net.modules() if isinstance(part, nn.Dropout)]
    assert dropouts == [0.5] + [0.5, 0.25, 0.5] * 4 + [0.4]


def test_windows_drop_attention_weights() -> None:
    attention = shaken(swin(2, 2, attention_dropout=0.125).stages[0].stack.blocks[0].attention)
    x = torch.randn(1, 64, 8)
    assert not torch.equal(attention(x), attention(x))
    assert torch.equal(attention.eval()(x), attention(x))


def test_a_swin_drops_values_of_its_embedding() -> None:
    net = swin(2, 2, dropout=0.5)
    net.stages.eval()
    images = torch.rand(1, 1, 8, 8)
    assert not torch.equal(net.features(images), net.features(images))


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_drop_values_of_their_embedding(kind: str) -> None:
    net = tiny(kind, dropout=0.5)
    inputs = [random_tokens()] * (1 if kind == "gpt" else 2)
    (net if kind == "gpt" else net.decoder).dropout.train()  # no other
    assert not torch.equal(net(*inputs), net(*inputs))


def test_both_heads_of_a_distilled_vit_drop_values() -> None:
    stack = StackConfig(16, 1, 2)
    net = ViT(ViTConfig(8, 2, 1, 3, distillation_token=True, head_dropout=0.2, stack=stack))
    assert [head.dropout.p for head in (net.head, net.distillation_head)] == [0.2, 0.2]


def test_cross_attention_is_skipped_at_the_rate_of_its_block() -> None:
    net = Stack(StackConfig(16, 3, 2, drop_path=0.5, cross_attention=True))
    rates = [[part.rate for part in block.cross_residual.children()] for block in net.blocks]
    assert rates == [[], [0.25], [0.5]]


def test_rare_skips_happen_in_16_bits() -> None:
    kept = DropPath(0.001).train()(torch.ones(200_000, 1, 1, dtype=torch.bfloat16))
    assert (kept == 0).float().mean().item() == pytest.approx(0.001, rel=0.5)


# Initial values ----------------------------------------------------------------------------------


def test_residual_layers_of_a_swin_are_scaled_by_the_depth_of_all_stages() -> None:
    stack = StackConfig(64, 8, 2, init="gpt2")
    net = Swin(SwinConfig(8, 1, 1, 3, (6, 2), 4, stack=stack))
    for stage in net.stages:
        std = stage.stack.blocks[0].feedforward.down.weight.std().item()
        assert std == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.05)


def test_tables_and_prefix_tokens_start_small() -> None:
    assert TableBias(8, 7).table.std().item() == pytest.approx(0.0176, rel=0.1)  # 0.02, truncated
    assert PrefixTokens(40, 100).vectors.std().item() == pytest.approx(0.02, rel=0.1)


def test_scaled_embeddings_start_by_their_own_width() -> None:
    stack = StackConfig(256, 1, 4, causal=True)
    net = Decoder(DecoderConfig(2000, 8, "sinusoidal", embedding_width=64, stack=stack))
    assert net.embed.weight.std().item() == pytest.approx(1 / 8, rel=0.02)


def test_attention_pooling_starts_as_the_blocks() -> None:
    config = ViTConfig(8, 2, 1, 3, pool="attention", stack=StackConfig(16, 1, 2))
    for net in (ViT(config), BertClassifier(replace(BERT, pool="attention"))):
        query = net.pool.attention.query
        assert query.weight.abs().max() <= 0.04  # two standard deviations
        assert not query.bias.any()


@pytest.mark.parametrize("cross", [False, True])
def test_norms_at_the_end_of_branches_make_a_block_the_identity(cross: bool) -> None:
    stack = StackConfig(16, 2, 2, order="res_post", final_norm=False, cross_attention=cross)
    x = torch.randn(2, 5, 16)
    assert torch.equal(Stack(stack)(x, context=Context(torch.randn(2, 3, 16))), x)
