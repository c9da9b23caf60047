"""Variants of blocks that experiments compare, each against its formula or another library."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import ATTENTIONS, MultiHeadAttention, attention
from modules.config import StackConfig
from modules.masks import causal
from modules.models.gpt import Decoder, DecoderConfig
from modules.norm import NORMS
from modules.pooling import POOLINGS
from modules.position import POSITIONS, build_position, grid_positions, resize_grid
from modules.record import WeightRecorder
from modules.transformer import Stack
from tests.helpers.tiny_models import close, random_tokens, shaken, tiny

B, N, M, E, H, D = 3, 9, 7, 24, 4, 6

# Attention ---------------------------------------------------------------------------------------


def heads_of(x: Tensor, heads: int) -> Tensor:
    """(B, N, heads x size) -> (B, heads, N, size)."""
    return torch.stack(x.chunk(heads, -1), 1)


def with_scores(net: MultiHeadAttention, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Result and weights by einsum, of a self-attention without key/value groups."""
    q, k, v = (heads_of(part, H) for part in net.qkv(x).chunk(3, -1))
    scale = {"dot": D**-0.5}.get(kind, 1.0)
    if kind == "bilinear":
        scores = torch.einsum("bhnd,hde,bhme->bhnm", q, net.bilinear, k)
    elif kind == "additive":
        sums = torch.tanh(q[:, :, :, None] + k[:, :, None])
        scores = torch.einsum("bhnmd,hd->bhnm", sums, net.score)
    else:
        if kind == "cosine":  # keys have no bias
            k = heads_of(x @ net.qkv.weight[E : 2 * E].T, H)
            scale = net.log_scale.exp() / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None])
        scores = torch.einsum("bhnd,bhmd->bhnm", q, k) * scale
    weights = scores.softmax(-1)
    mixed = torch.einsum("bhnm,bhmd->bnhd", weights, v)
    return net.output(mixed.flatten(2)), weights


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_scores_are_their_formulas(kind: str) -> None:
    net = shaken(ATTENTIONS[kind](E, H)).eval()
    x = 3 * torch.randn(B, N, E)
    expected, weights = with_scores(net, x, kind)
    close(net(x), expected)
    record: list[Tensor] = []
    close(net(x, cache=WeightRecorder(record)), expected)
    close(record[0], weights)
    others = [with_scores(net, x, other)[1] for other in ("dot", "unscaled") if other != kind]
    assert all((weights - other).abs().max() > 1e-3 for other in others)


