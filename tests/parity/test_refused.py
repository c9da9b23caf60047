"""What has no equal on the other side is refused, by the name of its option or weight."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from modules.models.bert import BertMaskedLM
from modules.models.gpt import Decoder
from modules.pretrained import bert, decoder, seq2seq
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.weights import load_weights
from tests.parity.families import CASES, FAMILIES, Settings

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
    (MARIAN, {"encoder_attention_heads": 5}, "5 heads"),
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


# Case, family, options of our config, the option that is named; None: the family takes it.
OPTIONS: list[tuple[str, str, Settings, str | None]] = [
    (BERT, "bert", {"position": "rotary"}, "position"),
    (BERT, "bert", {"embedding_norm": False}, "embedding_norm"),
    (BERT, "bert", {"order": "pre"}, "order"),
    (BERT, "bert", {"norm": "rmsnorm"}, "norm"),
    (BERT, "bert", {"bias": False}, "bias"),
    (BERT, "bert", {"feedforward": "swiglu"}, "feedforward"),
    (BERT, "roberta", {"feedforward": "relu"}, "feedforward"),
    (BERT, "distilbert", {}, "segments"),
    (GPT2, "gpt2", {"position": "alibi"}, "position"),
    (GPT2, "gpt2", {"bias": False}, "bias"),
    (GPT2, "gpt2", {"mlp_bias": False}, "mlp_bias"),
    (GPT2, "gpt2", {"norm": "rmsnorm"}, "norm"),
    (GPT2, "gpt2", {"kv_heads": 2}, "kv_heads"),
    (GPT2, "gpt2", {"head_dim": 16}, "heads"),
    (GPT2, "gpt2", {"feedforward": "swiglu"}, "feedforward"),
    (GPT2, "gpt2", {"order": "parallel"}, "order"),
    (GPT2, "gpt2", {"final_norm": False}, "final_norm"),
    (GPT2, "gpt2", {"attention": "additive"}, "attention"),
    (GPT2, "gpt2", {"layer_scale": 0.1}, "layer_scale"),
    (LLAMA, "llama", {"position_options": {"fraction": 0.5}}, "fraction"),
    (LLAMA, "llama", {"feedforward": "gelu"}, "feedforward"),
    (LLAMA, "llama", {"qk_norm": True}, "qk_norm"),
    (LLAMA, "llama", {"qkv_bias": True}, "bias"),
    (LLAMA, "llama", {"heads": 5, "kv_heads": 5, "head_dim": 8}, "5 does not divide 48"),
    (LLAMA, "mistral", {"mlp_bias": True}, "mlp_bias"),
    (LLAMA, "qwen2", {}, "qkv_bias"),
    (LLAMA, "qwen3", {}, "qk_norm"),
    (MARIAN, "marian", {"architecture": "prefix"}, "architecture"),
    (MARIAN, "marian", {"position": "learned"}, "position"),
    (MARIAN, "marian", {"position_options": {"base": 500.0}}, "base"),
    (MARIAN, "marian", {"embedding_norm": True}, "embedding_norm"),
    (MARIAN, "marian", {"tying": "inputs"}, "tying"),
    (MARIAN, "marian", {"norm_eps": 1e-6}, "norm_eps"),
    (MARIAN, "marian", {"order": "pre"}, "order"),
    (MARIAN, "marian", {"norm": "rmsnorm"}, "norm"),
    (MARIAN, "marian", {"bias": False}, "bias"),
    (MARIAN, "marian", {"kv_heads": 2}, "kv_heads"),
    (MARIAN, "marian", {"qk_norm": True}, "qk_norm"),
    (MARIAN, "marian", {"attention": "additive"}, "attention"),
    (MARIAN, "marian", {"feedforward": "swiglu"}, "feedforward"),
    (MARIAN, "marian", {"layer_scale": 0.1}, "layer_scale"),
    (MARIAN, "marian", {"tying": "target", "target_vocabulary": 9}, None),
    (MARIAN, "marian", {"encoder.feedforward": "gelu"}, "feedforward"),
    (BART, "bart", {"tying": "target"}, "tying"),
    (BART, "bart", {"position": "sinusoidal"}, "position"),
    (T5, "t5", {"position": "rotary"}, "position"),
    (T5, "t5", {"output_bias": True}, "output_bias"),
    (T5, "t5", {"scale_embedding": True}, "scale_embedding"),
    (T5, "t5", {"tying": "none"}, "tying"),
    (T5, "t5", {"tying": "inputs"}, None),
    (T5, "t5", {"feedforward": "geglu"}, "feedforward"),
    (T5, "t5", {"kv_heads": 2}, "kv_heads"),
    (
        T5,
        "t5",
        {"encoder.heads": 2, "encoder.kv_heads": 2, "encoder.head_dim": 16},
        "heads .* 2 and 4",
    ),
    (T5, "t5", {"encoder.mlp_width": 40}, "mlp_width .* 40 and 80"),
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


@pytest.mark.parametrize("name, family, options, named", OPTIONS)
def test_models_of_ours(name: str, family: str, options: Settings, named: str | None) -> None:
    config = changed(name, options)
    if named is None:
        assert FAMILIES[family].check(config) is None
        return
    with pytest.raises(ValueError, match=named):
        FAMILIES[family].config_to_external(config)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=named):
        FAMILIES[family].weights_to_external({}, config)


@pytest.mark.parametrize("option, value", [("pool", "mean"), ("pooler", "relu")])
def test_classifiers_of_ours(option: str, value: str) -> None:
    config = replace(CASES["BertForSequenceClassification"].ours(), **{option: value})
    with pytest.raises(ValueError, match=option):
        bert.BERT.weights_to_external({"head.linear.weight": torch.zeros(3, 32)}, config)
    with pytest.raises(ValueError, match=option):
        bert.BERT.config_to_external(config, ["a", "b", "c"])
    both = replace(CASES[BERT].ours(), next_sentence=True)
    with pytest.raises(ValueError, match="sentence"):
        bert.ROBERTA.weights_to_external(BertMaskedLM(both).state_dict(), both)


@pytest.mark.parametrize(
    "name, options, expected",
    [
        (GPT2, {"tied": False}, "gpt2"),
        (GPT2, {"bias": False}, "gpt2 models .* bias"),
        (LLAMA, {}, "llama"),
        (LLAMA, {"mlp_bias": True}, "llama"),
        (LLAMA, {"bias": True, "qkv_bias": True, "mlp_bias": False}, "llama"),
        (LLAMA, {"heads": 5, "kv_heads": 5, "head_dim": 8}, "mistral"),
        (LLAMA, {"qkv_bias": True}, "qwen2"),
        (LLAMA, {"qk_norm": True, "bias": True, "qkv_bias": True, "mlp_bias": False}, "qwen3"),
        (LLAMA, {"norm": "layernorm"}, "llama models .* norm"),
        (LLAMA, {"qk_norm": True, "mlp_bias": True}, "qwen3 models .* mlp_bias"),
        (MARIAN, {}, "marian"),
        (MARIAN, {"position": "rotary"}, "marian models .* position"),
        (BART, {}, "bart"),
        (T5, {}, "t5"),
        (T5, {"tying": "inputs"}, "t5"),
        (T5, {"encoder.mlp_width": 40}, "t5 models .* mlp_width"),
    ],
)
def test_the_family_that_a_model_matches(name: str, options: Settings, expected: str) -> None:
    module: Any = seq2seq if CASES[name].family in seq2seq.FAMILIES else decoder
    config = changed(name, options)
    if " " not in expected:
        assert module.matching_family(config).name == expected
        return
    with pytest.raises(ValueError, match=expected):
        module.matching_family(config)


# Weights ------------------------------------------------------------------------------------------

ADDED = {"model.score.weight": torch.zeros(1)}
BIASES = {
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
    (LLAMA, None, BIASES, {}, "stack.blocks.0.attention.qkv.bias"),
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
