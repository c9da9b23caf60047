"""Each entry of config.json changed in turn: equal logits, or refused in one sentence."""

import inspect
import json
import re
import time
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import pytest
import torch
import transformers

from modules.models.bert import BertConfig
from modules.pretrained.weights import load_weights
from tasks.checkpoints.pretrained import ModelFolder
from tasks.errors import UsageError
from tests.helpers.marks import slow_except
from tests.parity.families import (
    CASES,
    FAMILIES,
    LLAMA3,
    MODELS,
    PLAIN,
    Case,
    Settings,
    difference,
    network,
    our_logits,
    randomise,
    texts,
    their_logits,
)

each_model = pytest.mark.parametrize("case", [CASES[name] for name in MODELS], ids=MODELS)
FALSE = (  # in files of earlier versions
    *("output_attentions", "output_past", "gradient_checkpointing", "torchscript", "is_decoder"),
    *("add_bias_logits", "add_final_layer_norm", "normalize_before", "add_cross_attention"),
    *("static_position_embeddings", "tie_weights_", "sinusoidal_pos_embds", "use_mrope"),
    *("tie_encoder_decoder", "cross_attention_hidden_size", "use_bfloat16"),
    *("attention_bias", "mlp_bias", "use_sliding_window"),
)
NULL = (
    *("quantization_config", "per_layer_config", "transformers_weights", "normalize_embedding"),
    *("sliding_window", "layer_types", "rope_scaling", "task_specific_params"),
)
OLDER: Settings = {  # entries of files of earlier versions
    **dict.fromkeys(FALSE, False),
    **dict.fromkeys(NULL),
    "pruned_heads": {},
    "is_causal": True,
    "num_labels": 3,
    "torch_dtype": "float32",
    "_name_or_path": "model",
    "_attn_implementation": "eager",
    "position_embedding_type": "absolute",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 32,
    "n_ctx": 32,
    "pooler_fc_size": 16,
    "extra_pos_embeddings": 2,
    "num_beams": 1,
    "finetuning_task": "x",
}
ACTIVATIONS = ["relu", "gelu", "gelu_new", "silu", "quick_gelu"]
DTYPES = ["float32", "bfloat16", "nonsense"]
ROPE = [
    LLAMA3,
    {"rope_type": "default", "rope_theta": 77.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"factor": 3.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 77.0}},
    {},
]
FULL = "full_attention"
SLIDING = "sliding_attention"
VALUES: dict[str, list[Any]] = {  # of entries that do not take any number or word
    **dict.fromkeys(("hidden_act", "activation", "activation_function"), ACTIVATIONS),
    "dense_act_fn": ACTIVATIONS,
    "feed_forward_proj": [*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS), "a-b-c"],
    **dict.fromkeys(("dtype", "torch_dtype"), DTYPES),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE),
    "layer_types": [[FULL] * 2, [FULL, SLIDING], [SLIDING] * 2, [FULL], []],
    "sliding_window": [4, 0, 32],
    "max_window_layers": [0, 1, 2],
    "position_embedding_type": ["relative_key", "relative_key_query"],
    "pruned_heads": [{"0": [1]}],
    "id2label": [{"0": "a", "1": "b", "2": "c"}, {"0": "a", "1": "b"}, {}],
    "architectures": [["BertModel"], []],
    "model_type": ["mamba", "bert", "llama"],
    "head_dim": [2, 8],
    "rope_theta": [77.0, 5],
    "per_layer_config": [{"0": {"num_attention_heads": 2}}],
    "quantization_config": [{"quant_method": "fp8"}],
}
# Entries that decide what is computed, beside the sizes.
DECISIVE = {
    *("tie_word_embeddings", "is_encoder_decoder", "is_causal", "num_attention_heads"),
    *("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "hidden_act", "sliding_window"),
    "layer_types",
}
# What these say must not keep a model from being loaded.
HARMLESS = {
    *("use_cache", "dtype", "torch_dtype", "_name_or_path", "initializer_range", "n_ctx"),
    "num_beams",
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


def write(settings: Settings) -> None:
    Path("model").mkdir(exist_ok=True)
    Path("model/config.json").write_text(json.dumps(settings))


def save(case: Case, settings: Settings) -> None:
    """A new model of a config, the same whatever was drawn before; the config word for word."""
    torch.manual_seed(0)
    model = randomise(case.kind(case.kind.config_class.from_dict(json.loads(json.dumps(settings)))))
    model.save_pretrained("model")
    Path("model/generation_config.json").unlink(missing_ok=True)
    write(settings)


def load_ours(case: Case) -> tuple[Any, list[str]]:
    """Our network with the folder's weights, and the names of those that it did not give."""
    folder = ModelFolder("model", FAMILIES)
    config = folder.config
    if isinstance(config, BertConfig):
        config = config.__class__(
            **{**vars(config), "num_classes": min(config.num_classes or 3, 9)}
        )
    state = folder.weights()  # which refuses sizes that the weights do not have
    net = network(case.architecture, config)
    return net, load_weights(net, state, FAMILIES[folder.family].optional)


def outcome(case: Case) -> str:
    """ "equal", "refused" by us, "theirs" if transformers refuses the folder, or what is wrong."""
    try:
        net, missing = load_ours(case)
    except (UsageError, ValueError):
        return "refused"
    if missing:
        return "refused"  # the command says which
    inputs = texts(case.config(), [min(12, net.config.max_length or 12)] * 2)
    try:
        model, info = case.kind.from_pretrained(
            "model", dtype=torch.float32, output_loading_info=True
        )
        expected = their_logits(model.eval(), inputs)
    except Exception:
        return "theirs"
    if any(info.values()):
        return "we take weights that they lack or leave out"
    found = our_logits(net, inputs)
    if found.shape != expected.shape:
        return f"shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    far = difference(found, expected)
    # T5 does not divide its scores by sqrt(D): rounding is larger (seen: 1.1e-4, others 1e-5).
    limit = 3e-4 if case.kind is transformers.T5ForConditionalGeneration else 1e-4
    return "equal" if far <= limit else f"logits differ by {far:.1e}"


def entries(case: Case) -> Settings:
    """Entries and a usual value: of the config, of older files, and all that their code reads."""
    config = case.kind.config_class
    module = import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    reads = r'config\.([a-z]\w+)|[sg]etattr\((?:self\.)?config, "([a-z]\w+)"'
    found = re.findall(reads, inspect.getsource(module))
    names = {name for pair in found for name in pair if name} | config.attribute_map.keys()
    names = {name for name in names if not callable(getattr(config, name, None))}
    return OLDER | {name: getattr(config(), name, None) for name in names} | case.written()


def changes(name: str, value: Any) -> Iterator[Any]:
    """Other values of an entry."""
    yield None
    if name in VALUES:
        yield from VALUES[name]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value * 2)
    elif isinstance(value, float):
        yield from (0.25, 1e-3)
    elif isinstance(value, str):
        yield "other"
    elif value is None:
        yield from (True, 3)


def change_each(case: Case, names: Collection[str]) -> set[str]:
    """Changes each of these entries of a case, as `change_entries`."""
    tried = {name: value for name, value in entries(case).items() if name in names}
    return change_entries(
        case.written(), tried, lambda settings: save(case, settings), lambda: outcome(case)
    )


def change_entries(
    base: Settings, tried: Settings, save: Callable[[Settings], None], outcome: Callable[[], str]
) -> set[str]:
    """Each entry missing and with other values, over the same weights and over fitting ones.

    Returns the entries of which some other value gives equal logits.

    Args:
        base: A config.json.
        tried: Entries and a usual value.
        save: Writes `model` with new weights for a config.json.
        outcome: Of that folder.
    """
    save(base)
    weights = Path("model/model.safetensors").read_bytes()
    assert outcome() == "equal"
    wrong = {}
    taken = set()
    for name, usual in tried.items():
        missing = {key: value for key, value in base.items() if key != name}
        for settings in (missing, *({**base, name: value} for value in changes(name, usual))):
            Path("model/model.safetensors").write_bytes(weights)
            write(settings)
            found = [outcome()]
            if found[0] not in ("equal", "theirs"):
                try:
                    save(settings)
                except Exception:
                    found.append("theirs")  # they cannot build it
                else:
                    found.append(outcome())
            if "equal" in found:
                taken.add(name)
            if not {*found} <= {"equal", "refused", "theirs"}:
                wrong[f"{name} = {settings.get(name, '(missing)')}"] = found
    assert not wrong
    return taken


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("name", slow_except(PLAIN, MODELS))
def test_entries_that_decide(name: str) -> None:
    change_each(CASES[name], DECISIVE)


@pytest.mark.slow
@pytest.mark.exhaustive_except(*PLAIN)
@each_model
def test_every_entry(case: Case) -> None:
    """Most entries are those of many models: each model tries another third of them."""
    harmless = HARMLESS & case.written().keys()
    third = {one for one in entries(case) if not crc32(f"{case.kind.__name__} {one}".encode()) % 3}
    assert harmless <= change_each(case, third | harmless)


ODD: list[Any] = [
    *("text", "", [], [1], {}, {"a": 1}, -1, 0, 0.5, 1e30, 10**7, 10**12, 10**30, True),
    *([[[[[[[[[[1]]]]]]]]]], float("nan"), float("inf"), ["a", None]),
]


@pytest.mark.parametrize("name", slow_except(PLAIN, MODELS))
def test_odd_values(name: str) -> None:
    """One sentence that names the file, or the model loads; nothing else, and quickly."""
    case = CASES[name]
    base = case.written()
    save(case, base)
    samples = [(name, value) for name in {**OLDER, **base} for value in ODD]
    for name, value in Random(0).sample(samples, 20):
        write({**base, name: value})
        start = time.perf_counter()
        try:
            load_ours(case)
        except UsageError as error:
            assert "config.json" in str(error)
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
        assert time.perf_counter() - start < 10, (name, value)
