"""`profile`: formulas against what PyTorch counts, published sizes, and the command."""

import csv
import json
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from modules.attention import ATTENTIONS, MultiHeadAttention
from modules.config import StackConfig
from modules.kv_cache import KVCache
from modules.models.images import IMAGE_PRESETS
from modules.models.mae import MAEConfig
from modules.models.swin import second_version
from modules.models.vit import ViTConfig
from modules.norm import NORMS
from tasks.profiling import counting
from tasks.profiling.command import ProfileOptions, chosen_config
from tasks.profiling.formulas import block_formulas
from tasks.profiling.networks import DEFAULTS, NETWORKS, Network, resized
from tasks.profiling.parts import kv_cache_values
from tasks.profiling.timing import Point, fit, terms_of
from tests.helpers.command import Console, python
from tests.helpers.tiny_models import MODELS, STACK

MIXER = replace(STACK, order="mixer")
CONFIGS: dict[str, Any] = {kind: config for kind, (_, config) in MODELS.items()}
CONFIGS |= {
    "mixer": ViTConfig(8, 2, 1, 3, pool="mean", position="learned", stack=MIXER),
    "mae": MAEConfig(8, 2, 1, stack=STACK, decoder=StackConfig(16, 3, 4)),
    "pixels": replace(CONFIGS["gpt"], tied=False),
}
TASKS = {"vit": "vit", "bert": "bert", "masked": "mlm", "gpt": "lm"}
TASKS |= {"encoder_decoder": "seq2seq", "prefix": "seq2seq", "mae": "mae", "pixels": "igpt"}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False, "qkv_bias": False, "kv_heads": 2, "head_dim": 4},
    {"norm": "rmsnorm", "feedforward": "swiglu", "mlp_bias": False, "tied": False},
    {"order": "parallel", "qk_norm": True, "layer_scale": 0.1, "pool": "attention"},
    {"order": "post", "conv_kernel": 3, "position": "t5", "tying": "none", "output_bias": True},
    {"attention": "additive", "final_norm": False, "stem": "conv", "pooler": "tanh"},
    {"stem": "resnet", "norm_after_pool": True, "pool": "mean", "tying": "target"},
    {"stem": "convpool", "register_tokens": 2, "embedding_norm": True},
    {"norm": "batchnorm", "attention": "bilinear", "value_dim": 16},
    {"norm": "none", "attention": "unscaled", "order": "no_residual"},
    {"order": "cct", "stem": "cct", "pool": "sequence"},
    {"order": "res_post", "attention": "cosine", "kv_heads": 2},
    {"stem": "cct", "patch_size": 4},
    {"stem": "hybrid", "patch_size": 4, "pool": "mean"},
    {"embedding_width": 8, "position": "learned", "embedding_norm": True, "pool": "flatten"},
    {"embedding_width": 8, "tied": False, "bias": False, "position": "t5"},
]
MIXER_VARIANTS: list[dict[str, Any]] = [
    {},
    {"bias": False, "token_mlp_width": 7},
    {"norm": "rmsnorm", "feedforward": "swiglu", "mlp_bias": False, "register_tokens": 2},
    {"class_token": True, "norm_after_pool": True, "pool": "attention", "position": "none"},
    {"stem": "resnet", "layer_scale": 0.1, "token_mlp_width": 40},
]
# Of the ViTs, as their papers count.
WITHOUT_HEAD = ("base", "giant", "gigantic", "mixer_small", "mixer_base", "mixer_large")
# In millions, with the digits that were published.
PUBLISHED = {
    # Radford 2019, table 2, as counted by its authors later (github.com/openai/gpt-2)
    ("lm", "gpt2"): (124, 1),
    ("lm", "gpt2_medium"): (355, 1),
    ("lm", "gpt2_large"): (774, 1),
    ("lm", "gpt2_xl"): (1558, 1),
    ("lm", "megatron"): (8300, 100),  # Shoeybi 2019, table 2
    ("lm", "turing_nlg"): (17000, 1000),  # Rosset 2020
    ("lm", "gpt3"): (175000, 1000),  # Brown 2020, table 2.1
    ("bert", "base"): (110, 10),  # Devlin 2019, section 3
    ("bert", "large"): (340, 10),
    ("mlm", "base"): (110, 10),
    ("mlm", "large"): (340, 10),
    ("vit", "tiny"): (5.7, 0.1),  # Touvron 2021 (DeiT), table 1
    ("vit", "small"): (22, 1),
    ("vit", "base"): (86, 1),  # Dosovitskiy 2021, table 1
    ("vit", "large"): (304.3, 0.1),  # of timm; Dosovitskiy 2021 has 307 for patches of 32
    ("vit", "huge"): (632, 1),
    ("vit", "giant"): (1011, 1),  # Zhai 2022, table 2
    ("vit", "gigantic"): (1843, 1),
    ("vit", "22b"): (22000, 1000),  # Dehghani 2023
    ("vit", "cct_2_3x2"): (0.28, 0.01),  # Hassani 2021, table 2
    ("vit", "cct_7_3x1"): (3.76, 0.01),
    ("vit", "swin_tiny"): (28.3, 0.1),  # of timm; Liu 2021, table 1, has 29
    ("vit", "swin_small"): (50, 1),
    ("vit", "swin_base"): (88, 1),
    ("vit", "mixer_small"): (18, 1),  # Tolstikhin 2021, table 1
    ("vit", "mixer_base"): (59, 1),
    ("vit", "mixer_large"): (207, 1),
    ("igpt", "imagegpt_small"): (76, 2),  # Chen 2020, section 3, rounded down
    ("igpt", "imagegpt_medium"): (455, 2),
    ("igpt", "imagegpt_large"): (1362, 2),
    ("seq2seq", "base"): (65, 5),  # Vaswani 2017, table 3: 65, with about 37,000 tokens
    ("seq2seq", "big"): (213, 5),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [*product(TASKS, VARIANTS), *product(["mixer"], MIXER_VARIANTS)],
    ids=str,
)
def test_formulas_are_what_pytorch_counts(kind: str, options: dict[str, Any]) -> None:
    network = NETWORKS[TASKS.get(kind, "vit")]
    config = CONFIGS[kind]
    names = {field.name for field in fields(config)}
    stacks = names & {"stack", "encoder", "decoder"}
    blocks = {field.name for field in fields(getattr(config, min(stacks)))}
    inner = {name: value for name, value in options.items() if name in blocks}
    if kind in ("prefix", "mae"):
        inner.pop("conv_kernel", None)
    own = {name: value for name, value in options.items() if name in names}
    config = replace(config, **own, **{s: replace(getattr(config, s), **inner) for s in stacks})
    assert_formulas(network, network.fill(config, 31, 8), 8, batch=2)


