"""What a published folder asks of generation: followed as `generate` of transformers does, said, or refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.embedded.reference import documents
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tasks.checkpoints.generation_config import UNSUPPORTED, GenerationSettings
from tasks.lm.architectures import load_model
from tests.tasks.command import checkpoint, run, write_corpus
from tests.tasks.test_pretrained_seq2seq import marian_folder

transformers = pytest.importorskip("transformers")

FILE = "generation_config.json"
FLAGS = ("special", "normalized", "single_word", "lstrip", "rstrip")
PROMPT, NEW = "The value of a", 12
SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
        **{"num_key_value_heads": 2, "max_position_embeddings": 64},
    },
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the folder of a tiny random decoder, which is not to be changed."""
    tokenizer = Tokenizer.train(
        documents()["val"][:8], TokenizerConfig("bpe", 300, lowercase=False)
    )

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(1)
        options = transformers.AutoConfig.for_model(
            kind, vocab_size=tokenizer.vocab_size, bos_token_id=5, eos_token_id=6, **SIZES[kind]
        )
        model = transformers.AutoModelForCausalLM.from_config(options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tokenizer.to_json())
        return folder

    return make


@pytest.fixture(params=SIZES)
def folder(request: pytest.FixtureRequest, published: Callable[[str], Path]) -> Path:
    """A copy of such a folder, `theirs`, without a generation_config.json."""
    shutil.copytree(published(request.param), "theirs")
    Path("theirs", FILE).unlink()
    return Path("theirs").resolve()


def words(folder: Path) -> torch.Tensor:
    """Tokens of the prompt."""
    tokenizer = Tokenizer.from_file(folder)
    return torch.tensor([[tokenizer.special_id("bos"), *tokenizer.encode_batch([PROMPT])[0]]])


def theirs(folder: Path, **options: Any) -> list[int]:
    """New tokens of transformers."""
    model, read = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), words(folder)
    with torch.inference_mode():
        made = model.generate(read, attention_mask=torch.ones_like(read), pad_token_id=0, **options)
    return list(made[0, read.shape[1] :].tolist())


def ours(capsys: pytest.CaptureFixture[str], options: str = "") -> dict[str, Any]:
    """What `generate` prints as JSON."""
    capsys.readouterr()
    assert run(f'generate --ckpt_path theirs --prompt "{PROMPT}" --json {options}', "lm") == 0
    return dict(json.loads(capsys.readouterr().out.splitlines()[0]))


def ask(folder: Path, asked: dict[str, Any], name: str = FILE) -> None:
    """Writes what a folder asks of generation."""
    before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(before | asked))


# Of the tokens that follow greedily, by their places.
ASKED: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "several ends": lambda made: {"eos_token_id": [299, made[5], made[3]]},
    "one end": lambda made: {"eos_token_id": made[4]},
    "repetition_penalty": lambda made: {"repetition_penalty": 1.7},
    "banned words": lambda made: {"bad_words_ids": [[made[0]], [made[2]]]},
    "a banned end": lambda made: {"bad_words_ids": [[made[3]]], "eos_token_id": made[3]},
    "suppressed": lambda made: {"suppress_tokens": [made[0], made[1]]},
    "draws from one": lambda made: {"do_sample": True, "top_k": 1},
    "draws from few": lambda made: {"do_sample": True, "top_p": 1e-6, "temperature": 0.7},
    "beams": lambda made: {
        "num_beams": 3,
        "length_penalty": 0.3,
        "eos_token_id": [made[2], made[5]],
    },
    "beams that stop early": lambda made: {
        "num_beams": 3,
        "early_stopping": True,
        "eos_token_id": [made[2]],
    },
    "beams and bans": lambda made: {
        "num_beams": 3,
        "bad_words_ids": [[made[1]]],
        "eos_token_id": 6,
    },
    "beams and shared bans": lambda made: {
        **{
            "num_beams": 3,
            "bad_words_ids": [[made[1]]],
            "eos_token_id": 6,
            "renormalize_logits": True,
        }
    },
}


