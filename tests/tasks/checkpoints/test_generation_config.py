"""Generation settings of a folder: followed as transformers does, named, or refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import tessera
import torch
import transformers

from datamodules.embedded.reference import documents
from datamodules.tokenizers import Tokenizer
from tasks.checkpoints.generation_config import UNSUPPORTED, GenerationSettings
from tasks.lm.architectures import load_model
from tests.helpers.command import Console, run
from tests.helpers.model_folders import decoder_folder, marian_folder
from tests.helpers.tiny import write_corpus

FILE = "generation_config.json"
PROMPT = "The value of a"
NEW = 12
GENERATE = f'generate --ckpt_path theirs --prompt "{PROMPT}"'


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random decoders; not to be changed."""
    folders = {}
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM"):
        folders[name] = tmp_path_factory.mktemp(name)
        decoder_folder(folders[name], name, documents()["val"][:8])
        (folders[name] / FILE).unlink()
    return folders


@pytest.fixture
def gpt2(decoders: dict[str, Path]) -> Path:
    """A copy of the first in the folder `theirs`."""
    return Path(shutil.copytree(decoders["GPT2LMHeadModel"], "theirs"))


def prompt_tokens() -> torch.Tensor:
    tokenizer = Tokenizer.from_file(Path("theirs"))
    return torch.tensor([[tokenizer.special_id("bos"), *tokenizer.encode_batch([PROMPT])[0]]])


