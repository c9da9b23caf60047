"""Encoder-decoders: torch's own `nn.Transformer`, what a cache or padding must not change, and who sees whom."""

import copy
import json
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig
from modules.models import seq2seq_config
from modules.models.seq2seq import ARCHITECTURES, SEQ2SEQ_PRESETS, Seq2Seq, Seq2SeqConfig
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.position import POSITIONS
from modules.record import AttentionRecord
from tests.modules.test_parity_torch import copy_stack
from tests.modules.test_properties import shaken

B, M, N, V, E = 3, 7, 6, 19, 24
ENCODER = StackConfig(E, 2, 4, mlp_width=20)
DECODER = replace(ENCODER, causal=True, cross_attention=True)
TYINGS = get_args(seq2seq_config.TyingName)
PLACES = [name for name in POSITIONS if not name.endswith("2d")]
VARIANTS: list[dict[str, Any]] = [
    *({"position": name} for name in PLACES),
    *({"tying": name, "order": "post"} for name in TYINGS),
    {
        "embedding_norm": True,
        "output_bias": True,
        "scale_embedding": False,
        "kv_heads": 2,
        "position": "learned",
    },
    {
        "norm": "rmsnorm",
        "feedforward": "geglu",
        "bias": False,
        "qkv_bias": False,
        "position": "t5",
        "head_dim": 5,
    },
    {"order": "parallel", "attention": "additive", "qk_norm": True},
]
LENGTHS = torch.tensor([7, 3, 5])
KEEP = torch.arange(M) < LENGTHS[:, None]  # (B, M)


def name_of(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


def model(architecture: str = "encoder_decoder", **options: Any) -> Seq2Seq:
    own = {key: options.pop(key) for key in [*options] if key in Seq2SeqConfig.__dataclass_fields__}
    sizes = {
        "source_vocabulary": V,
        "target_vocabulary": V,
        "max_length": 12,
        "architecture": architecture,
    }
    stacks = {"encoder": replace(ENCODER, **options), "decoder": replace(DECODER, **options)}
    return shaken(ARCHITECTURES[architecture](Seq2SeqConfig(**{**sizes, **stacks, **own}))).eval()


def texts() -> tuple[Tensor, Tensor]:
    """Source and target tokens, (B, M) and (B, N)."""
    return torch.randint(V, (B, M)), torch.randint(V, (B, N))


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-5)


both = pytest.mark.parametrize("architecture", ARCHITECTURES)
every = pytest.mark.parametrize("options", VARIANTS, ids=name_of)


def test_names_are_the_keys() -> None:
    assert tuple(ARCHITECTURES) == get_args(seq2seq_config.ArchitectureName)


# nn.Transformer ------------------------------------------------------------------------------------------------------


def their_loss(
    net: Seq2Seq, theirs: nn.Transformer, given: tuple[Tensor, ...], table: Tensor
) -> tuple[Tensor, Tensor]:
    """Vectors (B, N, E) and smoothed loss of torch's encoder-decoder between our tables."""
    source, tokens, targets, padding_mask = given
    place = torch.arange(max(M, N))[:, None] / 10000.0 ** (torch.arange(0, E, 2) / E)
    waves = torch.stack((place.sin(), place.cos()), -1).flatten(1)  # (max(M, N), E)
    x, y = (table[t] * E**0.5 + waves[: t.shape[1]] for t in (source, tokens))
    hidden = theirs(
        x,
        y,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(N).isinf(),
        src_key_padding_mask=~KEEP,
        tgt_key_padding_mask=~padding_mask,
        memory_key_padding_mask=~KEEP,
    )
    return hidden, F.cross_entropy(
        (hidden @ table.T).flatten(0, 1), targets.flatten(), label_smoothing=0.1
    )


