"""What a language model cannot use: one sentence, an exit code, and nothing left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from datamodules.tokenizers import Tokenizer, TokenizerConfig
from tests.tasks.command import SHORT, SMALL_LM, run, write_corpus
from tests.tasks.test_bad_input import FAILED, USER, assert_refused, nothing, settings

FIT = f"fit {SMALL_LM} --data.source files --data.path texts"


def corpus() -> None:
    write_corpus(Path("texts"))


def text(content: str | bytes) -> Callable[[], None]:
    """One file, `texts/a.txt`."""

    def make() -> None:
        Path("texts").mkdir()
        Path("texts/a.txt").write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def table() -> None:
    Path("texts").mkdir()
    Path("texts/a.jsonl").write_text('{"title": "The fox", "body": "The lazy dog."}\n')


def numbers() -> None:
    from datasets import Dataset

    Path("texts").mkdir()
    Dataset.from_dict({"text": [1], "body": ["The lazy dog."]}).to_parquet("texts/a.parquet")


def corpus_and_tokenizer() -> None:
    corpus()
    Path("t.json").write_text(
        Tokenizer.train(["the lazy dog"], TokenizerConfig("bpe", 300)).to_json()
    )


def empty() -> None:
    Path("theirs").mkdir()


RUN_SAYS = "give its checkpoint, "
GENERATE = "generate --ckpt_path LETTERS"
SCORE = "score --ckpt_path LETTERS --data.path texts/a.txt"
CASES: dict[
    str, tuple[str, Callable[[], None], int, tuple[str, ...]]
] = {  # options, files, exit code, words
    "no files": (FIT, nothing, USER, ("texts does not exist",)),
    "empty corpus": (FIT, text(""), FAILED, ("holds no text",)),
    "nothing but space": (FIT, text(" \n\n "), FAILED, ("holds no text",)),
    "shorter than a window": (
        FIT,
        text("a b c d"),
        USER,
        ("are needed", "lower --data.max_length"),
    ),
    "not UTF-8": (FIT, text(b"one\ntwo\ncaf\xe9"), FAILED, ("texts/a.txt", "UTF-8")),
    "context too short": (
        f"{FIT} --model.net.max_length 16",
        corpus,
        USER,
        ("--data.max_length 32 is more than the 16 learned positions",),
    ),
    "vocabulary too small": (f"{FIT} --model.net.vocabulary 20", corpus, USER, ("the network 20",)),
    "not causal": (f"{FIT} --model.net.stack.causal false", corpus, USER, ("stack.causal",)),
    "z-loss": (f"{FIT} --model.z_loss -1", corpus, USER, ("z_loss -1.0 must not be negative",)),
    "samples": (f"{FIT} --model.samples.every 0", corpus, USER, ("samples.every is 0",)),
    "preset": (f"{FIT} --preset gpt3", corpus, USER, ("did you mean 'gpt2'",)),
    "no weights": (f"{FIT} --model.pretrained nowhere", corpus, USER, ("nowhere: no such folder",)),
    "another kind of model": (f"{FIT} --model.pretrained theirs", settings, USER, ("mamba",)),
    "another task": (
        f"{FIT} --model.pretrained VIT",
        corpus,
        USER,
        ("is of task 'vit': give one of lm",),
    ),
    "another tokenizer": (
        "fit --data.source files --data.path texts --model.pretrained LETTERS --data.max_length 32 "
        "--data.tokenizer.file t.json",
        corpus_and_tokenizer,
        USER,
        ("use the tokenizer that the network was trained with",),
    ),
    "no checkpoint": (
        "generate --ckpt_path nowhere.ckpt",
        nothing,
        USER,
        ("no checkpoint 'nowhere.ckpt'",),
    ),
    "an empty folder": (
        "generate --ckpt_path theirs",
        empty,
        USER,
        ("--ckpt_path theirs holds no model",),
    ),
    "a run to generate": ("generate --ckpt_path RUN", nothing, USER, ("--ckpt_path", RUN_SAYS)),
    "a run to score": (
        "score --ckpt_path RUN --data.path a",
        nothing,
        USER,
        ("--ckpt_path", RUN_SAYS),
    ),
    "a run to export": ("export --ckpt_path RUN", nothing, USER, ("--ckpt_path", RUN_SAYS)),
    "a run to go on from": (
        f"{FIT} --model.pretrained RUN",
        corpus,
        USER,
        ("--model.pretrained", RUN_SAYS),
    ),
    "another kind to generate": (
        "generate --ckpt_path theirs",
        settings,
        USER,
        ("--ckpt_path", "mamba"),
    ),
    "a checkpoint of another task": (
        "generate --ckpt_path VIT",
        nothing,
        USER,
        ("use python -m tasks.vit",),
    ),
    "checkpoint left out": ("generate", nothing, USER, ("--ckpt_path is missing",)),
    "temperature": (f"{GENERATE} --temperature -0.5", nothing, USER, ("temperature is -0.5",)),
    "top-p": (f"{GENERATE} --top_p 1.2", nothing, USER, ("top_p is 1.2",)),
    "top-p of 0": (f"{GENERATE} --top_p 0", nothing, USER, ("top_p is 0.0",)),
    "number of samples": (f"{GENERATE} --num_samples 0", nothing, USER, ("num_samples is 0",)),
    "more texts than beams": (
        f"{GENERATE} --beams 2 --num_samples 3",
        nothing,
        USER,
        ("raise beams",),
    ),
    "beams and top-k": (f"{GENERATE} --beams 2 --top_k 3", nothing, USER, ("leave top_k",)),
    "temperature too low": (
        f"{GENERATE} --temperature 1e-40",
        nothing,
        USER,
        ("temperature is 1e-40", "give 0"),
    ),
    "seed": (
        f"{GENERATE} --seed 99999999999999999999999",
        nothing,
        USER,
        ("seed is 99999999999999999999999",),
    ),
    "new tokens": (
        f"{GENERATE} --max_new_tokens 99999999999",
        nothing,
        USER,
        ("max_new_tokens is 99999999999",),
    ),
    "the same text twice": (
        f"{GENERATE} --temperature 0 --num_samples 2",
        nothing,
        USER,
        ("leave num_samples out",),
    ),
    "too many samples": (
        f"{GENERATE} --num_samples 99999999999",
        nothing,
        USER,
        ("num_samples is 99999999999",),
    ),
    "beams and temperature": (
        f"{GENERATE} --beams 2 --temperature 0.5",
        nothing,
        USER,
        ("leave temperature",),
    ),
    "beams and seed": (
        f"{GENERATE} --beams 2 --seed 3",
        nothing,
        USER,
        ("leave temperature and seed out",),
    ),
    "beams and stop strings": (
        f"{GENERATE} --beams 2 --stop x",
        nothing,
        USER,
        ("leave stop or beams out",),
    ),
    "empty stop string": (f'{GENERATE} --stop ""', nothing, USER, ("stop string is empty",)),
    "unknown character": (
        f'{GENERATE} --prompt "über"',
        nothing,
        USER,
        ("'ü' (U+00FC)", "leave it out"),
    ),
    "no prompt file": (f"{GENERATE} --prompt_file p.txt", nothing, USER, ("p.txt cannot be read",)),
    "empty prompt file": (
        f"{GENERATE} --prompt_file texts/a.txt",
        text("\n \n"),
        USER,
        ("holds no prompt",),
    ),
    "prompts not UTF-8": (
        f"{GENERATE} --prompt_file texts/a.txt",
        text(b"a\n\xff"),
        USER,
        ("UTF-8 in line 2",),
    ),
    "misspelled": (f"{GENERATE} --temprature 1", nothing, USER, ("did you mean --temperature",)),
    "no text to score": (SCORE, nothing, USER, ("texts/a.txt does not exist",)),
    "an empty text to score": (SCORE, text(""), FAILED, ("error: texts/a.txt holds no text",)),
    "a column to score": (
        "score --ckpt_path LETTERS --data.path texts",
        table,
        USER,
        ("no column text in texts", "set --data.text_column to one of title, body."),
    ),
    "numbers to score": (
        "score --ckpt_path LETTERS --data.path texts",
        numbers,
        USER,
        ("holds int64, not text", "set --data.text_column to one of body."),
    ),
    "one character": (SCORE, text("T"), USER, ("one token only",)),
    "a character to score": (SCORE, text("The lazy dög."), FAILED, ("'ö' (U+00F6)",)),
    "stride": (
        f"{SCORE} --stride 33",
        text("The lazy dog."),
        USER,
        ("--stride 33 must be from 1 to", "32"),
    ),
    "batch size": (f"{SCORE} --batch_size 0", text("The lazy dog."), USER, ("--batch_size 0",)),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals(
    case: str, lm_letters: Path, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, make, code, words = CASES[case]
    make()
    line = line.replace("LETTERS", str(lm_letters)).replace("VIT", str(best))
    assert_refused(line.replace("RUN", str(lm_letters.parents[1])), code, words, capsys, "lm")


def test_vit_is_not_exported_as_a_language_model(
    best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert SHORT and run(f"export --ckpt_path {best}", "lm") == USER
    assert "use python -m tasks.vit" in capsys.readouterr().err


def test_a_model_that_cannot_be_downloaded(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("generate", "score --data.path a", "export"):
        assert run(f"{command} --ckpt_path hf/someone/nothing", "lm") == FAILED
        assert "give their folder as --ckpt_path FOLDER" in capsys.readouterr().err
