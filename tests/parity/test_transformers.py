"""All families of transformers: equal logits and texts, weights and configs there and back."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.position import RotaryScaling
from modules.pretrained import bert, decoder, seq2seq
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.weights import load_weights
from tests.parity.families import (
    CASES,
    DECODERS,
    EOS,
    FAMILIES,
    LLAMA3,
    SEQ2SEQ,
    VOCABULARY,
    Case,
    Settings,
    difference,
    network,
    our_logits,
    ours,
    randomise,
    texts,
    their_logits,
    to_external,
)

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SPECIAL_TOKENS = {"decoder_start": 0, "eos": EOS, "pad": 0}


def loaded(family: str, net: Any) -> Any:
    """Our network as transformers reads it from a folder."""
    state = FAMILIES[family].weights_to_external(net.state_dict(), net.config)
    assert all(value.is_contiguous() for value in state.values())
    settings = to_external(family, net, SPECIAL_TOKENS)
    Path("out").mkdir()
    save_file(state, "out/model.safetensors", {"format": "pt"})
    Path("out/config.json").write_text(json.dumps(settings))
    kind = getattr(transformers, settings["architectures"][0])
    model, info = kind.from_pretrained("out", output_loading_info=True)
    assert not any(info.values())
    return model.eval()


@pytest.mark.plain_every(2)
@each_case
def test_models_come_here_and_go_back(case: Case) -> None:
    """Their random model has equal logits here, and all of it is the same back there."""
    model = case.build()
    net = ours(model)
    again = loaded(case.family, net)
    assert type(again) is case.kind
    for left in [False, True] if case in DECODERS else [False]:
        inputs = texts(model.config, left=left)
        expected = their_logits(model, inputs)
        assert expected.std() > 0.1
        assert difference(our_logits(net, inputs), expected) <= 2e-5
        assert difference(their_logits(again, inputs), expected) <= 1e-6
    weights = again.state_dict()
    for name, value in model.state_dict().items():
        # BART and RoBERTa never read the first two rows.
        first = 2 if "position" in name and case.family in ("bart", "roberta") else 0
        assert torch.equal(weights[name][first:], value[first:]), name
    found = config_from_huggingface(again.config.to_dict(), FAMILIES)
    assert found == config_from_huggingface(to_external(case.family, net), FAMILIES)
    assert found == (case.family, net.config)
    if isinstance(net, BertClassifier):
        assert again.config.id2label == {0: "class 0", 1: "class 1", 2: "class 2"}
    if not isinstance(net.config, BertConfig):
        assert (again.config.eos_token_id, again.config.pad_token_id) == (EOS, 0)
    if case in SEQ2SEQ:
        assert again.config.decoder_start_token_id == 0


def test_the_head_of_next_sentences() -> None:
    model = Case("BertForPreTraining", CASES["BertForMaskedLM"].settings).build()
    net = ours(model)
    inputs = texts(model.config)
    with torch.inference_mode():
        expected = model(**inputs)
        mask = inputs["attention_mask"].bool()
        hidden = net.encoder(inputs["input_ids"], mask, inputs["token_type_ids"])
        assert difference(net.sentence_logits(hidden), expected.seq_relationship_logits) <= 3e-5
        assert difference(net.head(hidden)[mask], expected.prediction_logits[mask]) <= 3e-5


def test_a_model_without_segments_becomes_bert() -> None:
    net = randomise(BertMaskedLM(replace(CASES["BertForMaskedLM"].ours(), segments=0)).eval())
    model = loaded("bert", net)
    inputs = texts(model.config)
    del inputs["token_type_ids"]
    assert difference(our_logits(net, inputs), their_logits(model, inputs)) <= 3e-5


def test_another_number_of_classes_and_the_other_head() -> None:
    model = CASES["BertForSequenceClassification"].build()
    config = replace(CASES["BertForSequenceClassification"].ours(), num_classes=7)
    state = bert.BERT.weights_from_external(model.state_dict(), config)
    missing = load_weights(BertClassifier(config), state, bert.HEADS)
    assert missing == ["head.linear.weight", "head.linear.bias"]
    pretrained = BertMaskedLM(config)
    missing = load_weights(pretrained, state, bert.HEADS)
    assert {name.partition(".")[0] for name in missing} == {"head"}
    missing = load_weights(BertClassifier(config), pretrained.state_dict(), bert.HEADS)
    assert {name.partition(".")[0] for name in missing} == {"head", "pooler"}


# Files of earlier versions ------------------------------------------------------------------------

OLDER: dict[str, Settings] = {  # weights that old files hold and nobody uses
    "BertForMaskedLM": {"embeddings.position_ids": torch.arange(48)[None]},
    "DistilBertForMaskedLM": {},
    "RobertaForMaskedLM": {"pooler.dense.weight": torch.ones(32, 32)},
    "GPT2LMHeadModel": {
        "h.0.attn.bias": torch.ones(1, 1, 128, 128),
        "h.1.attn.masked_bias": torch.tensor(-1e4),
    },
    "llama3 scaling, tied": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)},
    "MarianMTModel": {
        "encoder.embed_positions.weight": torch.ones(64, 64),
        "encoder.version": torch.ones(1),
    },
    "BartForConditionalGeneration": {"decoder.version": torch.ones(1)},
    "T5ForConditionalGeneration": {
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(32, 4)
    },
}


@pytest.mark.parametrize("name", OLDER)
def test_files_of_bare_models_and_earlier_versions(name: str) -> None:
    model = CASES[name].build()
    family, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    state = model.state_dict()
    expected = FAMILIES[family].weights_from_external(state, config)
    copies = [name for name in FAMILIES[family].copies(config) if "embed_tokens" not in name]
    prefix = f"{model.base_model_prefix}."
    bare = {}
    for key, value in state.items():
        if key not in copies:
            key = key.removeprefix(prefix)
            if family in bert.FAMILIES:
                key = key.replace("orm.weight", "orm.gamma").replace("orm.bias", "orm.beta")
            bare[key] = value
    assert not any(key.startswith(prefix) for key in bare)
    files = [bare | OLDER[name]]
    if family in seq2seq.FAMILIES:
        files.append({key: value for key, value in state.items() if "embed_tokens" not in key})
        files.append(files[1] | {"final_logits_bias": torch.zeros(1, VOCABULARY)})
        if family != "t5":
            del files[1]["final_logits_bias"]
    for file in files[:2]:
        found = FAMILIES[family].weights_from_external(file, config)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            wanted = expected[key]
            if key == "head.bias" and file is not files[0]:
                wanted = torch.zeros_like(wanted)
            assert torch.equal(value, wanted), key


def test_rotary_positions_in_earlier_words() -> None:
    case = CASES["llama3 scaling, tied"]
    settings = case.written()
    del settings["rope_parameters"]
    plain = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    plain["type"] = plain.pop("rope_type")
    settings |= {"rope_theta": 500.0, "rope_scaling": plain}
    assert config_from_huggingface(settings, FAMILIES) == ("llama", case.ours())
    del plain["original_max_position_embeddings"]
    found = config_from_huggingface(settings, FAMILIES)[1].position_options["scaling"]
    assert found == asdict(RotaryScaling("llama3", 8.0, 1.0, 4.0, 128))
    settings["rope_scaling"] = {"type": "linear", "factor": 2.0}
    del settings["tie_word_embeddings"], settings["hidden_act"], settings["rms_norm_eps"]
    config = config_from_huggingface(settings, FAMILIES)[1]
    scaling = asdict(RotaryScaling("linear", 2.0))
    assert config.position_options == {"base": 500.0, "scaling": scaling}
    assert (config.tied, config.stack.feedforward, config.stack.norm_eps) == (False, "swiglu", 1e-6)


def test_a_t5_with_one_table_and_unscaled_logits() -> None:
    """As transformers reads version 1.1 if the file has one table only."""
    case = Case("T5ForConditionalGeneration", CASES["t5 v1.1"].settings)
    model = case.build(tie_word_embeddings=True)
    model.config.scale_decoder_outputs = False
    net = ours(model)
    assert net.config.tying == "inputs"
    inputs = texts(model.config)
    assert difference(our_logits(net, inputs), their_logits(model, inputs)) <= 3e-5
    state = model.state_dict()
    del state["lm_head.weight"]
    found = seq2seq.T5.weights_from_external(state, net.config)
    assert torch.equal(found["unembed.weight"], net.embed.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """T5's queries are multiplied by sqrt(D), and its last norm divided by sqrt(E)."""
    case = CASES["T5ForConditionalGeneration"]
    model = case.build(d_model=96, d_kv=12).to(dtype)
    net = ours(model)
    inputs = texts(model.config)
    assert difference(our_logits(net, inputs), their_logits(model.float(), inputs)) <= 3e-4


