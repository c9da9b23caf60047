"""Folders of Hugging Face's layout, their entries changed one by one: equal logits, or one sentence."""

import inspect
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from modules.models.bert import BertClassifier, BertConfig, BertMaskedLM
from modules.models.gpt import Decoder, DecoderConfig
from modules.models.seq2seq import Seq2Seq
from modules.pretrained import bert, decoder, seq2seq
from modules.pretrained.family import config_from_huggingface
from modules.pretrained.weights import load_weights
from tasks.checkpoints.pretrained import folder_weights, read_settings
from tasks.errors import UsageError
from tests.tasks.command import checkpoint, run

transformers = pytest.importorskip("transformers")

Settings = dict[str, Any]
VOCABULARY = 40
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER: Settings = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "num_labels": 3,
}
ROTARY: Settings = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
BART: Settings = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
T5: Settings = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
GPT2: Settings = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
DISTILBERT: Settings = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 24,
    "max_position_embeddings": 32,
    "num_labels": 3,
}
MODELS: dict[str, tuple[str, Settings]] = {  # name of the class -> family, sizes
    "BertForMaskedLM": ("bert", ENCODER),
    "BertForSequenceClassification": ("bert", ENCODER),
    "DistilBertForMaskedLM": ("distilbert", DISTILBERT),
    "DistilBertForSequenceClassification": ("distilbert", DISTILBERT),
    "RobertaForMaskedLM": ("roberta", ENCODER),
    "RobertaForSequenceClassification": ("roberta", ENCODER),
    "GPT2LMHeadModel": ("gpt2", GPT2),
    "LlamaForCausalLM": ("llama", ROTARY),
    "MistralForCausalLM": ("mistral", {**ROTARY, "sliding_window": 24}),
    "Qwen2ForCausalLM": ("qwen2", ROTARY),
    "Qwen3ForCausalLM": ("qwen3", {**ROTARY, "head_dim": 6}),
    "MarianMTModel": ("marian", BART),
    "BartForConditionalGeneration": ("bart", BART),
    "T5ForConditionalGeneration": ("t5", T5),
}
each_model = pytest.mark.parametrize("name", MODELS)

