"""Our decoder against Hugging Face's GPT-2, Llama, Mistral and Qwen, weights copied over both ways."""

import json
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from modules.models.gpt import DECODER_PRESETS, Decoder, DecoderConfig
from modules.position import RotaryScaling, build_position
from modules.pretrained.decoder import FAMILIES, matching_family
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.weights import load_weights

transformers = pytest.importorskip("transformers")

Settings = dict[str, Any]
VOCABULARY = 97
GPT2: Settings = {"model_type": "gpt2", "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
SIZES: Settings = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
LLAMA, MISTRAL, QWEN2, QWEN3 = (
    {"model_type": name, **SIZES} for name in ("llama", "mistral", "qwen2", "qwen3")
)
LLAMA3: Settings = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, Settings] = {
    "gpt2": GPT2,
    "gpt2 untied": {
        **GPT2,
        "tie_word_embeddings": False,
        "n_inner": 80,
        "activation_function": "relu",
    },
    "llama": LLAMA,
    "llama3 scaling, tied": {**LLAMA, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "linear scaling": {
        **LLAMA,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
        "num_key_value_heads": 4,
    },
    "llama with biases in attention": {**LLAMA, "attention_bias": True},
    "llama with biases behind attention": {
        **LLAMA,
        "mlp_bias": True,
        "hidden_act": "gelu",
        "head_dim": 8,
    },
    "mistral": {**MISTRAL, "head_dim": 20, "sliding_window": 96},
    "qwen2": {**QWEN2, "tie_word_embeddings": True},
    "qwen3": {**QWEN3, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3 with biases": {**QWEN3, "head_dim": 12, "attention_bias": True, "rms_norm_eps": 1e-5},
}
each_case = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def one_thread(same_start: None) -> None:
    """A second one costs more than it brings where tensors are this small."""
    torch.set_num_threads(1)


def their_config(settings: Settings) -> Any:
    kind = (
        FAMILIES[settings["model_type"]]
        .architecture.removesuffix("LMHeadModel")
        .removesuffix("ForCausalLM")
    )
    return getattr(transformers, f"{kind}Config")(
        **{"vocab_size": VOCABULARY, **settings},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )


def theirs(settings: Settings) -> Any:
    """Their model with weights among which no zeros or ones hide a mistake."""
    model = transformers.AutoModelForCausalLM.from_config(their_config(settings)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(std=0.3)
            if name.endswith("weight") and ("norm" in name or ".ln_" in name):
                value += 1.0
    return model


def ours(model: Any) -> Decoder:
    """Our decoder with their weights."""
    family, config = config_from_huggingface(model.config.to_dict(), FAMILIES)
    net = Decoder(config).eval()
    load_weights(net, FAMILIES[family].weights_from_external(model.state_dict(), config))
    return net


def batch(lengths: tuple[int, ...] = (29, 11, 20), left: bool = True) -> tuple[Tensor, Tensor]:
    """Tokens (B, N) and where they are no padding (B, N)."""
    place = torch.arange(max(lengths))[None]
    size = torch.tensor(lengths)[:, None]
    padding_mask = place >= max(lengths) - size if left else place < size
    return torch.randint(1, VOCABULARY, padding_mask.shape).masked_fill(
        ~padding_mask, 0
    ), padding_mask


def run_theirs(
    model: nn.Module,
    tokens: Tensor,
    padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    with torch.inference_mode():
        mask = None if padding_mask is None else padding_mask.long()
        return model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits


def run_ours(
    net: Decoder,
    tokens: Tensor,
    padding_mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    with torch.inference_mode():
        return net.logits(net(tokens, padding_mask, positions))


def far(one: Tensor, two: Tensor) -> float:
    """Largest difference, as a share of the largest value: float32 rounds in proportion."""
    assert one.shape == two.shape
    return ((one - two).abs().max() / two.abs().max()).item()


@each_case
def test_logits(settings: Settings) -> None:
    model = theirs(settings)
    net = ours(model)
    tokens = batch((40, 40))[0]
    expected = run_theirs(model, tokens)
    assert expected.std() > 1
    assert far(run_ours(net, tokens), expected) <= 1e-5
    for left in (True, False):
        tokens, padding_mask = batch(left=left)
        positions = (padding_mask.long().cumsum(1) - 1).clamp(min=0)
        expected = run_theirs(model, tokens, padding_mask, positions)[padding_mask]
        assert far(run_ours(net, tokens, padding_mask)[padding_mask], expected) <= 1e-5


@each_case
def test_greedy_continuations(settings: Settings) -> None:
    model = theirs(settings)
    tokens, padding_mask = batch((17, 5, 30))
    with torch.inference_mode():
        options = {"do_sample": False, "max_new_tokens": 64, "min_new_tokens": 64}
        expected = model.generate(tokens, attention_mask=padding_mask.long(), **options)[
            :, tokens.shape[1] :
        ]
    prompts = [row[kept].tolist() for row, kept in zip(tokens, padding_mask, strict=True)]
    got = torch.stack(
        list(generate(ours(model), prompts, GenerationConfig(64, temperature=0))), 1
    )  # (B, 64)
    assert torch.equal(got, expected)
    assert len(got.unique()) > 10


@each_case
def test_there_and_back(settings: Settings) -> None:
    model = theirs(settings)
    net, state, family = ours(model), model.state_dict(), settings["model_type"]
    back = FAMILIES[family].weights_to_external(net.state_dict(), net.config)
    assert back.keys() == state.keys() - ({"lm_head.weight"} if net.config.tied else set())
    assert all(
        torch.equal(value, state[name]) and value.is_contiguous() for name, value in back.items()
    )
    settings = FAMILIES[family].config_to_external(net.config)
    assert config_from_huggingface(settings, FAMILIES) == (family, net.config)


@each_case
def test_a_model_of_ours_becomes_theirs(settings: Settings, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    family, config = config_from_huggingface(their_config(settings).to_dict(), FAMILIES)
    stack = replace(config.stack, init="xavier")
    net = Decoder(replace(config, stack=stack)).eval()
    assert matching_family(config).options == FAMILIES[family].options
    save_file(
        FAMILIES[family].weights_to_external(net.state_dict(), config),
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    written = FAMILIES[family].config_to_external(config, {"eos": 3, "pad": 0})
    (tmp_path / "config.json").write_text(json.dumps(written))
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(said.values())
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (
        None,
        3,
        0,
    )
    tokens = batch((40, 40))[0]
    expected = run_theirs(model.eval(), tokens)
    assert far(run_ours(net, tokens), expected) <= 1e-5 and expected.std() > 0.1
    assert config_from_huggingface(model.config.to_dict(), FAMILIES) == (family, config)


@pytest.mark.parametrize("name", ["llama", "llama3 scaling, tied", "linear scaling"])
def test_far_positions(name: str) -> None:
    model = theirs(CASES[name])
    tokens = batch((40, 40))[0]
    for start in (100, 5000, 100_000):
        positions = torch.arange(start, start + 40).expand_as(tokens)
        assert (
            far(
                run_ours(ours(model), tokens, None, positions),
                run_theirs(model, tokens, None, positions),
            )
            <= 1e-4
        )


def test_old_spellings() -> None:
    """Files of bare models leave the prefix out; old ones hold masks and frequencies, and say `rope_scaling`."""
    buffers = {
        "gpt2": {
            "h.0.attn.bias": torch.ones(1, 1, 128, 128),
            "h.1.attn.masked_bias": torch.tensor(-1e4),
        },
        "llama3 scaling, tied": {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)},
    }
    for name, more in buffers.items():
        model, prefix = theirs(CASES[name]), FAMILIES[CASES[name]["model_type"]].prefix
        settings, state = model.config.to_dict(), model.state_dict()
        family, config = config_from_huggingface(settings, FAMILIES)
        expected = FAMILIES[family].weights_from_external(state, config)
        del state["lm_head.weight"]
        old = {key.removeprefix(prefix): value for key, value in state.items()} | more
        assert not any(key.startswith(prefix) for key in old)
        got = FAMILIES[family].weights_from_external(old, config)
        assert got.keys() == expected.keys() and all(
            torch.equal(value, got[key]) for key, value in expected.items()
        )
        rope = settings.pop("rope_parameters", None)
        if rope:
            base = rope.pop("rope_theta")
            kind = rope.pop("rope_type")
            settings |= {"rope_theta": base, "rope_scaling": {"type": kind, **rope}}
            assert config_from_huggingface(settings, FAMILIES) == (family, config)
    linear = {
        **LLAMA,
        "vocab_size": 9,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_theta": 1000,
    }
    found = config_from_huggingface(linear, FAMILIES)[1]
    assert found.position_options == {
        "base": 1000.0,
        "scaling": asdict(RotaryScaling("linear", 2.0)),
    }
    assert not found.tied and (found.stack.feedforward, found.stack.norm_eps) == (
        "swiglu",
        1e-6,
    )  # not said
    llama3 = {
        key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"
    }
    found = config_from_huggingface({**linear, "rope_scaling": llama3}, FAMILIES)[1]
    scaling = RotaryScaling("llama3", 8.0, 1.0, 4.0, SIZES["max_position_embeddings"])
    assert found.position_options["scaling"] == asdict(scaling)


@pytest.mark.parametrize(
    "settings, length",
    [
        ({**MISTRAL, "sliding_window": 16}, 16),
        ({**MISTRAL, "sliding_window": 16, "layer_types": ["full_attention"] * 2}, 16),
        ({**MISTRAL, "sliding_window": None}, 128),
        (MISTRAL, 128),  # their usual window, 4096, is longer
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, 128),
        ({**QWEN3, "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, 128),
    ],
)
def test_windows(settings: Settings, length: int) -> None:
    """Attention that looks back over a window is ours within the window, which is then our context."""
    model = theirs(settings)
    net = ours(model)
    assert net.config.max_length == length
    old = {key: value for key, value in model.config.to_dict().items() if key != "layer_types"}
    assert config_from_huggingface({**old, **settings}, FAMILIES)[1] == net.config
    tokens = batch((40, 40))[0]
    assert far(run_ours(net, tokens[:, :length]), run_theirs(model, tokens[:, :length])) <= 1e-5
    assert length > 40 or far(run_ours(net, tokens), run_theirs(model, tokens)) > 0.01
    written = FAMILIES[settings["model_type"]].config_to_external(net.config)
    assert written["max_position_embeddings"] == length
    again = transformers.AutoConfig.for_model(**written)
    if length == 16:
        with pytest.raises(ValueError, match="sliding_window 16"):
            replace(net.config, max_length=17)
    if length == 16 and settings["model_type"] == "mistral":
        with pytest.raises(ValueError, match="sliding_window None, but this one has 16"):
            FAMILIES["llama"].config_to_external(net.config)
    assert again.sliding_window == net.config.sliding_window
    assert config_from_huggingface(again.to_dict(), FAMILIES)[1] == net.config


PUBLISHED: dict[int, Settings] = {  # number of weights -> config.json as published
    124_439_808: {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "vocab_size": 50257,
    },
    1_235_814_400: {  # Llama-3.2-1B
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    },
    7_241_732_096: {  # Mistral-7B-v0.1
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    },
    494_032_768: {  # Qwen2.5-0.5B
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    596_049_920: {  # Qwen3-0.6B
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize(
    "count, settings", PUBLISHED.items(), ids=[s["model_type"] for s in PUBLISHED.values()]
)
def test_published_sizes(count: int, settings: Settings) -> None:
    family, config = config_from_huggingface(settings, FAMILIES)
    written = FAMILIES[family].config_to_external(config)
    assert config_from_huggingface(written, FAMILIES) == (family, config)
    changed = (
        {"max_position_embeddings", "sliding_window"}
        if family == "mistral"
        else {"rope_scaling", "sliding_window"}
    )
    same = settings.keys() & written.keys() - {"bos_token_id", "eos_token_id", *changed}
    assert len(same) >= 12 and all(settings[name] == written[name] for name in same)
    with torch.device("meta"):
        net = Decoder(config)
        models = [
            transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**said))
            for said in (settings, written)
        ]
    assert sum(value.numel() for value in net.parameters()) == count
    back = FAMILIES[family].weights_to_external(net.state_dict(), config)
    for model in models:
        state = {
            name: value
            for name, value in model.state_dict().items()
            if not (config.tied and name.startswith("lm"))
        }
        assert {name: value.shape for name, value in back.items()} == {
            name: v.shape for name, v in state.items()
        }
        assert (
            FAMILIES[family].weights_from_external(state, config).keys() == net.state_dict().keys()
        )


SHAPES = [
    pytest.param(s, id=s["model_type"], marks=[pytest.mark.slow] * (s["model_type"] != "gpt2"))
    for s in PUBLISHED.values()
]


@pytest.mark.parametrize("settings", SHAPES)
def test_logits_in_published_shapes(settings: Settings) -> None:
    """GPT-2 as it is; of the others one block and a few of the tokens."""
    if settings["model_type"] != "gpt2":
        settings = {
            **settings,
            "num_hidden_layers": 1,
            "vocab_size": 1000,
            "torch_dtype": "float32",
        }
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings)
    ).eval()
    net, tokens = ours(model), torch.randint(settings["vocab_size"], (1, 33))
    expected = run_theirs(model, tokens)
    assert expected.std() > 0.1
    assert far(run_ours(net, tokens), expected) <= 1e-4
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 64, "min_new_tokens": 64}
    theirs = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, 33:]
    got = torch.stack(list(generate(net, tokens.tolist(), GenerationConfig(64, temperature=0))), 1)[
        0
    ]  # (64,)
    assert torch.equal(got, theirs)


@pytest.mark.parametrize(
    "settings", list(PUBLISHED.values())[1:], ids=lambda settings: settings["model_type"]
)
def test_published_rotations_are_equal_to_the_last_bit(settings: Settings) -> None:
    family, config = config_from_huggingface(settings, FAMILIES)
    kind = FAMILIES[family].architecture.removesuffix("ForCausalLM")
    code = import_module(f"transformers.models.{family}.modeling_{family}")
    rotary = getattr(code, f"{kind}RotaryEmbedding")(transformers.AutoConfig.for_model(**settings))
    places = torch.arange(0, settings["max_position_embeddings"], 101)[None]  # (1, N)
    length = settings["max_position_embeddings"]
    encoding = build_position("rotary", config.position_options, config.stack, (length,))
    ours = encoding.rotate(places[..., None])
    for mine, other in zip((ours.cos, ours.sin), rotary(torch.zeros(1), places), strict=True):
        half = config.stack.resolved.head_dim // 2
        assert torch.equal(mine[0, 0, :, half:], other[0, :, half:])  # (N, D / 2)


def test_presets_are_as_published() -> None:
    stack = replace(
        DECODER_PRESETS["gpt2"].stack, dropout=0.1, mlp_dropout=0.0, attention_dropout=0.1
    )
    published = replace(DECODER_PRESETS["gpt2"], vocabulary=50257, stack=stack)
    assert config_from_huggingface(PUBLISHED[124_439_808], FAMILIES) == ("gpt2", published)
    assert {
        name: matching_family(replace(config, vocabulary=9)).name
        for name, config in DECODER_PRESETS.items()
    } == {
        name: "llama" if config.position == "rotary" else "gpt2"
        for name, config in DECODER_PRESETS.items()
    }


def yarn(kind: str) -> Settings:
    return {"rope_scaling": {"type": kind, "factor": 2.0}}


@pytest.mark.parametrize(
    "settings, words",
    [
        (
            {**LLAMA, "model_type": "mamba"},
            'model_type "mamba" is not supported; .* gpt2, llama, mistral, qwen2, qwen3',
        ),
        ({**QWEN3, "model_type": "qwen3_moe"}, 'model_type "qwen3_moe"'),
        ({}, 'model_type "None"'),
        (
            {**LLAMA, **yarn("dynamic")},
            'rope_type "dynamic" is not supported; .* default or linear or llama3',
        ),
        ({**LLAMA, **yarn("yarn")}, 'rope_type "yarn"'),
        ({**LLAMA, **yarn("longrope")}, 'rope_type "longrope"'),
        ({**LLAMA, "rope_parameters": {"rope_type": "proportional"}}, 'rope_type "proportional"'),
        (
            {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "lacks low_freq_factor, high_freq_factor",
        ),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor .* is 0.5"),
        (
            {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "from layer to layer",
        ),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {**QWEN3, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            "chunked_attention",
        ),
        ({**LLAMA, "hidden_act": "gelu_new"}, 'activation "gelu_new" is none of silu'),
        ({**GPT2, "activation_function": "mish"}, 'activation "mish" is none of gelu'),
        (
            {**LLAMA, "hidden_size": None, "intermediate_size": None},
            "lacks hidden_size, intermediate_size",
        ),
        ({**GPT2, "n_embd": None}, "lacks n_embd"),
        ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights is False"),
        (
            {**GPT2, "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention is True"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({**LLAMA, "num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
    ],
)
def test_configs_that_we_lack_parts_for(settings: Settings, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_huggingface({"vocab_size": VOCABULARY, **settings}, FAMILIES)


def test_weights_that_do_not_fit() -> None:
    model = theirs({**LLAMA, "tie_word_embeddings": True})
    state, config = model.state_dict(), config_from_huggingface(model.config.to_dict(), FAMILIES)[1]
    with pytest.raises(
        ValueError, match="no place for: model.layers.2.mlp.up_proj.weight, model.score.weight"
    ):
        more = dict.fromkeys(("score.weight", "model.layers.2.mlp.up_proj.weight"), torch.zeros(1))
        FAMILIES["llama"].weights_from_external(state | more, config)
    with pytest.raises(ValueError, match="lack stack.blocks.0.norm1.weight"):
        FAMILIES["llama"].weights_from_external(
            {name: value for name, value in state.items() if "0.input" not in name}, config
        )
    with pytest.raises(ValueError, match="model.layers.1.self_attn.k_proj.weight is missing"):
        FAMILIES["llama"].weights_from_external(
            {name: value for name, value in state.items() if "1.self_attn.k" not in name},
            config,
        )
    with pytest.raises(ValueError, match="config has no stack.blocks.0.attention.qkv.bias"):
        biases = {
            f"model.layers.0.self_attn.{part}_proj.bias": torch.zeros(48 if part == "q" else 24)
            for part in "qkv"
        }
        FAMILIES["llama"].weights_from_external({**state, **biases}, config)
    with pytest.raises(
        ValueError, match="lm_head.weight is not model.embed_tokens.weight: .*tie_word_embeddings"
    ):
        FAMILIES["llama"].weights_from_external(
            {**state, "lm_head.weight": torch.zeros(VOCABULARY, 48)}, config
        )
    with pytest.raises(ValueError, match="lack unembed.weight"):
        bare = {name: value for name, value in state.items() if name != "lm_head.weight"}
        FAMILIES["llama"].weights_from_external(bare, replace(config, tied=False))
    with pytest.raises(ValueError, match=r"embed.weight is \(97, 48\) .* but \(98, 48\)"):
        FAMILIES["llama"].weights_from_external(state, replace(config, vocabulary=98))
    ours_state = FAMILIES["llama"].weights_from_external(state, config)
    with pytest.raises(ValueError, match=r"embed.weight is \(97, 48\) .* but \(98, 48\)"):
        load_weights(Decoder(replace(config, vocabulary=98)), ours_state)
    with pytest.raises(ValueError, match="lack unembed.weight"):
        load_weights(Decoder(replace(config, tied=False)), ours_state)
    with pytest.raises(ValueError, match="config has no stack.blocks.1"):
        load_weights(Decoder(replace(config, stack=replace(config.stack, depth=1))), ours_state)


GPT2_OURS, LLAMA_OURS = (
    replace(DECODER_PRESETS[name], vocabulary=VOCABULARY) for name in ("tiny", "llama")
)


@pytest.mark.parametrize(
    "family, config, change, words",
    [
        (
            "gpt2",
            GPT2_OURS,
            {"position": "alibi"},
            "gpt2 models have position learned, but this one has alibi",
        ),
        ("gpt2", GPT2_OURS, {"bias": False}, "bias True"),
        ("gpt2", GPT2_OURS, {"mlp_bias": False}, "mlp_bias True"),
        ("gpt2", GPT2_OURS, {"norm": "rmsnorm"}, "norm layernorm"),
        ("gpt2", GPT2_OURS, {"kv_heads": 2}, "as many kv_heads as heads"),
        ("gpt2", GPT2_OURS, {"head_dim": 16}, "each of size width / heads"),
        ("gpt2", GPT2_OURS, {"feedforward": "swiglu"}, 'gpt2 models have no feedforward "swiglu"'),
        ("gpt2", GPT2_OURS, {"order": "parallel"}, "order pre"),
        ("gpt2", GPT2_OURS, {"final_norm": False}, "final_norm True"),
        ("gpt2", GPT2_OURS, {"attention": "additive"}, "attention dot"),
        ("gpt2", GPT2_OURS, {"layer_scale": 0.1}, "layer_scale None"),
        (
            "llama",
            LLAMA_OURS,
            {"position_options": {"fraction": 0.5}},
            "fraction 1, not 0.5",
        ),
        ("llama", LLAMA_OURS, {"feedforward": "gelu"}, 'llama models have no feedforward "gelu"'),
        ("llama", LLAMA_OURS, {"qk_norm": True}, "qk_norm False"),
        ("llama", LLAMA_OURS, {"qkv_bias": True}, "bias True, but this one has False"),
        ("llama", LLAMA_OURS, {"heads": 7, "kv_heads": 7, "head_dim": 8}, "7 does not divide 768"),
        ("mistral", LLAMA_OURS, {"mlp_bias": True}, "mistral models have mlp_bias False"),
        ("qwen2", LLAMA_OURS, {}, "qwen2 models have qkv_bias True"),
        ("qwen3", LLAMA_OURS, {}, "qwen3 models have qk_norm True"),
    ],
)
def test_models_that_theirs_cannot_be_like(
    family: str, config: DecoderConfig, change: Settings, words: str
) -> None:
    own = {name: value for name, value in change.items() if hasattr(config, name)}
    blocks = {name: value for name, value in change.items() if name not in own}
    config = replace(config, **own, stack=replace(config.stack, **blocks))
    with pytest.raises(ValueError, match=words):
        FAMILIES[family].config_to_external(config)
    with pytest.raises(ValueError, match=words):
        FAMILIES[family].weights_to_external({}, config)


def test_the_family_that_suits() -> None:
    def matching(**change: Any) -> str:
        return matching_family(replace(LLAMA_OURS, stack=replace(LLAMA_OURS.stack, **change))).name

    assert (
        matching()
        == matching(bias=True, qkv_bias=True, mlp_bias=False)
        == matching(mlp_bias=True)
        == "llama"
    )
    assert matching(heads=7, kv_heads=7, head_dim=8) == "mistral"
    assert matching(qkv_bias=True) == "qwen2"
    assert matching(qk_norm=True, bias=True, mlp_bias=False, qkv_bias=True) == "qwen3"
    assert matching_family(replace(GPT2_OURS, tied=False)).name == "gpt2"
    with pytest.raises(
        ValueError, match="llama models have norm rmsnorm, but this one has layernorm"
    ):
        matching(norm="layernorm")
    with pytest.raises(ValueError, match="qwen3 models have mlp_bias False"):
        matching(qk_norm=True, mlp_bias=True)
    with pytest.raises(ValueError, match="gpt2 models have bias True"):
        matching_family(replace(GPT2_OURS, stack=replace(GPT2_OURS.stack, bias=False)))


def test_dropout_is_a_matter_of_rates() -> None:
    settings = {**GPT2, "vocab_size": 9, "embd_pdrop": 0.3, "resid_pdrop": 0.2, "attn_pdrop": 0.05}
    stack = config_from_huggingface(settings, FAMILIES)[1].stack
    assert (stack.dropout, stack.resolved.mlp_dropout, stack.attention_dropout) == (0.2, 0.0, 0.05)
    written = FAMILIES["gpt2"].config_to_external(config_from_huggingface(settings, FAMILIES)[1])
    assert [written[name] for name in ("embd_pdrop", "resid_pdrop", "attn_pdrop")] == [
        0.2,
        0.2,
        0.05,
    ]
    config = config_from_huggingface(
        {**LLAMA, "vocab_size": 9, "attention_dropout": 0.2}, FAMILIES
    )[1]
    assert config.stack.attention_dropout == 0.2
    dropping = replace(config, stack=replace(config.stack, dropout=0.1, drop_path=0.1))
    assert FAMILIES["llama"].config_to_external(dropping) == FAMILIES["llama"].config_to_external(
        config
    )
