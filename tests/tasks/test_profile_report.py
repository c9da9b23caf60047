"""The sentences of `profile`."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from modules.init import INITS
from modules.models.swin import SWIN_PRESETS
from modules.norm import NORMS
from modules.windows import RELATIVE_BIASES, TableBias
from tasks.profiling.command import ProfileOptions, variants_without_formula, why_not_measured
from tasks.profiling.counting import on_meta
from tasks.profiling.formulas import crossover
from tasks.profiling.networks import DEFAULTS, NETWORKS
from tasks.profiling.report import Profile, crossover_sentence
from tasks.profiling.timing import Point, fit
from tests.helpers.command import Console, Patch


def test_sizes_that_data_decide_are_said(console: Console) -> None:
    line = "profile --max_minutes 1e-9"
    out = " ".join(console.printed(line, "bert")[0].split())
    assert "hidden width of feed-forward 176" in out
    assert "T 64 (tokens of a sample)" in out  # `max_length` of its reviews
    assert "Assumed, since data decide in a training: K, V;" in out
    assert "decide in a training: V;" in " ".join(console.printed(line, "mlm")[0].split())
    out = " ".join(console.printed(f"{line} --preset base", "bert")[0].split())
    assert "T 512 (tokens of a sample)" in out
    assert "Assumed, since data decide in a training: K, V, T;" in out
    out = " ".join(console.printed(f"{line} --vocabulary 500 --lengths 64", "bert")[0].split())
    assert "V 500 (vocabulary)" in out and "decide in a training: K parameters" in out


@pytest.mark.parametrize("task", ["bert", "lm"])
def test_texts_have_the_length_of_the_training(task: str, console: Console) -> None:
    Path("data").mkdir()
    Path("data/train.csv").write_text("text,label\n" + "one two three four,a\nfive six,b\n" * 40)
    console.printed(
        "fit --data.path data --data.max_length 24 --data.tokenizer.vocabulary 300 "
        "--trainer.max_steps 1 --model.net.max_length 48 --run_dir r",
        task,
    )
    options = "profile --max_minutes 1e-9"
    out = " ".join(console.printed(f"{options} --ckpt_path r", task)[0].split())
    assert "T 24 (tokens of a sample)" in out and "Assumed" not in out
    out = console.printed(f"{options} --model.net.max_length 4 --model.net.position learned", task)
    assert "T 4 (tokens of a sample)" in " ".join(out[0].split())  # not those of the config
    if task == "bert":
        out = console.printed(f"{options} --model.net.max_length 4 --model.net.pool flatten", task)
        assert "T 4 (tokens of a sample)" in " ".join(out[0].split())


def test_activations_that_are_computed_again_are_named(console: Console) -> None:
    line = "profile --max_minutes 1e-9 --model.net.stack.checkpoint_activations true"
    out = " ".join(console.printed(line, "bert")[0].split())
    assert "the FLOP, because of stack.checkpoint_activations true: they are counted only" in out


@pytest.mark.parametrize("task", ["lm", "bert"])
def test_the_width_of_narrow_embeddings_is_said(task: str, console: Console) -> None:
    line = "profile --max_minutes 1e-9 --lengths 8 --model.net.embedding_width 8"
    assert "E 8 (width of embeddings)" in console.printed(line, task)[0]


def test_a_crossover_outside_of_the_lengths_is_not_a_number() -> None:
    def sentence(scores: float) -> str:
        points = [
            Point("length", n, None, 1, n, n, 0, (0, 0), parts={"scores": scores, "projections": 1})
            for n in (4, 16)
        ]
        return crossover_sentence(Profile("", [], {"T": 16}, {}, (0, 0), {}, None, "cpu", points))

    assert "about 8 tokens" in " ".join(sentence(2.0).split())
    assert "not within the lengths here, 4 to 16 tokens" in " ".join(sentence(0.1).split())


def test_memory_that_is_lacking_has_decimals() -> None:
    size = Point("length", 8, None, 1, 8, 8, 10**15, (0, 0))
    reason = why_not_measured([size], ProfileOptions(), "cpu")
    assert re.search(r"about [\d,]+\.\d GiB, and [\d,]+\.\d GiB are free", reason)


def test_the_largest_part_is_named(console: Console) -> None:
    line = "profile --preset tiny --vocabulary 50 --repetitions 1 --lengths 64,32 --output out"
    out = " ".join(console.printed(line, "lm")[0].split())
    found = json.loads(Path("out/profile.json").read_text())
    sentence = out.partition("With 64 tokens, ")[2].partition(".")[0]
    for what, key in (("parameters", "parameters"), ("FLOP of training", "flop_training")):
        amounts = {part["name"]: part[key] for part in found["parts"]}
        name = max(amounts, key=lambda part: amounts[part])
        share = amounts[name] / sum(amounts.values())
        assert f"most {what}: {name} ({share:.0%})" in sentence
    with open("out/profile.csv", newline="") as file:  # short times have as many digits as others
        rows = {int(row["tokens"]): float(row["inference_s"]) for row in csv.DictReader(file)}
    times = {one["tokens"]: one["inference_s"] for one in found["points"]}
    assert rows == pytest.approx(times, rel=1e-5)
    (times,) = [one["inference_parts_s"] for one in found["points"] if one["tokens"] == 64]
    name = max(times, key=lambda part: times[part])
    assert f"most time of inference: {name} ({times[name] / sum(times.values()):.0%})" in sentence


@pytest.mark.parametrize(
    ("task", "name"), [("bert", "tiny"), ("vit", "base"), ("vit", "deit_tiny")]
)
def test_parts_have_the_flop_that_pytorch_counts(task: str, name: str) -> None:
    """The last block computes little but keys and values, for the tokens that are read."""
    network = NETWORKS[task]
    config = network.fill(network.presets[name], 50, 32)
    parts, sizes = network.parts(config, 32)
    expected = {part.name: part.forward_flops(sizes) for part in parts}
    net = on_meta(network, config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.outputs(net, *network.inputs(config, 1, 32, "meta"))
    found = dict.fromkeys(("attention", "feedforward"), 0)
    for module, counts in counter.get_flop_counts().items():
        last = module.rpartition(".")[2]
        if last in found:
            found[last] += sum(counts.values())
    assert found["feedforward"] == expected["feed-forward"]
    both = expected["attention projections"] + expected["attention scores"]
    assert found["attention"] == both


def test_memory_of_each_size_is_counted(console: Console) -> None:
    line = "profile --preset tiny --vocabulary 50 --max_minutes 1e-9 --lengths 16,8 --output out"
    out = console.printed(f"{line} --depths 4,8 --batch_sizes 1,3", "lm")[0]
    assert "most time" not in out
    with open("out/profile.csv") as file:
        rows = {(row["axis"], int(row["value"])): row for row in csv.DictReader(file)}
    found = json.loads(Path("out/profile.json").read_text())
    base = found["memory"]["activations of a sample"]["float32"]
    kept = {size: int(row["activation_bytes"]) for size, row in rows.items()}
    assert kept["length", 16] == kept["depth", 4] == kept["batch_size", 1] == base
    assert kept["length", 8] < base < kept["depth", 8] < 2 * base
    assert kept["batch_size", 3] == pytest.approx(3 * base, rel=0.05)  # masks are kept once
    for size, row in rows.items():
        assert int(row["training_bytes"]) == 16 * int(row["parameters"]) + kept[size]
    for point in found["points"]:
        assert point["activation_bytes"] == kept[point["axis"], point["value"]]


def test_vocabulary_that_would_be_ignored_is_refused(console: Console) -> None:
    line = "profile --preset tiny --vocabulary 50 --max_minutes 1e-9"
    console.refused(f"{line} --lengths 32", "does not read tokens")
    console.refused(f"{line} --model.net.vocabulary 60", "has a vocabulary of 60", task="lm")


class Offset(nn.LayerNorm):
    """A layer norm with a parameter more."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.offset = nn.Parameter(self.weight.detach().clone())


