"""Blocks and models against torch.nn's own, weights copied; parts against other libraries'."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import AdditiveAttention, MultiHeadAttention
from modules.config import StackConfig
from modules.masks import NO_MASK, Mask, causal, padding
from modules.patch_embedding import PatchStem, ResidualStem
from modules.position import POSITIONS, build_position, grid_positions
from modules.record import WeightRecorder
from modules.transformer import Stack
from tests.helpers.tiny_models import SOURCE, close, random_tokens, shaken, tiny

B, N, M, E, H = 3, 9, 7, 24, 4
SEEN = SOURCE > 0  # (B, M)


def copy_attention(net: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    weight = theirs.in_proj_weight
    if weight is None:  # keys and values of another width
        weight = (theirs.q_proj_weight, torch.cat((theirs.k_proj_weight, theirs.v_proj_weight)))
    else:
        weight = weight.split((E, 2 * E))
    query, key_value = theirs.in_proj_bias.split((E, 2 * E))
    if net.is_cross:
        net.query.load_state_dict({"weight": weight[0], "bias": query})
        net.key_value.load_state_dict({"weight": weight[1], "bias": key_value})
    else:
        net.qkv.load_state_dict({"weight": torch.cat(weight), "bias": theirs.in_proj_bias})
    net.output.load_state_dict(theirs.out_proj.state_dict())


def copy_stack(net: Stack, theirs: Any) -> None:
    """Copies all weights of torch's encoder or decoder."""
    for block, layer in zip(net.blocks, theirs.layers, strict=True):
        copy_attention(block.attention, layer.self_attn)
        pairs = [(block.norm1, layer.norm1), (block.norm2, layer.norm2)]
        if block.has_cross:
            copy_attention(block.cross_attention, layer.multihead_attn)
            pairs[1:] = [(block.cross_norm, layer.norm2), (block.norm2, layer.norm3)]
        pairs += [(block.feedforward.up, layer.linear1), (block.feedforward.down, layer.linear2)]
        for part, other in pairs:
            part.load_state_dict(other.state_dict())
    if theirs.norm is not None:
        net.norm.load_state_dict(theirs.norm.state_dict())


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "pairs", "both", "10", "24"])
def test_attention_is_that_of_torch(kind: str) -> None:
    triangle = torch.ones(M, M, dtype=torch.bool).tril()
    pairs = (torch.rand(M, M) > 0.4) | torch.eye(M, dtype=torch.bool)
    mask, allowed, padded = {
        "causal": (causal(M), triangle, None),
        "padding": (padding(SEEN), None, ~SEEN),
        "pairs": (Mask(pairs[None, None]), pairs, None),
        "both": (causal(M) & padding(SEEN), triangle, ~SEEN),
    }.get(kind, (NO_MASK, None, None))
    x = torch.randn(B, M, E)
    context = None
    if kind.isdecimal():  # cross-attention to vectors of this width
        context = torch.randn(B, N, int(kind))
    other = x if context is None else context
    width = other.shape[-1]
    theirs = shaken(nn.MultiheadAttention(E, H, kdim=width, vdim=width, batch_first=True)).eval()
    context_width = None if context is None else width
    net = MultiHeadAttention(E, H, context_width=context_width).eval()
    copy_attention(net, theirs)
    attn_mask = None if allowed is None else ~allowed
    options = {"key_padding_mask": padded, "attn_mask": attn_mask, "average_attn_weights": False}
    expected, weights = theirs(x, other, other, **options)
    record: list[Tensor] = []
    close(net(x, context, mask), expected)
    close(net(x, context, mask, cache=WeightRecorder(record)), expected)
    close(record[0], weights)


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_decoders_their_losses_and_gradients_are_those_of_torch(
    order: str, activation: str
) -> None:
    options = {"batch_first": True, "norm_first": order == "pre"}
    theirs = shaken(nn.Transformer(E, H, 2, 2, 20, 0.0, activation, **options))
    net = tiny(
        "encoder_decoder", order=order, final_norm=True, feedforward=activation, norm_eps=1e-5
    )
    copy_stack(net.encoder.stack, theirs.encoder)
    copy_stack(net.decoder.stack, theirs.decoder)
    tokens = random_tokens(B, N)
    mask = torch.arange(N) < torch.tensor([9, 2, 4])[:, None]
    targets = random_tokens(B, N).masked_fill(~mask, -100)
    table = net.embed.weight.detach().clone().requires_grad_()
    angle = torch.arange(N)[:, None] / 10000.0 ** (torch.arange(0, E, 2) / E)
    waves = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)  # (N, E)
    expected = theirs(
        table[SOURCE] * E**0.5 + waves[:M],
        table[tokens] * E**0.5 + waves,
        tgt_mask=torch.ones(N, N, dtype=torch.bool).triu(1),
        src_key_padding_mask=~SEEN,
        tgt_key_padding_mask=~mask,
        memory_key_padding_mask=~SEEN,
    )
    scores = (expected @ table.T).flatten(0, 1)
    their_loss = F.cross_entropy(scores, targets.flatten(), label_smoothing=0.1)
    found = net(SOURCE, tokens, SEEN, mask)
    close(found[mask], expected[mask])
    loss, _ = net.loss(net(SOURCE, tokens, SEEN), targets, 0.1)
    close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    grads = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
        grads.embed.weight.copy_(table.grad)
    copy_stack(grads.encoder.stack, theirs.encoder)
    copy_stack(grads.decoder.stack, theirs.decoder)
    close((p.grad for p in net.parameters()), (p.data for p in grads.parameters()))