def test_unscaled_attention_is_that_of_torch_with_scale_1() -> None:
    net = shaken(ATTENTIONS["unscaled"](E, H, 2)).eval()
    x = torch.randn(B, N, E)
    q, k, v = net.qkv(x).split((E, E // 2, E // 2), -1)
    q, k, v = heads_of(q, H), heads_of(k, 2), heads_of(v, 2)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
    close(net(x, mask=causal(N)), net.output(out.transpose(1, 2).flatten(2)))


def test_bilinear_scores_start_with_the_variance_of_scaled_ones() -> None:
    net = ATTENTIONS["bilinear"](512, 2)
    q, k = torch.randn(2, 1, 2, 100, 256)
    assert ((q @ net.bilinear) @ k.mT).std().item() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("context_width", [None, 10])
def test_values_may_be_wider_than_keys(kv_heads: int, context_width: int | None) -> None:
    wide = 11
    net = shaken(MultiHeadAttention(E, H, kv_heads, (D, wide), context_width=context_width)).eval()
    x = torch.randn(B, N, E)
    sizes = (kv_heads * D, kv_heads * wide)
    context = None
    if context_width is None:
        q, k, v = net.qkv(x).split((H * D, *sizes), -1)
    else:
        context = torch.randn(B, M, context_width)
        q = net.query(x)
        k, v = net.key_value(context).split(sizes, -1)
    mixed = []
    for head in range(H):
        group = head * kv_heads // H
        scores = q[..., D * head : D * (head + 1)] @ k[..., D * group : D * (group + 1)].mT
        mixed.append((scores / D**0.5).softmax(-1) @ v[..., wide * group : wide * (group + 1)])
    expected = net.output(torch.cat(mixed, -1))
    assert net.output.weight.shape == (E, H * wide)
    close(net(x, context), expected)
    record: list[Tensor] = []
    close(net(x, context, cache=WeightRecorder(record)), expected)
    assert record[0].shape == (B, H, N, N if context is None else M)


# Norms, residual sums, initial values -------------------------------------------------------------


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_their_formulas(name: str) -> None:
    norm, x = shaken(NORMS[name](E, eps=0.1)), 3 + torch.randn(B, N, E)
    axes: Any = (0, 1) if name == "batchnorm" else -1
    mean = 0 if name == "rmsnorm" else x.mean(axes, keepdim=True)
    expected = (x - mean) / ((x - mean).square().mean(axes, keepdim=True) + 0.1).sqrt()
    if name == "none":
        expected = x
    elif name == "rmsnorm":
        expected = expected * norm.weight
    else:
        affine = norm.norm if name == "batchnorm" else norm
        expected = expected * affine.weight + affine.bias
    close(norm(x), expected)
    flat = x.flatten(0, 1)  # as the heads of masked language models have them
    close(norm(flat), expected.flatten(0, 1))
    assert not [n for n, _ in NORMS[name](E, bias=False).named_parameters() if "bias" in n]


def test_batch_norm_is_that_of_torch_and_keeps_running_means() -> None:
    norm, theirs = NORMS["batchnorm"](E, eps=1e-5), nn.BatchNorm1d(E)
    for _ in range(3):
        x = 2 + 3 * torch.randn(B, N, E)
        close(norm(x), theirs(x.mT).mT)  # theirs takes channels before tokens
    norm.eval(), theirs.eval()
    x = torch.randn(B, N, E)
    close(norm(x), theirs(x.mT).mT)
    close(norm(x)[:1, :2], norm(x[:1, :2]))  # each token by itself
    synchronised = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    assert isinstance(synchronised.norm, nn.SyncBatchNorm)


def test_blocks_without_residual_sums_apply_one_layer_of_torch_after_the_other() -> None:
    theirs = shaken(nn.TransformerEncoderLayer(E, H, 20, 0.0, batch_first=True)).eval()
    net = Stack(StackConfig(E, 1, H, mlp_width=20, feedforward="relu", norm_eps=1e-5)).eval()
    plain = Stack(
        StackConfig(
            *(E, 1, H), mlp_width=20, feedforward="relu", norm_eps=1e-5, order="no_residual"
        )
    ).eval()
    block: Any = plain.blocks[0]
    attention = {"weight": theirs.self_attn.in_proj_weight, "bias": theirs.self_attn.in_proj_bias}
    block.attention.qkv.load_state_dict(attention)
    for ours, other in (
        (block.attention.output, theirs.self_attn.out_proj),
        (block.norm1, theirs.norm1),
        (block.norm2, theirs.norm2),
        (block.feedforward.up, theirs.linear1),
        (block.feedforward.down, theirs.linear2),
    ):
        ours.load_state_dict(other.state_dict())
    net.load_state_dict(plain.state_dict())
    x = torch.randn(B, N, E)
    y = theirs.norm1(x)
    y, _ = theirs.self_attn(y, y, y)
    y = theirs.linear2(theirs.linear1(theirs.norm2(y)).relu())
    close(plain(x), plain.norm(y))
    assert (net(x) - plain(x)).abs().max() > 0.1


def test_without_residual_sums_tokens_become_alike() -> None:
    def spread(order: Any) -> float:
        torch.manual_seed(0)
        net = Stack(StackConfig(E, 12, H, order=order, norm="none", init="xavier")).eval()
        out = net(torch.randn(1, N, E))
        return ((out - out.mean(1, keepdim=True)).norm() / out.norm()).item()

    assert spread("pre") > 0.1
    assert spread("no_residual") < 1e-4


def test_squared_relu() -> None:
    """Source: So 2021, "Primer", section 3."""
    part = Stack(StackConfig(E, 1, H, feedforward="relu2")).blocks[0].feedforward
    x = torch.randn(B, N, E)
    hidden = torch.clamp(x @ part.up.weight.T + part.up.bias, min=0) ** 2
    close(part(x), hidden @ part.down.weight.T + part.down.bias)


@pytest.mark.parametrize(
    "name, up, down, largest",
    [
        ("trunc_normal", 0.0176, 0.0176, 0.04),
        ("xavier", (2 / 1280) ** 0.5, (2 / 1280) ** 0.5, (6 / 1280) ** 0.5),
        ("kaiming", (2 / 256) ** 0.5, (2 / 1024) ** 0.5, None),
        ("gpt2", 0.02, 0.02 / 16**0.5, None),
        ("zero_residual", 1 / 16, 0.0, None),
    ],
)
def test_initial_values(name: Any, up: float, down: float, largest: float | None) -> None:
    part = Stack(StackConfig(256, 8, 4, init=name)).blocks[0].feedforward
    assert part.up.weight.std().item() == pytest.approx(up, rel=0.03)
    assert part.down.weight.std().item() == pytest.approx(down, rel=0.03)
    assert largest is None or part.up.weight.max().item() == pytest.approx(largest, rel=0.01)
    assert not part.up.bias.any()


@torch.no_grad()
def test_kaiming_keeps_the_size_of_values_through_layers_with_relu() -> None:
    x = torch.randn(64, 512)
    start = x.square().mean()
    for _ in range(20):
        part = Stack(StackConfig(512, 1, 4, mlp_width=512, init="kaiming")).blocks[0].feedforward
        x = part.up(x).relu()
    assert 0.3 < (x.square().mean() / start).item() < 3


# Pooling, embeddings, masks ----------------------------------------------------------------------


def test_means_of_many_large_vectors_are_finite_in_float16() -> None:
    x = torch.full((1, 512, E), 200.0).half()
    pooling = POOLINGS["mean"](E, 1, 512)
    for padding_mask in (None, torch.ones(1, 512, dtype=torch.bool)):
        close(pooling(x, padding_mask), x[:, 0])


def test_layer_scale_may_be_a_whole_number() -> None:
    stack = Stack(StackConfig(E, 1, 2, layer_scale=1))
    close(stack.blocks[0].residual1.scale.gamma, torch.ones(E))


def test_flattening_is_a_matrix_for_each_place() -> None:
    pool: Any = shaken(POOLINGS["flatten"](E, H, N))
    x = torch.randn(B, N, E)
    by_place = pool.linear.weight.unflatten(1, (N, E))  # (E, N, E)
    close(pool(x), torch.einsum("bnf,enf->be", x, by_place) + pool.linear.bias, atol=1e-4)
    with pytest.raises(ValueError, match=f"{N} tokens at most, not {N + 1}"):
        pool(torch.randn(B, N + 1, E))


def test_a_narrow_embedding_is_that_of_albert() -> None:
    albert = pytest.importorskip("transformers.models.albert.modeling_albert")
    sizes = {"vocab_size": 31, "embedding_size": 10, "hidden_size": E, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": H, "intermediate_size": 20, "max_position_embeddings": 16}
    config = albert.AlbertConfig(
        **sizes,
        num_hidden_groups=2,  # no weights shared between blocks
        type_vocab_size=2,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    theirs = shaken(albert.AlbertForMaskedLM(config)).eval()
    theirs.tie_weights()
    options = {"order": "post", "norm_eps": 1e-12, "final_norm": False, "pad_id": 0}
    net = tiny("masked", embedding_width=10, next_sentence=False, **options)
    embed, encoder = theirs.albert.embeddings, theirs.albert.encoder
    head = theirs.predictions
    pairs = [
        (net.encoder.embed, embed.word_embeddings),
        (net.encoder.segment, embed.token_type_embeddings),
        (net.encoder.norm, embed.LayerNorm),
        (net.encoder.project_in, encoder.embedding_hidden_mapping_in),
        (net.head.dense, head.dense),
        (net.head.norm, head.LayerNorm),
    ]
    with torch.no_grad():
        net.encoder.position.table.copy_(embed.position_embeddings.weight)
        net.head.tokens.bias.copy_(head.decoder.bias)
        for block, group in zip(net.encoder.stack.blocks, encoder.albert_layer_groups, strict=True):
            layer = group.albert_layers[0]
            own = layer.attention
            parts = (own.query, own.key, own.value)
            block.attention.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            block.attention.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
            pairs += [
                (block.attention.output, own.dense),
                (block.norm1, own.LayerNorm),
                (block.feedforward.up, layer.ffn),
                (block.feedforward.down, layer.ffn_output),
                (block.norm2, layer.full_layer_layer_norm),
            ]
    for ours, other in pairs:
        ours.load_state_dict(other.state_dict())
    tokens = random_tokens(2, 7)
    segments = torch.randint(2, tokens.shape)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    expected = theirs(tokens, mask.long(), segments).logits
    close(net(tokens, mask, segments)[mask.flatten()], expected[mask])


@pytest.mark.parametrize("position", ["learned", "rotary"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_table_of_a_decoder_scores_what_is_mapped_back_to_it(
    tied: bool, position: str
) -> None:
    net = tiny("gpt", embedding_width=10, tied=tied, position=position)
    assert net.embed.weight.shape == (31, 10)
    tokens = random_tokens(2, 7)
    narrow = net.embed.weight[tokens]
    if position == "learned":
        narrow = narrow + net.position.table[:7]
    wide = narrow @ net.project_in.weight.T + net.project_in.bias
    of_heads = build_position(position, {}, net.config.stack, (7,))  # of heads as wide as ever
    hidden = net.stack(wide, rotary=of_heads.rotate(grid_positions((7,))))
    if tied:
        hidden = hidden @ net.project_out.weight.T + net.project_out.bias
    table = net.embed.weight if tied else net.unembed.weight
    close(net.logits(net(tokens)), hidden @ table.T)
    assert table.shape == (31, 10 if tied else E)


@torch.no_grad()
def test_a_decoder_without_a_causal_mask_sees_what_it_predicts() -> None:
    for is_causal in (True, False):
        net = tiny("gpt", causal=is_causal)
        tokens = random_tokens(1, 9)
        changed = tokens.clone()
        changed[:, 5] = tokens[:, 5] % 30 + 1
        moved = (net(changed) - net(tokens)).abs().amax(2)[0] > 1e-6
        assert moved[5:].all()
        assert moved[:5].all() == moved[:5].any() == (not is_causal)


@torch.no_grad()
@pytest.mark.parametrize("position", ["none", "sinusoidal", "rotary", "alibi", "t5", "learned"])
def test_decoders_take_longer_texts_than_in_training_unless_positions_are_learned(
    position: str,
) -> None:
    stack = StackConfig(E, 2, H, causal=True)
    nets = []
    for length in (8, 16):
        torch.manual_seed(1)
        nets.append(Decoder(DecoderConfig(31, length, position, stack=stack)).eval())
    short, long = nets
    tokens = random_tokens(2, 16)
    if position == "learned":
        with pytest.raises(ValueError, match="16 tokens are more than the 8 learned positions"):
            short(tokens)
        return
    long.load_state_dict(short.state_dict())
    close(short(tokens), long(tokens))


def test_softmax_is_computed_in_32_bits() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 8).bfloat16()
    seen: list[Tensor] = []
    attention(q, k, v, on_weights=seen.append)
    assert seen[0].dtype == torch.float32
    close(seen[0].sum(-1), torch.ones(2, 4, 9), 1e-6)
    pool: Any = POOLINGS["sequence"](16, 1, 9).bfloat16()
    x = 3 * torch.randn(2, 9, 16).bfloat16()
    weights = pool.score(x).float().softmax(1).bfloat16()
    assert torch.equal(pool(x), (weights.mT @ x)[:, 0])


def test_scores_of_the_user_stay() -> None:
    scores = torch.randn(1, 2, 4, 4)
    before = scores.clone()
    x = torch.randn(1, 2, 4, 3)
    attention(x, x, x, causal(4), score_fn=lambda q, k: scores)
    assert torch.equal(scores, before)


def test_the_alibi_of_images_is_by_euclidean_distance() -> None:
    positions = grid_positions((3, 4))
    alibi = POSITIONS["alibi"](StackConfig(16, heads=2), (3, 4))
    distance = torch.cdist(positions.float(), positions.float())  # (1, N, N)
    slopes = torch.tensor([1 / 16, 1 / 256])[:, None, None]
    close(alibi.bias(positions, positions), -slopes * distance[:, None])


def test_positions_of_texts_are_resized_between_centres() -> None:
    resized = resize_grid(torch.arange(4.0)[:, None], (8,))[:, 0]
    close(resized, torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]))
