"""Our encoder-decoder against Hugging Face's Marian, BART and T5, weights copied over both ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.config import StackConfig
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.models.seq2seq import SEQ2SEQ_PRESETS, Seq2Seq, Seq2SeqConfig
from modules.position import T5Bias
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.seq2seq import FAMILIES, matching_family
from modules.pretrained.weights import load_weights

transformers = pytest.importorskip("transformers")

Settings = dict[str, Any]
VOCABULARY, END = 61, 1
BART: Settings = {
    "model_type": "bart",
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
}
MARIAN: Settings = {
    **BART,
    "model_type": "marian",
    "scale_embedding": True,
    "activation_function": "swish",
}
OWN_VOCABULARIES: Settings = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 53}
T5: Settings = {
    "model_type": "t5",
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
}
CASES: dict[str, Settings] = {
    "marian": MARIAN,
    "marian of odd width": {
        **MARIAN,
        "d_model": 45,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 5,
    },
    "marian with two vocabularies": {**MARIAN, **OWN_VOCABULARIES},
    "marian with three tables": {**MARIAN, **OWN_VOCABULARIES, "tie_word_embeddings": False},
    "bart": BART,
    "bart, scaled": {**BART, "scale_embedding": True, "activation_function": "relu"},
    "t5": T5,
    "t5 v1.1": {
        **T5,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "num_heads": 3,
    },
    "t5 with silu": {**T5, "feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-5},
}
each_case = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """A second one costs more than it brings where tensors are this small."""
    torch.set_num_threads(1)


def theirs(settings: Settings, std: float = 0.2) -> Any:
    """Their model with weights among which no zeros or ones hide a mistake."""
    tokens = {
        "pad_token_id": 0,
        "eos_token_id": END,
        "bos_token_id": 2,
        "decoder_start_token_id": 0,
    }
    given = {
        "vocab_size": VOCABULARY,
        **tokens,
        **settings,
        "forced_eos_token_id": None,
        "forced_bos_token_id": None,
    }
    model = transformers.AutoModelForSeq2SeqLM.from_config(
        transformers.AutoConfig.for_model(**given)
    ).eval()
    if settings.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(
            model.lm_head.weight.detach().clone()
        )  # some versions tie it all the same
    values = dict(model.named_parameters()) | {
        n: b for n, b in model.named_buffers() if n == "final_logits_bias"
    }
    with torch.no_grad():
        for name, value in values.items():
            if name.endswith("embed_positions.weight") and settings["model_type"] == "marian":
                continue
            value.normal_(std=std)
            if name.endswith("norm.weight") or "layernorm_embedding.weight" in name:
                value += 1.0
    return model


def ours(model: Any) -> Seq2Seq:
    """Our model with their weights."""
    family, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    net = Seq2Seq(config).eval()
    load_weights(net, FAMILIES[family].weights_from_external(model.state_dict(), config))
    return net


def batch(
    model: Any, lengths: tuple[int, ...] = (40, 11, 25), size: int = 30
) -> tuple[Tensor, Tensor, Tensor]:
    """Sources (B, M), where they are no padding (B, M), and targets (B, N)."""
    padding_mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    source = torch.randint(3, model.config.vocab_size, padding_mask.shape).masked_fill(
        ~padding_mask, 0
    )
    most = model.get_output_embeddings().weight.shape[0]
    return (
        source,
        padding_mask,
        torch.randint(3, most, (len(lengths), size)).index_fill_(1, torch.tensor(0), 0),
    )


def run_theirs(model: nn.Module, source: Tensor, padding_mask: Tensor, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(
            input_ids=source, attention_mask=padding_mask.long(), decoder_input_ids=tokens
        ).logits


def run_ours(net: Seq2Seq, source: Tensor, padding_mask: Tensor, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return net.logits(net(source, tokens, padding_mask))


def far(one: Tensor, two: Tensor) -> float:
    """Largest difference, as a share of the largest value: float32 rounds in proportion."""
    assert one.shape == two.shape
    return ((one - two).abs().max() / two.abs().max()).item()


@each_case
def test_logits(settings: Settings) -> None:
    model = theirs(settings)
    inputs = batch(model)
    expected = run_theirs(model, *inputs)
    assert expected.std() > (0.1 if settings["model_type"] == "t5" else 1)
    assert far(run_ours(ours(model), *inputs), expected) <= 3e-5


def same_texts(
    model: Any, net: Seq2Seq, lengths: tuple[int, ...], new: int, penalty: float, beams: int = 5
) -> None:
    """Compares their `generate` with our `translate`, all beams and their scores."""
    source, padding_mask, _ = batch(model, lengths)
    options = {
        "num_beams": beams,
        "num_return_sequences": beams,
        "do_sample": False,
        "max_new_tokens": new,
    }
    more = {"length_penalty": penalty, "output_scores": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        found = model.generate(
            source, attention_mask=padding_mask.long(), **options, **(more if beams > 1 else {})
        )
    texts = found.sequences if beams > 1 else found
    sources = [row[kept].tolist() for row, kept in zip(source, padding_mask, strict=True)]
    config = GenerationConfig(
        new, temperature=0, beams=beams, length_penalty=penalty, early_stopping="likely"
    )
    got = [text for each in translate(net, sources, config, 0, [END]) for text in each]
    assert len(got) == len(texts)
    for number, (mine, other) in enumerate(zip(got, texts[:, 1:].tolist(), strict=True)):
        length = other.index(END) + 1 if END in other else len(other)
        assert (mine.tokens, mine.finished) == (other[:length], END in other)
        assert beams == 1 or mine.score == pytest.approx(
            found.sequences_scores[number].item(), rel=1e-4, abs=1e-4
        )
    assert beams == 1 or any(text.finished for text in got)


def writing(settings: Settings) -> Any:
    """Their model with both sides as deep, as their cache wants T5, and with texts that end now and then."""
    model = theirs(settings | ({"num_decoder_layers": 2} if settings["model_type"] == "t5" else {}))
    with torch.no_grad():
        if settings["model_type"] == "t5":
            model.get_output_embeddings().weight[END] *= 3
        else:
            model.final_logits_bias[:, END] += 6 if settings.get("scale_embedding") else 2
    return model


@each_case
@pytest.mark.parametrize("penalty", [0.6, 1.0, 2.0])
def test_beam_search(settings: Settings, penalty: float) -> None:
    model = writing(settings)
    same_texts(model, ours(model), (19, 5, 9, 13), 16, penalty)


@each_case
def test_greedy(settings: Settings) -> None:
    model = writing(settings)
    same_texts(model, ours(model), (19, 5, 9, 13), 40, 1.0, beams=1)


@each_case
def test_there_and_back(settings: Settings) -> None:
    model = theirs(settings)
    net, state, family = ours(model), model.state_dict(), settings["model_type"]
    back = FAMILIES[family].weights_to_external(net.state_dict(), net.config)
    assert back.keys() <= state.keys()
    copies = (
        "lm_head",
        "embed_tokens",
        "embed_positions" if family == "marian" else "embed_tokens",
    )
    assert all(any(copy in name for copy in copies) for name in state.keys() - back.keys())
    for name, value in back.items():
        assert value.is_contiguous()
        if "embed_positions" in name:  # nobody uses their first two rows
            value, state[name] = value[2:], state[name][2:]
        assert torch.equal(value, state[name]), name
    assert config_from_huggingface(FAMILIES[family].config_to_external(net.config), FAMILIES) == (
        family,
        net.config,
    )


def saved(net: Seq2Seq, folder: Path) -> Any:
    """Our model as they read it from a folder."""
    from safetensors.torch import save_file

    family = matching_family(net.config).name
    save_file(
        FAMILIES[family].weights_to_external(net.state_dict(), net.config),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    special = {"decoder_start": 0, "eos": END, "pad": 0}
    (folder / "config.json").write_text(
        json.dumps(FAMILIES[family].config_to_external(net.config, special))
    )
    model, said = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(said.values())
    assert type(model).__name__ == FAMILIES[family].architecture
    start = model.config.decoder_start_token_id
    assert (start, model.config.eos_token_id, model.config.pad_token_id) == (0, END, 0)
    return model.eval()


def sized(config: Seq2SeqConfig, **changes: Any) -> Seq2SeqConfig:
    return replace(
        config, source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY, max_length=64, **changes
    )


@each_case
def test_a_model_of_ours_becomes_theirs(settings: Settings, tmp_path: Path) -> None:
    config = ours(theirs(settings)).config
    net = Seq2Seq(replace(config, encoder=replace(config.encoder, init="xavier"))).eval()
    model = saved(net, tmp_path)
    inputs = batch(model)
    expected = run_theirs(model, *inputs)
    assert far(run_ours(net, *inputs), expected) <= 3e-5 and expected.std() > 0.1
    family, again = config_from_huggingface(model.config.to_dict(), FAMILIES)
    assert (family, again) == (settings["model_type"], config)


def test_a_preset_is_a_marian_model(tmp_path: Path) -> None:
    """What is trained here from scratch goes to Hugging Face, too."""
    net = Seq2Seq(sized(SEQ2SEQ_PRESETS["tiny"])).eval()
    with torch.no_grad():
        net.embed.weight[END] *= 3  # so that texts end
    model = saved(net, tmp_path)
    inputs = batch(model)
    assert far(run_ours(net, *inputs), run_theirs(model, *inputs)) <= 3e-5
    same_texts(model, net, (19, 5, 9), 16, 1.0, beams=1)
    assert {
        name: matching_family(config).name for name, config in SEQ2SEQ_PRESETS.items()
    } == dict.fromkeys(SEQ2SEQ_PRESETS, "marian")


def test_buckets_are_equal_at_all_distances() -> None:
    attention = transformers.models.t5.modeling_t5.T5Attention
    places = torch.arange(1000)
    for causal in (False, True):
        bias = T5Bias(StackConfig(64, heads=4, causal=causal), (1000,))
        offset = places[None] - places[::37, None]  # (27, 1000): key - query
        expected = attention._relative_position_bucket(offset, not causal)
        assert torch.equal(bias.bucket(offset), expected)
        assert len(expected.unique()) == (32 if causal else 31)


def test_old_and_bare_files() -> None:
    """Bare models leave the prefix out; old files hold sinusoids, versions and all copies of a table."""
    more = {
        "marian": {
            "model.encoder.embed_positions.weight": torch.ones(64, 64),
            "model.encoder.version": torch.ones(1),
        },
        "bart": {"model.decoder.version": torch.ones(1)},
        "t5": {
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(
                32, 4
            )
        },
    }
    for name, buffers in more.items():
        model, prefix = theirs(CASES[name]), FAMILIES[name].prefix
        family, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
        state = model.state_dict() | buffers
        expected = FAMILIES[family].weights_from_external(state, config)
        del state["lm_head.weight"]
        bare = {key.removeprefix(prefix): value for key, value in state.items()}
        few = {key: value for key, value in state.items() if "embed_tokens" not in key}
        for found in (
            FAMILIES[family].weights_from_external(bare, config),
            FAMILIES[family].weights_from_external(few, config),
        ):
            assert found.keys() == expected.keys()
            assert all(torch.equal(value, found[key]) for key, value in expected.items())
        without = {key: value for key, value in few.items() if key != "final_logits_bias"}
        assert (
            FAMILIES[family]
            .weights_from_external(without, config)
            .get("head.bias", torch.zeros(1))
            .count_nonzero()
            == 0
        )


def test_a_t5_with_one_table_that_scales_nothing() -> None:
    """What today's transformers make of version 1.1 where the file has one table only."""
    settings = {**T5, "feed_forward_proj": "gated-gelu"}
    model = theirs(settings)
    if not hasattr(model.config, "scale_decoder_outputs"):
        pytest.skip("transformers before version 5 says it by tie_word_embeddings alone")
    model.config.scale_decoder_outputs = False
    net, inputs = ours(model), batch(model)
    assert net.config.tying == "inputs"
    assert far(run_ours(net, *inputs), run_theirs(model, *inputs)) <= 3e-5
    family, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert torch.equal(
        FAMILIES[family].weights_from_external(state, config)["unembed.weight"], net.embed.weight
    )


