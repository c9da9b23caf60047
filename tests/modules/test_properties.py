"""What must hold for every variant, whatever its weights; new entries of a family join by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.attention import ATTENTIONS, AttentionCache, MultiHeadAttention
from modules.config import StackConfig
from modules.embedding import TokenEmbedding
from modules.feedforward import FEEDFORWARDS
from modules.init import INITS
from modules.lm_heads import TokenHead
from modules.masks import NO_MASK, Mask, causal, documents, padding, prefix
from modules.models.gpt import Decoder
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from modules.norm import NORMS
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.patch_embedding import STEMS
from modules.pooling import POOLINGS
from modules.position import POSITIONS, build_position, grid_positions, resize_grid
from modules.record import WeightRecorder
from modules.rotary_scaling import RotaryScaling
from modules.transformer import NO_CONTEXT, ORDERS, Context, Stack
from tests.helpers.tiny_models import assert_all_learn, close, label, shaken, tiny

B, N, M, E, H = 2, 6, 5, 16, 2
SMALL = StackConfig(E, 2, H, mlp_width=12)
TINY = ViTConfig(image_size=8, patch_size=2, channels=1, num_classes=3, stack=SMALL)
CHOICES: list[dict[str, Any]] = [
    *({"norm": name} for name in NORMS),
    *({"feedforward": name} for name in FEEDFORWARDS),
    *({"order": name} for name in ORDERS),
    *({"attention": name} for name in ATTENTIONS),
    *({"init": name} for name in INITS),
    {"kv_heads": 1},
    {"head_dim": 6},
    {"value_dim": 3, "kv_heads": 1},
    {"value_dim": 12, "cross_attention": True},
    {"bias": False, "qkv_bias": False},
    {"qk_norm": True},
    {"layer_scale": 0.1},
    {"causal": True},
    {"cross_attention": True, "context_width": 10},
    {"cross_attention": True, "order": "post"},
    {"cross_attention": True, "order": "parallel"},
    {"cross_attention": True, "order": "no_residual"},
    {"conv_kernel": 3},
    {"conv_kernel": 3, "order": "post"},
    {"conv_kernel": 3, "order": "parallel", "causal": True},
    {"checkpoint_activations": True},
]
every_choice = pytest.mark.parametrize("options", CHOICES, ids=label)
PADDING = torch.tensor([[True] * N, [False] * 2 + [True] * (N - 2)])  # on the left of row 1


def vit(**options: Any) -> ViT:
    return shaken(ViT(replace(TINY, **options)))


def context_for(options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Context:
    if not options.get("cross_attention"):
        return NO_CONTEXT
    return Context(torch.randn(B, M, options.get("context_width", E), dtype=dtype))


# Gradients ---------------------------------------------------------------------------------------


class Applied(nn.Module):
    """A network on an input that is learned, too."""

    def __init__(self, net: nn.Module, x: Tensor, *others: Any) -> None:
        super().__init__()
        self.net = net
        self.x = nn.Parameter(x)
        self.others = others

    def forward(self) -> Tensor:
        return self.net(self.x, *self.others)


class Step(nn.Module):
    """The loss of a language model, of tokens that it predicts."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self) -> Tensor:
        tokens = torch.arange(12).view(2, 6) % 6 + 1  # none is padding
        targets = tokens.roll(1, 1)
        if isinstance(self.net, Decoder):
            return self.net.loss(self.net(tokens), targets, 0.1, 0.3)[0]
        vectors = self.net.hidden(tokens, None, tokens % 2)
        loss, _ = self.net.loss(vectors, targets.flatten(), tokens >= 0, 0.1)
        return loss + self.net.sentence_logits(vectors).square().sum()


def check_gradients(net: nn.Module) -> None:
    """Finite differences in float64 by all weights, laid out as one vector."""
    shaken(net).double()
    names, values = zip(*net.named_parameters(), strict=True)

    def run(flat: Tensor) -> Tensor:
        parts = flat.split([value.numel() for value in values])
        weights = [part.view_as(value) for part, value in zip(parts, values, strict=True)]
        return torch.func.functional_call(net, dict(zip(names, weights, strict=True)), ())

    flat = torch.cat([value.detach().flatten() for value in values]).requires_grad_()
    assert torch.autograd.gradcheck(run, flat, fast_mode=True)


@every_choice
def test_gradients_of_blocks(options: dict[str, Any]) -> None:
    options = {"depth": 1, "heads": 2, "width": 8, "mlp_width": 6, **options}
    context = context_for({"context_width": 8, **options}, torch.float64)
    stack = Stack(StackConfig(**options), 3)
    check_gradients(Applied(stack, torch.randn(B, 3, 8), NO_MASK, None, context))