# Positions and windows ----------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [{}, {"original_max_position_embeddings": 64}], ids=len)
def test_the_length_beside_the_scaling_takes_precedence(inner: Settings) -> None:
    case = CASES["LlamaForCausalLM"]
    rope = {name: value for name, value in LLAMA3.items() if "original" not in name} | inner
    settings = case.written(rope_parameters=rope, original_max_position_embeddings=16)
    family, config = config_from_huggingface(settings, FAMILIES)
    net = network(case.architecture, config)
    model = randomise(case.kind(case.kind.config_class.from_dict(settings)).eval())
    load_weights(net, FAMILIES[family].weights_from_external(model.state_dict(), config))
    inputs = texts(model.config)
    assert difference(our_logits(net, inputs), their_logits(model, inputs)) <= 3e-5


USED = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    "name, changes, length",
    [
        ("MistralForCausalLM", {"sliding_window": 16}, 16),
        ("MistralForCausalLM", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}, 16),
        ("MistralForCausalLM", {"sliding_window": None}, 128),
        ("MistralForCausalLM", {"sliding_window": 4096}, 128),
        ("Qwen2ForCausalLM", {**USED, "max_window_layers": 1}, 16),
        ("Qwen3ForCausalLM", {**USED, "max_window_layers": 2}, 128),
        ("Qwen3ForCausalLM", {**USED, "use_sliding_window": False, "max_window_layers": 0}, 128),
    ],
)
def test_the_window_of_attention_is_our_context(name: str, changes: Settings, length: int) -> None:
    case = CASES[name]
    model = case.build(**changes)
    net = ours(model)
    assert net.config.max_length == length
    older = {key: value for key, value in model.config.to_dict().items() if key != "layer_types"}
    assert config_from_huggingface({**older, **changes}, FAMILIES)[1] == net.config
    inputs = texts(model.config, (min(length, 40),) * 2)
    assert difference(our_logits(net, inputs), their_logits(model, inputs)) <= 3e-5
    if length == 16:
        with pytest.raises(ValueError, match="17 tokens are more than sliding_window 16"):
            our_logits(net, texts(model.config, (17, 17)))
        with pytest.raises(ValueError, match="sliding_window 16"):
            replace(net.config, max_length=17)
        if case.family == "mistral":
            with pytest.raises(ValueError, match="sliding_window"):
                decoder.FAMILIES["llama"].config_to_external(net.config)
    written = to_external(case.family, net)
    assert written["max_position_embeddings"] == length
    again = transformers.AutoConfig.for_model(**written)
    assert again.sliding_window == net.config.sliding_window
    assert config_from_huggingface(again.to_dict(), FAMILIES)[1] == net.config


