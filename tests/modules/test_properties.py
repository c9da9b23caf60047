"""What must hold for every variant, whatever the weights; new entries of the family dicts are picked up here."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import modules.config as config
from modules.attention import ATTENTIONS, MultiHeadAttention
from modules.cache import AttentionCache
from modules.config import StackConfig
from modules.embedding import TokenEmbedding
from modules.feedforward import FEEDFORWARDS
from modules.heads import POOLERS
from modules.init import INITS
from modules.lm_heads import TokenHead
from modules.masks import NO_MASK, Mask, causal, documents, from_bool, padding
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.norm import NORMS
from modules.parameter_groups import parameter_roles
from modules.patch_embedding import STEMS
from modules.pooling import POOLINGS
from modules.position import POSITIONS, build_position, grid_positions, resize_grid
from modules.record import AttentionRecord, WeightRecorder
from modules.transformer import NO_CONTEXT, ORDERS, Context, Stack

B, N, E, H = 2, 6, 16, 2
SMALL = StackConfig(width=E, depth=2, heads=H, mlp_width=12)
TINY = ViTConfig(image_size=8, patch_size=2, channels=1, num_classes=3, stack=SMALL)
FAMILIES = {
    "norm": (NORMS, config.NormName),
    "feedforward": (FEEDFORWARDS, config.FeedForwardName),
    "order": (ORDERS, config.OrderName),
    "attention": (ATTENTIONS, config.AttentionName),
    "init": (INITS, config.InitName),
    "stem": (STEMS, config.StemName),
    "pool": (POOLINGS, config.PoolName),
    "pooler": (POOLERS, config.PoolerName),
}
STACK_FAMILIES = ("norm", "feedforward", "order", "attention", "init")
SWITCHES: list[dict[str, Any]] = [
    {"kv_heads": 1},
    {"head_dim": 6},
    {"bias": False, "qkv_bias": False},
    {"qk_norm": True},
    {"layer_scale": 0.1},
    {"causal": True},
    {"cross_attention": True, "context_width": 10},
    {"cross_attention": True, "order": "post"},
    {"cross_attention": True, "order": "parallel"},
    {"checkpoint_activations": True},
]
CHOICES = [{family: name} for family in STACK_FAMILIES for name in FAMILIES[family][0]] + SWITCHES


def label(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


def vit(**options: Any) -> ViT:
    net = ViT(replace(TINY, **options))
    return shaken(net)


def shaken(net: Any) -> Any:
    """Moves every weight off its start value."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return net


def source(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Context:
    width = options.get("context_width", E)
    if not options.get("cross_attention"):
        return NO_CONTEXT
    return Context(torch.randn(B, 5, width, dtype=dtype))


def part(context: Context, row: int) -> Context:
    if context is NO_CONTEXT:
        return context
    return context.select(torch.tensor([row]))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_the_keys(family: str) -> None:
    entries, literal = FAMILIES[family]
    assert tuple(entries) == get_args(literal)


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CHOICES, ids=label)
def test_gradients_of_blocks(options: dict[str, Any]) -> None:
    options = {"depth": 1, "heads": 2, "width": 8, "mlp_width": 6, **options}
    other = source({"context_width": 8, **options}, torch.float64)
    check_gradients(Stack(StackConfig(**options)), torch.randn(B, 3, 8), NO_MASK, None, other)


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("stem", STEMS)
def test_gradients_of_positions_and_stems(name: str, stem: str) -> None:
    check_vit(position=name, stem=stem, register_tokens=1)


@pytest.mark.parametrize("name", POOLINGS)
def test_gradients_of_poolings(name: str) -> None:
    check_vit(pool=name, norm_after_pool=True)


def check_vit(**options: Any) -> None:
    stack = StackConfig(width=8, depth=1, heads=2, mlp_width=6)
    check_gradients(
        ViT(replace(TINY, image_size=4, stack=stack, **options)), torch.randn(B, 1, 4, 4)
    )


def check_gradients(net: nn.Module, x: Tensor, *others: Any) -> None:
    """Finite differences in float64 by all weights and the input, laid out as one vector."""
    shaken(net).double()
    names, values = zip(("x", x.double()), *net.named_parameters(), strict=True)

    def run(flat: Tensor) -> Tensor:
        parts = flat.split([value.numel() for value in values])
        x, *weights = (part.view_as(value) for part, value in zip(parts, values, strict=True))
        return torch.func.functional_call(
            net, dict(zip(names[1:], weights, strict=True)), (x, *others)
        )

    flat = torch.cat([value.detach().flatten() for value in values]).requires_grad_()
    assert torch.autograd.gradcheck(run, flat, fast_mode=True)


