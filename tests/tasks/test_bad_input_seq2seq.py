"""What a translator cannot use: one sentence, an exit code, and nothing left behind."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.command import PAIRS, SMALL_S2S, run, write_pairs
from tests.tasks.test_bad_input import FAILED, USER, assert_refused, nothing, settings

FIT = f"fit {SMALL_S2S} {PAIRS}"


def pairs() -> None:
    write_pairs(Path("pairs"))


def one_line_less() -> None:
    pairs()
    path = Path("pairs/train.up")
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))


def twice() -> None:
    pairs()
    Path("pairs/train.en.gz").write_bytes(gzip.compress(Path("pairs/train.en").read_bytes()))


def one_word_more() -> None:
    pairs()
    path = Path("pairs/train.en")
    path.write_text(path.read_text().replace("two", "eleven", 1))


def not_text() -> None:
    pairs()
    Path("pairs/train.en").write_bytes(b"two\ncaf\xe9\n")
    Path("pairs/train.up").write_text("TWO\nFOUR\n")


def broken_lines() -> None:
    Path("a.txt").write_bytes(b"two\n\xff\n")


TRANSLATE = "translate --ckpt_path TRANSLATOR --text two"
ATTEND = "attend --ckpt_path TRANSLATOR"
CASES: dict[
    str, tuple[str, Callable[[], None], int, tuple[str, ...]]
] = {  # options, files, exit code, words
    "no files": (FIT, nothing, USER, ("pairs does not exist",)),
    "different numbers of lines": (FIT, one_line_less, FAILED, ("has 160 lines", "train.up 159")),
    "unknown language": (
        FIT.replace("en-up", "en-xx"),
        pairs,
        USER,
        ("but no test.xx", "--data.languages"),
    ),
    "no languages": (
        FIT.replace("--data.languages en-up", ""),
        pairs,
        USER,
        ("--data.languages is missing",),
    ),
    "not UTF-8": (FIT, not_text, FAILED, ("line 2 of", "train.en", "UTF-8")),
    "vocabulary too small": (
        f"{FIT} --model.net.source_vocabulary 9 --model.net.target_vocabulary 9",
        pairs,
        USER,
        ("has 27 tokens and the network 9", "leave --model.net.source_vocabulary out"),
    ),
    "context too short": (
        f"{FIT} --model.net.position learned --model.net.max_length 16",
        pairs,
        USER,
        ("--data.max_length 24 is more than the 16 learned positions",),
    ),
    "one table for two vocabularies": (
        f"{FIT} --data.tokenizer.joint false",
        one_word_more,
        USER,
        ("there are 18 source tokens and 17 target tokens", 'tying "target"'),
    ),
    "one table for two vocabularies of one size": (
        f"{FIT} --data.tokenizer.joint false",
        pairs,
        USER,
        (
            "--model.net.tying all shares one table",
            "tokenizers number",
            "set --model.net.tying target",
        ),
    ),
    "architecture": (
        f"{FIT} --model.net.architecture prefx",
        pairs,
        USER,
        ("did you mean prefix",),
    ),
    "widths": (f"{FIT} --model.net.decoder.width 64", pairs, USER, ("32 wide and the decoder 64",)),
    "smoothing": (
        f"{FIT} --model.label_smoothing 1",
        pairs,
        USER,
        ("label_smoothing 1.0 must be from 0",),
    ),
    "beams": (f"{FIT} --model.decoding.beams 0", pairs, USER, ("decoding.beams is 0",)),
    "beams of validation": (
        f"{FIT} --model.decoding.val_beams 0",
        pairs,
        USER,
        ("decoding.val_beams is 0",),
    ),
    "too many beams": (
        f"{FIT} --model.decoding.beams 10001",
        pairs,
        USER,
        ("decoding.beams is 10001", "to 10000"),
    ),
    "length penalty": (
        f"{FIT} --model.decoding.length_penalty 11",
        pairs,
        USER,
        ("decoding.length_penalty is 11", "from -10 to 10"),
    ),
    "no tokens": (
        f"{FIT} --model.decoding.max_new_tokens 0",
        pairs,
        USER,
        ("decoding.max_new_tokens is 0",),
    ),
    "too many tokens": (
        f"{FIT} --model.decoding.max_new_tokens 1000001",
        pairs,
        USER,
        ("decoding.max_new_tokens is 1000001",),
    ),
    "a language with a hyphen": (
        FIT.replace("en-up", "en-pt-BR"),
        pairs,
        USER,
        ("--data.languages is en-pt-BR", "such as en:pt-BR"),
    ),
    "plain and compressed": (
        FIT,
        twice,
        USER,
        ("pairs/train.en and", "pairs/train.en.gz", "remove one"),
    ),
    "an average of one": (
        f"{FIT} --model.average 1",
        pairs,
        USER,
        ("--model.average 1 must be at least 2",),
    ),
    "two averages": (f"{FIT} --model.average 3 --model.ema 0.9", pairs, USER, ("leave one out",)),
    "preset": (f"{FIT} --preset tinny", pairs, USER, ("did you mean 'tiny'",)),
    "no weights": (f"{FIT} --model.pretrained nowhere", pairs, USER, ("nowhere: no such folder",)),
    "another kind of model": (f"{FIT} --model.pretrained theirs", settings, USER, ("mamba",)),
    "no checkpoint": (
        "translate --ckpt_path nowhere.ckpt --text a",
        nothing,
        USER,
        ("no checkpoint 'nowhere.ckpt'",),
    ),
    "a checkpoint of another task": (
        "translate --ckpt_path VIT --text a",
        nothing,
        USER,
        ("python -m tasks.vit",),
    ),
    "checkpoint left out": ("translate --text a", nothing, USER, ("--ckpt_path is missing",)),
    "more than the beam": (
        f"{TRANSLATE} --nbest 6",
        nothing,
        USER,
        ("nbest is 6", "5 beams", "raise beams"),
    ),
    "more than one": (
        f"{TRANSLATE} --beams 1 --nbest 2",
        nothing,
        USER,
        ("nbest is 2", "raise beams"),
    ),
    "no translation": (f"{TRANSLATE} --nbest 0", nothing, USER, ("nbest is 0",)),
    "no sentence at a time": (f"{TRANSLATE} --batch_size 0", nothing, USER, ("batch_size is 0",)),
    "a drawn beam": (
        f"{TRANSLATE} --temperature 1",
        nothing,
        USER,
        ("samples none", "set beams and nbest to 1"),
    ),
    "several drawn": (
        f"{TRANSLATE} --beams 1 --nbest 2 --temperature 1",
        nothing,
        USER,
        (
            "samples one translation of each sentence",
            "set beams and nbest to 1, or leave temperature out",
        ),
    ),
    "top-k with beams": (f"{TRANSLATE} --top_k 3", nothing, USER, ("top_k",)),
    "top-k without drawing": (
        f"{TRANSLATE} --beams 1 --top_k 3",
        nothing,
        USER,
        ("give a temperature",),
    ),
    "no file": (f"{TRANSLATE} --file a.txt", nothing, USER, ("--file a.txt cannot be read",)),
    "a file that is not UTF-8": (
        f"{TRANSLATE} --file a.txt",
        broken_lines,
        USER,
        ("UTF-8 in line 2",),
    ),
    "misspelled": (f"{TRANSLATE} --beam 1", nothing, USER, ("did you mean --beams",)),
    "no text to look at": (f'{ATTEND} --text " "', nothing, USER, ("--text is empty",)),
    "no beam": (f"{ATTEND} --text two --beams 0", nothing, USER, ("--beams 0",)),
    "no such picture": (
        f"{ATTEND} --text two --out a/b.xyz",
        nothing,
        USER,
        ("--out a/b.xyz", "use .png, .pdf"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals(
    case: str, translator: Path, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line, make, code, words = CASES[case]
    make()
    line = line.replace("TRANSLATOR", str(translator)).replace("VIT", str(best))
    assert_refused(line, code, words, capsys, "seq2seq")


def test_pairs_with_an_empty_side_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs()
    lines = Path("pairs/train.up").read_text().splitlines()
    lines[3], lines[7] = "", "   "
    Path("pairs/train.up").write_text("\n".join(lines) + "\n")
    assert run(f"{FIT} --trainer.limit_train_batches 1 --run_dir r", "seq2seq") == 0
    assert "skipped  " in capsys.readouterr().out