def theirs(**options: Any) -> list[int]:
    """New tokens of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained("theirs").eval()
    tokens = prompt_tokens()
    mask = torch.ones_like(tokens)
    with torch.inference_mode():
        found = model.generate(tokens, attention_mask=mask, pad_token_id=0, **options)
    return found[0, tokens.shape[1] :].tolist()


def ours(console: Console, options: str = "") -> dict[str, Any]:
    """What `generate` prints as JSON."""
    return console.objects(f"{GENERATE} {options}", "lm")[0]


def add_settings(settings: dict[str, Any], name: str = FILE) -> None:
    """Adds entries to a file of the folder."""
    file = Path("theirs", name)
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | settings))


# From the tokens of greedy decoding to settings.
SETTINGS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "several ends": lambda made: {"eos_token_id": [299, made[5], made[3]]},
    "one end": lambda made: {"eos_token_id": made[4]},
    "repetition penalty": lambda made: {"repetition_penalty": 0.2},
    "banned words": lambda made: {"bad_words_ids": [[made[0]], [made[2]]]},
    "a banned end": lambda made: {"bad_words_ids": [[made[3]]], "eos_token_id": made[3]},
    "suppressed": lambda made: {"suppress_tokens": [made[0], made[1]]},
    "top 1": lambda made: {"do_sample": True, "top_k": 1},
    "top p": lambda made: {"do_sample": True, "top_p": 1e-6, "temperature": 0.7},
    "beams": lambda made: {"length_penalty": 0.3, "eos_token_id": [made[2], made[5]]},
    "beams that stop early": lambda made: {"early_stopping": True, "eos_token_id": [made[2]]},
    "beams and bans": lambda made: {"bad_words_ids": [[made[1]]]},
    "beams and bans, renormalised": lambda made: (
        {"bad_words_ids": [[made[1]]], "renormalize_logits": True}
    ),
}


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(
    "kind", ["GPT2LMHeadModel", pytest.param("LlamaForCausalLM", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_transformers(
    name: str, kind: str, decoders: dict[str, Path], console: Console
) -> None:
    shutil.copytree(decoders[kind], "theirs")
    greedy = theirs(max_new_tokens=NEW, do_sample=False)
    settings = {"max_new_tokens": NEW, "eos_token_id": 6, "do_sample": False}
    if "beams" in name:
        settings["num_beams"] = 3
    settings |= SETTINGS[name](greedy)
    add_settings(settings)
    expected = theirs()
    assert expected != greedy or settings["do_sample"]
    found = ours(console)
    assert found["tokens"] == len(expected)
    ends: Any = settings["eos_token_id"]
    if expected[-1] in (ends if isinstance(ends, list) else [ends]):
        expected.pop()
    assert found["text"] == Tokenizer.from_file(Path("theirs")).decode(expected)


def test_settings_in_an_older_config(gpt2: Path, console: Console) -> None:
    greedy = theirs(max_new_tokens=NEW, do_sample=False)
    options = f"--temperature 0 --max_new_tokens {NEW}"
    add_settings({"eos_token_id": greedy[4]}, "config.json")
    assert ours(console, options)["tokens"] == greedy.index(greedy[4]) + 1 < NEW
    add_settings({"eos_token_id": greedy[2]})  # which then counts alone
    assert ours(console, options)["tokens"] == greedy.index(greedy[2]) + 1


FILTERS = {"do_sample": True, "top_k": 7, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("settings, options", [
    ({"do_sample": True}, "--top_k 50"),
    ({"do_sample": True, "top_k": 0, "temperature": 0.5}, "--temperature 0.5"),
    (FILTERS, "--top_k 7 --top_p 0.9 --min_p 0.01"),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, "--temperature 0"),
    ({"max_length": 20}, "--max_new_tokens {left}"),
    ({"stop_strings": ["e", "a"]}, "--stop e --stop a"),
    ({"repetition_penalty": 1.3, "temperature": 0.8}, "--repetition_penalty 1.3 --temperature 0.8"),
    ({}, "--temperature 1.0"),
])  # fmt: skip
def test_settings_equal_options(
    settings: dict[str, Any], options: str, gpt2: Path, console: Console
) -> None:
    usual = ours(console, "--seed 3")
    typed = ours(console, f"--seed 3 {options.format(left=20 - prompt_tokens().shape[1])}")
    add_settings(settings)
    assert ours(console, "--seed 3") == typed
    assert (typed != usual) == bool(settings)
    if not {"stop_strings", "top_k", "top_p", "do_sample"} & settings.keys():
        typed = "--temperature 1.0 --repetition_penalty 1 --max_new_tokens 100"  # which wins
        assert ours(console, f"--seed 3 {typed}") == usual


def test_settings_and_a_temperature_of_zero(gpt2: Path, console: Console) -> None:
    """Samplers' settings then have no meaning; typed ones are refused."""
    greedy = ours(console, "--temperature 0")
    add_settings({"do_sample": True, "top_k": 5, "num_return_sequences": 3})
    assert ours(console, "--temperature 0 --samples 1") == greedy
    assert console.objects(f"{GENERATE} --temperature 0", "lm") == [greedy]  # all would be the same
    model = tessera.load(gpt2, kind=tessera.LanguageModel)
    assert model.generate(PROMPT, temperature=0.0) == greedy["text"]
    console.refused(f"{GENERATE} --temperature 0 --top_p 0.5", "give a temperature", task="lm")
    assert ours(console, "--temperature 0 --min_p 0 --samples 1") == greedy  # 0 is off
    add_settings({"do_sample": True, "temperature": 0.0, "num_return_sequences": 1})
    assert ours(console) == greedy


@pytest.mark.parametrize("settings, options, named", [
    ({"no_repeat_ngram_size": 3, "min_length": 0}, "", ["no_repeat_ngram_size 3"]),
    ({"min_new_tokens": 5, "forced_eos_token_id": 6}, "",
     ["min_new_tokens 5", "forced_eos_token_id 6"]),
    ({"num_beams": 4, "do_sample": True}, "", ["num_beams 4"]),
    ({"repetition_penalty": 1.2, "temperature": 0.5}, "--beams 2", ["repetition_penalty 1.2"]),
    ({"begin_suppress_tokens": [4]}, "", ["begin_suppress_tokens, "]),
    ({"num_beams": 2, "stop_strings": ["e"]}, "", ["stop_strings in beam search"]),
    ({"num_beams": 4, "temperature": 0.7, "typical_p": 1.0, "use_cache": True, "new": 3}, "", []),
    ({"num_beams": 4}, "--temperature 0.5 --samples 2", []),
])  # fmt: skip
def test_unsupported_settings_are_named_in_one_line(
    settings: dict[str, Any], options: str, named: list[str], gpt2: Path, console: Console
) -> None:
    add_settings(settings)
    line = f"generate --ckpt_path theirs --max_new_tokens 3 {options}"
    lines = [line for line in console.printed(line, "lm")[1].splitlines() if FILE in line]
    assert len(lines) == bool(named)
    assert all(name in lines[0] for name in named)
    assert not lines or "min_length" not in lines[0]