@pytest.mark.parametrize("options", CHOICES, ids=label)
def test_every_parameter_of_a_stack_gets_a_gradient(options: dict[str, Any]) -> None:
    stack = Stack(replace(SMALL, **options))
    out = stack(torch.randn(B, N, E), context=source(options))
    (out * torch.randn_like(out)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in stack.parameters())


@pytest.mark.parametrize("pool", POOLINGS)
@pytest.mark.parametrize("name", POSITIONS)
def test_every_parameter_of_a_vit_gets_a_gradient_and_a_role(name: str, pool: str) -> None:
    net = vit(position=name, pool=pool, register_tokens=2)
    out = net(torch.randn(B, 1, 8, 8))
    (out * torch.randn_like(out)).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert list(parameter_roles(net)) == [key for key, _ in net.named_parameters()]


# Order of tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [c for c in CHOICES if not c.get("causal")], ids=label)
def test_tokens_without_positions_have_no_order(options: dict[str, Any]) -> None:
    stack = shaken(Stack(replace(SMALL, **options))).eval()
    x, order, other = torch.randn(B, N, E), torch.randperm(N), source(options)
    torch.testing.assert_close(
        stack(x, context=other)[:, order], stack(x[:, order], context=other), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("name", [name for name in POOLINGS if name != "cls"])
def test_poolings_do_not_see_the_order(name: str) -> None:
    pool = shaken(POOLINGS[name](E, H))
    x, order = torch.randn(B, N, E), torch.randperm(N)
    torch.testing.assert_close(pool(x), pool(x[:, order]))


@pytest.mark.parametrize("name", POOLINGS)
def test_poolings_skip_padding(name: str) -> None:
    pool = shaken(POOLINGS[name](E, H))
    x, padding_mask = torch.randn(3, N, E), torch.arange(N)[None] < torch.tensor([N, 2, 0])[:, None]
    pooled = pool(x, padding_mask)
    torch.testing.assert_close(pooled[0], pool(x[:1])[0])
    torch.testing.assert_close(pooled[1], pool(x[1:2, :2])[0])
    empty = {"attention": pool.attention.output.bias} if name == "attention" else {"cls": x[2, 0]}
    torch.testing.assert_close(pooled[2], empty.get(name, torch.zeros(E)))


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "none"])
def test_positions_tell_patches_apart(name: str) -> None:
    net = vit(position=name, pool="mean").eval()
    images = torch.randn(1, 1, 8, 8)
    assert (net(images) - net(images.transpose(2, 3).contiguous())).abs().max() > 1e-4


@pytest.mark.parametrize("options", CHOICES, ids=label)
def test_the_past_does_not_see_the_future(options: dict[str, Any]) -> None:
    stack = shaken(Stack(replace(SMALL, **{**options, "causal": True}))).eval()
    x, other = torch.randn(B, N, E), source(options)
    later = x.clone()
    later[:, 4:] = torch.randn(B, N - 4, E)
    before, after = stack(x, context=other), stack(later, context=other)
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-6, rtol=1e-5)
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-3