def test_additive_attention_is_bahdanaus() -> None:
    net = AdditiveAttention(E, H, context_width=10)
    x = torch.randn(1, N, E)
    context = torch.randn(1, M, 10)
    q = net.query(x[0])
    k, v = net.key_value(context[0]).split(E, -1)
    heads = []
    for head, part in enumerate(torch.arange(E).split(E // H)):
        rows = [[net.score[head] @ torch.tanh(a[part] + b[part]) for b in k] for a in q]
        heads.append(torch.tensor(rows).softmax(-1) @ v[:, part])
    close(net(x, context)[0], net.output(torch.cat(heads, -1)))


def test_parallel_block_is_the_papers() -> None:
    net = shaken(Stack(StackConfig(E, 1, H, order="parallel", final_norm=False)))
    block = net.blocks[0]
    x = torch.randn(B, N, E)
    normed = block.norm1(x)
    close(net(x), x + block.attention(normed) + block.feedforward(normed))


def test_norms_at_the_end_of_residual_branches_are_timms() -> None:
    timm = pytest.importorskip("timm.models.vision_transformer")
    net = Stack(StackConfig(E, 1, H, order="res_post", final_norm=False))
    x = torch.randn(B, N, E)
    assert torch.equal(net(x), x)  # at first
    block = shaken(net).blocks[0]
    theirs = timm.ResPostBlock(E, H, qkv_bias=True)
    names = {"qkv": "attn.qkv", "output": "attn.proj", "up": "mlp.fc1", "down": "mlp.fc2"}
    theirs.load_state_dict(
        {
            ".".join([names.get(part, part) for part in name.split(".")[-2:]]): value
            for name, value in block.state_dict().items()
        }
    )
    close(net(x), theirs(x))


def test_a_part_of_each_head_is_rotated_as_llamas() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rotary = build_position("rotary", {"fraction": 0.5}, StackConfig(64, heads=4), (16,))
    x = torch.randn(B, 4, N, 16)
    width = 8
    angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    both = torch.cat((angle, angle), -1)[None]
    turned = x[..., :width]
    expected, _ = llama.apply_rotary_pos_emb(turned, turned, both.cos(), both.sin())
    close(rotary.rotate(grid_positions((N,)))(x), torch.cat((expected, x[..., width:]), -1))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_relative_bias_is_t5s(is_decoder: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(400)[None] - torch.arange(400)[:, None]
    expected = t5.T5Attention._relative_position_bucket(offset, bidirectional=not is_decoder)
    ours = POSITIONS["t5"](StackConfig(E, heads=H, causal=is_decoder), (16,))
    assert torch.equal(ours.bucket(offset), expected)
    table = ours.table[0]  # (buckets, H)
    positions = grid_positions((400,))
    close(ours.bias(positions, positions)[0].movedim(0, -1), table[expected])


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_alibi_slopes_are_blooms(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    alibi = POSITIONS["alibi"](StackConfig(8 * heads, heads=heads), (N,))
    positions = grid_positions((N,))
    expected = bloom.build_alibi_tensor(torch.ones(1, N), heads, torch.float32)[:, 0]  # (H, M)
    last_query = alibi.bias(positions, positions)[0, :, -1]  # rows may differ by a constant
    close(last_query - last_query[:, :1], expected)


def test_positions_on_two_axes_are_timms() -> None:
    timm = pytest.importorskip("timm.layers")
    theirs = timm.build_sincos2d_pos_embed([2, 3], dim=E)
    row_sin, column_sin, row_cos, column_cos = theirs.chunk(4, -1)
    ours = POSITIONS["sincos2d"](StackConfig(E, heads=H), (2, 3)).embed(torch.zeros(1, 6, E))[0]
    close(ours, torch.cat((row_sin, row_cos, column_sin, column_cos), -1))


@pytest.mark.parametrize("training", [True, False])
def test_residual_stem_by_functions_of_torch(training: bool) -> None:
    stem = shaken(ResidualStem(3, 32, 4)).train(training)
    images = torch.randn(B, 3, 16, 16)
    values = copy.deepcopy(stem.state_dict())  # before the statistics change
    found = stem(images)

    def normalised(x: Tensor, conv: str, norm: str, pool: int) -> Tensor:
        x = F.conv2d(x, values[f"layers.{conv}.weight"], padding=1)
        x = F.max_pool2d(x, pool)
        names = ("running_mean", "running_var", "weight", "bias")
        mean, variance, scale, bias = (values[f"layers.{norm}.{name}"] for name in names)
        if training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        shape = (1, -1, 1, 1)
        x = (x - mean.view(shape)) / (variance.view(shape) + 1e-5).sqrt()
        return F.gelu(x * scale.view(shape) + bias.view(shape))

    x = images
    for first in (0, 5):  # numbers of the layers that halve the image
        x = normalised(x, f"{first}", f"{first + 2}", 2)
        x = x + normalised(x, f"{first + 4}.conv", f"{first + 4}.norm", 1)
    assert found.shape == (B, 16, 32)
    close(found, x.flatten(2).mT, atol=1e-5)


def test_patches_are_those_of_a_convolution() -> None:
    stem = PatchStem(3, E, 4)
    images = torch.randn(B, 3, 12, 20, requires_grad=True)
    inputs = (images, stem.conv.weight, stem.conv.bias)
    outputs = (stem(images), stem.conv(images).flatten(2).mT)  # (B, N, E) each
    close(*outputs)
    direction = torch.randn(B, 15, E)
    ours, theirs = (torch.autograd.grad(output, inputs, direction) for output in outputs)
    close(ours, theirs, atol=1e-4)