def assert_formulas(network: Network, config: Any, length: int, batch: int) -> None:
    parts, sizes = network.parts(config, length)
    by_part = {part.name: part.parameter_count(sizes) for part in parts}
    net = counting.on_meta(network, config)
    assert counting.parameters_by_part(net, config) == {n: c for n, c in by_part.items() if c}
    assert sum(by_part.values()) == sum(p.numel() for p in net.parameters())
    forward = sum(part.forward_flops(sizes) for part in parts)
    training = sum(part.training_flops(sizes) for part in parts)
    found = counting.counted_flops(network, config, batch, length)
    assert found == (batch * forward, batch * training)


# Windows that fill the grid, that do not, and stages smaller than a window.
@pytest.mark.parametrize("length", [32, 24, 10])
@pytest.mark.parametrize("version", [1, 2])
def test_formulas_of_windows_are_what_pytorch_counts(length: int, version: int) -> None:
    config = IMAGE_PRESETS["swin_cifar"]
    if version == 2:
        config = second_version(config)
    # The MLP of the second version computes its bias once for a batch.
    assert_formulas(NETWORKS["vit"], NETWORKS["vit"].fill(config, 0, length), length, 3 - version)


@pytest.mark.parametrize(
    ("task", "name"),
    [("vit", "mixer_large"), ("mae", "huge"), ("igpt", "imagegpt_large")],
)
def test_formulas_of_networks_too_large_to_train(task: str, name: str) -> None:
    network = NETWORKS[task]
    config = network.presets[name]
    vocabulary, length = DEFAULTS.get(task, (0, network.length(config) or 0))
    assert_formulas(network, network.fill(config, vocabulary, length), length, batch=1)


