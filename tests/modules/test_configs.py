"""Configs: what fits comes back from JSON and runs; what does not is refused, its entry named."""

import inspect
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from modules import config as names
from modules.attention import ATTENTIONS, MultiHeadAttention
from modules.config import StackConfig
from modules.feedforward import FEEDFORWARDS
from modules.generation.sampling import GenerationConfig
from modules.heads import POOLERS
from modules.init import INITS
from modules.models.bert import BERT_PRESETS, BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import DECODER_PRESETS, Decoder, DecoderConfig
from modules.models.images import IMAGE_PRESETS, build_image_net
from modules.models.mae import MAEConfig
from modules.models.seq2seq import ARCHITECTURES, SEQ2SEQ_PRESETS, Seq2Seq, Seq2SeqConfig
from modules.models.seq2seq_config import ArchitectureName
from modules.models.swin import SwinConfig
from modules.models.vit import ViT, ViTConfig
from modules.norm import NORMS
from modules.patch_embedding import STEMS
from modules.pooling import POOLINGS
from modules.position import POSITIONS, Position, Rotary, build_position, resize_grid
from modules.rotary_scaling import RotaryScaling
from modules.schema import from_dict
from modules.transformer import ORDERS, Stack
from tests.helpers.tiny_models import BERT, CROSS, LENGTH, SEQ2SEQ, VOCAB, new_cache, tiny

BLOCKS = StackConfig()
CAUSAL = StackConfig(causal=True)
ADDITIVE = StackConfig(attention="additive", causal=True)
SCALED = {"scaling": {"kind": "llama3", "factor": 8.0}}


@pytest.mark.parametrize(
    "entries, literal",
    [
        (NORMS, names.NormName),
        (FEEDFORWARDS, names.FeedForwardName),
        (ORDERS, names.OrderName),
        (ATTENTIONS, names.AttentionName),
        (INITS, names.InitName),
        (STEMS, names.StemName),
        (POOLINGS, names.PoolName),
        (POOLERS, names.PoolerName),
        (ARCHITECTURES, ArchitectureName),
    ],
)
def test_options_name_the_entries_of_their_family(entries: dict[str, Any], literal: Any) -> None:
    listed = get_args(literal)
    if str in listed:  # Literal[...] | str
        listed = get_args(listed[0])
    assert tuple(entries) == listed


@pytest.mark.parametrize("axes, config", [
    (1, BertConfig), (1, DecoderConfig), (1, Seq2SeqConfig), (2, ViTConfig),
])  # fmt: skip
def test_options_name_all_position_encodings(axes: int, config: type) -> None:
    text = re.sub(r"\s+", " ", config.__doc__ or "")
    listed = re.findall(r"modules/position\.py: ([\w, ]+ or \w+)\.", text)[0]
    fitting = [name for name, kind in POSITIONS.items() if axes in kind.dims]
    assert re.split(", | or ", listed) == fitting
    with pytest.raises(ValueError) as refusal:
        config(position="sinusoid")
    assert POSITIONS.keys() & set(re.findall(r"\w+", str(refusal.value))) == set(fitting)