@pytest.mark.parametrize(
    "options",
    [
        *({"position": name, "stem": "patch", "register_tokens": 1} for name in POSITIONS),
        *({"stem": name, "patch_size": 4 if name == "hybrid" else 2} for name in STEMS),
        *({"pool": name, "norm_after_pool": True} for name in POOLINGS),
    ],
    ids=label,
)
def test_gradients_of_vits(options: dict[str, Any]) -> None:
    stack = StackConfig(8, 1, 2, mlp_width=6)
    net = ViT(replace(TINY, image_size=4, stack=stack, **options))
    check_gradients(Applied(net, torch.randn(B, 1, 4, 4)))


@pytest.mark.parametrize("kind", ["masked", "gpt"])
def test_gradients_of_a_training_step(kind: str) -> None:
    check_gradients(Step(tiny(kind, width=8, depth=1, heads=2, mlp_width=6)))


@every_choice
def test_every_parameter_of_a_stack_learns(options: dict[str, Any]) -> None:
    net = shaken(Stack(replace(SMALL, **options), N))
    out = net(torch.randn(B, N, E), context=context_for(options))
    assert_all_learn(net, (out * torch.randn_like(out)).sum())


@pytest.mark.parametrize("pool", POOLINGS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_parameter_of_a_vit_learns(position: str, pool: str) -> None:
    net = vit(position=position, pool=pool, register_tokens=2)
    assert_all_learn(net, net(torch.randn(B, 1, 8, 8)).square().sum())


# Who sees whom -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "none"])
def test_positions_tell_patches_apart(name: str) -> None:
    net = vit(position=name, pool="mean").eval()
    images = torch.randn(1, 1, 8, 8)
    assert (net(images) - net(images.transpose(2, 3).contiguous())).abs().max() > 1e-4


@pytest.mark.parametrize("name", POOLINGS)
def test_poolings_skip_padding_and_two_know_the_order(name: str) -> None:
    pool = shaken(POOLINGS[name](E, H, N))
    x = torch.randn(3, N, E)
    pooled = pool(x, torch.arange(N) < torch.tensor([[N], [2], [0]]))
    close(pooled[0], pool(x[:1])[0])
    close(pooled[1], pool(x[1:2, :2])[0])
    last = {"attention": "attention.output", "flatten": "linear"}.get(name)
    empty = pool.get_submodule(last).bias if last else torch.zeros(E)
    close(pooled[2], x[2, 0] if name == "cls" else empty)
    has_order = name in ("cls", "flatten")
    assert torch.allclose(pool(x), pool(x.flip(1)), atol=1e-5) == (not has_order)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kind", ["causal", "empty sequence", "empty row", "packed"])
def test_a_query_that_sees_nothing_gives_zeros(
    kind: str, with_bias: bool, dropout: float, attention: str
) -> None:
    second_row = torch.tensor([[False] * N, [True] * N])
    second_query = torch.eye(N, dtype=torch.bool)[1].expand(B, N)
    mask, masked = {
        "causal": (padding(PADDING) & causal(N), ~PADDING),
        "empty sequence": (padding(~second_row), second_row),
        "empty row": (Mask(~second_query[0, :, None].expand(1, 1, N, N)) & NO_MASK, second_query),
        "packed": (documents((~PADDING).long()) & padding(PADDING), ~PADDING),
    }[kind]
    net = shaken(ATTENTIONS[attention](E, H, bias=False, dropout=dropout))
    bias = torch.randn(1, H, N, N, requires_grad=True)
    x = torch.randn(B, N, E, requires_grad=True)
    weights: list[Tensor] = []
    for cache in (AttentionCache(), WeightRecorder(weights)):
        out = net(x, mask=mask.with_bias(bias) if with_bias else mask, cache=cache)
        assert not out[masked].any()
        assert dropout or out[~masked].any(-1).all()
        out.square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in (x, *net.parameters()))
        assert not with_bias or torch.isfinite(bias.grad).all()
    assert not weights[0].transpose(1, 2)[masked].any()  # (B, N, H, M)[masked]


