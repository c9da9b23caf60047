"""Blocks against torch.nn's own, weights copied over; positions against transformers and timm."""

import pytest
import torch
from torch import Tensor, nn

from modules.attention import AdditiveAttention, MultiHeadAttention
from modules.config import StackConfig
from modules.feedforward import FEEDFORWARDS
from modules.masks import NO_MASK, causal, documents, from_bool, padding
from modules.position import POSITIONS, build_position, grid_positions
from modules.record import WeightRecorder
from modules.transformer import Context, Stack

B, N, M, E, H = 3, 7, 5, 24, 4
KEEP = torch.arange(M)[None] < torch.tensor([5, 3, 1])[:, None]  # (B, M)


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def copy_attention(net: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    weight, bias = theirs.in_proj_weight, theirs.in_proj_bias
    with torch.no_grad():
        if weight is None:
            net.query.weight.copy_(theirs.q_proj_weight)
            net.key_value.weight.copy_(torch.cat((theirs.k_proj_weight, theirs.v_proj_weight)))
        elif net.is_cross:
            net.query.weight.copy_(weight[:E])
            net.key_value.weight.copy_(weight[E:])
        else:
            net.qkv.weight.copy_(weight)
        if net.is_cross:
            net.query.bias.copy_(bias[:E])
            net.key_value.bias.copy_(bias[E:])
        else:
            net.qkv.bias.copy_(bias)
        net.output.load_state_dict(theirs.out_proj.state_dict())


def shaken(net: nn.Module) -> nn.Module:
    """Evaluation mode, every weight moved off its start value, so that zero biases and unit norms hide nothing."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return net.eval()


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "pairs", "causal and padding"])
def test_self_attention(mask: str) -> None:
    theirs = shaken(nn.MultiheadAttention(E, H, batch_first=True))
    net = MultiHeadAttention(StackConfig(E, heads=H)).eval()
    copy_attention(net, theirs)
    x = torch.randn(B, M, E)
    allowed = torch.rand(M, M) > 0.4
    allowed |= torch.eye(M, dtype=torch.bool)
    triangle = torch.ones(M, M, dtype=torch.bool).tril()
    ours, drawn, padded = {
        "none": (NO_MASK, None, None),
        "causal": (causal(M), ~triangle, None),
        "padding": (padding(KEEP), None, ~KEEP),
        "pairs": (from_bool(allowed), ~allowed, None),
        "causal and padding": (causal(M) & padding(KEEP), ~triangle, ~KEEP),
    }[mask]
    expected, weights = theirs(
        x, x, x, key_padding_mask=padded, attn_mask=drawn, average_attn_weights=False
    )
    record: list[Tensor] = []
    close(net(x, mask=ours), expected)
    close(net(x, mask=ours, cache=WeightRecorder(record)), expected)
    close(record[0], weights)


@pytest.mark.parametrize("context_width", [E, 10])
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention(context_width: int, masked: bool) -> None:
    theirs = shaken(
        nn.MultiheadAttention(E, H, kdim=context_width, vdim=context_width, batch_first=True)
    )
    net = MultiHeadAttention(StackConfig(E, heads=H), context_width).eval()
    copy_attention(net, theirs)
    x, source = torch.randn(B, N, E), torch.randn(B, M, context_width)
    expected, weights = theirs(
        x, source, source, key_padding_mask=~KEEP if masked else None, average_attn_weights=False
    )
    record: list[Tensor] = []
    mask = padding(KEEP) if masked else NO_MASK
    close(net(x, source, mask), expected)
    close(net(x, source, mask, cache=WeightRecorder(record)), expected)
    close(record[0], weights)


@pytest.mark.parametrize("order", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder(order: str, activation: str) -> None:
    layer = nn.TransformerEncoderLayer(
        E, H, 40, 0.0, activation, batch_first=True, norm_first=order == "pre"
    )
    norm = nn.LayerNorm(E) if order == "pre" else None
    theirs = shaken(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))
    config = StackConfig(E, 2, H, mlp_width=40, order=order, feedforward=activation, norm_eps=1e-5)
    net = Stack(config).eval()
    copy_stack(net, theirs)
    x = torch.randn(B, M, E)
    expected = theirs(x, src_key_padding_mask=~KEEP)
    got = net(x, padding(KEEP))
    close(got[KEEP], expected[KEEP])  # theirs may leave anything at padding


@pytest.mark.parametrize("order", ["pre", "post"])
def test_decoder(order: str) -> None:
    layer = nn.TransformerDecoderLayer(E, H, 40, 0.0, batch_first=True, norm_first=order == "pre")
    theirs = shaken(nn.TransformerDecoder(layer, 2, nn.LayerNorm(E) if order == "pre" else None))
    config = StackConfig(
        E,
        2,
        H,
        mlp_width=40,
        order=order,
        feedforward="relu",
        norm_eps=1e-5,
        causal=True,
        cross_attention=True,
    )
    net = Stack(config).eval()
    copy_stack(net, theirs)
    x, source = torch.randn(B, N, E), torch.randn(B, M, E)
    future = torch.ones(N, N, dtype=torch.bool).triu(1)
    expected = theirs(x, source, tgt_mask=future, memory_key_padding_mask=~KEEP)
    close(net(x, context=Context(source, padding(KEEP))), expected)


@pytest.mark.parametrize("name, activation", [("swiglu", "silu"), ("geglu", "gelu")])
def test_gated_feed_forward_is_llamas(name: str, activation: str) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    sizes = llama.LlamaConfig(
        hidden_size=E, num_attention_heads=H, intermediate_size=40, hidden_act=activation
    )
    theirs, net = llama.LlamaMLP(sizes), FEEDFORWARDS[name](E, 40, bias=False)
    net.load_state_dict(
        {key.replace("_proj", ""): value for key, value in theirs.state_dict().items()}
    )
    x = torch.randn(B, N, E)
    close(net(x), theirs(x))


def test_additive_attention_is_bahdanaus() -> None:
    net, x, source = (
        AdditiveAttention(StackConfig(E, heads=H), 10),
        torch.randn(1, N, E),
        torch.randn(1, M, 10),
    )
    q, (k, v) = net.query(x[0]), net.key_value(source[0]).split(E, -1)
    heads = []
    for h, part in enumerate(torch.arange(E).split(E // H)):
        energies = [
            [net.score[h] @ torch.tanh(q[n, part] + k[m, part]) for m in range(M)] for n in range(N)
        ]
        heads.append(torch.tensor(energies).softmax(-1) @ v[:, part])
    close(net(x, source)[0], net.output(torch.cat(heads, -1)))


def test_parallel_block_is_the_papers() -> None:
    net = shaken(Stack(StackConfig(E, 1, H, order="parallel", final_norm=False)))
    block, x = net.blocks[0], torch.randn(B, N, E)
    normed = block.norm1(x)
    close(net(x), x + block.attention(normed) + block.feedforward(normed))


def copy_stack(net: Stack, theirs: nn.TransformerEncoder | nn.TransformerDecoder) -> None:
    """Copies all weights of torch's encoder or decoder."""
    for block, layer in zip(net.blocks, theirs.layers, strict=True):
        copy_attention(block.attention, layer.self_attn)
        pairs = [(block.norm1, layer.norm1), (block.feedforward.up, layer.linear1)]
        pairs += [(block.feedforward.down, layer.linear2)]
        if block.has_cross:
            copy_attention(block.cross_attention, layer.multihead_attn)
            pairs += [(block.cross_norm, layer.norm2), (block.norm2, layer.norm3)]
        else:
            pairs += [(block.norm2, layer.norm2)]
        for part, other in pairs:
            part.load_state_dict(other.state_dict())
    if theirs.norm is not None:
        net.norm.load_state_dict(theirs.norm.state_dict())


def position(name: str, grid: tuple[int, ...] = (16,), **options: float | bool) -> nn.Module:
    return POSITIONS[name](StackConfig(E, heads=H, **options), grid)  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_rotary_is_llamas(fraction: float) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rotary = build_position("rotary", {"fraction": fraction}, StackConfig(64, heads=4), (16,))
    q, k = torch.randn(B, 4, N, 16), torch.randn(B, 4, N, 16)
    turned = int(16 * fraction)
    angle = torch.arange(N)[:, None] * 10000.0 ** (-torch.arange(0, turned, 2) / turned)
    both = torch.cat((angle, angle), -1)[None]
    expected = llama.apply_rotary_pos_emb(q[..., :turned], k[..., :turned], both.cos(), both.sin())
    rotate = rotary.rotate(grid_positions((N,)))
    close(rotate(q), torch.cat((expected[0], q[..., turned:]), -1))
    close(rotate(k), torch.cat((expected[1], k[..., turned:]), -1))


@pytest.mark.parametrize("is_decoder", [False, True])
def test_relative_bias_is_t5s(is_decoder: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    offset = torch.arange(200)[None] - torch.arange(200)[:, None]
    expected = t5.T5Attention._relative_position_bucket(offset, bidirectional=not is_decoder)
    assert torch.equal(position("t5", causal=is_decoder).bucket(offset), expected)


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_alibi_slopes_are_blooms(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    alibi = POSITIONS["alibi"](StackConfig(8 * heads, heads=heads), (N,))
    positions = grid_positions((N,))
    expected = bloom.build_alibi_tensor(torch.ones(1, N), heads, torch.float32)[
        :, 0
    ]  # (H, M): slope x key
    got = alibi.bias(positions, positions)[0]  # (H, N, M)
    close(
        got[:, -1] - got[:, -1, :1], expected
    )  # the last query sees all keys before it; rows may differ by a constant


def test_sinusoidal_is_the_papers() -> None:
    for width in (8, 7):
        encoding = POSITIONS["sinusoidal"](StackConfig(width, heads=1), (1,))
        got = encoding.embed(torch.zeros(1, 40, width))[0]
        for spot in (0, 1, 39):
            for i in range(width):
                angle = torch.tensor(spot / 10000 ** (2 * (i // 2) / width), dtype=torch.float64)
                expected = angle.sin() if i % 2 == 0 else angle.cos()
                assert abs(got[spot, i] - expected) < 1e-5


def test_two_axes_are_timms() -> None:
    timm = pytest.importorskip("timm.layers")
    expected = timm.build_sincos2d_pos_embed(
        [2, 3], dim=E
    )  # row sines, column sines, row cosines, column cosines
    quarter = expected.chunk(4, -1)
    got = position("sincos2d", (2, 3)).embed(torch.zeros(1, 6, E))[0]
    close(got, torch.cat((quarter[0], quarter[2], quarter[1], quarter[3]), -1))


def test_documents_are_a_block_diagonal() -> None:
    ids = torch.tensor([[0, 0, 1, 1, 1]])
    assert (
        documents(ids).allowed[0, 0].int().tolist()
        == torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).int().tolist()
    )