@pytest.mark.parametrize("asked", ASKED)
def test_tokens_are_those_of_transformers(
    asked: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = theirs(folder, max_new_tokens=NEW, do_sample=False)
    entries = {"max_new_tokens": NEW, "eos_token_id": 6, "do_sample": False, **ASKED[asked](greedy)}
    ask(folder, entries)
    expected = theirs(folder)
    assert expected != greedy or entries["do_sample"]
    found = ours(capsys)
    assert found["tokens"] == len(expected)
    ends = (
        [entries["eos_token_id"]]
        if isinstance(entries["eos_token_id"], int)
        else entries["eos_token_id"]
    )
    ended = expected[-1] in ends
    assert found["text"] == Tokenizer.from_file(folder).decode(expected[:-1] if ended else expected)


def test_an_older_config_says_it_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = theirs(folder, max_new_tokens=NEW, do_sample=False)
    ask(folder, {"eos_token_id": greedy[4]}, "config.json")
    expected = theirs(folder, max_new_tokens=NEW)
    assert len(expected) < len(greedy)
    assert ours(capsys, f"--temperature 0 --max_new_tokens {NEW}")["tokens"] == len(expected)
    ask(folder, {"eos_token_id": greedy[2]})  # which then counts alone
    assert (
        ours(capsys, f"--temperature 0 --max_new_tokens {NEW}")["tokens"]
        == greedy.index(greedy[2]) + 1
    )


@pytest.mark.parametrize(
    "asked, same",
    [
        ({"do_sample": True}, "--top_k 50"),
        ({"do_sample": True, "top_k": 0, "temperature": 0.5}, "--temperature 0.5"),
        (
            {"do_sample": True, "top_k": 7, "top_p": 0.9, "min_p": 0.01},
            "--top_k 7 --top_p 0.9 --min_p 0.01",
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, "--temperature 0"),
        ({"max_length": 20}, "--max_new_tokens {left}"),
        ({"stop_strings": ["e", "a"]}, "--stop e --stop a"),
        (
            {"repetition_penalty": 1.3, "temperature": 0.8},
            "--repetition_penalty 1.3 --temperature 0.8",
        ),
        ({}, "--temperature 1.0"),
    ],
)
def test_what_the_folder_asks_is_what_one_may_type(
    asked: dict[str, Any],
    same: str,
    published: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(published("gpt2"), "theirs")
    usual = ours(capsys, "--seed 3")
    typed = ours(capsys, f"--seed 3 {same.format(left=20 - words(Path('theirs')).shape[1])}")
    ask(Path("theirs"), asked)
    assert ours(capsys, "--seed 3") == typed and (typed != usual) == bool(asked)
    options = "--seed 3 --temperature 1.0 --repetition_penalty 1 --max_new_tokens 100"  # what is typed wins
    if not {"stop_strings", "top_k", "top_p", "do_sample"} & asked.keys():
        assert ours(capsys, options) == usual


@pytest.mark.parametrize(
    "asked, options, words",
    [
        ({"no_repeat_ngram_size": 3, "min_length": 0}, "", ["no_repeat_ngram_size 3"]),
        (
            {"min_new_tokens": 5, "forced_eos_token_id": 6},
            "",
            ["min_new_tokens 5", "forced_eos_token_id 6"],
        ),
        ({"num_beams": 4, "do_sample": True}, "", ["num_beams 4 with do_sample"]),
        (
            {"repetition_penalty": 1.2, "temperature": 0.5},
            "--beams 2",
            ["repetition_penalty 1.2 in beam search"],
        ),
        ({"begin_suppress_tokens": [4]}, "", ["begin_suppress_tokens"]),
        (
            {
                "num_beams": 4,
                "temperature": 0.7,
                "typical_p": 1.0,
                "use_cache": True,
                "new_entry": 3,
            },
            "",
            [],
        ),
        ({"num_beams": 4}, "--temperature 0.5 --num_samples 2", []),
    ],
)
def test_what_is_not_done_is_said_in_one_line(
    asked: dict[str, Any],
    options: str,
    words: list[str],
    published: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(published("gpt2"), "theirs")
    ask(Path("theirs"), asked)
    assert run(f"generate --ckpt_path theirs --max_new_tokens 3 {options}", "lm") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if FILE in line]
    assert len(said) == bool(words)
    assert all(word in said[0] for word in words) and (not said or "min_length" not in said[0])


# Entries of transformers that do not change what is written: where it is computed, what is returned, drafts of others.
ELSEWHERE = re.compile(
    "_.*|use_cache|cache_.*|max_cache_len|output_.*|return_dict.*|(pad|bos)_token_id|transformers_version|use_mtp|"
    ".*assistant.*|.*lookup.*|.*lookbehind|max_matching_ngram_size|speculation_type|.*compile.*|continuous.*|low_memory|"
    "prefill_chunk_size"
)


def test_no_entry_is_ignored() -> None:
    known = {field.name for field in fields(GenerationSettings)} | set(UNSUPPORTED)
    assert not [
        name
        for name in vars(transformers.GenerationConfig())
        if not (name in known or ELSEWHERE.fullmatch(name))
    ]


BAD = {
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


@pytest.mark.parametrize("task", ["lm", "seq2seq"])
@pytest.mark.parametrize("name", BAD)
def test_entries_that_cannot_be_followed(
    name: str, task: str, published: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    if task == "lm":
        shutil.copytree(published("gpt2"), "theirs")
    else:
        Path("theirs").mkdir()
        marian_folder(Path("theirs"))
    line = (
        "generate --ckpt_path theirs" if task == "lm" else "translate --ckpt_path theirs --text a"
    )
    if task == "seq2seq" and name in (
        "temperature",
        "top_k",
        "repetition_penalty",
    ):  # in beam search there is none
        line += " --beams 1" if name == "temperature" else " --beams 1 --temperature 1"
    capsys.readouterr()
    for value in BAD[name]:
        if task == "seq2seq" and value == [""]:
            continue  # which is said not to be done, as other strings are
        draws = {"do_sample": True} if name == "temperature" else {}
        Path("theirs", FILE).write_text(json.dumps({name: value, **draws}))
        assert run(line, task) == 2
        said = capsys.readouterr().err
        ours = {"num_beams": "beams", "stop_strings": "stop"}.get(name, name)
        assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 400
        assert FILE in said and (name in said or ours in said), said


@pytest.mark.parametrize(
    "content", ["", "[1]", '"text"', "{", "[" * 100_000, '{"eos_token_id": 6', "\udcff"]
)
def test_files_that_cannot_be_read(
    content: str, published: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(published("gpt2"), "theirs")
    Path("theirs", FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    capsys.readouterr()
    assert run("generate --ckpt_path theirs", "lm") == 2
    said = capsys.readouterr().err
    assert FILE in said and said.count("\n") == 1


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    published: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(published("gpt2"), "theirs")
    content = json.loads(Path("theirs/tokenizer.json").read_text())
    size = len(content["model"]["vocab"])
    content["added_tokens"].append({"id": size, "content": "<new>", **dict.fromkeys(FLAGS, False)})
    Path("theirs/tokenizer.json").write_text(json.dumps(content))
    capsys.readouterr()
    assert run("generate --ckpt_path theirs", "lm") == 2
    said = capsys.readouterr().err
    assert "theirs" in said and f"{size + 1} tokens" in said and said.count("\n") == 1


def test_a_run_from_such_a_folder_ends_texts_by_its_own_token(
    published: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(published("gpt2"), "theirs")
    ask(Path("theirs"), {"bad_words_ids": [[5, 6]], "eos_token_id": 9, "max_new_tokens": 3})
    write_corpus(Path("texts"))
    line = "fit --model.pretrained theirs --data.source files --data.path texts --trainer.max_steps 1 --run_dir r"
    assert run(f"{line} --model.samples.generation.max_new_tokens 2", "lm") == 0
    model = load_model("r/checkpoints/last.ckpt")
    assert (
        model.boundary_tokens.eos == 6
        and model.generation() is None
        and checkpoint("r")["tessera"]["task"] == "lm"
    )
    assert run("generate --ckpt_path r/checkpoints/last.ckpt --max_new_tokens 4", "lm") == 0


def test_beams_of_a_translator_are_those_of_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("theirs").mkdir()
    marian_folder(Path("theirs"))

    def translated(options: str) -> str:
        capsys.readouterr()
        line = "translate --ckpt_path theirs --text The --text cat --json"
        assert run(f"{line} {options}", "seq2seq") == 0
        return capsys.readouterr().out

    before = translated("--beams 2 --length_penalty 0.2 --max_new_tokens 5")
    usual = translated("--max_new_tokens 9")
    ask(Path("theirs"), {"num_beams": 2, "length_penalty": 0.2, "max_length": 6})
    assert (
        translated("")
        == before
        != translated("--max_new_tokens 9 --beams 5 --length_penalty 1.0")
        == usual
    )
    for asked, same in (
        ({"num_beams": 1}, "--beams 1"),
        (
            {"num_beams": 1, "temperature": 0.5, "top_k": 3},
            "--beams 1",
        ),  # where nothing asks for draws
        ({"num_beams": 1, "do_sample": True}, "--beams 1 --temperature 1 --top_k 50"),
        (
            {"num_beams": 1, "do_sample": True, "top_k": 3, "temperature": 0.5},
            "--beams 1 --temperature 0.5 --top_k 3",
        ),
    ):
        Path("theirs", FILE).unlink()
        expected = translated(f"{same} --max_new_tokens 5")
        ask(Path("theirs"), asked)
        assert translated("--max_new_tokens 5") == expected