@pytest.mark.parametrize("given_padding_mask", [False, True])
@pytest.mark.parametrize("order", ["pre", "post"])
def test_outputs_and_gradients_are_those_of_torch(order: str, given_padding_mask: bool) -> None:
    theirs = shaken(
        nn.Transformer(E, 4, 2, 2, 20, 0.0, batch_first=True, norm_first=order == "pre")
    )
    net = model(order=order, final_norm=True, feedforward="relu", norm_eps=1e-5).train()
    for ours, their in ((net.encoder, theirs.encoder), (net.decoder, theirs.decoder)):
        copy_stack(ours.stack, their)
    source, tokens = texts()
    padding_mask = torch.arange(N) < torch.tensor([6, 2, 4])[:, None]
    targets = torch.randint(V, (B, N)).masked_fill(~padding_mask, -100)
    table = net.embed.weight.detach().clone().requires_grad_()
    expected, their = their_loss(net, theirs, (source, tokens, targets, padding_mask), table)
    hidden = net(source, tokens, KEEP, padding_mask if given_padding_mask else None)
    close(hidden[padding_mask], expected[padding_mask])
    ours, _ = net.loss(hidden, targets, 0.1)
    close(ours, their)
    ours.backward()
    their.backward()
    wanted = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
        for mine, other in ((wanted.encoder, theirs.encoder), (wanted.decoder, theirs.decoder)):
            copy_stack(mine.stack, other)
        wanted.embed.weight.copy_(table.grad)
    for (name, one), two in zip(net.named_parameters(), wanted.parameters(), strict=True):
        assert one.grad is not None and one.grad.abs().sum() > 0, name
        close(one.grad, two)


# Cache and padding ---------------------------------------------------------------------------------------------------


@torch.no_grad()
@both
@every
@pytest.mark.parametrize("pieces", [(1,) * N, (2, 1, 3)], ids=str)
def test_step_by_step_is_teacher_forced(
    architecture: str, options: dict[str, Any], pieces: tuple[int, ...]
) -> None:
    net, (source, tokens) = model(architecture, **options), texts()
    whole = net.logits(net(source, tokens, KEEP))
    seen = net.encode(source, KEEP)
    cache = net.make_cache(seen, N)
    parts = [net.decode(part, seen, cache=cache) for part in tokens.split(pieces, 1)]
    close(net.logits(torch.cat(parts, 1)), whole)
    assert cache.length == cache.length


@torch.no_grad()
@both
@every
def test_padding_changes_nothing(architecture: str, options: dict[str, Any]) -> None:
    net, (source, tokens) = model(architecture, **options), texts()
    ends = (6, 2, 4)
    padding_mask = torch.arange(N) < torch.tensor(ends)[:, None]
    whole, kept = net(source, tokens, KEEP), net(source, tokens, KEEP, padding_mask)
    for row, (length, end) in enumerate(zip(LENGTHS, ends, strict=True)):
        alone = net(source[row : row + 1, :length], tokens[row : row + 1, :end])[0]
        close(whole[row, :end], alone)
        close(kept[row, :end], alone)
    left = net(
        source, tokens.flip(1), KEEP, padding_mask.flip(1)
    )  # padding on the left of the target
    for row, end in enumerate(ends):
        close(left[row, N - end :], net(source, tokens.flip(1)[:, N - end :], KEEP)[row])


# Who sees whom -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@both
@every
def test_no_token_sees_a_later_one(architecture: str, options: dict[str, Any]) -> None:
    net, (source, tokens) = model(architecture, **options), texts()
    before = net(source, tokens, KEEP)
    for place in range(N):
        changed = tokens.clone()
        changed[:, place] = (tokens[:, place] + 1) % V
        after = net(source, changed, KEEP)
        torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-6, rtol=0)
        moved = (after - before).abs().amax(2)[:, place:]  # (B, N - place)
        assert (moved > 1e-5).all()


@torch.no_grad()
@both
def test_all_see_all_of_the_source_but_its_padding(architecture: str) -> None:
    net, (source, tokens) = model(architecture, position="rotary"), texts()
    before = net(source, tokens, KEEP)
    for place in range(M):
        changed = source.clone()
        changed[:, place] = (source[:, place] + 1) % V
        moved = (net(changed, tokens, KEEP) - before).abs().amax(2) > 1e-5  # (B, N)
        assert torch.equal(moved, KEEP[:, place : place + 1].expand(-1, N))


