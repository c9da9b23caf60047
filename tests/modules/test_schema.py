"""Primitives against dataclasses: what fits is built, what does not is refused by the name of its entry."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from modules.models.bert import BERT_PRESETS, BertConfig
from modules.models.gpt import DECODER_PRESETS, DecoderConfig
from modules.models.seq2seq_config import SEQ2SEQ_PRESETS, Seq2SeqConfig
from modules.models.vit import VIT_PRESETS, ViTConfig
from modules.schema import from_dict

PRESETS = [
    *VIT_PRESETS.values(),
    *BERT_PRESETS.values(),
    *DECODER_PRESETS.values(),
    *SEQ2SEQ_PRESETS.values(),
]
PRESETS += [DecoderConfig(position="rotary", position_options={"scaling": {"kind": "llama3"}})]


@pytest.mark.parametrize("preset", PRESETS)
def test_configs_come_back_from_json(preset: Any) -> None:
    assert from_dict(type(preset), json.loads(json.dumps(asdict(preset)))) == preset


@pytest.mark.parametrize(
    "kind, options, entry",
    [
        (ViTConfig, [], "config"),
        (ViTConfig, {"modell": 1}, "modell"),
        (ViTConfig, {"stack": 5}, "stack"),
        (ViTConfig, {"stack": {"depht": 3}}, "stack.depht"),
        (ViTConfig, {"stack": {"depth": 10_000_000}}, "depth"),
        (ViTConfig, {"stack": {"depth": 2.0}}, "stack.depth"),
        (ViTConfig, {"stack": {"depth": True}}, "stack.depth"),
        (ViTConfig, {"stack": {"depth": "3"}}, "stack.depth"),
        (ViTConfig, {"stack": {"depth": None}}, "stack.depth"),
        (ViTConfig, {"stack": {"norm_eps": float("nan")}}, "stack.norm_eps"),
        (ViTConfig, {"stack": {"order": ["pre"]}}, "stack.order"),
        (ViTConfig, {"stack": {"bias": 1}}, "stack.bias"),
        (ViTConfig, {"pool": "token"}, "pool"),
        (BertConfig, {"vocabulary": [30522]}, "vocabulary"),
        (DecoderConfig, {"rotary_scaling": "llama3"}, "rotary_scaling"),
        (Seq2SeqConfig, {"encoder": {"heads": {}}}, "encoder.heads"),
    ],
)
def test_refused_by_name(kind: type, options: Any, entry: str) -> None:
    with pytest.raises(ValueError, match=entry):
        from_dict(kind, options)