def test_a_block_has_12_d2_13_d_parameters_unless_it_is_varied() -> None:
    network = NETWORKS["lm"]
    plain, varied = network.presets["gpt3"], network.presets["llama"]
    assert str(block_formulas(network.parts(plain, 8)[0])[""]) == "12 d² + 13 d"
    # queries and output d x d, keys and values d x d / 3, three matrices d x 8 d / 3, two norms
    assert str(block_formulas(network.parts(varied, 8)[0])[""]) == "32/3 d² + 2 d"


@pytest.mark.parametrize(("task", "name"), PUBLISHED)
def test_presets_have_the_published_numbers_of_parameters(task: str, name: str) -> None:
    network = NETWORKS[task]
    config = network.presets[name]
    vocabulary, length = DEFAULTS.get(task, (0, 0))
    length = network.length(config) or length
    config = network.fill(config, vocabulary, length)
    count = sum(p.numel() for p in counting.on_meta(network, config).parameters())
    parts, sizes = network.parts(config, length)
    assert sum(part.parameter_count(sizes) for part in parts) == count
    if task == "vit" and name in WITHOUT_HEAD:
        count -= parts[-1].parameter_count(sizes)
    millions, rounding = PUBLISHED[task, name]
    assert abs(count / 1e6 - millions) <= rounding / 2


def test_the_cache_of_a_token_is_what_a_cache_holds() -> None:
    config = replace(MODELS["gpt"][1], stack=replace(MODELS["gpt"][1].stack, kv_heads=2))
    cache = KVCache.like(torch.zeros(1), config.stack, 1, 16)
    kept = cache.keys.numel() + cache.values.numel()
    assert kept == 16 * kv_cache_values(config)


def test_planted_factors_are_found() -> None:
    config = MODELS["gpt"][1]
    points = [
        Point("length", length, config, 2, length, length, 0, (0, 0))
        for length in (16, 64, 256, 1024)
    ]
    planted = (2e-9, 3e-9, 0.001)
    times = [sum(a * b for a, b in zip(planted, terms_of(p).values(), strict=True)) for p in points]
    assert fit(points, times).factors == pytest.approx(planted, rel=1e-5)
    constant = fit(points, [0.5] * 4)
    assert constant.factors == pytest.approx((0, 0, 0.5), abs=1e-9)


def test_other_widths_keep_the_heads() -> None:
    config = resized(NETWORKS["lm"].presets["llama"], 384, 3)
    assert (config.stack.width, config.stack.depth) == (384, 3)
    assert (config.stack.resolved.head_dim, config.stack.resolved.kv_heads) == (64, 2)
    autoencoder = resized(CONFIGS["mae"], 48, 1)
    assert (autoencoder.stack.width, autoencoder.stack.depth) == (48, 1)
    assert autoencoder.decoder == CONFIGS["mae"].decoder
    stack = replace(MIXER, heads=1, token_mlp_width=10)
    mixer = resized(replace(CONFIGS["mixer"], stack=stack), 36)
    assert mixer.stack == replace(stack, width=36, mlp_width=30, token_mlp_width=15)


def test_image_gpt_without_options_is_for_the_pixels_of_the_digits() -> None:
    config = chosen_config("igpt", ProfileOptions())[1]
    assert (config.vocabulary, config.max_length) == (17 + 1, 8 * 8)
    config = chosen_config("igpt", ProfileOptions(config=["configs/igpt/cifar10_cpu.yaml"]))[1]
    assert (config.vocabulary, config.max_length) == (256 + 1, 16 * 16)