# Entries of transformers that do not change what is generated: where it is computed, what is
# returned, drafts of other models.
HARMLESS = re.compile(
    "_.*|use_cache|cache_.*|max_cache_len|output_.*|return_dict.*|(pad|bos)_token_id|low_memory|"
    "transformers_version|use_mtp|.*assistant.*|.*lookup.*|.*lookbehind|max_matching_ngram_size|"
    "speculation_type|.*compile.*|continuous.*|prefill_chunk_size"
)


def test_no_entry_is_ignored() -> None:
    known = {field.name for field in fields(GenerationSettings)} | {*UNSUPPORTED}
    names = vars(transformers.GenerationConfig())
    assert [name for name in names if name not in known and not HARMLESS.fullmatch(name)] == []


BAD: dict[str, list[Any]] = {
    "eos_token_id": ["6", [6, "73"], [[6]], 6.0, True, {"a": 1}, -1, 300, 10**9, 10**400],
    "bad_words_ids": ["x", [5], [[1, 2]], [[]], [[1.5]], [[300]], {"a": 1}],
    "suppress_tokens": [5, ["a"], [300]],
    "temperature": ["hot", -1, [1], 1e99],
    "top_k": [1.5, "many", -3, True],
    "repetition_penalty": [0, -1.2, [1.2], "x"],
    "max_new_tokens": [0, -1, "x", 10**12],
    "num_beams": [0, -2, 1.5, "x"],
    "early_stopping": ["always", 3, []],
    "do_sample": ["yes", 1],
    "stop_strings": [3, [3], [""]],
}
OPTION_NAMES = {"num_beams": "beams", "stop_strings": "stop"}


@pytest.mark.parametrize("name", BAD)
def test_values_that_are_refused(name: str, gpt2: Path, console: Console) -> None:
    for value in BAD[name]:
        settings = {name: value, "do_sample": True} if name == "temperature" else {name: value}
        (gpt2 / FILE).write_text(json.dumps(settings))
        error = console.refused("generate --ckpt_path theirs", FILE, task="lm")
        assert name in error or OPTION_NAMES.get(name, name) in error
        assert len(error) < 400