PUBLISHED: dict[str, Settings] = {
    "opus-mt-en-de": {
        "model_type": "marian",
        "activation_dropout": 0.0,
        "activation_function": "swish",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "d_model": 512,
        "decoder_attention_heads": 8,
        "decoder_ffn_dim": 2048,
        "decoder_layers": 6,
        "decoder_start_token_id": 58100,
        "dropout": 0.1,
        "encoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "encoder_layers": 6,
        "eos_token_id": 0,
        "max_position_embeddings": 512,
        "normalize_before": False,
        "normalize_embedding": False,
        "pad_token_id": 58100,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "vocab_size": 58101,
    },
    "bart-base": {
        "model_type": "bart",
        "activation_dropout": 0.1,
        "activation_function": "gelu",
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "attention_dropout": 0.1,
        "bos_token_id": 0,
        "d_model": 768,
        "decoder_attention_heads": 12,
        "decoder_ffn_dim": 3072,
        "decoder_layers": 6,
        "decoder_start_token_id": 2,
        "dropout": 0.1,
        "encoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "encoder_layers": 6,
        "eos_token_id": 2,
        "max_position_embeddings": 1024,
        "normalize_before": False,
        "normalize_embedding": True,
        "pad_token_id": 1,
        "scale_embedding": False,
        "vocab_size": 50265,
    },
    "t5-small": {
        "model_type": "t5",
        "d_ff": 2048,
        "d_kv": 64,
        "d_model": 512,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "layer_norm_epsilon": 1e-06,
        "n_positions": 512,
        "num_heads": 8,
        "num_layers": 6,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "vocab_size": 32128,
    },
    "t5-v1_1-small": {
        "model_type": "t5",
        "d_ff": 1024,
        "d_kv": 64,
        "d_model": 512,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "layer_norm_epsilon": 1e-06,
        "num_decoder_layers": 8,
        "num_heads": 6,
        "num_layers": 8,
        "pad_token_id": 0,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "vocab_size": 32128,
    },
}
# Published numbers of weights, less those that nobody uses or learns, and with the biases of tokens, no weights there.
COUNTS = {
    "opus-mt-en-de": 74_410_496 - 2 * 512 * 512 + 58101,
    "bart-base": 139_420_416 - 4 * 768 + 50265,
    "t5-small": 60_506_624,
    "t5-v1_1-small": 76_961_152,
}
each_published = pytest.mark.parametrize("name", PUBLISHED)


