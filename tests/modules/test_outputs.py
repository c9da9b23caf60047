"""Networks of which only the first vectors are read: the last block computes no others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.activations import recorded
from modules.attention import ATTENTIONS, MultiHeadAttention
from modules.config import StackConfig
from modules.masks import NO_MASK, Mask, causal, padding
from modules.models.bert import BertClassifier, BertConfig
from modules.models.vit import ViT, ViTConfig
from modules.norm import NORMS
from modules.position import POSITIONS, Rotary
from modules.record import AttentionRecord
from modules.transformer import NO_CONTEXT, ORDERS, Context, Stack
from tests.helpers.tiny_models import VOCAB, close, label, random_tokens, shaken

B, N, E, H = 2, 6, 16, 2
SMALL = StackConfig(E, 2, H, mlp_width=12)
VIT = ViTConfig(image_size=8, patch_size=2, channels=1, num_classes=3, stack=SMALL)
BERT = BertConfig(vocabulary=VOCAB, num_classes=3, max_length=N, stack=SMALL)
PADDING = torch.tensor([[True] * N, [True] * 4 + [False] * 2])
EARLIER = torch.ones(1, 1, N, N, dtype=torch.bool).tril(-1)  # the first token sees nothing
MASKS = {"none": NO_MASK, "padding": padding(PADDING), "earlier": NO_MASK & Mask(EARLIER)}
CHOICES: list[dict[str, Any]] = [
    *({"order": name} for name in ORDERS),
    *({"attention": name} for name in ATTENTIONS),
    *({"norm": name} for name in NORMS),
    {"kv_heads": 1, "qk_norm": True},
    {"value_dim": 3},
    {"layer_scale": 0.1, "drop_path": 0.2, "final_norm": False},
    {"conv_kernel": 3},
    {"conv_kernel": 3, "order": "parallel"},
    {"cross_attention": True},
    {"cross_attention": True, "order": "post"},
    {"cross_attention": True, "order": "parallel"},
    {"cross_attention": True, "order": "no_residual"},
    {"checkpoint_activations": True},
]


def gradients(loss: Tensor, net: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(net.parameters())))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", CHOICES, ids=label)
def test_the_first_vectors_are_those_of_all(options: dict[str, Any], mask: str, count: int) -> None:
    net = shaken(Stack(replace(SMALL, **options), N)).double()
    x = torch.randn(B, N, E, dtype=torch.float64)
    context = NO_CONTEXT
    if options.get("cross_attention"):
        context = Context(torch.randn(B, 5, E, dtype=torch.float64))
    found = []
    for num_outputs in (None, count):
        torch.manual_seed(1)
        y = net(x, MASKS[mask].with_outputs(num_outputs), context=context)[:, :count]
        found.append([y, *gradients(y.square().sum(), net)])
    assert found[1][0].shape == (B, count, E)
    close(found[1], found[0], 1e-9, 1e-12)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("options", [{}, {"distillation_token": True}, {"register_tokens": 2}])
def test_a_vit_reads_the_first_vectors(position: str, options: dict[str, Any]) -> None:
    net = shaken(ViT(replace(VIT, position=position, **options)))
    images = torch.randn(B, 1, 8, 8)
    x = net.tokens(images)
    assert x.shape == (B, net.config.prefix_tokens + 16, E)
    heads = [net.head(x[:, 0])]
    if net.distillation_head is not None:
        heads.append(net.distillation_head(x[:, 1]))
    close(net(images, each_head=True), torch.stack(heads))
    close(net.features(images), x[:, 0])


@pytest.mark.parametrize("position", [name for name in POSITIONS if 1 in POSITIONS[name].dims])
def test_a_classifier_of_texts_reads_the_first_vector(position: str) -> None:
    net = shaken(BertClassifier(replace(BERT, position=position, segments=2, pooler="tanh")))
    tokens = random_tokens(B, N)
    inputs = (tokens, PADDING, tokens % 2)
    close(net(*inputs), net.classify(net.encoder(*inputs), PADDING))


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_padding_may_be_numbers(dtype: torch.dtype) -> None:
    net = shaken(BertClassifier(BERT))
    tokens = random_tokens(B, N)
    close(net(tokens, PADDING.to(dtype)), net(tokens, PADDING), 0, 0)


def test_a_record_has_the_weights_of_all_tokens() -> None:
    record = AttentionRecord()
    net = shaken(ViT(VIT))
    images = torch.randn(B, 1, 8, 8)
    close(net(images, record), net(images))
    assert [weights.shape for weights in record.self_attn] == [(B, H, 17, 17)] * 2


def test_recorded_activations_are_those_of_all_tokens() -> None:
    net = shaken(ViT(VIT))
    images = torch.randn(B, 1, 8, 8)
    logits = net(images)
    with recorded(net, "blocks.1*", "hidden") as found:
        close(net(images), logits)
    assert found["blocks.1.attention.weights"].shape == (B, H, 17, 17)
    assert found["blocks.1"].shape == found["blocks.1.feedforward"].shape == (B, 17, E)
    close(found["hidden"], net.tokens(images))


@pytest.mark.parametrize("wrong", [{"mask": PADDING}, {"rotary": Rotary(SMALL, (N,))}], ids=label)
def test_attention_says_what_a_mask_and_a_rotation_are(wrong: dict[str, Any]) -> None:
    net = MultiHeadAttention(E, H)
    with pytest.raises(ValueError, match="padding|rotate"):
        net(torch.randn(B, N, E), **wrong)


@pytest.mark.parametrize("mask", ["none", "padding"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])  # with and without the fast kernel
def test_causal_stacks_have_first_vectors(mask: str, dropout: float) -> None:
    net = shaken(Stack(replace(SMALL, causal=True))).train(dropout > 0)
    for block in net.blocks:
        block.attention.dropout = dropout * 1e-9  # drops nothing
    x = torch.randn(B, N, E)
    close(net(x, MASKS[mask].with_outputs(2)), net(x, MASKS[mask])[:, :2])


def test_combined_masks_keep_the_number_of_outputs() -> None:
    few = padding(torch.tensor([[True, True, False], [True] * 3])).with_outputs(1)
    assert (few & causal(3)).num_outputs == (causal(3) & few).num_outputs == 1
    assert (few & few).num_outputs == few.select(torch.tensor([1])).num_outputs == 1
    with pytest.raises(ValueError, match="outputs"):
        few & causal(3).with_outputs(2)
