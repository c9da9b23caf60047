"""Encoders, classifiers and masked language models: what must hold whatever the weights, and what is refused."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig
from modules.feedforward import GatedFeedForward
from modules.heads import POOLERS
from modules.models.bert import BERT_PRESETS, BertClassifier, BertConfig, BertMaskedLM, Encoder
from modules.models.vit import VIT_PRESETS, ViT
from modules.parameter_groups import parameter_depths, parameter_roles
from modules.pooling import POOLINGS
from modules.position import POSITIONS, Rotary
from modules.record import AttentionRecord
from modules.transformer import Block
from tests.modules.test_properties import CHOICES, label, shaken

V, N, E = 13, 7, 16
TINY = BertConfig(
    V,
    3,
    N,
    segments=2,
    embedding_norm=True,
    stack=StackConfig(width=E, depth=2, heads=2, mlp_width=12),
)
PLACES = [name for name in POSITIONS if not name.endswith("2d")]
VARIANTS: list[dict[str, Any]] = [
    *({"stack": choice} for choice in CHOICES if not {"causal", "cross_attention"} & choice.keys()),
    *({"position": name} for name in PLACES),
    *({"pool": name} for name in POOLINGS),
    *({"pooler": name} for name in POOLERS),
    {"segments": 0},
    {"embedding_norm": False},
]


def build(kind: Any, options: dict[str, Any] | None = None) -> Any:
    options = dict(options or {})
    stack = replace(TINY.stack, **options.pop("stack", {}))
    return shaken(kind(replace(TINY, stack=stack, **options))).eval()


def texts(lengths: tuple[int, ...] = (N, 3, 5)) -> tuple[Tensor, Tensor]:
    padding_mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return torch.randint(1, V, padding_mask.shape).masked_fill(~padding_mask, 0), padding_mask


def name_of(options: dict[str, Any]) -> str:
    return label(options.get("stack", options))


def test_tokens_are_dropped_in_training_only() -> None:
    options = {"token_dropout": 0.5, "position": "none", "embedding_norm": False, "segments": 0}
    net, (tokens, _) = build(Encoder, options), texts()
    seen: list[Tensor] = []
    net.stack.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    net(tokens)
    net.train()(tokens)
    table = net.embed(tokens)  # (B, N, E)
    assert torch.equal(seen[0], table)
    gone = seen[1].eq(0).all(-1)
    assert gone.any() and not gone.all()
    torch.testing.assert_close(seen[1][~gone], 2 * table[~gone])


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_a_padded_batch_equals_each_text_alone(options: dict[str, Any]) -> None:
    net, (tokens, padding_mask) = build(BertClassifier, options), texts()
    segments = (torch.arange(N) > 2).long().expand_as(tokens) if net.config.segments else None
    hidden, logits = (
        net.encoder(tokens, padding_mask, segments),
        net(tokens, padding_mask, segments),
    )
    for i, length in enumerate(padding_mask.sum(1).tolist()):
        one = (
            tokens[i : i + 1, :length],
            None,
            None if segments is None else segments[i : i + 1, :length],
        )
        torch.testing.assert_close(hidden[i, :length], net.encoder(*one)[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits[i], net(*one)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_only_positions_know_the_order(options: dict[str, Any]) -> None:
    net, (tokens, _) = build(Encoder, {"position": "none", **options}), texts((N, N))
    order = torch.tensor([6, 2, 4, 0, 1, 5, 3])
    moved, straight = net(tokens[:, order]), net(tokens)[:, order]
    if net.config.position == "none":
        torch.testing.assert_close(moved, straight, atol=1e-5, rtol=1e-5)
    else:
        assert (moved - straight).abs().max() > 1e-3


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_every_parameter_gets_a_gradient_a_role_and_a_depth(options: dict[str, Any]) -> None:
    net, (tokens, padding_mask) = build(BertClassifier, options).train(), texts()
    segments = torch.randint(2, tokens.shape) if net.config.segments else None
    out = net(tokens, padding_mask, segments)
    (out * torch.randn_like(out)).sum().backward()
    names = [name for name, _ in net.named_parameters()]
    assert not [
        name for name, p in net.named_parameters() if p.grad is None or p.grad.abs().sum() == 0
    ]
    assert list(parameter_roles(net)) == list(parameter_depths(net)) == names


@pytest.mark.parametrize("name", PLACES)
def test_gradients_by_finite_differences(name: str) -> None:
    stack = StackConfig(width=8, depth=1, heads=2, mlp_width=6)
    config = replace(TINY, vocabulary=6, position=name, pool="mean", pooler="tanh", stack=stack)  # type: ignore[arg-type]
    net, (tokens, padding_mask) = shaken(BertClassifier(config)).double(), texts((4, 2))
    names, values = zip(*net.named_parameters(), strict=True)

    def run(flat: Tensor) -> Tensor:
        parts = flat.split([value.numel() for value in values])
        weights = {
            key: part.view_as(value) for key, part, value in zip(names, parts, values, strict=True)
        }
        return torch.func.functional_call(net, weights, (tokens % 5 + 1, padding_mask))

    flat = torch.cat([value.detach().flatten() for value in values]).requires_grad_()
    assert torch.autograd.gradcheck(run, flat, fast_mode=True)


def test_full_batches_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    net, (tokens, _) = build(Encoder), texts((N, N))
    expected = net(tokens)
    monkeypatch.setattr(
        "modules.masks._unmask_empty_rows",
        lambda allowed: pytest.fail("a mask where nothing is padding"),
    )
    assert torch.equal(net(tokens, torch.ones_like(tokens, dtype=torch.bool)), expected)


@pytest.mark.parametrize("name", PLACES)
def test_longer_texts_than_the_model_was_built_for(name: str) -> None:
    net, tokens = build(Encoder, {"position": name}), torch.randint(1, V, (1, N + 2))
    if name == "learned":
        with pytest.raises(ValueError, match="9 tokens are more than the 7 learned positions"):
            net(tokens)
    else:
        assert torch.isfinite(net(tokens)).all()


def test_segments_change_the_vectors() -> None:
    net, (tokens, _) = build(Encoder), texts((N, N))
    first = torch.zeros_like(tokens)
    assert torch.equal(net(tokens), net(tokens, None, first))
    assert (net(tokens, None, first + 1) - net(tokens)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="knows no segments"):
        build(Encoder, {"segments": 0})(tokens, None, first)


def test_attention_weights_on_request() -> None:
    net, (tokens, padding_mask), record = build(BertClassifier), texts(), AttentionRecord()
    torch.testing.assert_close(
        net(tokens, padding_mask, None, record), net(tokens, padding_mask), atol=1e-5, rtol=1e-5
    )
    assert [tuple(weights.shape) for weights in record.self_attn] == [(3, 2, N, N)] * 2
    assert record.self_attn[0].masked_fill(padding_mask[:, None, None], 0).abs().max() == 0


# Masked language models ----------------------------------------------------------------------------------------------


def test_scores_at_chosen_places_only() -> None:
    net, (tokens, padding_mask) = build(BertMaskedLM), texts()
    where = torch.zeros_like(padding_mask)
    where[0, 2] = where[1, 0] = where[2, 4] = True
    every, some = net(tokens, padding_mask), net(tokens, padding_mask, None, where)
    assert every.shape == (3 * N, V) and some.shape == (3, V)
    torch.testing.assert_close(some, every.unflatten(0, (3, N))[where])
    flat = torch.tensor([2 * N + 4, 2])
    torch.testing.assert_close(net(tokens, padding_mask, None, flat), every[flat])
    assert net(tokens, padding_mask, None, torch.zeros_like(padding_mask)).shape == (0, V)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_that_of_the_scores(smoothing: float) -> None:
    net, (tokens, padding_mask) = build(BertMaskedLM), texts()
    where, targets = torch.rand(padding_mask.shape) < 0.6, torch.randint(V, padding_mask.shape)
    targets = targets[where]
    logits = net(tokens, padding_mask, None, where)
    plain = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    loss, right = net.loss(net.encoder(tokens, padding_mask), targets, where, smoothing)
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-5)
    assert right == (logits.argmax(1) == targets).sum()
    leaves = list(net.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(plain, leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)


def test_the_table_is_shared_and_stored_once() -> None:
    net = build(BertMaskedLM)
    state = net.state_dict()
    assert sum(value.shape == (V, E) for value in state.values()) == 1
    other = BertMaskedLM(net.config).eval()
    other.load_state_dict(state, assign=True)
    tokens, _ = texts((N, N))
    assert torch.equal(other(tokens), net(tokens))
    other.encoder.embed.weight.data.zero_()
    assert torch.equal(other(tokens), other.head.tokens.bias.expand(2 * N, V))


def test_whether_one_sentence_follows_the_other() -> None:
    net, (tokens, padding_mask) = build(BertMaskedLM, {"next_sentence": True}), texts()
    hidden = net.encoder(tokens, padding_mask)
    logits = net.sentence_logits(hidden)
    assert logits.shape == (3, 2)
    changed = hidden.clone()
    changed[:, 1:] = 0
    assert torch.equal(net.sentence_logits(changed), logits)  # from the first token alone
    with pytest.raises(ValueError, match="next_sentence: true"):
        build(BertMaskedLM).sentence_logits(hidden)


# Roles, depths, configs ----------------------------------------------------------------------------------------------


def test_roles_of_new_parts() -> None:
    net = nn.ModuleDict(
        {"mlm": build(BertMaskedLM, {"next_sentence": True}), "classes": build(BertClassifier)}
    )
    roles = parameter_roles(net)
    tables = {name for name, role in roles.items() if role == "table"}
    assert tables == {
        f"{kind}.{name}.weight"
        for kind, name in (
            *(
                (kind, f"encoder.{part}")
                for kind in ("mlm", "classes")
                for part in ("embed", "segment")
            ),
            ("mlm", "sentence.linear"),
            ("classes", "head.linear"),
        )
    }
    matrices = {name for name, role in roles.items() if role == "matrix" and "blocks" not in name}
    assert matrices == {"mlm.head.dense.weight", "mlm.pooler.dense.weight"}
    assert roles["mlm.head.tokens.bias"] == roles["classes.encoder.position.table"] == "scalar"


@pytest.mark.parametrize("preset", ["cifar_tiny", "digits"])
def test_depths_of_a_vit(preset: str) -> None:
    config = replace(VIT_PRESETS[preset], register_tokens=1, pool="attention", position="learned")
    check_depths(
        ViT(config), config.stack.depth, ("embed.", "position.", "prefix."), "", ("pool.", "head.")
    )


def test_depths_of_encoders() -> None:
    front = ("encoder.embed.", "encoder.segment.", "encoder.position.", "encoder.norm.")
    classifier = build(BertClassifier, {"pool": "attention", "pooler": "relu"})
    check_depths(classifier, 2, front, "encoder.", ("pool.", "pooler.", "head."))
    masked = build(BertMaskedLM, {"next_sentence": True, "stack": {"final_norm": True}})
    check_depths(masked, 2, front, "encoder.", ("head.", "pooler.", "sentence."))


def check_depths(
    net: nn.Module, depth: int, front: tuple[str, ...], inner: str, end: tuple[str, ...]
) -> None:
    found: dict[str, int] = parameter_depths(net)
    for name, at in found.items():
        if name.startswith(front):
            assert at == 0, name
        elif name.startswith(f"{inner}stack.blocks."):
            assert at == 1 + int(name.split("blocks.")[1].split(".")[0]), name
        else:
            assert name.startswith((f"{inner}stack.norm.", *end)) and at == depth + 1, name
    assert set(found.values()) == set(range(depth + 2))


@pytest.mark.parametrize("name", BERT_PRESETS)
def test_presets_run_and_survive_files(name: str) -> None:
    preset = replace(BERT_PRESETS[name], vocabulary=V, num_classes=3)
    data = json.loads(json.dumps(asdict(preset)))
    assert BertConfig(**{**data, "stack": StackConfig(**data["stack"])}) == preset
    with torch.device("meta"):
        assert BertClassifier(preset)(torch.zeros(2, N, dtype=torch.long)).shape == (2, 3)
        assert BertMaskedLM(preset)(torch.zeros(2, N, dtype=torch.long)).shape == (2 * N, V)


def test_modern_is_pre_norm_with_rotary_positions_gated_units_and_few_biases() -> None:
    config = replace(BERT_PRESETS["modern"], vocabulary=V, num_classes=2)
    stack = config.stack
    assert (stack.width, stack.depth, stack.heads, stack.resolved.mlp_width) == (256, 4, 4, 688)
    for kind, biases in (
        (BertClassifier, {"head.linear.bias"}),
        (BertMaskedLM, {"head.tokens.bias"}),
    ):
        net: Any = kind(config)
        assert type(net.encoder.position) is Rotary and net.encoder.segment is None
        for block in net.encoder.stack.blocks:
            assert type(block) is Block  # norms before the sub-layers
            assert isinstance(block.norm1, nn.RMSNorm) and isinstance(block.norm2, nn.RMSNorm)
            assert isinstance(block.feedforward, GatedFeedForward)
            assert isinstance(block.feedforward.activation, nn.GELU)
        assert isinstance(net.encoder.stack.norm, nn.RMSNorm)
        assert {name for name, _ in net.named_parameters() if name.endswith("bias")} == biases


def test_dropout_is_where_bert_has_it() -> None:
    config = replace(BERT_PRESETS["tiny"], vocabulary=V, num_classes=2)
    places = [
        name
        for name, module in BertClassifier(config).named_modules()
        if isinstance(module, nn.Dropout)
    ]
    blocks = [f"encoder.stack.blocks.{i}.residual{end}.dropout" for i in (0, 1) for end in (1, 2)]
    assert places == ["encoder.dropout", *blocks, "head.dropout"]
    roberta = replace(config, pooler_dropout=0.1)
    assert isinstance(BertClassifier(roberta).pooler.dropout, nn.Dropout)


def test_padding_starts_at_zero() -> None:
    table = Encoder(replace(TINY, padding=2)).embed.weight
    assert table[2].abs().sum() == 0 and table[[0, 1, 3]].abs().sum(1).min() > 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"vocabulary": 0}, "vocabulary is 0"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"segments": -1}, "segments is -1"),
        ({"padding": 13}, "padding 13 is no token of a vocabulary of 13"),
        ({"padding": -1}, "padding -1"),
        ({"position": "rotary2d"}, 'position "rotary2d" is for images'),
        ({"position": "sincos2d"}, 'position "sincos2d" is for images'),
        ({"position": "rotary", "stack": StackConfig(attention="additive")}, "dot products"),
        ({"stack": StackConfig(causal=True)}, "whole text"),
        ({"stack": StackConfig(cross_attention=True)}, "whole text"),
        ({"segments": 1, "next_sentence": True}, "next_sentence needs two segments"),
        ({"position": "rotary", "position_options": {"fraction": 0.0}}, "fraction is 0.0"),
        ({"head_dropout": 1.0}, "head_dropout is 1.0"),
        ({"token_dropout": 1.0}, "token_dropout is 1.0"),
        ({"pooler_dropout": -0.1}, "pooler_dropout is -0.1"),
    ],
)
def test_encoders_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(TINY, **options)


def test_numbers_that_the_data_must_fill_in() -> None:
    with pytest.raises(ValueError, match="vocabulary is null"):
        BertMaskedLM(replace(TINY, vocabulary=None))
    with pytest.raises(ValueError, match="num_classes is null"):
        BertClassifier(replace(TINY, num_classes=None))
