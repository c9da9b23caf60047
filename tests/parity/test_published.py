"""Published models: sizes, presets and rotations."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers

from modules.models.bert import BERT_PRESETS
from modules.models.gpt import DECODER_PRESETS
from modules.models.seq2seq import SEQ2SEQ_PRESETS
from modules.position import build_position
from modules.pretrained import bert, decoder, seq2seq
from modules.pretrained.family import config_from_huggingface, matching_family
from tests.helpers.marks import slow_except
from tests.parity.families import CASES, FAMILIES, network
from tests.parity.test_transformers import SPECIAL_TOKENS

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


@pytest.mark.parametrize("name", slow_except(list(PUBLISHED)[::4], PUBLISHED))
def test_published_configs_and_numbers_of_parameters(name: str) -> None:
    settings = PUBLISHED[name]["config"]
    family, config = config_from_huggingface(settings, FAMILIES)
    written = FAMILIES[family].config_to_external(config, SPECIAL_TOKENS)
    assert config_from_huggingface(written, FAMILIES) == (family, config)
    differ = {key for key in settings.keys() & written.keys() if settings[key] != written[key]}
    allowed = {"rope_scaling", "sliding_window", "activation_function"}
    if family == "mistral":
        allowed.add("max_position_embeddings")
    assert {key for key in differ if not key.endswith("token_id")} <= allowed
    architecture = FAMILIES[family].architecture
    kind = getattr(transformers, architecture)
    with torch.device("meta"):
        net = network(architecture, config)
        models = [kind(kind.config_class(**said)) for said in (settings, written)]
    assert sum(value.numel() for value in net.parameters()) == PUBLISHED[name]["parameters"]
    back = FAMILIES[family].weights_to_external(net.state_dict(), config)
    for model in models:
        state = {key: model.state_dict()[key] for key in back}
        assert all(value.shape == state[key].shape for key, value in back.items())
        found = FAMILIES[family].weights_from_external(state, config)
        assert net.state_dict().keys() == found.keys()


ROTARY = {name: PUBLISHED[name]["config"] for name in PUBLISHED}
ROTARY = {name: settings for name, settings in ROTARY.items() if "rope_theta" in settings}
ROTARY |= {name: CASES[name].written() for name in ("LlamaForCausalLM", "linear scaling")}


@pytest.mark.parametrize("name", ROTARY)
def test_rotations_are_equal_to_the_last_bit_also_far_away(name: str) -> None:
    settings = ROTARY[name]
    family, config = config_from_huggingface(settings, FAMILIES)
    kind = FAMILIES[family].architecture.removesuffix("ForCausalLM")
    code = import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(code, f"{kind}RotaryEmbedding")(transformers.AutoConfig.for_model(**settings))
    positions = torch.arange(0, 131072, 101)[None]  # (1, N)
    encoding = build_position("rotary", config.position_options, config.stack, (131072,))
    rotation = encoding.rotate(positions[..., None])
    half = config.stack.resolved.head_dim // 2
    expected = rotary(torch.zeros(1), positions)
    for mine, other in zip((rotation.cos, rotation.sin), expected, strict=True):
        assert torch.equal(mine[0, 0, :, half:], other[0, :, half:])  # (N, D / 2)


def test_presets_are_as_published() -> None:
    sizes = {
        "tiny": (128, 2, 2, 512),
        "mini": (256, 4, 4, 1024),
        "small": (512, 4, 8, 2048),
        "base": (768, 12, 12, 3072),
    }
    for name, size in sizes.items():
        config = replace(BERT_PRESETS[name], vocabulary=30522, num_classes=2)
        stack = config.stack
        assert (stack.width, stack.depth, stack.heads, stack.resolved.mlp_width) == size
        assert bert.BERT.config_to_external(config, ["no", "yes"])["hidden_size"] == stack.width
    published = transformers.BertConfig(architectures=["BertForSequenceClassification"])
    assert config_from_huggingface(published.to_dict(), FAMILIES) == ("bert", config)
    gpt2 = DECODER_PRESETS["gpt2"]
    stack = replace(gpt2.stack, dropout=0.1, mlp_dropout=0.0, attention_dropout=0.1)
    config = replace(gpt2, vocabulary=50257, stack=stack)
    assert config_from_huggingface(PUBLISHED["gpt2"]["config"], FAMILIES) == ("gpt2", config)
    for config in DECODER_PRESETS.values():
        expected = "llama" if config.position == "rotary" else "gpt2"
        assert matching_family(replace(config, vocabulary=9), decoder.FAMILIES).name == expected
    for config in SEQ2SEQ_PRESETS.values():
        assert matching_family(config, seq2seq.FAMILIES).name == "marian"