# Masks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", CHOICES, ids=label)
def test_a_padded_batch_equals_each_sequence_alone(
    options: dict[str, Any], is_causal: bool
) -> None:
    stack = shaken(Stack(replace(SMALL, **{**options, "causal": is_causal}))).eval()
    lengths, other = (N, 3), source(options)
    x = torch.randn(B, N, E)
    padding_mask = torch.arange(N)[None] < torch.tensor(lengths)[:, None]
    together = stack(x, padding(padding_mask), context=other)
    for i, length in enumerate(lengths):
        alone = stack(x[i : i + 1, :length], context=part(other, i))
        torch.testing.assert_close(together[i, :length], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in POSITIONS if not name.endswith("2d")])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_equal_each_document_alone(name: str, is_causal: bool) -> None:
    place = shaken(POSITIONS[name](replace(SMALL, causal=is_causal), (N,)))
    stack = shaken(Stack(replace(SMALL, causal=is_causal))).eval()
    x, lengths = torch.randn(1, N, E), (4, 2)

    def run(x: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        both = mask & Mask(causal=is_causal)
        return stack(
            place.embed(x, positions),
            both.with_bias(place.bias(positions, positions)),
            place.rotate(positions),
        )

    restart = torch.cat([torch.arange(n) for n in lengths])[None, :, None]  # (1, N, 1)
    packed = run(x, restart, documents(torch.tensor([[0, 0, 0, 0, 1, 1]])))
    for part, piece in zip(packed.split(lengths, 1), x.split(lengths, 1), strict=True):
        alone = run(piece, grid_positions((piece.shape[1],)), NO_MASK)
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "kind", ["left padding and causal", "empty sequence", "empty row", "packed and padded"]
)
def test_a_row_that_sees_nothing_gives_zeros(kind: str, with_bias: bool, attention: str) -> None:
    padding_mask = torch.tensor([[True] * N, [False] * 2 + [True] * (N - 2)])
    allowed = torch.ones(N, N, dtype=torch.bool)
    allowed[1] = False
    mask, dead = {
        "left padding and causal": (padding(padding_mask) & causal(N), ~padding_mask),
        "empty sequence": (
            padding(torch.tensor([[True] * N, [False] * N])),
            torch.tensor([[False] * N, [True] * N]),
        ),
        "empty row": (from_bool(allowed), torch.eye(N, dtype=torch.bool)[1].expand(B, N)),
        "packed and padded": (
            documents((~padding_mask).long()) & padding(padding_mask),
            ~padding_mask,
        ),
    }[kind]
    net = shaken(ATTENTIONS[attention](StackConfig(E, heads=H, bias=False)))
    bias = torch.randn(1, H, N, N, requires_grad=True)
    x = torch.randn(B, N, E, requires_grad=True)
    weights: list[Tensor] = []
    for memory in (AttentionCache(), WeightRecorder(weights)):
        out = net(x, mask=mask.with_bias(bias) if with_bias else mask, cache=memory)
        assert (
            torch.equal(out[dead], torch.zeros_like(out[dead]))
            and out[~dead].abs().min(-1)[0].sum() > 0
        )
        out.square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in (x, *net.parameters()))
        assert not with_bias or torch.isfinite(bias.grad).all()
    assert weights[0].transpose(1, 2)[dead].abs().max() == 0  # (B, N, H, M)[dead]


