"""What has no equal on the other side is refused, by the name of its option or weight."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from modules.models.gpt import Decoder
from modules.pretrained import bert, decoder, seq2seq
from modules.pretrained.family import config_from_huggingface, matching_family
from modules.pretrained.weights import load_weights
from tests.helpers.marks import slow_except
from tests.parity.families import (
    CASES,
    FAMILIES,
    MODELS,
    PLAIN,
    Settings,
    difference,
    network,
    our_logits,
    randomise,
    texts,
    to_external,
)

BERT = "BertForMaskedLM"
GPT2 = "GPT2LMHeadModel"
LLAMA = "LlamaForCausalLM"
QWEN3 = "Qwen3ForCausalLM"
MARIAN = "MarianMTModel"
BART = "BartForConditionalGeneration"
T5 = "T5ForConditionalGeneration"


def scaled(kind: str, **options: Any) -> Settings:
    """A config of rotary positions."""
    return {"rope_parameters": None, "rope_scaling": {"rope_type": kind, **options}}


SETTINGS: list[tuple[str, Settings, str]] = [  # case, entries of its config.json, what is named
    (BERT, {"model_type": "mamba"}, "mamba"),
    (BERT, {"model_type": None}, "model_type"),
    (BERT, {"position_embedding_type": "relative_key"}, "relative_key"),
    (BERT, {"hidden_act": "mish"}, "mish"),
    (BERT, {"is_decoder": True}, "is_decoder"),
    (BERT, {"add_cross_attention": True}, "add_cross_attention"),
    (BERT, {"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size"),
    (GPT2, {"n_embd": None}, "n_embd"),
    (GPT2, {"activation_function": "mish"}, "mish"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    (LLAMA, {"hidden_act": "gelu_new"}, "gelu_new"),
    (LLAMA, {"hidden_size": None, "intermediate_size": None}, "hidden_size, intermediate_size"),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    (LLAMA, {"num_key_value_heads": 3}, "kv_heads 3"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
    (LLAMA, scaled("dynamic", factor=2.0), "dynamic"),
    (LLAMA, scaled("yarn", factor=2.0), "yarn"),
    (LLAMA, scaled("llama3", factor=8.0), "low_freq_factor, high_freq_factor"),
    (LLAMA, scaled("linear"), "factor"),
    (LLAMA, scaled("linear", factor=0.5), "factor"),
    (QWEN3, {"model_type": "qwen3_moe"}, "qwen3_moe"),
    (QWEN3, {"use_sliding_window": True, "layer_types": ["chunked_attention"]}, "chunked"),
    (MARIAN, {"model_type": "pegasus"}, "pegasus"),
    (MARIAN, {"normalize_before": True}, "normalize_before"),
    (MARIAN, {"normalize_embedding": True}, "normalize_embedding"),
    (MARIAN, {"tie_word_embeddings": False}, "tie_word_embeddings"),
    (MARIAN, {"activation_function": "mish"}, "mish"),
    (MARIAN, {"d_model": None}, "d_model"),
    (MARIAN, {"decoder_layers": None}, "decoder_layers"),
    (MARIAN, {"encoder_attention_heads": 5}, "heads 5"),
    (BART, {"add_final_layer_norm": True}, "add_final_layer_norm"),
    (BART, {"tie_word_embeddings": False}, "tie_word_embeddings"),
    (T5, {"num_heads": None, "d_ff": None}, "d_ff, num_heads"),
    (T5, {"num_layers": None, "num_decoder_layers": None}, "num_layers"),
    (T5, {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets"),
    (T5, {"relative_attention_max_distance": 64}, "relative_attention_max_distance"),
    (
        T5,
        {"feed_forward_proj": "gated-relu", "is_gated_act": True, "dense_act_fn": "relu"},
        "gated-relu",
    ),
]


@pytest.mark.parametrize("name, entries, named", SETTINGS)
def test_configs_of_theirs(name: str, entries: Settings, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        config_from_huggingface(CASES[name].written(**entries), FAMILIES)


POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")
FEEDFORWARDS = (
    *("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu"),
    *("swiglu", "geglu", "geglu_tanh"),
)
SWITCHES = ("embedding_norm", "scale_embedding", "output_bias", "tied", "next_sentence")
SWITCHES += ("final_norm", "bias", "qk_norm")
BIASES: list[Settings] = [
    {"bias": True, "qkv_bias": True, "mlp_bias": False},
    {"qkv_bias": True},
    {"mlp_bias": True},
]
OPTIONS: list[Settings] = [  # of our configs, or of both stacks, or of one
    {},
    *({"position": name} for name in POSITIONS),
    *({"feedforward": name} for name in FEEDFORWARDS),
    *({"order": name} for name in ("pre", "post", "parallel", "res_post", "no_residual")),
    *({"tying": name} for name in ("all", "inputs", "target", "none")),
    *({"pooler": name} for name in ("none", "tanh", "relu")),
    *({name: value} for name in SWITCHES for value in (True, False)),
    *BIASES,
    {"position_options": {"base": 500.0}},
    {"position_options": {"fraction": 0.5}},
    {"architecture": "prefix"},
    {"segments": 0},
    {"pool": "mean"},
    {"pool": "flatten"},
    {"embedding_width": 10},
    {"causal": False},
    {"value_dim": 5},
    {"pad_id": 3},
    {"sliding_window": 128},
    {"kv_heads": 1},
    {"head_dim": 16, "heads": 2},
    {"heads": 5, "kv_heads": 5, "head_dim": 8},
    *({"attention": name} for name in ("unscaled", "bilinear", "additive", "cosine")),
    *({"norm": name} for name in ("rmsnorm", "layernorm", "batchnorm", "none")),
    {"norm_eps": 1e-3},
    {"layer_scale": 0.1},
    {"conv_kernel": 4},
    {"tying": "target", "target_vocabulary": 9},
    {"encoder.feedforward": "gelu"},
    {"encoder.mlp_width": 40},
    {"encoder.depth": 1},
    {"encoder.heads": 2, "encoder.head_dim": 16},
]


def changed(name: str, options: Settings) -> Any:
    """Our config of a case with other options, of itself or of its stacks."""
    config = CASES[name].ours()
    own = {option: value for option, value in options.items() if hasattr(config, option)}
    config = replace(config, **own)
    for side in ["encoder", "decoder"] if hasattr(config, "encoder") else ["stack"]:
        more = {}
        for option in options.keys() - own.keys():
            if "." not in option or option.startswith(side):
                more[option.removeprefix(f"{side}.")] = options[option]
        config = replace(config, **{side: replace(getattr(config, side), **more)})
    return config


def check_options(name: str, options: Settings, family: str) -> bool:
    """Whether a family takes our model; if so, it comes back with equal logits."""
    config = changed(name, options)
    words = {word for option in options for word in re.split(r"\W|_", option)}
    refusal = None
    try:
        FAMILIES[family].check(config)
        net = randomise(network(name, config))
        settings = to_external(family, net)
        state = FAMILIES[family].weights_to_external(net.state_dict(), net.config)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert family != CASES[name].family or any(word in refusal for word in words), refusal
        return False
    assert settings["model_type"] == family
    back = network(settings["architectures"][0], FAMILIES[family].config_from_external(settings))
    load_weights(back, FAMILIES[family].weights_from_external(state, back.config))
    inputs = texts(CASES[name].config(), (9, 4, 5))
    inputs = {key: value.clamp(max=8) for key, value in inputs.items()}  # of small vocabularies
    if options.get("segments") == 0:
        inputs.pop("token_type_ids", None)
    assert difference(our_logits(back, inputs), our_logits(net, inputs)) <= 1e-6
    return True


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("name", slow_except(PLAIN, MODELS))
def test_options_of_ours_are_refused_by_name_or_come_back(name: str) -> None:
    own = CASES[name].family
    for options in OPTIONS:
        try:
            changed(name, options)
        except (TypeError, ValueError):  # there is no such model of ours
            continue
        assert check_options(name, options, own) or options


@pytest.mark.parametrize(
    "name", [name for name in MODELS if CASES[name].family not in bert.FAMILIES]
)
def test_the_first_family_that_takes_a_model_is_found(name: str) -> None:
    all_families: list[Any] = [seq2seq.FAMILIES, decoder.FAMILIES, decoder.IMAGE_FAMILIES]
    (families,) = [found for found in all_families if CASES[name].family in found]
    assert matching_family(CASES[name].ours(), families).name == CASES[name].family
    for options in ({}, *BIASES, {"heads": 5, "kv_heads": 5, "head_dim": 8}, {"tying": "inputs"}):
        try:
            config = changed(name, options)
        except TypeError:
            continue
        taken = [family for family in families if check_options(name, options, family)]
        if taken:
            assert matching_family(config, families).name == taken[0]
        else:
            with pytest.raises(ValueError):
                matching_family(config, families)


@pytest.mark.parametrize(
    "name, options, named",
    [
        (GPT2, {"bias": False}, "gpt2 models .* bias"),
        (LLAMA, {"norm": "layernorm"}, "llama models .* norm"),
        (LLAMA, {"qk_norm": True, "mlp_bias": True}, "qwen3 models .* mlp_bias"),
        (MARIAN, {"position": "rotary"}, "marian models .* position"),
        (T5, {"encoder.mlp_width": 40}, "t5 models .* mlp_width"),
    ],
)
def test_the_nearest_family_says_why(name: str, options: Settings, named: str) -> None:
    module: Any = seq2seq if CASES[name].family in seq2seq.FAMILIES else decoder
    with pytest.raises(ValueError, match=named):
        matching_family(changed(name, options), module.FAMILIES)


# Weights ------------------------------------------------------------------------------------------

ADDED = {"model.score.weight": torch.zeros(1)}
MORE_BIASES = {
    f"model.layers.0.self_attn.{part}_proj.bias": torch.zeros(48 if part == "q" else 24)
    for part in "qkv"
}
# Case, part of the names of weights that are left out, weights that are added, options of our
# config, what is named.
WEIGHTS: list[tuple[str, str | None, dict[str, Any], Settings, str]] = [
    (BERT, None, {"surprise": torch.zeros(1)}, {}, "surprise"),
    (BERT, ".self.", {}, {}, "encoder.stack.blocks.0.attention.qkv.weight"),
    (BERT, None, {"cls.predictions.decoder.weight": torch.zeros(61, 32)}, {}, "decoder.weight"),
    (BERT, None, {}, {"max_length": 9}, r"position.table is \(48, 32\).*\(9, 32"),
    (BERT, None, {}, {"vocabulary": 70}, r"encoder.embed.weight is \(61, 32\).*\(70, 32"),
    ("llama3 scaling, tied", None, ADDED, {}, "model.score.weight"),
    (LLAMA, "0.input", {}, {}, "stack.blocks.0.norm1.weight"),
    (LLAMA, "1.self_attn.k", {}, {}, "model.layers.1.self_attn.k_proj.weight"),
    (LLAMA, None, MORE_BIASES, {}, "stack.blocks.0.attention.qkv.bias"),
    (LLAMA, "lm_head", {}, {}, "unembed.weight"),
    (LLAMA, None, {}, {"vocabulary": 98}, r"embed.weight is \(61, 48\).*\(98, 48\)"),
    (LLAMA, None, {}, {"depth": 1}, "model.layers.1"),
    ("llama3 scaling, tied", None, {"lm_head.weight": torch.zeros(61, 48)}, {}, "lm_head.weight"),
    (MARIAN, None, ADDED | {"encoder.layers.2.fc1.bias": torch.zeros(1)}, {}, "2.fc1.bias, model"),
    (MARIAN, "encoder.layers.0.self_attn_layer", {}, {}, "encoder.stack.blocks.0.norm1.weight"),
    (MARIAN, "1.encoder_attn.k", {}, {}, "model.decoder.layers.1.encoder_attn.k_proj.weight"),
    (MARIAN, None, {"lm_head.weight": torch.zeros(61, 64)}, {}, "lm_head.weight"),
    (MARIAN, None, {}, {"mlp_width": 40}, r"feedforward.up.weight is \(.., 64\).*\(40, 64\)"),
    (LLAMA, None, {"model.norm.weight": torch.zeros(48, dtype=torch.int8)}, {}, "model.norm"),
    (GPT2, None, {"transformer.h.0.attn.c_attn.weight": torch.tensor(1.0)}, {}, "qkv.weight"),
]


@pytest.mark.parametrize("name, left_out, added, options, named", WEIGHTS)
def test_weights_of_theirs(
    name: str, left_out: str | None, added: Any, options: Settings, named: str
) -> None:
    state = CASES[name].build().state_dict()
    kept = {key: value for key, value in state.items() if not left_out or left_out not in key}
    with pytest.raises(ValueError, match=named):
        FAMILIES[CASES[name].family].weights_from_external(kept | added, changed(name, options))


@pytest.mark.parametrize(
    "options, named",
    [
        ({"vocabulary": 98}, r"embed.weight is \(61, 48\).*\(98, 48\)"),
        ({"tied": False}, "unembed.weight"),
        ({"depth": 1}, "stack.blocks.1"),
    ],
)
def test_weights_that_do_not_fit_another_config_of_ours(options: Settings, named: str) -> None:
    state = Decoder(CASES["llama3 scaling, tied"].ours()).state_dict()
    with pytest.raises(ValueError, match=named):
        load_weights(Decoder(changed("llama3 scaling, tied", options)), state)