@torch.no_grad()
def test_weights_can_be_watched() -> None:
    net, (source, tokens), record, own = model(), texts(), AttentionRecord(), AttentionRecord()
    seen = net.encode(source, KEEP, own)
    close(net.decode(tokens, seen, cache=record), net(source, tokens, KEEP))
    assert [tuple(weights.shape) for weights in own.self_attn] == [(B, 4, M, M)] * 2
    assert [tuple(weights.shape) for weights in record.cross_attn] == [(B, 4, N, M)] * 2
    for weights in record.cross_attn:
        close(weights.sum(-1), torch.ones(B, 4, N))
        assert weights.masked_select(~KEEP[:, None, None]).abs().max() == 0
    assert record.self_attn[0].triu(1).abs().max() == 0
    net, record = model("prefix"), AttentionRecord()
    net.decode(tokens, net.encode(source, KEEP), cache=record)
    (weights, _) = record.self_attn
    assert weights.shape == (B, 4, M + N, M + N) and weights[:, :, :M, M:].abs().max() == 0
    assert weights[0, :, :M, :M].min() > 0 and weights[0, :, M:, M:].triu(1).abs().max() == 0


# Loss, weights, sizes ------------------------------------------------------------------------------------------------


@both
@every
def test_loss_and_gradients_are_those_of_all_logits(
    architecture: str, options: dict[str, Any]
) -> None:
    net, (source, tokens), targets = (
        model(architecture, **options).train(),
        texts(),
        torch.randint(V, (B, N)),
    )
    targets[1, 2:] = -100
    hidden = net(source, tokens, KEEP)
    logits = net.logits(hidden).flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)
    ours, right = net.loss(hidden, targets, 0.1)
    close(ours, plain)
    assert right == (logits.argmax(1) == targets.flatten()).sum()
    names, params = zip(*net.named_parameters(), strict=True)
    grads = torch.autograd.grad(ours, params, retain_graph=True)
    for name, one, two in zip(names, grads, torch.autograd.grad(plain, params), strict=True):
        close(one, two)
        assert one.abs().sum() > 0, name
    roles = parameter_roles(net)
    assert list(roles) == list(parameter_depths(net)) == [*names]
    assert {name for name, role in roles.items() if role == "table"} == {
        n for n in names if n.endswith("embed.weight")
    }


@both
@pytest.mark.parametrize("tying", TYINGS)
def test_tables_are_shared_as_said(architecture: str, tying: Any) -> None:
    sizes = {} if tying in ("all", "inputs") else {"source_vocabulary": V + 4}
    net, source = model(architecture, tying=tying, **sizes), texts()[0]
    tables = {name.split(".")[0] for name in net.state_dict() if name.endswith("embed.weight")}
    own = {
        "all": set(),
        "inputs": {"unembed"},
        "target": {"source_embed"},
        "none": {"source_embed", "unembed"},
    }
    assert tables == {"embed"} | own[tying]
    with torch.no_grad():
        before, hidden = net.encode(source).states.clone(), torch.randn(1, E)
        close(
            net.logits(hidden),
            hidden @ (net.embed if net.unembed is None else net.unembed).weight.T,
        )
        net.embed.weight.zero_()
        assert torch.equal(net.encode(source).states, before) == (tying in ("target", "none"))


def test_start_values() -> None:
    torch.manual_seed(0)
    preset = replace(
        SEQ2SEQ_PRESETS["tiny"], source_vocabulary=2000, target_vocabulary=2000, max_length=50
    )
    for tying in TYINGS:
        net = Seq2Seq(replace(preset, tying=tying)).eval()
        tokens = torch.arange(2000)[None]
        assert net.embed(tokens).std().item() == pytest.approx(1, abs=0.02)
        assert net.embed_source(tokens).std().item() == pytest.approx(1, abs=0.02)
        with torch.no_grad():
            scores = net.logits(net(tokens[:, :40], tokens[:, 40:80]))
        assert 0.7 < scores.std() < 1.4
        qkv = net.encoder.stack.blocks[0].attention.qkv
        assert qkv.weight.abs().max().item() == pytest.approx(
            (6 / (4 * 128)) ** 0.5, rel=0.01
        )  # as nn.Transformer's
    plain = Seq2Seq(replace(preset, scale_embedding=False)).embed.weight
    assert plain.abs().max().item() == pytest.approx((6 / 2128) ** 0.5, rel=0.01)