def test_masks_combine_in_any_order() -> None:
    padding_mask = torch.tensor([[True] * N, [False] * 2 + [True] * (N - 2)])
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]] * B)
    parts = [padding(padding_mask), documents(ids), causal(N)]
    expected = (padding_mask[:, None, None] & (ids[:, None, :, None] == ids[:, None, None])).tril()
    for first, second, third in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        mask = parts[first] & parts[second] & parts[third]
        assert torch.equal(mask.allowed & ~mask.fully_masked, expected)
    assert (causal(N) & causal(N)).is_causal and (causal(N) & NO_MASK).is_causal
    assert causal(2, 5).allowed[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    seen = Mask(padding_mask[:, None, None], causal=True).add_to(torch.zeros(B, H, N, N)).isfinite()
    assert torch.equal(seen, padding_mask[:, None, None].expand(-1, H, N, -1).tril())
    bias = torch.randn(1, H, N, N)
    late, early = (parts[0] & causal(N)).with_bias(bias), parts[0].with_bias(bias) & causal(N)
    assert torch.equal(late.bias_and_mask, early.bias_and_mask) and not early.is_causal


@pytest.mark.parametrize("options", CHOICES, ids=label)
def test_weights_on_request_do_not_change_the_result(options: dict[str, Any]) -> None:
    stack = shaken(Stack(replace(SMALL, **options))).eval()
    x, record, other = torch.randn(B, N, E), AttentionRecord(), source(options)
    torch.testing.assert_close(
        stack(x, context=other, cache=record), stack(x, context=other), atol=1e-5, rtol=1e-5
    )
    assert [tuple(w.shape) for w in record.self_attn] == [(B, H, N, N)] * 2
    assert [tuple(w.shape) for w in record.cross_attn] == (
        [(B, H, N, 5)] * 2 if other is not NO_CONTEXT else []
    )
    for weights in record.self_attn + record.cross_attn:
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    stack(x, context=other)
    assert len(record.self_attn) == 2  # nothing is kept on the modules


# Positions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, grid", [("rotary", (9,)), ("rotary2d", (4, 5))])
def test_rotary_scores_depend_on_the_offset_only(name: str, grid: tuple[int, ...]) -> None:
    options = {"fraction": 0.5} if name == "rotary" else {}
    rotary = build_position(name, options, StackConfig(32, heads=2), grid)
    positions = grid_positions(grid)
    q, k = torch.randn(1, 2, 1, 16).expand(-1, -1, positions.shape[1], -1), torch.randn(1, 2, 1, 16)
    k = k.expand(-1, -1, positions.shape[1], -1)
    here, there = (
        rotary.rotate(positions),
        rotary.rotate(positions + torch.arange(7, 7 + len(grid))),
    )
    scores = here(q) @ here(k).mT
    torch.testing.assert_close(there(q) @ there(k).mT, scores, atol=1e-4, rtol=1e-4)
    assert (scores[..., 0, 1:] - scores[..., 0, :1]).abs().min() > 1e-4
    torch.testing.assert_close(here(q).norm(dim=-1), q.norm(dim=-1))


def test_prefix_tokens_are_not_rotated() -> None:
    rotation = POSITIONS["rotary2d"](SMALL, (2, 2)).rotate(grid_positions((2, 2)))
    x = torch.randn(B, H, 6, E // H)
    after = rotation.after_prefix(2)(x)
    assert torch.equal(after[:, :, :2], x[:, :, :2])
    torch.testing.assert_close(after[:, :, 2:], rotation(x[:, :, 2:]))


@pytest.mark.parametrize("name", POSITIONS)
def test_coordinates_default_to_the_grid(name: str) -> None:
    grid = (2, 3)
    place = shaken(POSITIONS[name](SMALL, grid))
    x = torch.randn(B, 6, E)
    torch.testing.assert_close(place.embed(x), place.embed(x, grid_positions(grid)))


def test_a_learned_table_is_resized_to_another_grid() -> None:
    ramp = torch.stack(
        torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1
    )  # (8, 8, 2)
    assert torch.equal(resize_grid(ramp, (8, 8)), ramp)
    small = resize_grid(ramp, (4, 4))
    torch.testing.assert_close(
        small[1:3, 1:3, 0], torch.tensor([[2.5, 2.5], [4.5, 4.5]]), atol=0.1, rtol=0
    )
    line = resize_grid(torch.arange(4.0)[:, None], (8,))
    assert line.shape == (8, 1) and (line.diff(dim=0) >= 0).all()
    with pytest.raises(ValueError, match="grid"):
        resize_grid(ramp, (4,))


# Sizes, roles, starts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 192])
def test_an_encoder_layer_has_12_d2_13_d_parameters(width: int) -> None:
    stack = Stack(StackConfig(width=width, depth=1, heads=2, final_norm=False))
    assert sum(p.numel() for p in stack.parameters()) == 12 * width**2 + 13 * width


def test_a_gate_keeps_the_parameter_count() -> None:
    plain, gated = (
        Stack(StackConfig(width=192, depth=1, feedforward=name)) for name in ("gelu", "swiglu")
    )
    counts = [sum(p.numel() for p in net.parameters()) for net in (plain, gated)]
    assert abs(counts[0] - counts[1]) / counts[0] < 0.01


def test_roles() -> None:
    roles = parameter_roles(vit(pool="attention", register_tokens=1, class_token=True, stem="conv"))
    tables = {name for name, role in roles.items() if role == "table"}
    assert tables == {
        "embed.stem.layers.0.weight",
        "embed.stem.layers.3.weight",
        "head.linear.weight",
    }
    matrices = {
        name.split("blocks.0.")[-1]
        for name, role in roles.items()
        if role == "matrix" and "blocks.1" not in name
    }
    assert matrices == {f"attention.{n}.weight" for n in ("qkv", "output")} | {
        f"feedforward.{n}.weight" for n in ("up", "down")
    } | {f"pool.attention.{n}.weight" for n in ("query", "key_value", "output")}
    scalars = {name for name, role in roles.items() if role == "scalar"}
    assert {
        "position.table",
        "prefix.vectors",
        "pool.query",
        "stack.norm.weight",
        "head.linear.bias",
    } <= scalars


def test_tied_weights_have_one_role() -> None:
    embedding = TokenEmbedding(11, E, scale=True)
    net = nn.ModuleDict({"embedding": embedding, "head": TokenHead(embedding, bias=True)})
    assert parameter_roles(net) == {"embedding.weight": "table", "head.bias": "scalar"}
    tokens = torch.tensor([[1, 2]])
    torch.testing.assert_close(embedding(tokens), embedding.weight[tokens] * E**0.5)
    torch.testing.assert_close(net["head"](torch.eye(E)[None])[0], embedding.weight.T)


@pytest.mark.parametrize("name", INITS)
def test_start_values(name: str) -> None:
    block = Stack(StackConfig(width=256, depth=8, heads=4, init=name)).blocks[0]
    up, down = block.feedforward.up.weight.std().item(), block.feedforward.down.weight.std().item()
    glorot = (2 / (256 + 1024)) ** 0.5
    expected = {
        "trunc_normal": (0.0176, 0.0176),
        "xavier": (glorot, glorot),
        "gpt2": (0.02, 0.02 / 16**0.5),
    }
    assert name not in expected or (up, down) == pytest.approx(expected[name], rel=0.03)
    assert (
        name != "trunc_normal"
        or block.feedforward.up.weight.abs().max().item() == pytest.approx(0.04, rel=0.01)
    )
    assert block.feedforward.up.bias.abs().max() == 0


def test_dropout_is_at_all_five_places() -> None:
    net = vit(stack=replace(SMALL, dropout=0.5, attention_dropout=0.5))
    rates = [module.p for module in net.modules() if isinstance(module, nn.Dropout)]
    assert len(rates) == 1 + 3 * 2 and net.stack.blocks[0].attention.dropout == 0.5
    images = torch.randn(1, 1, 8, 8)
    assert not torch.equal(net(images), net(images))
    attention = MultiHeadAttention(StackConfig(E, heads=H, attention_dropout=0.5))
    x = torch.randn(1, N, E)
    assert not torch.equal(attention(x), attention(x)) and torch.equal(
        attention.eval()(x), attention(x)
    )
    net.eval()
    assert torch.equal(net(images), net(images))


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize(
    "kind", ["free", "padding", "causal", "padding and causal", "bias", "everything"]
)
def test_dropped_weights_are_those_of_the_fast_kernel(
    kind: str, kv_heads: int, monkeypatch: Any
) -> None:
    padding_mask = torch.tensor([[True] * N, [False] + [True] * (N - 1)])
    parts = {
        "padding": padding(padding_mask),
        "causal": causal(N),
        "bias": Mask().with_bias(torch.randn(1, H, N, N)),
    }
    mask = NO_MASK
    for name in parts:
        mask = mask & parts[name] if name in kind or kind == "everything" else mask
    attention, x = (
        MultiHeadAttention(StackConfig(E, heads=H, kv_heads=kv_heads, attention_dropout=0.5)),
        torch.randn(B, N, E, requires_grad=True),
    )
    leaves = [x, *attention.parameters()]
    fast = attention.eval()(x, mask=mask)
    upstream = torch.randn_like(fast)
    expected = torch.autograd.grad(fast, leaves, upstream)
    rates: list[float] = []
    monkeypatch.setattr(
        "modules.attention.fast_dropout", lambda weights, rate: rates.append(rate) or weights
    )
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda *_: pytest.fail("slow on CPUs")
    )
    slow = attention.train()(x, mask=mask)
    torch.testing.assert_close(slow, fast, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(slow, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    assert rates == [0.5]


def test_drop_path_drops_whole_samples() -> None:
    stack = Stack(replace(SMALL, depth=3, drop_path=0.5))
    rates = [[part.rate for part in block.residual1.children()] for block in stack.blocks]
    assert rates == [[], [0.25], [0.5]]
    drop = stack.blocks[2].residual1.drop_path
    kept = drop(torch.ones(1000, N, E))
    assert set(kept.unique().tolist()) == {0.0, 2.0} and kept.std((1, 2)).max() == 0
    assert kept.mean() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(drop.eval()(torch.ones(3, N, E)), torch.ones(3, N, E))


def test_recomputed_activations_change_nothing() -> None:
    for options in CHOICES:
        plain = Stack(replace(SMALL, dropout=0.2, **options))
        again = Stack(replace(SMALL, dropout=0.2, **{**options, "checkpoint_activations": True}))
        again.load_state_dict(plain.state_dict())
        x, other = torch.randn(B, N, E), source(options)
        for net in (plain, again):
            torch.manual_seed(1)
            net(x, context=other).square().sum().backward()
        for one, two in zip(plain.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_presets_run(name: str) -> None:
    preset = VIT_PRESETS[name]
    with torch.device("meta"):
        logits = ViT(preset)(torch.empty(2, preset.channels, preset.image_size, preset.image_size))
    assert logits.shape == (2, preset.num_classes)