# Entries of files that were written by earlier versions.
OLDER: Settings = {
    **dict.fromkeys(
        ("output_attentions", "output_past", "gradient_checkpointing", "torchscript"), False
    ),
    **dict.fromkeys(
        ("add_bias_logits", "add_final_layer_norm", "normalize_before", "is_decoder"), False
    ),
    **dict.fromkeys(
        ("static_position_embeddings", "tie_weights_", "sinusoidal_pos_embds", "use_mrope"), False
    ),
    **dict.fromkeys(("tie_encoder_decoder", "cross_attention_hidden_size", "use_bfloat16"), False),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_sliding_window", "add_cross_attention"), False
    ),
    **dict.fromkeys(("quantization_config", "per_layer_config", "transformers_weights"), None),
    **dict.fromkeys(
        ("sliding_window", "layer_types", "rope_scaling", "task_specific_params"), None
    ),
    "normalize_embedding": None,
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
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LAYERS = ["full_attention", "sliding_attention"]
ACTIVATIONS = ["relu", "gelu", "gelu_new", "silu", "quick_gelu"]
OTHERS: dict[str, list[Any]] = {  # entries whose other values are not any number or word
    **dict.fromkeys(
        ("hidden_act", "activation", "activation_function", "dense_act_fn"), ACTIVATIONS
    ),
    "feed_forward_proj": [*ACTIVATIONS, *(f"gated-{name}" for name in ACTIVATIONS), "a-b-c"],
    **dict.fromkeys(("dtype", "torch_dtype"), ["float32", "bfloat16", "nonsense"]),
    **dict.fromkeys(
        ("rope_scaling", "rope_parameters"),
        [
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
        ],
    ),
    "layer_types": [
        ["full_attention"] * 2,
        LAYERS,
        ["sliding_attention"] * 2,
        ["full_attention"],
        [],
    ],
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
OUTCOMES = ("equal", "refused", "theirs")
# Entries that decide what is computed beside the sizes.
DECISIVE = {
    *("tie_word_embeddings", "is_encoder_decoder", "is_causal", "num_attention_heads"),
    *("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "hidden_act", "sliding_window"),
    "layer_types",
}
# What these say must not keep a model from being loaded.
HARMLESS = {
    "use_cache",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "initializer_range",
    "n_ctx",
    "num_beams",
}


@dataclass
class Their:
    """A tiny model of transformers in a folder."""

    name: str
    folder: Path

    @property
    def family(self) -> str:
        return MODELS[self.name][0]

    @property
    def kind(self) -> Any:
        return getattr(transformers, self.name)

    def settings(self) -> Settings:
        return json.loads((self.folder / "config.json").read_text())

    def save(self, settings: Settings) -> None:
        """A new model of this config, and the config word for word."""
        model = self.kind(self.kind.config_class.from_dict(deepcopy(settings))).eval()
        draw(model)
        model.save_pretrained(self.folder)
        (self.folder / "generation_config.json").unlink(missing_ok=True)
        self.write(settings)

    def write(self, settings: Settings) -> None:
        (self.folder / "config.json").write_text(json.dumps(settings))

    def load(self) -> tuple[Any, bool]:
        """Their model as they read the folder, and whether every weight is one of the file; None: they refuse it."""
        try:
            model, said = self.kind.from_pretrained(
                self.folder, dtype=torch.float32, output_loading_info=True
            )
        except Exception:
            return None, False
        return model.eval(), not any(said.values())

    def expected(self, model: Any, length: int) -> Tensor | None:
        """Their logits for texts of this length; None: they cannot compute them."""
        tokens, keep = texts(length)
        target = {"decoder_input_ids": tokens.flip(1)} if self.family in seq2seq.FAMILIES else {}
        try:
            with torch.inference_mode():
                return model(tokens, attention_mask=keep.long(), return_dict=True, **target).logits
        except Exception:
            return None


def texts(length: int) -> tuple[Tensor, Tensor]:
    """Tokens (2, N) and where they are no padding (2, N)."""
    tokens = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    keep = torch.ones(2, length, dtype=torch.bool)
    return tokens, keep


def draw(model: nn.Module) -> None:
    """Weights among which no zeros or ones hide a mistake."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "position_ids" in name or not value.is_floating_point() or "inv_freq" in name:
                continue
            if "embed_positions" in name and "Marian" in type(model).__name__:
                continue
            value.normal_(std=0.3)
            if name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name):
                value += 1.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Their]:
    """One folder for each class; not to be changed."""
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = {}
    for name, (family, sizes) in MODELS.items():
        their = found[name] = Their(name, tmp_path_factory.mktemp(name))
        ids = IDS | ({"pad_token_id": 1, "bos_token_id": 0} if family == "roberta" else {})
        given = {"vocab_size": VOCABULARY, **ids, **sizes, "architectures": [name]}
        config = their.kind.config_class(**given)
        their.save(config.to_dict())
    return found


@pytest.fixture
def their(name: str, made: dict[str, Their], tmp_path: Path) -> Their:
    """A copy to change."""
    torch.set_num_threads(1)
    return Their(name, Path(shutil.copytree(made[name].folder, tmp_path / "model")))


def ours(their: Their) -> tuple[Any, list[str]]:
    """Our network with the folder's weights, and the names of those that it did not give."""
    families: dict[str, Any] = {**bert.FAMILIES, **decoder.FAMILIES, **seq2seq.FAMILIES}
    _, config = read_settings(
        their.folder, lambda settings: config_from_huggingface(settings, families)
    )
    if isinstance(config, BertConfig):
        config = replace(config, num_classes=min(config.num_classes or 3, 9))
        kind: Any = BertMaskedLM if "Masked" in their.name else BertClassifier
    else:
        kind = Decoder if isinstance(config, DecoderConfig) else Seq2Seq
    net = kind(config)
    optional = bert.HEADS if isinstance(config, BertConfig) else ()
    return net.eval(), load_weights(net, folder_weights(their.folder, families), optional)


def logits(net: Any, length: int) -> Tensor:
    """Our logits for texts of this length."""
    tokens, keep = texts(length)
    with torch.inference_mode():
        if isinstance(net, BertClassifier):
            return net(tokens, keep)
        if isinstance(net, BertMaskedLM):
            return net(tokens, keep).unflatten(0, tokens.shape)
        if isinstance(net, Decoder):
            return net.logits(net(tokens, keep))
        return net.logits(net(tokens, tokens.flip(1), keep))


def outcome(their: Their) -> str:
    """What becomes of a folder: "equal", "refused" (by us), "theirs" (refuse it), else what is wrong."""
    try:
        net, missing = ours(their)
    except (UsageError, ValueError):
        return "refused"
    if missing:
        return "refused"  # the command says which
    model, clean = their.load()
    if model is None:
        return "theirs"
    length = min(12, net.config.max_length or 12)
    expected = their.expected(model, length)
    if expected is None:
        return "theirs"
    if not clean:
        return "we take weights that they lack or leave out"
    found = logits(net, length)
    if found.shape != expected.shape:
        return f"shapes {tuple(found.shape)} and {tuple(expected.shape)}"
    far = ((found - expected).abs().max() / expected.abs().max()).item()
    return "equal" if far <= 1e-4 else f"logits differ by {far:.1e}"


def entries(their: Their) -> Settings:
    """Their entries with a value that they may have: of the config, of older files, and all that their code reads."""
    config = their.kind.config_class
    source = inspect.getsource(
        import_module(f"transformers.models.{their.family}.modeling_{their.family}")
    )
    read = re.findall(r'config\.([a-z]\w+)|[sg]etattr\((?:self\.)?config, "([a-z]\w+)"', source)
    named = {name for pair in read for name in pair if name}
    methods = {name for name in named if callable(getattr(config, name, None))}
    known = {
        name: getattr(config(), name, None)
        for name in (named | config.attribute_map.keys()) - methods
    }
    return OLDER | known | their.settings()


def changes(name: str, value: Any) -> Iterator[Any]:
    """Other values of an entry."""
    yield None
    if name in OTHERS:
        yield from OTHERS[name]
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


def examine(their: Their, names: Collection[str]) -> set[str]:
    """Each entry missing, null, and with other values, over the same weights, and over those that go with it.

    Returns the entries of which some other value gives equal logits.
    """
    base, kept = their.settings(), (their.folder / "model.safetensors").read_bytes()
    assert outcome(their) == "equal"
    wrong, taken = {}, set()
    for name, usual in entries(their).items():
        if name not in names:
            continue
        shortened = {key: value for key, value in base.items() if key != name}
        for settings in (shortened, *({**base, name: value} for value in changes(name, usual))):
            (their.folder / "model.safetensors").write_bytes(kept)
            their.write(settings)
            found = {"as they are": outcome(their)}
            if found["as they are"] not in ("equal", "theirs"):
                try:
                    their.save(settings)
                except Exception:
                    found["of its own"] = "theirs"  # they cannot build it
                else:
                    found["of its own"] = outcome(their)
            taken |= {name} if "equal" in found.values() else set()
            said = f"{name} = {settings.get(name, '(missing)')}, weights"
            wrong |= {f"{said} {key}": one for key, one in found.items() if one not in OUTCOMES}
    assert not wrong
    return taken


@each_model
def test_entries_that_decide(their: Their) -> None:
    examine(their, DECISIVE)


@pytest.mark.slow
@each_model
def test_every_entry(their: Their) -> None:
    names = entries(their).keys()
    assert HARMLESS & their.settings().keys() <= examine(their, names)


DEEP: Any = [[[[[[[[[[1]]]]]]]]]]
ODD: list[Any] = [
    "text",
    "",
    [],
    [1],
    {},
    {"a": 1},
    -1,
    0,
    0.5,
    1e30,
    10**7,
    10**12,
    10**30,
    True,
    DEEP,
]
ODD += [float("nan"), float("inf"), ["a", None]]


@each_model
def test_odd_values(their: Their) -> None:
    """One sentence that names the entry, or the model loads; nothing else, and nothing that takes long."""
    base, draws = their.settings(), Random(0)
    cases = [(name, value) for name in {**OLDER, **base} for value in ODD]
    for name, value in draws.sample(cases, 20):
        their.write({**base, name: value})
        start = time.perf_counter()
        try:
            ours(their)
        except UsageError as error:
            assert "config.json" in str(error) and "\n" not in str(error) and len(str(error)) < 1000
        assert time.perf_counter() - start < 10, (name, value)


@pytest.mark.parametrize("name, entry", [("LlamaForCausalLM", entry) for entry in ROTARY])
@pytest.mark.parametrize(
    "value", ["text", [4], 4.5, True, {}, 10**12, 10**30, -4, float("nan")], ids=str
)
def test_sizes_are_refused_by_name(their: Their, entry: str, value: Any) -> None:
    their.write({**their.settings(), entry: value})
    with pytest.raises(
        UsageError, match=f"config.json: .*{entry}" if value != -4 else "config.json: "
    ):
        ours(their)


BROKEN: dict[str, bytes] = {
    "a list": b"[[1, 2]]",
    "deep": b'{"model_type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "twice": b'{"model_type": "llama", "model_type": "gpt2"}',
    "cut": b'{"model_type": "lla',
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "latin": b'{"model_type": "\xe9"}',
    "empty": b"",
}


def refused(line: str, task: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a command says that fails with this code."""
    capsys.readouterr()
    assert run(line, task) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


@pytest.mark.parametrize("name", ["LlamaForCausalLM"])
@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_damaged_configs(their: Their, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (their.folder / "config.json").write_bytes(content)
    for line, task in (
        (f"generate --ckpt_path {their.folder}", "lm"),
        *(
            (f"fit --model.pretrained {their.folder}", task)
            for task in ("lm", "bert", "mlm", "seq2seq")
        ),
    ):
        assert "config.json" in refused(line, task, 2, capsys)


@pytest.mark.parametrize("name", ["LlamaForCausalLM"])
def test_a_config_that_is_a_pipe(their: Their, capsys: pytest.CaptureFixture[str]) -> None:
    (their.folder / "config.json").unlink()
    os.mkfifo(their.folder / "config.json")
    assert "config.json" in refused(f"fit --model.pretrained {their.folder}", "lm", 2, capsys)


@pytest.mark.parametrize("name", ["LlamaForCausalLM"])
@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b'{"weight_map": 5}',
        b'{"weight_map": ["a"]}',
        b'{"weight_map": {"a": 5}}',
        b'{"weight_map": {"a": ["b"]}}',
        b'{"weight_map": {"a": "other.safetensors"}}',
        b'{"weight_map": {"a": ""}}',
        b'{"weight_map": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda content: content[:40].decode(),
)
def test_damaged_indices(their: Their, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (their.folder / "model.safetensors").unlink()
    (their.folder / "model.safetensors.index.json").write_bytes(content)
    assert str(their.folder) in refused(f"generate --ckpt_path {their.folder}", "lm", 1, capsys)


@pytest.mark.parametrize("name", ["LlamaForCausalLM"])
@pytest.mark.parametrize(
    "change, code",
    [
        (lambda value: value.masked_fill(torch.eye(*value.shape, dtype=torch.bool), torch.nan), 1),
        (
            lambda value: value.masked_fill(
                torch.eye(*value.shape, dtype=torch.bool), torch.inf
            ).half(),
            1,
        ),
        (lambda value: value.to(torch.float8_e4m3fn), 2),
        (lambda value: value.to(torch.int8), 2),
        (lambda value: value[0, 0], 2),
        (lambda value: value[0], 2),
        (lambda value: value[None], 2),
        (lambda value: value[:, :3], 2),
        (lambda value: None, 2),
    ],
)
@pytest.mark.parametrize(
    "file, tensor",
    [
        ("model.safetensors", "layers.1.self_attn.k_proj"),
        ("pytorch_model.bin", "layers.0.mlp.up_proj"),
    ],
)
def test_damaged_weights(
    their: Their, change: Any, code: int, file: str, tensor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    save_tokenizer(their.folder)
    state = load_file(their.folder / "model.safetensors")
    (their.folder / "model.safetensors").unlink()
    value = change(state.pop(f"model.{tensor}.weight"))
    if value is not None:
        state[f"model.{tensor}.weight"] = value.contiguous()
    (save_file if file.endswith("safetensors") else torch.save)(state, their.folder / file)
    said = refused(f"generate --ckpt_path {their.folder} --max_new_tokens 2", "lm", code, capsys)
    assert tensor.split(".")[-1] in said or "stack.blocks" in said


@pytest.mark.parametrize("name", ["LlamaForCausalLM"])
def test_a_tensor_without_the_memory_that_it_says(
    their: Their, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of a few bytes and a config that agrees with it."""
    (their.folder / "model.safetensors").unlink()
    torch.save(
        {"model.embed_tokens.weight": torch.zeros(1).expand(10**9, 16)},
        their.folder / "pytorch_model.bin",
    )
    their.write({**their.settings(), "vocab_size": 10**9})
    save_tokenizer(their.folder)
    said = refused(f"generate --ckpt_path {their.folder}", "lm", 1, capsys)
    assert "pytorch_model.bin" in said


@pytest.mark.parametrize("file", ["vit.safetensors", "vit.pth"])
def test_weights_of_timm_that_are_not_finite(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    model.blocks[0].attn.qkv.weight.data[3, 3] = torch.nan
    (save_file if file.endswith("safetensors") else torch.save)(model.state_dict(), file)
    assert "blocks.0.attn.qkv.weight" in refused(f"fit --model.pretrained {file}", "vit", 1, capsys)


def save_tokenizer(folder: Path) -> None:
    """One with fewer tokens than the tiny models have."""
    texts = ["two three one four\n"] * 5
    tokenizer = Tokenizer.train(texts, TokenizerConfig("character", VOCABULARY, 1))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Qwen2ForCausalLM"])
def test_texts_are_no_longer_than_a_window(
    their: Their, capsys: pytest.CaptureFixture[str]
) -> None:
    window = {
        "sliding_window": 24,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "layer_types": None,
    }
    their.write({**their.settings(), **window})
    save_tokenizer(their.folder)
    Path("text.txt").write_text("two three one four\n" * 60)
    line = "fit --data.source files --data.path text.txt --trainer.max_epochs 1 --model.samples.every null"
    line += " --data.batch_size 4 --trainer.limit_train_batches 2 --trainer.log_every_n_steps 1"
    for source in (their.folder, "r/checkpoints/best.ckpt"):
        again = f"{line} --model.pretrained {source}"
        if source == their.folder:
            assert (
                run(f"{again} --run_dir r", "lm") == 0
            )  # rows are as long as the window where nobody says
            assert checkpoint("r", "best")["tessera"]["net"]["max_length"] == 24
        said = refused(f"{again} --data.max_length 25 --run_dir s", "lm", 2, capsys)
        assert "--data.max_length 25" in said and "24" in said
        write = f"generate --ckpt_path {source} --prompt two --max_new_tokens"
        assert run(f"{write} 21", "lm") == 0
        for beams in (1, 2):
            assert "sliding_window" in refused(
                f"{write} 23 --beams {beams} --temperature 0", "lm", 2, capsys
            )
    assert run("export --ckpt_path r/checkpoints/best.ckpt --format hf --output back", "lm") == 0
    said = json.loads(Path("back/config.json").read_text())
    assert (said["model_type"], said["sliding_window"]) == (their.family, 24)