@pytest.mark.parametrize(
    "content", ["", "[1]", '"text"', "{", "[" * 100_000, '{"eos_token_id": 6', "\udcff"]
)
def test_files_that_cannot_be_read(content: str, gpt2: Path, console: Console) -> None:
    (gpt2 / FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    console.refused("generate --ckpt_path theirs", FILE, task="lm")


def test_a_run_from_a_folder_has_its_own_end(gpt2: Path) -> None:
    add_settings({"bad_words_ids": [[5, 6]], "eos_token_id": 9, "max_new_tokens": 3})
    write_corpus(Path("texts"))
    line = "fit --model.pretrained theirs --data.path texts --run_dir r"
    options = "--trainer.max_steps 1 --data.batch_size 2 --data.max_length 32"
    assert run(f"{line} {options} --model.samples.generation.max_new_tokens 2", "lm") == 0
    model = load_model("r/checkpoints/last.ckpt")
    assert (model.boundary_tokens.eos, model.generation()) == (6, None)
    assert run("generate --ckpt_path r/checkpoints/last.ckpt --max_new_tokens 4", "lm") == 0


def test_settings_of_a_translator(console: Console) -> None:
    marian_folder(Path("theirs"))

    def translated(options: str) -> str:
        line = f"translate --ckpt_path theirs --text The --text cat --json {options}"
        return console.printed(line, "seq2seq")[0]

    expected = translated("--beams 2 --length_penalty 0.2 --max_new_tokens 5")
    usual = translated("--max_new_tokens 9")
    add_settings({"num_beams": 2, "length_penalty": 0.2, "max_length": 6})
    assert translated("") == expected != usual
    assert translated("--max_new_tokens 9 --beams 5 --length_penalty 1.0") == usual
    samples = "--beams 1 --temperature {} --top_k {}"
    line = "translate --ckpt_path theirs --text a"
    refused = {"num_beams": 1.5, "eos_token_id": [6, "73"], "bad_words_ids": [[8, 9]]}
    for name, value in (*refused.items(), ("forced_eos_token_id", 4000)):
        Path("theirs", FILE).write_text(json.dumps({name: value}))
        console.refused(line, FILE, OPTION_NAMES.get(name, name), task="seq2seq")
    Path("theirs", FILE).write_text('{"no_repeat_ngram_size": 3}')
    assert "no_repeat_ngram_size 3" in console.printed(f"{line} --max_new_tokens 3", "seq2seq")[1]
    for settings, options in (
        ({}, "--beams 1"),
        ({"temperature": 0.5, "top_k": 3}, "--beams 1"),  # where nothing asks for samples
        ({"do_sample": True}, samples.format(1, 50)),
        ({"do_sample": True, "top_k": 3, "temperature": 0.5}, samples.format(0.5, 3)),
    ):
        Path("theirs", FILE).unlink()
        expected = translated(f"{options} --max_new_tokens 5")
        add_settings({"num_beams": 1, **settings})
        assert translated("--max_new_tokens 5") == expected


# Exports ------------------------------------------------------------------------------------------

KEPT = {"eos_token_id": [6, 50], "repetition_penalty": 1.3, "suppress_tokens": [20]}


@pytest.mark.parametrize("file", [FILE, "config.json"])
def test_an_exported_folder_generates_as_before(file: str, gpt2: Path) -> None:
    """Also with settings that only transformers knows, if they have a file of their own."""
    given = {**KEPT, "no_repeat_ngram_size": 4} if file == FILE else KEPT
    content = json.loads((gpt2 / file).read_text()) if file != FILE else {}
    (gpt2 / file).write_text(json.dumps(content | given))
    assert run("export --ckpt_path theirs --output back", "lm") == 0
    saved = json.loads(Path("back", FILE).read_text())
    assert saved.items() >= given.items()
    special = transformers.GenerationConfig.from_model_config(
        transformers.AutoConfig.from_pretrained("theirs")
    )
    assert saved["bos_token_id"] == special.bos_token_id
    assert saved["pad_token_id"] == load_model("theirs").tokenizer.special_id("pad")
    texts = [
        tessera.load(folder, kind=tessera.LanguageModel).generate(
            PROMPT, max_new_tokens=NEW, temperature=0
        )
        for folder in ("theirs", "back")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("file", [FILE, "config.json"])
def test_an_exported_translator_decodes_as_before(file: str) -> None:
    marian_folder(Path("theirs"))
    given = {"num_beams": 2, "length_penalty": 0.3, "max_length": 12, "early_stopping": True}
    Path("theirs", FILE).unlink()
    path = Path("theirs", file)  # without the special tokens if it is new
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | given))
    assert run("export --ckpt_path theirs --output back", "seq2seq") == 0
    saved = json.loads(Path("back", FILE).read_text())
    assert saved.items() >= given.items() and "max_new_tokens" not in saved
    assert {"decoder_start_token_id", "eos_token_id", "pad_token_id"} <= saved.keys()
    texts = [
        tessera.load(folder, kind=tessera.Translator).translate(["one", "two three"])
        for folder in ("theirs", "back")
    ]
    assert texts[0] == texts[1]