@each_published
def test_published_sizes(name: str) -> None:
    settings = PUBLISHED[name]
    family, config = config_from_huggingface(settings, FAMILIES)
    written = FAMILIES[family].config_to_external(config)
    assert config_from_huggingface(written, FAMILIES) == (family, config)
    same = {
        theirs
        for theirs in settings.keys() & written.keys()
        if not theirs.endswith(("token_id", "function"))
    }
    assert len(same) >= 9 and all(settings[theirs] == written[theirs] for theirs in same)
    with torch.device("meta"):
        net = Seq2Seq(config)
        model = transformers.AutoModelForSeq2SeqLM.from_config(
            transformers.AutoConfig.for_model(**settings)
        )
    back = FAMILIES[family].weights_to_external(net.state_dict(), config)
    state = {key: value.shape for key, value in model.state_dict().items()}
    assert {key: state[key] for key in back} == {key: value.shape for key, value in back.items()}
    assert sum(value.numel() for value in net.parameters()) == COUNTS[name]


@pytest.mark.slow
@each_published
def test_published_shapes(name: str) -> None:
    settings = {
        **PUBLISHED[name],
        "pad_token_id": 0,
        "eos_token_id": END,
        "decoder_start_token_id": 0,
    }
    model = theirs(
        settings, 0.02
    )  # as they begin; with larger ones T5's own rounding grows beyond the bound
    net, inputs = ours(model), batch(model, (33, 20))
    expected = run_theirs(model, *inputs)
    assert expected.std() > 0.01
    assert far(run_ours(net, *inputs), expected) <= 1e-4
    with torch.no_grad():
        for weights in {model.get_output_embeddings().weight, net.head.weight}:
            weights[END] *= 20  # so that texts end
    same_texts(model, net, (12, 7), 12, 1.0)


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {**BART, "model_type": "pegasus"},
            'model_type "pegasus" is not supported; .* marian, bart, t5',
        ),
        ({}, 'model_type "None"'),
        ({**MARIAN, "normalize_before": True}, "normalize_before is True"),
        ({**MARIAN, "normalize_embedding": True}, "normalize_embedding is True"),
        ({**BART, "add_final_layer_norm": True}, "add_final_layer_norm is True"),
        ({**BART, "tie_word_embeddings": False}, "tie_word_embeddings False is not supported"),
        (
            {**MARIAN, "tie_word_embeddings": False},
            "share_encoder_decoder_embeddings True and tie_word_embeddings Fal",
        ),
        ({**MARIAN, "activation_function": "mish"}, 'activation "mish" is none of gelu'),
        ({**MARIAN, "d_model": None}, "lacks d_model"),
        ({**MARIAN, "decoder_layers": None}, "lacks decoder_layers"),
        ({**T5, "num_heads": None, "d_ff": None}, "lacks d_ff, num_heads"),
        ({**T5, "num_layers": None, "num_decoder_layers": None}, "lacks num_layers"),
        ({**T5, "relative_attention_num_buckets": 64}, "relative_attention_num_buckets is 64"),
        ({**T5, "relative_attention_max_distance": 64}, "relative_attention_max_distance is 64"),
        ({**T5, "feed_forward_proj": "gated-relu"}, 'activation "gated-relu" is none of'),
        ({**T5, "quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({**MARIAN, "encoder_attention_heads": 5}, "width 64 cannot be split into 5 heads"),
    ],
)
def test_configs_that_we_lack_parts_for(settings: Settings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_huggingface({"vocab_size": VOCABULARY, **settings}, FAMILIES)


def test_weights_that_do_not_fit() -> None:
    model = theirs(MARIAN)
    state, config = model.state_dict(), config_from_huggingface(model.config.to_dict(), FAMILIES)[1]
    with pytest.raises(
        ValueError, match="no place for: model.encoder.layers.2.fc1.bias, model.score.weight"
    ):
        FAMILIES["marian"].weights_from_external(
            {**state, "score.weight": state["lm_head.weight"], "encoder.layers.2.fc1.bias": 0},
            config,
        )
    with pytest.raises(ValueError, match="lack encoder.stack.blocks.0.norm1.weight"):
        FAMILIES["marian"].weights_from_external(
            {n: v for n, v in state.items() if "encoder.layers.0.self_attn_layer" not in n},
            config,
        )
    with pytest.raises(
        ValueError, match="model.decoder.layers.1.encoder_attn.k_proj.weight is missing"
    ):
        FAMILIES["marian"].weights_from_external(
            {n: v for n, v in state.items() if "1.encoder_attn.k" not in n}, config
        )
    with pytest.raises(
        ValueError, match="lm_head.weight is not model.shared.weight: the config says"
    ):
        FAMILIES["marian"].weights_from_external(
            {**state, "lm_head.weight": state["lm_head.weight"] + 1}, config
        )
    with pytest.raises(
        ValueError,
        match=r"decoder.stack.blocks.0.feedforward.up.weight is \(96, 64\) .* but \(80, 64",
    ):
        FAMILIES["marian"].weights_from_external(
            state, replace(config, decoder=replace(config.decoder, mlp_width=80))
        )


PRESET = sized(SEQ2SEQ_PRESETS["tiny"])
BART_OURS, T5_OURS = (
    config_from_huggingface({"vocab_size": VOCABULARY, **said}, FAMILIES)[1] for said in (BART, T5)
)


@pytest.mark.parametrize(
    "family, config, change, words",
    [
        (
            "marian",
            PRESET,
            {"architecture": "prefix"},
            "architecture encoder_decoder, but this one has prefix",
        ),
        (
            "marian",
            PRESET,
            {"position": "learned"},
            "position sinusoidal, but this one has learned",
        ),
        ("marian", PRESET, {"position_options": {"base": 500.0}}, "base 10000, not 500.0"),
        ("marian", PRESET, {"embedding_norm": True}, "embedding_norm False"),
        (
            "marian",
            PRESET,
            {"tying": "inputs"},
            "tying all or none or target, but this one has inputs",
        ),
        ("marian", PRESET, {"norm_eps": 1e-6}, "norm_eps 1e-05"),
        ("marian", PRESET, {"order": "pre"}, "order post"),
        ("marian", PRESET, {"norm": "rmsnorm"}, "norm layernorm"),
        ("marian", PRESET, {"bias": False}, "bias True"),
        ("marian", PRESET, {"kv_heads": 2}, "as many kv_heads as heads"),
        ("marian", PRESET, {"qk_norm": True}, "qk_norm False"),
        ("marian", PRESET, {"attention": "additive"}, "attention dot"),
        ("marian", PRESET, {"feedforward": "swiglu"}, 'no feedforward "swiglu"'),
        ("marian", PRESET, {"layer_scale": 0.1}, "layer_scale None"),
        ("bart", BART_OURS, {"tying": "target"}, "tying all, but this one has target"),
        ("bart", BART_OURS, {"position": "sinusoidal"}, "position learned"),
        ("t5", T5_OURS, {"position": "rotary"}, "position t5"),
        ("t5", T5_OURS, {"output_bias": True}, "output_bias False"),
        ("t5", T5_OURS, {"scale_embedding": True}, "scale_embedding False"),
        ("t5", T5_OURS, {"tying": "none"}, "tying all or inputs"),
        ("t5", T5_OURS, {"feedforward": "geglu"}, 'no feedforward "geglu"'),
        ("t5", T5_OURS, {"kv_heads": 2}, "as many kv_heads as heads"),
    ],
)
def test_models_that_theirs_cannot_be_like(
    family: str, config: Seq2SeqConfig, change: Settings, words: str
) -> None:
    own = {name: value for name, value in change.items() if hasattr(config, name)}
    blocks = {name: value for name, value in change.items() if name not in own}
    config = replace(
        config,
        **own,
        encoder=replace(config.encoder, **blocks),
        decoder=replace(config.decoder, **blocks),
    )
    with pytest.raises(ValueError, match=words):
        FAMILIES[family].config_to_external(config)
    with pytest.raises(ValueError, match=words):
        FAMILIES[family].weights_to_external({}, config)


def test_sides_that_theirs_cannot_part() -> None:
    for config, change, words in (
        (
            PRESET,
            {"feedforward": "gelu"},
            "marian models have the same feedforward in encoder and decoder, not",
        ),
        (
            T5_OURS,
            {"heads": 2, "kv_heads": 2, "head_dim": 16},
            "t5 models have the same heads .* not 2 and 4",
        ),
        (T5_OURS, {"mlp_width": 40}, "t5 models have the same mlp_width .* not 40 and 80"),
    ):
        with pytest.raises(ValueError, match=words):
            matching_family(replace(config, encoder=replace(config.encoder, **change)))
    other = replace(PRESET, tying="target", target_vocabulary=9)
    assert matching_family(other).name == "marian"
    with pytest.raises(ValueError, match="bart models have tying all"):
        FAMILIES["bart"].config_to_external(replace(BART_OURS, tying="target"))
    assert [
        matching_family(config).name
        for config in (BART_OURS, T5_OURS, replace(T5_OURS, tying="inputs"))
    ] == [*("bart", "t5", "t5")]
    with pytest.raises(ValueError, match="position sinusoidal, but this one has rotary"):
        matching_family(replace(PRESET, position="rotary"))
    assert FAMILIES.keys() == FAMILIES.keys()


def test_dropout_is_a_matter_of_rates() -> None:
    settings = {
        **MARIAN,
        "vocab_size": 9,
        "dropout": 0.3,
        "attention_dropout": 0.05,
        "activation_dropout": 0.2,
    }
    for stack in (
        config_from_huggingface(settings, FAMILIES)[1].encoder,
        config_from_huggingface(settings, FAMILIES)[1].decoder,
    ):
        assert (stack.dropout, stack.resolved.mlp_dropout, stack.attention_dropout) == (
            0.3,
            0.2,
            0.05,
        )
    written = FAMILIES["marian"].config_to_external(config_from_huggingface(settings, FAMILIES)[1])
    assert [written[name] for name in ("dropout", "attention_dropout", "activation_dropout")] == [
        0.3,
        0.05,
        0.2,
    ]
    stack = config_from_huggingface({**T5, "vocab_size": 9, "dropout_rate": 0.3}, FAMILIES)[
        1
    ].decoder
    assert (stack.dropout, stack.resolved.mlp_dropout, stack.attention_dropout) == (0.3, 0.3, 0.3)