def test_published_sizes() -> None:
    tiny = SEQ2SEQ_PRESETS["tiny"]
    for stack in (tiny.encoder, tiny.decoder):
        assert (stack.depth, stack.width, stack.mlp_width, stack.heads) == (4, 128, 256, 4)
    published = {"base": (512, 8, 2048), "big": (1024, 16, 4096)}
    assert {*SEQ2SEQ_PRESETS} == {"tiny", *published}
    for name, (width, heads, hidden) in published.items():
        with torch.device("meta"):
            config = replace(
                SEQ2SEQ_PRESETS[name],
                source_vocabulary=37000,
                target_vocabulary=37000,
                max_length=9,
            )
            net, theirs = Seq2Seq(config), nn.Transformer(width, heads, 6, 6, hidden)
        count, wanted = (sum(p.numel() for p in part.parameters()) for part in (net, theirs))
        assert count == wanted - 4 * width + 37000 * width  # theirs has two norms more


@pytest.mark.parametrize("name", SEQ2SEQ_PRESETS)
def test_config_round_trip(name: str) -> None:
    data = json.loads(json.dumps(asdict(SEQ2SEQ_PRESETS[name])))
    stacks = {side: StackConfig(**data.pop(side)) for side in ("encoder", "decoder")}
    assert Seq2SeqConfig(**data, **stacks) == SEQ2SEQ_PRESETS[name]


@both
@pytest.mark.parametrize("position", PLACES)
def test_recomputed_activations_change_nothing(architecture: str, position: str) -> None:
    net, (source, tokens) = (
        model(architecture, position=position, checkpoint_activations=True),
        texts(),
    )
    with torch.no_grad():
        plain = net(source, tokens, KEEP)
    close(net(source, tokens, KEEP), plain)
    net.loss(net(source, tokens, KEEP), tokens)[0].backward()
    assert all(p.grad is not None for p in net.parameters())


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"source_vocabulary": 0}, "source_vocabulary is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"position": "rotary2d"}, "for images"),
        ({"position": "rotary", "position_options": {"fraction": 0.0}}, "fraction is 0.0"),
        ({"encoder": DECODER}, "leave encoder.causal and encoder.cross_attention off"),
        ({"decoder": ENCODER}, "set decoder.causal and decoder.cross_attention"),
        ({"encoder": StackConfig(12, 1, 2)}, "The encoder is 12 wide and the decoder 192"),
        (
            {"decoder": StackConfig(causal=True, cross_attention=True, context_width=5)},
            "leave decoder.context_width out",
        ),
        (
            {"source_vocabulary": 5, "target_vocabulary": 6},
            'there are 5 source tokens and 6 target tokens; .*"target"',
        ),
    ],
)
def test_models_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Seq2SeqConfig(**options)


@both
def test_wrong_inputs_are_named(architecture: str) -> None:
    with pytest.raises(ValueError, match="fill all in"):
        ARCHITECTURES[architecture](Seq2SeqConfig(source_vocabulary=5, target_vocabulary=5))
    net, (source, tokens) = model(architecture, position="learned"), texts()
    with pytest.raises(ValueError, match="learned positions; shorten them"):
        net.make_cache(net.encode(source), 25)
    with pytest.raises(ValueError, match="learned positions; shorten them"):
        net(source, torch.zeros(B, 25, dtype=torch.int64))
    cache = net.make_cache(net.encode(source), 4)
    with pytest.raises(ValueError, match="do not fit into a cache"):
        net.decode(tokens, net.encode(source), cache=cache)


@torch.no_grad()
def test_autocast_chooses_the_caches_type() -> None:
    net, (source, tokens) = model(), texts()
    with torch.autocast("cpu", torch.bfloat16):
        seen = net.encode(source, KEEP)
        cache = net.make_cache(seen, N)
        net.decode(tokens, seen, cache=cache)
    assert cache.data.dtype == torch.bfloat16


@pytest.mark.parametrize("texts, tokens", [(0, 3), (2, 0)])
def test_there_may_be_no_text_or_no_token(texts: int, tokens: int) -> None:
    net = model()
    hidden = net(
        torch.zeros(texts, 4, dtype=torch.int64), torch.zeros(texts, tokens, dtype=torch.int64)
    )
    assert hidden.shape == (texts, tokens, net.config.decoder.width)


@pytest.mark.parametrize("sources, texts", [(4, 2), (2, 4), (2, 3), (4, 3)])
def test_sources_and_texts_of_different_numbers_do_not_mix(sources: int, texts: int) -> None:
    with pytest.raises(RuntimeError, match="size"):
        model()(
            torch.zeros(sources, 5, dtype=torch.int64), torch.zeros(texts, 6, dtype=torch.int64)
        )