@pytest.mark.parametrize(
    "name, changes, rates",
    [
        ("GPT2LMHeadModel", {"resid_pdrop": 0.2, "attn_pdrop": 0.05}, (0.2, 0.0, 0.05)),
        ("LlamaForCausalLM", {"attention_dropout": 0.2}, (0.0, 0.0, 0.2)),
        (
            "MarianMTModel",
            {"dropout": 0.3, "activation_dropout": 0.2, "attention_dropout": 0.05},
            (0.3, 0.2, 0.05),
        ),
        ("T5ForConditionalGeneration", {"dropout_rate": 0.3}, (0.3, 0.3, 0.3)),
        (
            "BertForMaskedLM",
            {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.05},
            (0.2, 0.0, 0.05),
        ),
    ],
)
def test_rates_of_dropout(name: str, changes: Settings, rates: tuple[float, ...]) -> None:
    family, config = config_from_huggingface(CASES[name].written(**changes), FAMILIES)
    stacks = [config.encoder, config.decoder] if CASES[name] in SEQ2SEQ else [config.stack]
    for stack in stacks:
        assert (stack.dropout, stack.resolved.mlp_dropout, stack.attention_dropout) == rates
    written = FAMILIES[family].config_to_external(config)
    assert {key: written[key] for key in changes} == changes
    if family == "llama":  # which has no other rates
        stack = replace(config.stack, dropout=0.1, drop_path=0.1)
        assert decoder.FAMILIES["llama"].config_to_external(replace(config, stack=stack)) == written


def read_config(name: str, *left_out: str, **entries: Any) -> Any:
    """Our config from a config.json of Hugging Face without some entries."""
    written = CASES[name].written(**entries)
    kept = {key: value for key, value in written.items() if key not in left_out}
    return config_from_huggingface(kept, FAMILIES)[1]


def test_entries_that_are_left_out_have_the_defaults_of_transformers() -> None:
    config = read_config("MistralForCausalLM", "sliding_window", max_position_embeddings=9000)
    assert config.sliding_window == config.max_length == 4096
    entries = {"use_sliding_window": True, "sliding_window": 8}
    for depth, window in ((28, None), (29, 8)):  # the first 28 layers see everything
        config = read_config(
            "Qwen2ForCausalLM",
            "max_window_layers",
            "layer_types",
            num_hidden_layers=depth,
            **entries,
        )
        assert config.sliding_window == window


def test_a_roberta_drops_values_before_and_after_its_pooler() -> None:
    entries = {"hidden_dropout_prob": 0.2, "classifier_dropout": 0.3}
    config = read_config("RobertaForMaskedLM", **entries)
    assert (config.pooler_dropout, config.head_dropout) == (0.3, 0.3)
