"""Text models, encoders and decoders alike: padding, order, losses, shared tables, memory."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig
from modules.heads import POOLERS
from modules.kernels.cross_entropy import IGNORE_INDEX
from modules.models.bert import BERT_PRESETS, BertClassifier
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import SEQ2SEQ_PRESETS, Seq2Seq
from modules.models.seq2seq_config import TyingName
from modules.parameter_groups import parameter_roles
from modules.pooling import POOLINGS
from modules.record import AttentionRecord
from tests.helpers.tiny_models import (
    BERT,
    DECODERS,
    LENGTH,
    SOURCE,
    TEXT_POSITIONS,
    VARIANTS,
    VOCAB,
    assert_all_learn,
    close,
    every_decoder,
    every_variant,
    gradients,
    hidden,
    label,
    new_cache,
    random_tokens,
    tiny,
)

TYINGS = get_args(TyingName)
LENGTHS = (9, 4, 6)
OWN_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *(("bert", {"pool": name}) for name in POOLINGS),
    *(("bert", {"pooler": name}) for name in POOLERS),
    ("bert", {"segments": 0}),
    ("bert", {"embedding_norm": False}),
    ("bert", {"embedding_width": 10}),
    ("masked", {}),
    ("gpt", {"tied": False}),
    ("gpt", {"embedding_width": 10}),
    ("gpt", {"embedding_width": 10, "tied": False, "position": "rotary"}),
    *((kind, {"tying": name}) for kind in DECODERS[1:] for name in TYINGS),
    *(
        (kind, {"embedding_norm": True, "output_bias": True, "scale_embedding": False})
        for kind in DECODERS[1:]
    ),
]
EVERY_MODEL = [(kind, options) for kind in ("bert", *DECODERS) for options in VARIANTS]
EVERY_MODEL += OWN_OPTIONS


@pytest.mark.plain_every(2)
@torch.no_grad()
@pytest.mark.parametrize("kind, options", EVERY_MODEL, ids=str)
def test_padding_changes_nothing(kind: str, options: dict[str, Any]) -> None:
    net = tiny(kind, **options)
    tokens = random_tokens(3, 9)
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    together = hidden(net, tokens, mask)
    for row, length in enumerate(LENGTHS):
        close(together[row, :length], hidden(net, tokens[row : row + 1, :length], rows=[row])[0])
    if kind == "bert":
        close(net(tokens, mask)[2], net(tokens[2:, :6])[0])
    if kind in DECODERS:
        close(hidden(net, tokens)[mask], together[mask])  # nobody sees what is on the right
        left = hidden(net, tokens, mask.flip(1))
        for row, length in enumerate(LENGTHS):
            alone = tokens[row : row + 1, -length:]
            close(left[row, -length:], hidden(net, alone, rows=[row])[0])


@pytest.mark.plain_every(2)
@torch.no_grad()
@pytest.mark.parametrize("kind, options", EVERY_MODEL, ids=str)
def test_what_each_token_sees(kind: str, options: dict[str, Any]) -> None:
    net = tiny(kind, **options)
    tokens = random_tokens(3, 9)
    changed = tokens.clone()
    changed[:, 5] = tokens[:, 5] % (VOCAB - 1) + 1
    before = hidden(net, tokens)
    moved = (hidden(net, changed) - before).abs().amax(2) > 1e-6  # (B, N)
    assert moved[:, 5:].all()
    assert moved[:, :5].all() == moved[:, :5].any() == (kind not in DECODERS)
    if kind not in DECODERS:
        order = torch.randperm(9)
        straight = torch.allclose(hidden(net, tokens[:, order]), before[:, order], atol=1e-4)
        assert straight == (options.get("position") == "none")


@torch.no_grad()
@pytest.mark.parametrize("kind", DECODERS[1:])
def test_all_see_the_source_but_not_its_padding(kind: str) -> None:
    net = tiny(kind, position="rotary")
    tokens = random_tokens(3, 9)
    mask = SOURCE > 0
    before = net(SOURCE, tokens, mask)
    for position in range(7):
        changed = SOURCE.clone()
        changed[:, position] += 1
        moved = (net(changed, tokens, mask) - before).abs().amax(2) > 1e-5  # (B, N)
        assert torch.equal(moved, mask[:, position, None].expand(-1, 9))
    with pytest.raises(RuntimeError):
        net(SOURCE[:2], tokens)  # another number of rows


@torch.no_grad()
@pytest.mark.parametrize("rows, length", [(0, 3), (2, 0)])
def test_there_may_be_no_row_or_no_token(rows: int, length: int) -> None:
    source = torch.ones(rows, 4, dtype=torch.int64)
    out = tiny("encoder_decoder")(source, torch.ones(rows, length, dtype=torch.int64))
    assert out.shape == (rows, length, 24)


@torch.no_grad()
@pytest.mark.parametrize("position", TEXT_POSITIONS)
def test_texts_longer_than_max_length(position: str) -> None:
    net = tiny("bert", position=position)
    if position == "learned":
        with pytest.raises(ValueError, match=f"{LENGTH + 2} tokens"):
            net(random_tokens(1, LENGTH + 2))
    else:
        assert torch.isfinite(net(random_tokens(1, LENGTH + 2))).all()


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("kind, options", [m for m in EVERY_MODEL if m[0] in DECODERS], ids=str)
def test_the_loss_of_a_decoder_is_that_of_all_logits(kind: str, options: dict[str, Any]) -> None:
    net = tiny(kind, **options).train()
    targets = random_tokens(3, 9)
    targets[0, :5] = targets[2, 3] = IGNORE_INDEX
    vectors = hidden(net, random_tokens(3, 9))
    logits = net.logits(vectors).flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), label_smoothing=0.1)
    counted = targets.flatten() != IGNORE_INDEX
    plain = plain + 0.3 * logits.logsumexp(1)[counted].square().mean()
    loss, correct = net.loss(vectors, targets, 0.1, 0.3)
    close(loss, plain)
    close(gradients(loss, net), gradients(plain, net), rtol=1e-4)
    assert correct == (logits.argmax(1) == targets.flatten()).sum()
    assert_all_learn(net, loss)


@pytest.mark.parametrize("options", [o for kind, o in EVERY_MODEL if kind == "bert"], ids=label)
def test_every_parameter_of_a_classifier_learns(options: dict[str, Any]) -> None:
    if "conv_kernel" in options:
        options = {**options, "pool": "mean"}  # the class token has no token before it
    net = tiny("bert", **options).train()
    tokens = random_tokens(3, 9)
    segments = torch.randint(2, tokens.shape) if options.get("segments", 2) else None
    assert_all_learn(net, net(tokens, None, segments).square().sum())


def test_the_loss_of_a_masked_language_model_is_that_of_its_scores() -> None:
    net = tiny("masked").train()
    tokens = random_tokens(3, 9)
    segments = torch.randint(2, tokens.shape)
    where = torch.rand(3, 9) < 0.6
    targets = random_tokens(3, 9)[where]
    vectors = net.hidden(tokens, None, segments)
    logits = net(tokens, None, segments, where)
    plain = F.cross_entropy(logits, targets, label_smoothing=0.1)
    loss, correct = net.loss(vectors, targets, where, 0.1)
    sentences = net.sentence_logits(vectors).square().sum()
    close(loss, plain)
    close(gradients(loss + sentences, net), gradients(plain + sentences, net), rtol=1e-4)
    assert correct == (logits.argmax(1) == targets).sum()
    assert_all_learn(net, loss + sentences)
    tables = [name for name, role in parameter_roles(net).items() if role == "table"]
    assert tables == ["encoder.embed.weight", "encoder.segment.weight", "sentence.linear.weight"]


@every_variant
def test_packed_documents_cost_what_each_costs_alone(options: dict[str, Any]) -> None:
    net = tiny("gpt", **options)
    lengths = (7, 1, 8)
    tokens = random_tokens(2)
    targets = random_tokens(2)
    ids = torch.arange(3).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
    packed = net(tokens, positions=positions, documents=ids)
    parts = [net(part) for part in tokens.split(lengths, 1)]
    close(packed, torch.cat(parts, 1))
    losses = [
        net.loss(part, target)[0] * length
        for part, target, length in zip(parts, targets.split(lengths, 1), lengths, strict=True)
    ]
    loss = net.loss(packed, targets)[0] * LENGTH
    close(loss, sum(losses), rtol=1e-4)
    close(gradients(loss, net), gradients(sum(losses), net), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", *DECODERS])
def test_recorded_weights_are_those_of_the_mask(kind: str) -> None:
    net = tiny(kind, kv_heads=2)
    tokens = random_tokens(3, 9)
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    record = AttentionRecord()
    if kind == "bert":
        close(net(tokens, mask, None, record), net(tokens, mask))
        assert not record.self_attn[0].masked_fill(mask[:, None, None], 0).any()
        return
    close(hidden(net, tokens, cache=record), hidden(net, tokens))
    first = 7 if kind == "prefix" else 0  # source tokens, which see each other
    assert [w.shape for w in record.self_attn] == [(3, 4, first + 9, first + 9)] * 2
    weights = record.self_attn[0][0]  # of the row without padding
    assert not weights[:, first:, first:].triu(1).any()
    assert not weights[:, :first, first:].any()
    assert (weights[:, :, :first] > 0).all()
    assert len(record.cross_attn) == (2 if kind == "encoder_decoder" else 0)
    for weights in record.cross_attn:
        close(weights.sum(-1), torch.ones(3, 4, 9))
        assert not weights.masked_fill((SOURCE > 0)[:, None, None], 0).any()


# Tables, sizes, initial values --------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("kind", DECODERS[1:])
@pytest.mark.parametrize("tying", TYINGS)
def test_tables_of_sources_targets_and_scores_are_shared_as_said(kind: str, tying: Any) -> None:
    sizes = {} if tying in ("all", "inputs") else {"source_vocabulary": VOCAB + 4}
    net = tiny(kind, tying=tying, **sizes)
    tables = {name.split(".")[0] for name in net.state_dict() if name.endswith("embed.weight")}
    own = {"all": [], "inputs": ["unembed"], "target": ["source_embed"]}
    assert tables == {"embed", *own.get(tying, ["source_embed", "unembed"])}
    before = net.encode(SOURCE).states.clone()
    scores = net.logits(torch.ones(1, 24))
    net.embed.weight.zero_()
    assert torch.equal(net.encode(SOURCE).states, before) == (tying in ("target", "none"))
    assert torch.equal(net.logits(torch.ones(1, 24)), scores) == (tying in ("inputs", "none"))


@torch.no_grad()
def test_a_table_stays_shared_when_weights_are_assigned() -> None:
    masked = tiny("masked")
    other = tiny("masked")
    other.load_state_dict(masked.state_dict(), assign=True)
    tokens = random_tokens()
    assert torch.equal(other(tokens), masked(tokens))
    other.encoder.embed.weight.zero_()
    assert torch.equal(other(tokens), other.head.tokens.bias.expand(3 * LENGTH, VOCAB))


@torch.no_grad()
def test_initial_values_of_tables() -> None:
    sizes = {"source_vocabulary": 2000, "target_vocabulary": 2000, "max_length": 50}
    preset = replace(SEQ2SEQ_PRESETS["tiny"], **sizes)
    tokens = torch.arange(2000)[None]
    for tying in TYINGS:
        net = Seq2Seq(replace(preset, tying=tying)).eval()
        assert net.embed(tokens).std().item() == pytest.approx(1, abs=0.02)
        assert net.embed_source(tokens).std().item() == pytest.approx(1, abs=0.02)
        assert 0.7 < net.logits(net(tokens[:, :40], tokens[:, 40:80])).std() < 1.4
    plain = Seq2Seq(replace(preset, scale_embedding=False)).embed.weight
    assert plain.abs().max().item() == pytest.approx((6 / 2128) ** 0.5, rel=0.01)
    padded = BertClassifier(replace(BERT, pad_id=2)).encoder.embed.weight
    assert not padded[2].any()
    assert padded[[0, 1, 3]].any(1).all()
    scaled = BertClassifier(replace(BERT, pad_id=2, vocabulary=2000, position="sinusoidal"))
    assert scaled.encoder.embed(tokens).std().item() == pytest.approx(1, abs=0.02)
    assert not scaled.encoder.embed.weight[2].any()
    for tied, init, std in ((True, "gpt2", None), (False, "gpt2", 0.02), (True, "kaiming", 0.102)):
        stack = StackConfig(192, 1, init=init, causal=True)
        net = Decoder(DecoderConfig(2000, 9, "sinusoidal", tied=tied, stack=stack))
        assert net.embed(tokens).std().item() == pytest.approx(1, abs=0.02)
        weight = net.stack.blocks[0].attention.qkv.weight
        if std is None:  # Xavier: uniform up to sqrt(6 / (inputs + outputs))
            assert weight.abs().max().item() == pytest.approx((6 / (4 * 192)) ** 0.5, rel=0.01)
        else:
            assert weight.std().item() == pytest.approx(std, rel=0.02)
    gpt = Decoder(DecoderConfig(2000, 9, tied=False, stack=StackConfig(causal=True)))
    for table in (gpt.embed, gpt.unembed):
        assert table.weight.std().item() == pytest.approx(0.0176, rel=0.02)


@torch.no_grad()
@pytest.mark.parametrize("width", [24, 10])
@pytest.mark.parametrize("kind", ["gpt", "bert", "masked"])
def test_sinusoidal_positions_are_added_to_scaled_embeddings(kind: str, width: int) -> None:
    waves = torch.tensor(  # channels 2i: sin(n / 10000^(2i / E)); 2i + 1: cos of the same
        [
            [
                (math.cos if c % 2 else math.sin)(n / 10000 ** ((c - c % 2) / width))
                for c in range(width)
            ]
            for n in range(LENGTH)
        ]
    )
    for position, scale_embedding, scaled in (
        ("sinusoidal", None, True),
        ("sinusoidal", False, False),
        ("learned", None, False),
        ("learned", True, True),
    ):
        options: dict[str, Any] = {"position": position, "scale_embedding": scale_embedding}
        if kind != "gpt":
            options |= {"segments": 0, "embedding_norm": False, "next_sentence": False}
        net = tiny(kind, embedding_width=None if width == 24 else width, **options)
        body = net if kind == "gpt" else net.encoder
        inputs: list[Tensor] = []
        body.dropout.register_forward_pre_hook(
            lambda _, given, inputs=inputs: inputs.append(*given)
        )
        tokens = random_tokens()
        net(tokens)
        vectors = body.embed.weight[tokens] * (math.sqrt(width) if scaled else 1)
        close(inputs[0], vectors + (waves if position == "sinusoidal" else body.position.table))


def test_dropout_is_where_bert_has_it() -> None:
    config = replace(BERT_PRESETS["tiny"], vocabulary=9, num_classes=2, pooler_dropout=0.2)
    rates = {
        name: module.p
        for name, module in BertClassifier(config).named_modules()
        if isinstance(module, nn.Dropout)
    }
    block = "encoder.stack.blocks"
    expected = {f"{block}.{i}.residual{end}.dropout": 0.1 for i in (0, 1) for end in (1, 2)}
    expected |= {"encoder.dropout": 0.1, "pooler.dropout": 0.2, "head.dropout": 0.1}
    assert rates == expected


@torch.no_grad()
def test_bert_drops_whole_tokens_in_training_only() -> None:
    net = tiny("bert", token_dropout=0.5, position="none", embedding_norm=False, segments=0)
    inputs: list[Tensor] = []
    net.encoder.stack.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    tokens = random_tokens()
    net(tokens)
    net.train()(tokens)
    vectors = net.encoder.embed(tokens)
    assert torch.equal(inputs[0], vectors)
    dropped = inputs[1].eq(0).all(-1)
    assert 0.2 < dropped.float().mean() < 0.8
    close(inputs[1][~dropped], 2 * vectors[~dropped])


@torch.no_grad()
def test_masked_language_models_score_chosen_positions() -> None:
    net = tiny("masked")
    tokens = random_tokens()
    where = torch.zeros(3, LENGTH, dtype=torch.bool)
    where[0, 2] = where[1, 0] = where[2, 4] = True
    everywhere = net(tokens)
    assert everywhere.shape == (3 * LENGTH, VOCAB)
    close(net(tokens, None, None, where), everywhere[where.flatten()])
    close(net(tokens, None, None, torch.tensor([36, 2])), everywhere[[36, 2]])
    assert net(tokens, None, None, where & False).shape == (0, VOCAB)


@torch.no_grad()
@every_decoder
def test_caches_have_the_type_of_autocast_or_of_the_weights(kind: str) -> None:
    net = tiny(kind)
    with torch.autocast("cpu", torch.bfloat16):
        cache = new_cache(net, range(3), 4)
        hidden(net, random_tokens(3, 4), cache=cache)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16
    assert new_cache(net.to(torch.float16), range(3), 4).values.dtype == torch.float16


def allocated(length: int, position: str) -> int:
    """Most bytes of tensors at a time in a training step on `length` tokens."""
    net = Decoder(DecoderConfig(VOCAB, length, position, stack=StackConfig(64, 2, 2, causal=True)))
    tokens = random_tokens(1, length)
    with torch.profiler.profile(profile_memory=True) as profile:
        net.loss(net(tokens), tokens)[0].backward()
    total = 0
    most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


@pytest.mark.parametrize("position", ["rotary", "learned", "none"])
def test_memory_of_training_is_in_proportion_to_the_length(position: str) -> None:
    short, middle, long = (allocated(length, position) for length in (512, 1024, 2048))
    assert (long - middle) / (middle - short) == pytest.approx(2, abs=0.05)