@pytest.mark.parametrize("own, grid", [(1, (3, 3)), (2, (9,))])
def test_a_position_for_other_inputs_is_refused_with_those_that_fit(
    own: int, grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("Window", (Position,), {"dims": (own,)})
    monkeypatch.setitem(POSITIONS, "window", kind)
    with pytest.raises(ValueError, match=f"{own} ax.*{len(grid)} ax") as error:
        build_position("window", {}, SMALL, grid)
    named = re.findall(r"\w+", str(error.value).partition("choose from")[2])
    assert named == [name for name, kind in POSITIONS.items() if len(grid) in kind.dims]


FAMILIES: dict[str, dict[str, Any]] = {
    "ATTENTIONS": ATTENTIONS,
    "FEEDFORWARDS": FEEDFORWARDS,
    "NORMS": NORMS,
    "ORDERS": ORDERS,
    "INITS": INITS,
    "STEMS": STEMS,
    "POOLINGS": POOLINGS,
    "POOLERS": POOLERS,
    "POSITIONS": POSITIONS,
}


def test_entries_are_called_as_the_readme_says() -> None:
    text = (Path(names.__file__).parent / "README.md").read_text()
    calls = dict(re.findall(r"^\| `([A-Z]+)` \| `\((.*?)\)`", text, re.M))
    assert calls.keys() == FAMILIES.keys()
    for family, entries in FAMILIES.items():
        arguments = calls[family].split(", ")
        positional = [name for name in arguments if not name.endswith("=")]
        keywords = {name.rstrip("="): None for name in arguments if name.endswith("=")}
        for entry in entries.values():
            inspect.signature(entry).bind(*positional, **keywords)  # else raises TypeError


@pytest.mark.parametrize("is_rotated", [True, False])
def test_an_own_attention_says_whether_it_takes_rotary_positions(
    is_rotated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(MultiHeadAttention):
        takes_rotary = is_rotated

    monkeypatch.setitem(ATTENTIONS, "own", Own)
    stack: Any = replace(CAUSAL, attention="own")
    if not is_rotated:
        with pytest.raises(ValueError, match="attention"):
            DecoderConfig(position="rotary", stack=stack, max_length=LENGTH)
        return
    nets = []
    for config in (CAUSAL, stack):
        torch.manual_seed(0)
        options = {"position": "rotary", "vocabulary": VOCAB, "max_length": LENGTH}
        nets.append(Decoder(DecoderConfig(stack=config, **options)))
    tokens = torch.arange(LENGTH)[None] % VOCAB
    assert torch.equal(nets[0](tokens), nets[1](tokens))


@pytest.mark.parametrize(
    "option, family",
    [
        ("norm", NORMS),
        ("feedforward", FEEDFORWARDS),
        ("order", ORDERS),
        ("attention", ATTENTIONS),
        ("init", INITS),
        ("stem", STEMS),
        ("pool", POOLINGS),
        ("position", POSITIONS),
        ("pooler", POOLERS),
    ],
)
def test_a_wrong_variant_is_refused_with_the_choices(option: str, family: dict[str, Any]) -> None:
    wrong = f"{next(iter(family))}s"
    options: dict[str, Any] = {option: wrong}
    is_of_blocks = hasattr(BLOCKS, option)
    with pytest.raises(ValueError) as refusal:
        if option == "pooler":
            replace(BERT, **options)
        elif is_of_blocks:
            ViTConfig(stack=replace(BLOCKS, **options))
        else:
            ViTConfig(**options)
    name = f"stack.{option}" if is_of_blocks else option
    choices = ", ".join(family)
    hint = f"did you mean {next(iter(family))}?"
    assert str(refusal.value) == f'{name} is "{wrong}"; choose one of {choices} ({hint}).'


@pytest.mark.parametrize(
    "option, family, value",
    [
        ("norm", NORMS, nn.LayerNorm),
        ("feedforward", FEEDFORWARDS, FEEDFORWARDS["gelu"]),
        ("order", ORDERS, ORDERS["pre"]),
        ("attention", ATTENTIONS, MultiHeadAttention),
        ("init", INITS, INITS["xavier"]),
    ],
)
def test_an_entry_of_your_own_is_used_by_every_model(
    option: str, family: dict[str, Any], value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(family, "own", value)
    stack: Any = {option: "own"}
    nets = [
        ViT(ViTConfig(stack=replace(BLOCKS, **stack), image_size=8, patch_size=4)),
        BertMaskedLM(replace(BERT, stack=replace(BERT.stack, **stack))),
        Decoder(DecoderConfig(VOCAB, LENGTH, stack=replace(CAUSAL, **stack))),
        Seq2Seq(replace(SEQ2SEQ, decoder=replace(SEQ2SEQ.decoder, **stack))),
    ]
    for net in nets:  # a checkpoint has the config as primitives
        assert from_dict(type(net.config), json.loads(json.dumps(asdict(net.config)))) == net.config


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(
    "preset",
    [
        *IMAGE_PRESETS.values(),
        *BERT_PRESETS.values(),
        *DECODER_PRESETS.values(),
        *SEQ2SEQ_PRESETS.values(),
        DecoderConfig(position="rotary", position_options=SCALED, max_length=9),
    ],
)
def test_presets_come_back_from_json_and_run(preset: Any) -> None:
    assert from_dict(type(preset), json.loads(json.dumps(asdict(preset)))) == preset
    tokens = torch.zeros(2, 7, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        if isinstance(preset, ViTConfig | SwinConfig):
            images = torch.empty(2, preset.channels, preset.image_size, preset.image_size)
            assert build_image_net(preset)(images).shape == (2, preset.num_classes)
        elif isinstance(preset, BertConfig):
            config = replace(preset, vocabulary=VOCAB, num_classes=3)
            assert BertClassifier(config)(tokens).shape == (2, 3)
            assert BertMaskedLM(config)(tokens).shape == (2 * 7, VOCAB)
        elif isinstance(preset, DecoderConfig):
            net = Decoder(replace(preset, vocabulary=VOCAB))
            assert net.logits(net(tokens)).shape == (2, 7, VOCAB)
        else:
            sizes = {"source_vocabulary": VOCAB, "target_vocabulary": VOCAB, "max_length": 9}
            model = Seq2Seq(replace(preset, **sizes))
            assert model.logits(model(tokens, tokens)).shape == (2, 7, VOCAB)


def test_encoder_decoders_have_the_published_sizes() -> None:
    tables = {"source_vocabulary": 37000, "target_vocabulary": 37000, "max_length": 9}
    for name, width, heads, mlp_width in (("base", 512, 8, 2048), ("big", 1024, 16, 4096)):
        with torch.device("meta"):
            theirs = nn.Transformer(width, heads, 6, 6, mlp_width)
            ours = Seq2Seq(replace(SEQ2SEQ_PRESETS[name], **tables))
        expected = sum(p.numel() for p in theirs.parameters()) - 4 * width  # two norms more
        expected += 37000 * width
        assert sum(p.numel() for p in ours.parameters()) == expected
    modern = BERT_PRESETS["modern"].stack.resolved
    assert (modern.head_dim, modern.mlp_width, modern.final_norm) == (64, 688, True)


ALONE: list[tuple[Any, dict[str, list[Any]]]] = [  # wrong values of options, named by the option
    (BLOCKS, {"width": [10], "depth": [10**7], "kv_heads": [2], "norm_eps": [0.0]}),
    (BLOCKS, {"value_dim": [0]}),
    (replace(BLOCKS, order="no_residual"), {"drop_path": [0.1], "init": ["zero_residual"]}),
    (BERT, {"embedding_width": [0]}),
    (ViTConfig(), {"register_tokens": [-1], "class_token": [False]}),
    (BERT, {"segments": [-1], "pad_id": [VOCAB, -1]}),
    (RotaryScaling(), {"factor": [0.5], "low_freq_factor": [4.0, 0.0], "original_max_length": [0]}),
    (GenerationConfig(), {"temperature": [-1.0, 1e-40, float("inf")], "max_new_tokens": [10**11]}),
    (GenerationConfig(), {"top_k": [0], "top_p": [0.0, 1.1], "min_p": [1.5], "seed": [2**63]}),
    (GenerationConfig(), {"repetition_penalty": [0.0], "length_penalty": [float("nan")]}),
    (replace(GenerationConfig(), beams=2), {"top_k": [3], "temperature": [0.5], "seed": [1]}),
    (replace(GenerationConfig(), beams=2), {"repetition_penalty": [1.1]}),
]
IMPOSSIBLE: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (config, {name: value}, name)
        for config, options in ALONE
        for name, values in options.items()
        for value in values
    ),
    (BLOCKS, {"context_width": 8}, "cross_attention"),
    (ViTConfig(), {"image_size": 30, "patch_size": 4}, "image_size 30"),
    (ViTConfig(), {"stem": "conv", "patch_size": 7}, "patch_size 7"),
    (ViTConfig(), {"stem": "conv", "patch_size": 1}, "patch_size 1"),
    (ViTConfig(), {"stack": CAUSAL}, "stack.causal"),
    (ViTConfig(), {"stack": StackConfig(cross_attention=True)}, "stack.cross_attention"),
    (ViTConfig(), {"position": "nowhere"}, '"nowhere"'),
    (ViTConfig(), {"position": "rotary", "position_options": {"basis": 9}}, '"basis"'),
    (ViTConfig(), {"position": "rotary", "position_options": {"base": "9"}}, "options.base"),
    (ViTConfig(), {"position": "rotary", "position_options": {"base": -9.0}}, "base is -9"),
    (ViTConfig(), {"position": "sincos2d", "position_options": {"base": 0.0}}, "base is 0"),
    (ViTConfig(), {"pool": "attention", "stack": StackConfig(64, 1, 3, head_dim=8)}, "width 64"),
    (MAEConfig(), {"patch_size": 1, "channels": 1}, "norm_pixels"),
    (SwinConfig(), {"stack": StackConfig(depth=12, final_norm=False)}, "stack.final_norm"),
    (StackConfig(), {"layer_scale": math.inf}, "layer_scale"),
    (ViTConfig(), {"position": "rotary", "position_options": {"fraction": 0.0}}, "fraction"),
    (ViTConfig(), {"position": "rotary", "position_options": {"fraction": 0.01}}, "1 of 64"),
    (ViTConfig(), {"position": "rotary", "stack": StackConfig(9, heads=3)}, "3 of 3"),
    (ViTConfig(), {"position": "rotary2d", "stack": StackConfig(18, heads=3)}, "6 of 6"),
    (ViTConfig(), {"position": "sincos2d", "stack": StackConfig(6, heads=3)}, "sincos2d"),
    (ViTConfig(), {"position": "t5", "position_options": {"buckets": 3}}, "buckets"),
    (ViTConfig(), {"position": "t5", "position_options": {"max_distance": 16}}, "max_distance"),
    (BERT, {"position": "rotary2d"}, "rotary2d"),
    (BERT, {"stack": CAUSAL}, "stack.causal"),
    (BERT, {"stack": StackConfig(cross_attention=True)}, "stack.cross_attention"),
    (BERT, {"segments": 1, "next_sentence": True}, "next_sentence"),
    (DecoderConfig(), {"sliding_window": 8, "max_length": 9}, "sliding_window"),
    (DecoderConfig(), {"position": "sincos2d"}, "sincos2d"),
    (DecoderConfig(), {"embedding_width": 0}, "embedding_width"),
    (DecoderConfig(), {"stack": CROSS}, "stack.cross_attention"),
    (DecoderConfig(), {"position": "rotary", "stack": ADDITIVE}, "attention"),
    (DecoderConfig(), {"position_options": {"scaling": {}}}, '"scaling"'),
    (Seq2SeqConfig(), {"architecture": "decoder"}, "architecture .*encoder_decoder, prefix"),
    (Seq2SeqConfig(), {"tying": "both"}, "tying .*inputs, target, none"),
    (Seq2SeqConfig(), {"position": "rotary2d"}, "rotary2d"),
    (Seq2SeqConfig(), {"encoder": CROSS}, "encoder.causal"),
    (Seq2SeqConfig(), {"decoder": BLOCKS}, "decoder.causal"),
    (Seq2SeqConfig(), {"encoder": StackConfig(12, 1, 2)}, "width"),
    (Seq2SeqConfig(), {"decoder": replace(CROSS, context_width=5)}, "context_width"),
    (Seq2SeqConfig(), {"source_vocabulary": 5, "target_vocabulary": 6}, "tying"),
    (
        Seq2SeqConfig(architecture="prefix"),
        {"decoder": replace(CROSS, conv_kernel=3)},
        "decoder.conv_kernel",
    ),
    (StackConfig(), {"conv_kernel": 1}, "conv_kernel is 1"),
]


@pytest.mark.parametrize("config, options, name", IMPOSSIBLE)
def test_impossible_options_are_named(config: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        replace(config, **options)


FROM_ZERO = {"pad_id", "register_tokens", "segments"}  # whole numbers that may be 0


@pytest.mark.parametrize(
    "kind", [StackConfig, ViTConfig, BertConfig, DecoderConfig, Seq2SeqConfig, GenerationConfig]
)
def test_sizes_below_one_and_other_rates_than_probabilities_are_named(kind: Any) -> None:
    for name, annotation in get_type_hints(kind).items():
        types = get_args(annotation) or (annotation,)
        wrong: list[Any] = []
        if int in types and name != "seed":
            wrong = [-1] if name in FROM_ZERO else [0, -1]
        elif "drop" in name:
            wrong = [-0.1, 1.0, 2.0]
        for value in wrong:
            with pytest.raises(ValueError, match=name):
                kind(**{name: value})


@pytest.mark.parametrize(
    "kind, options, entry",
    [
        (ViTConfig, [], "config"),
        (ViTConfig, {"modell": 1}, "modell"),
        (ViTConfig, {"stack": 5}, "stack"),
        (ViTConfig, {"stack": {"depht": 3}}, "stack.depht"),
        (ViTConfig, {"stack": {"depth": 2.0}}, "stack.depth"),
        (ViTConfig, {"stack": {"depth": True}}, "stack.depth"),
        (ViTConfig, {"stack": {"depth": None}}, "stack.depth"),
        (ViTConfig, {"stack": {"norm_eps": float("nan")}}, "stack.norm_eps"),
        (ViTConfig, {"stack": {"order": ["pre"]}}, "stack.order"),
        (ViTConfig, {"stack": {"bias": 1}}, "stack.bias"),
        (ViTConfig, {"pool": "token"}, "pool"),
        (BertConfig, {"vocabulary": [30522]}, "vocabulary"),
        (Seq2SeqConfig, {"encoder": {"heads": {}}}, "encoder.heads"),
    ],
)
def test_entries_of_the_wrong_type_are_named(kind: type, options: Any, entry: str) -> None:
    with pytest.raises(ValueError, match=entry):
        from_dict(kind, options)


ROWS = torch.zeros(1, 2, 8)
LONG = torch.zeros(3, 2 * LENGTH + 1, dtype=torch.int64)
SMALL = StackConfig(8, heads=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ViT(replace(ViTConfig(), channels=None)),
        lambda: tiny("bert", vocabulary=None),
        lambda: tiny("bert", num_classes=None),
        lambda: tiny("gpt", vocabulary=None),
        lambda: tiny("gpt", max_length=None),
        lambda: tiny("prefix", max_length=None),
        lambda: tiny("encoder_decoder", target_vocabulary=None),
        lambda: tiny("vit")(torch.zeros(1, 1, 9, 9)),
        lambda: tiny("bert")(LONG),
        lambda: tiny("bert", position="none", pool="flatten")(LONG),
        lambda: tiny("bert", segments=0)(LONG[:, :2], None, LONG[:, :2]),
        lambda: tiny("masked", next_sentence=False).sentence_logits(ROWS),
        lambda: tiny("gpt")(LONG),
        lambda: tiny("gpt").make_cache(1, LENGTH + 1),
        lambda: new_cache(tiny("encoder_decoder", position="learned"), range(3), LENGTH + 1),
        lambda: tiny("gpt")(LONG[:, :2], documents=LONG[:, :2], cache=tiny("gpt").make_cache(3, 2)),
        lambda: tiny("prefix", position="learned")(LONG[:, :2], LONG),
        lambda: Stack(StackConfig(8, 1, 2, cross_attention=True))(ROWS),
        lambda: MultiHeadAttention(8, 2)(ROWS, ROWS),
        lambda: MultiHeadAttention(8, 3),
        lambda: MultiHeadAttention(8, 4, kv_heads=3),
        lambda: Rotary(SMALL, (4,)).rotate(torch.arange(4)[None]),
        lambda: Rotary(SMALL, (4,)).rotate(torch.zeros(1, 4, 2)),
        lambda: MultiHeadAttention(8, 2)(torch.zeros(1, 3, 8), mask=torch.ones(3, 3).tril() > 0),
        lambda: POSITIONS["learned"](SMALL, (4, 4)).embed(torch.zeros(1, 17, 8)),
        lambda: build_position("rotary2d", {}, SMALL, (9,)),
        lambda: resize_grid(torch.zeros(8, 8, 2), (4,)),
    ],
)
def test_inputs_that_do_not_fit_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        call()