class OwnTable(TableBias):
    """Of a module that is not the library's."""


def test_own_variants_that_cannot_be_the_reason_are_not_named(
    console: Console, monkeypatch: Patch
) -> None:
    monkeypatch.setitem(NORMS, "offset", Offset)
    monkeypatch.setitem(INITS, "own_init", INITS["xavier"])
    options = "--model.net.stack.norm offset --model.net.stack.init own_init"
    line = f"profile --preset tiny --lengths 8 --vocabulary 20 --max_minutes 1e-9 {options}"
    out = " ".join(console.printed(line, "lm")[0].split())
    assert 'the parameters of norms, because of stack.norm "offset": they' in out
    monkeypatch.setitem(RELATIVE_BIASES, "own_table", OwnTable)
    config = replace(SWIN_PRESETS["swin_tiny"], relative_bias="own_table")
    assert variants_without_formula(config) == ['relative_bias "own_table"']


@pytest.mark.parametrize(("task", "name"), [("lm", "gpt2"), ("bert", "base")])
def test_attention_has_most_flop_from_six_widths_on(task: str, name: str) -> None:
    network = NETWORKS[task]
    vocabulary, length = DEFAULTS[task]
    parts, symbols = network.parts(network.fill(network.presets[name], vocabulary, length), length)
    assert crossover(parts, symbols) == 6 * 768  # 2 T d^2 (4 + 8) = 4 T^2 d, Kaplan 2020


def test_six_nd_and_the_memory_of_moments() -> None:
    found = Profile("", [], {"T": 16}, {"head": 10}, (0, 0), {}, None, "cpu")
    assert found.six_nd == 6 * 10 * 16
    assert found.memory()["moments of AdamW"] == {"float32": 80, "bfloat16": 40}


def test_fitted_factors_are_not_negative() -> None:
    config = NETWORKS["lm"].presets["gpt2"]
    points = [Point("length", n, config, 2, n, n, 0, (0, 0)) for n in (16, 64, 256, 1024)]
    found = fit(points, [0.02, 0.01, 0.012, 0.03])
    assert found is not None and (found.factors >= 0).all() and found.factors.any()