BAD = {
    "--preset gtp2": "gpt2",
    "--preset gpt2 --lengths 2048": "1024",
    "--preset gpt2 --lengths 0": "--lengths",
    "--preset gpt2 --widths=-64": "--widths",
    "--preset gpt2 --widths 100": "multiples of 64",
    "--preset gpt2 --depths 2,x": "--depths",
    "--preset gpt2 --depths 1001": "--depths",
    "--preset gpt2 --batch_sizes 0": "--batch_sizes",
    "--preset gpt2 --repetitions 0": "--repetitions",
    "--preset gpt2 --config configs/lm/reference.yaml": "--config",
    "--config missing.yaml": "missing.yaml",
    "--ckpt_path missing.ckpt": "missing.ckpt",
    "--preset gpt2 --output file": "--output",
    "--preset gpt2 --output file/below": "--output",
}


def test_configs_are_merged_as_by_fit() -> None:
    files = ["configs/vit/digits.yaml", "configs/lab/base/digits.yaml"]
    name, both, _ = chosen_config("vit", ProfileOptions(config=files))
    _, last, _ = chosen_config("vit", ProfileOptions(config=files[1:]))
    assert name == " ".join(files)
    assert both.stack.width == last.stack.width == 48
    assert (both.image_size, last.image_size) == (8, 224)


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_sentence(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Console(capsys).refused(f"profile {line}", BAD[line], task="lm")


def test_a_text_that_is_too_long_for_the_pooling_is_refused(console: Console) -> None:
    line = "profile --lengths 600 --max_minutes 1e-9 --model.net.position rotary"
    console.printed(f"{line} --model.net.pool mean", task="bert")
    names = ("--lengths 600", "--model.net.pool flatten", "max_length")
    console.refused(f"{line} --model.net.pool flatten", *names, task="bert")
    console.printed(f"{line} --model.net.pool flatten", task="mlm")  # which does not pool


@pytest.mark.slow
def test_a_network_that_is_too_large_is_counted_only(tmp_path: Path, capsys: Any) -> None:
    out, _ = Console(capsys).printed(f"profile --preset gpt3 --output {tmp_path}/a", task="lm")
    assert "Times are left out" in out and "12 d² + 13 d" in out
    assert max(map(len, out.splitlines())) <= 100 or str(tmp_path) in out
    found = json.loads((tmp_path / "a/profile.json").read_text())
    assert found["parameters"] == 174_604_259_328 and found["no_times"]
    assert found["flop_training"] == found["flop_training_counted"]
    assert Image.open(tmp_path / "a/profile.png").format == "PNG"


SMALL = [
    "vit profile --preset cifar_tiny --lengths 16,32",
    "vit profile --preset mixer_cifar --lengths 16,32 --widths 64,32",
    "mae profile --widths 32,64 --depths 1,2",
    "bert profile --lengths 8,16",
    "mlm profile --lengths 8,16",
    "lm profile --lengths 8,16 --widths 64,128 --depths 1,2 --batch_sizes 1,2",
    "igpt profile --preset digits --lengths 8,16",
    "seq2seq profile --lengths 8,16",
]


@pytest.mark.slow
@pytest.mark.exhaustive_except("cifar_tiny", "mae", "bert", "seq2seq")
@pytest.mark.parametrize("line", SMALL)
def test_profile(line: str, tmp_path: Path) -> None:
    done = python(f"tasks.{line} --repetitions 1 --output out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    found = json.loads((tmp_path / "out/profile.json").read_text())
    assert found["flop_training"] == found["flop_training_counted"]
    assert found["no_times"] is None
    for point in found["points"]:
        assert point["inference_s"] > 0 and point["training_s"] > 0
        assert sum(point["inference_parts_s"].values()) > 0
    with (tmp_path / "out/profile.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(found["points"])
    assert Image.open(tmp_path / "out/profile.png").width > 500


def test_a_network_without_attention_has_no_terms_of_attention(console: Console) -> None:
    small = "--preset mixer_cifar --model.net.stack.width 16 --lengths 8,16 --widths 8,16"
    out, _ = console.printed(f"profile {small} --repetitions 1 --output out")
    found = json.loads(Path("out/profile.json").read_text())
    assert "token mixing" in out and "T² d" not in out
    assert found["crossover_tokens"] is None
    assert found["flop_training"] == found["flop_training_counted"]
    for one in found["fits"]:
        assert one["seconds"].keys() == {"T d²", "1"}
    assert Image.open("out/profile.png").format == "PNG"


def test_the_smallest_images_of_an_autoencoder_have_a_visible_patch(console: Console) -> None:
    console.printed("profile --max_minutes 1e-9 --output out", task="mae")
    found = json.loads(Path("out/profile.json").read_text())
    assert [point["value"] for point in found["points"]] == [4, 8]  # not 2, which is one patch
    assert (found["sizes"]["R"], found["sizes"]["S"], found["sizes"]["T"]) == (4, 12, 16)
    console.refused("profile --lengths 2", "--lengths 2", "mask_ratio", task="mae")


@pytest.mark.parametrize(
    "task, options",
    [("vit", "--preset cifar_cpu"), ("mlm", "--preset tiny --model.net.stack.norm batchnorm")],
)
def test_batch_norm_of_a_single_vector(task: str, options: str, console: Console) -> None:
    """One sample is counted, whose channels have one number each: training refuses that."""
    console.printed(f"profile {options} --lengths 8 --repetitions 1 --output out", task=task)
    found = json.loads(Path("out/profile.json").read_text())
    assert found["flop_training_counted"] == found["flop_training"] > 0
    assert found["points"][0]["training_s"] > 0


class TwoPaths(MultiHeadAttention):
    """Attention with scores of a product more, and a factor."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.factor = nn.Parameter(torch.ones(1))

    def score_fn(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.factor + k @ q.mT  # (B, H, N, M)


class Thirds(nn.LayerNorm):
    """A norm with three numbers more than its formula."""

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__(width, eps, bias=bias)
        self.thirds = nn.Parameter(torch.ones(3))


PROFILED = "--lengths 8,4 --repetitions 1 --vocabulary 20 --preset tiny --model.net.stack.depth 2"


def profiled(console: Console, options: str) -> dict[str, Any]:
    """profile.json of a language model with the options, and "out": what was printed."""
    out, _ = console.printed(f"profile {PROFILED} {options} --output out", task="lm")
    return {**json.loads(Path("out/profile.json").read_text()), "out": out}


def test_options_of_the_network_are_those_of_fit(console: Console) -> None:
    found = profiled(console, "--model.net.stack.width 64 --model.net.stack.norm none")
    (feedforward,) = [part for part in found["parts"] if part["name"] == "feed-forward"]
    assert feedforward["parameters"] == 2 * (8 * 64**2 + 5 * 64) and not found["own_variants"]
    for name, value in {"stack.wdith": 64, "stack.width": "wide", "stack.norm": "mine"}.items():
        console.refused(f"profile {PROFILED} --model.net.{name} {value}", name, task="lm")


def test_a_part_without_a_formula_is_counted(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NORMS, "thirds", Thirds)
    monkeypatch.setitem(ATTENTIONS, "two_paths", TwoPaths)
    plain = profiled(console, "")
    own = profiled(console, "--model.net.stack.norm thirds")
    assert own["parameters"] == plain["parameters"] + 5 * 3  # two norms a block and the last one
    for part in own["parts"]:
        assert (part["parameters"] is None) == (part["name"] == "norms")
    assert own["flop_training"] == own["flop_training_counted"] == plain["flop_training"]
    assert len(own["own_variants"]) == 1 and "thirds" in own["own_variants"][0]

    own = profiled(console, "--model.net.stack.attention two_paths")
    assert own["parameters"] == plain["parameters"] + 2
    more = 2 * 2 * 8 * 8 * 128  # a product more in each of 2 blocks, of 8 tokens
    assert own["flop_forward_counted"] == plain["flop_forward"] + more
    assert own["flop_forward"] is own["crossover_tokens"] is None
    assert own["memory"]["weights"]["float32"] == 4 * own["parameters"]
    for point in own["points"]:
        assert point["inference_s"] > 0 and point["training_s"] > 0
    assert "two_paths" in own["out"] and "nan" not in own["out"]
    with open("out/profile.csv") as file:
        counted = {row["tokens"]: int(row["flop_forward"]) for row in csv.DictReader(file)}
    assert counted["8"] == own["flop_forward_counted"]
    assert Image.open("out/profile.png").format == "PNG"