def test_masks_combine_in_any_order() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]] * B)
    parts = [padding(PADDING), documents(ids), causal(N)]
    expected = (PADDING[:, None, None] & (ids[:, None, :, None] == ids[:, None, None])).tril()
    for first, second, third in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)):
        mask = parts[first] & parts[second] & parts[third]
        assert torch.equal(mask.allowed & ~mask.fully_masked, expected)
    assert (causal(N) & causal(N)).is_causal
    assert (causal(N) & NO_MASK).is_causal
    assert causal(2, 5).allowed[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert prefix(2, 3).allowed[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    seen = Mask(PADDING[:, None, None], causal=True).add_to(torch.zeros(B, H, N, N)).isfinite()
    assert torch.equal(seen, PADDING[:, None, None].expand(-1, H, N, -1).tril())
    bias = torch.randn(1, H, N, N)
    late = (parts[0] & causal(N)).with_bias(bias)
    early = parts[0].with_bias(bias) & causal(N)
    assert torch.equal(late.bias_and_mask, early.bias_and_mask)
    assert not early.is_causal
    twice = NO_MASK.with_bias(bias).with_bias(bias)
    assert torch.equal(twice.bias_and_mask, 2 * bias)


# Positions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, grid", [("rotary", (9,)), ("rotary2d", (4, 5))])
def test_rotary_scores_depend_on_the_offset_only(name: str, grid: tuple[int, ...]) -> None:
    options = {"fraction": 0.5} if name == "rotary" else {}
    rotary = build_position(name, options, StackConfig(32, heads=2), grid)
    positions = grid_positions(grid)
    q = torch.randn(1, 2, 1, 16).expand(-1, -1, positions.shape[1], -1)
    k = torch.randn(1, 2, 1, 16).expand(-1, -1, positions.shape[1], -1)
    here = rotary.rotate(positions)
    there = rotary.rotate(positions + torch.arange(7, 7 + len(grid)))
    scores = here(q) @ here(k).mT
    close(there(q) @ there(k).mT, scores, atol=1e-4)
    assert (scores[..., 0, 1:] - scores[..., 0, :1]).abs().min() > 1e-4
    close(here(q).norm(dim=-1), q.norm(dim=-1))
    behind = here.after_prefix(2)(torch.cat((k[:, :, :2], q), 2))
    assert torch.equal(behind[:, :, :2], k[:, :, :2])
    close(behind[:, :, 2:], here(q))


@pytest.mark.parametrize("kind", ["linear", "llama3"])
def test_scaled_rotary_positions_turn_slower(kind: Any) -> None:
    scaling = RotaryScaling(kind, 4.0, 1.0, 4.0, 64)
    stack = StackConfig(64, heads=2)
    positions = torch.tensor([[1, 7, 30]])[..., None]
    rotation = POSITIONS["rotary"](stack, (9,), scaling=scaling).rotate(positions)
    wavelength = 2 * torch.pi * 10000 ** (torch.arange(16) / 16)
    kept = ((64 / wavelength - 1) / 3).clamp(0, 1) if kind == "llama3" else torch.zeros(16)
    angle = positions.float() / wavelength * 2 * torch.pi * (kept + (1 - kept) / 4)
    close(rotation.cos[0, 0, :, :16], angle.cos()[0])
    close(rotation.sin[0, 0, :, 16:], angle.sin()[0])


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_default_to_the_grid(name: str) -> None:
    position = shaken(POSITIONS[name](SMALL, (2, 3)))
    x = torch.randn(B, 6, E)
    close(position.embed(x), position.embed(x, grid_positions((2, 3))))


def test_a_learned_table_is_resized_to_another_grid() -> None:
    ramp = grid_positions((8, 8)).float().view(8, 8, 2)
    assert torch.equal(resize_grid(ramp, (8, 8)), ramp)
    close(resize_grid(ramp, (4, 4))[1:3, 1:3, 0], torch.tensor([[2.5, 2.5], [4.5, 4.5]]), 0.1)
    line = resize_grid(torch.arange(4.0)[:, None], (8,))
    assert line.shape == (8, 1)
    assert (line.diff(dim=0) >= 0).all()


# Sizes, roles, initial values, dropout -----------------------------------------------------------


def test_roles_and_depths_of_a_vit() -> None:
    net = vit(pool="attention", register_tokens=1, class_token=True, stem="conv")
    roles = parameter_roles(net)
    first = {name: role for name, role in roles.items() if "blocks.1" not in name}
    by_role = {role: {n for n, r in first.items() if r == role} for role in roles.values()}
    stem = "embed.stem.layers"
    assert by_role["table"] == {f"{stem}.0.weight", "head.linear.weight"}
    block = "stack.blocks.0"
    assert by_role["matrix"] == {
        f"{stem}.3.weight",
        *(f"{block}.attention.{name}.weight" for name in ("qkv", "output")),
        *(f"{block}.feedforward.{name}.weight" for name in ("up", "down")),
        *(f"pool.attention.{name}.weight" for name in ("query", "key_value", "output")),
    }
    assert {"position.table", "prefix.vectors", "pool.query", "head.linear.bias"} < (
        by_role["scalar"]
    )
    depths = {name.split(".")[0]: depth for name, depth in parameter_depths(net).items()}
    assert depths == {"embed": 0, "position": 0, "prefix": 0, "stack": 3, "pool": 3, "head": 3}
    assert parameter_depths(net)["stack.blocks.1.norm1.weight"] == 2


def test_tied_weights_have_one_role() -> None:
    embedding = TokenEmbedding(11, E, scale=True)
    net = nn.ModuleDict({"embedding": embedding, "head": TokenHead(embedding, bias=True)})
    assert parameter_roles(net) == {"embedding.weight": "table", "head.bias": "scalar"}
    tokens = torch.tensor([[1, 2]])
    close(embedding(tokens), embedding.weight[tokens] * E**0.5)
    close(net["head"](torch.eye(E)[None])[0], embedding.weight.T)


def test_convolutions_start_with_unit_variance() -> None:
    conv = ViT(replace(VIT_PRESETS["tiny"], image_size=16)).embed.stem.conv
    assert conv.weight.std().item() == pytest.approx(0.88 * (3 * 16 * 16) ** -0.5, rel=0.03)
    assert not conv.bias.any()


def test_dropout_is_after_embedding_attention_and_feed_forward() -> None:
    net = vit(stack=replace(SMALL, dropout=0.5, mlp_dropout=0.25, attention_dropout=0.125))
    rates = [module.p for module in net.modules() if isinstance(module, nn.Dropout)]
    assert rates == [0.5] + [0.5, 0.25, 0.5] * 2
    x = torch.randn(1, N, E)
    attention = net.stack.blocks[0].attention
    assert attention.dropout == 0.125
    assert not torch.equal(attention(x), attention(x))
    assert torch.equal(attention.eval()(x), attention(x))


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize("parts", [(), (0,), (1,), (0, 1), (2,), (0, 1, 2)], ids=str)
def test_attention_with_dropout_is_that_of_the_fast_kernel(
    parts: tuple[int, ...], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = [padding(PADDING.flip(1)), causal(N), Mask().with_bias(torch.randn(1, H, N, N))]
    mask = NO_MASK
    for part in parts:
        mask = mask & choices[part]
    net = MultiHeadAttention(E, H, kv_heads, dropout=0.5)
    x = torch.randn(B, N, E, requires_grad=True)
    leaves = [x, *net.parameters()]
    fast = net.eval()(x, mask=mask)
    upstream = torch.randn_like(fast)
    expected = torch.autograd.grad(fast, leaves, upstream)
    rates: list[float] = []
    keep_all = "modules.attention.fast_dropout"
    monkeypatch.setattr(keep_all, lambda weights, rate: rates.append(rate) or weights)
    slow = net.train()(x, mask=mask)
    close(slow, fast)
    close(torch.autograd.grad(slow, leaves, upstream), expected, rtol=1e-4)
    assert rates == [0.5]  # CPUs do not drop in the fast kernel


def test_drop_path_drops_whole_samples() -> None:
    net = Stack(replace(SMALL, depth=3, drop_path=0.5))
    rates = [[part.rate for part in block.residual1.children()] for block in net.blocks]
    assert rates == [[], [0.25], [0.5]]
    drop = net.blocks[2].residual1.drop_path
    kept = drop(torch.ones(1000, N, E))
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert kept.std((1, 2)).max() == 0
    assert kept.mean() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(drop.eval()(torch.ones(3, N, E)), torch.ones(3, N, E))


@every_choice
def test_recomputed_activations_change_nothing(options: dict[str, Any]) -> None:
    plain = Stack(replace(SMALL, dropout=0.2, **options), N)
    options = {**options, "checkpoint_activations": True}
    if options.get("norm") == "batchnorm":  # its running statistics would change
        with pytest.raises(ValueError, match="checkpoint_activations"):
            replace(SMALL, **options)
        return
    again = Stack(replace(SMALL, dropout=0.2, **options), N)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(B, N, E)
    context = context_for(options)
    for net in (plain, again):
        torch.manual_seed(1)
        net(x, context=context).square().sum().backward()
    close((p.grad for p in again.parameters()), (p.grad for p in plain.parameters()), 0, 0)
