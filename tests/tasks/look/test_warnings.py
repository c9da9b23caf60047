"""What `look` says of texts that the network does not read as they are."""

from pathlib import Path

import pytest

from tests.helpers.command import Console
from tests.helpers.page import content, tab_views

FAST = "--effects false --figures false --output out"


def test_a_long_text_is_cut_and_said(runs: Path, console: Console) -> None:
    text = "word " * 200
    ckpt = runs / "lm/checkpoints/best.ckpt"
    line = f"look --ckpt_path {ckpt} --text '{text}' --effects false --figures false --output out"
    out, _ = console.printed(line, "lm")
    assert "32" in out.splitlines()[0]
    (view,) = tab_views(content(Path("out/look.html")))["attention"]
    assert view["shape"][-1] == 32


@pytest.mark.parametrize("task, line, unknown", [
    ("bert", "--text 'a жук film, жук'", ["жук"]),
    ("bert", "--text 'a good film' --patch 0 --patch_from 'a жук film'", ["жук"]),
    ("mlm", "--text 'a [MASK] film 日'", ["日"]),
    ("seq2seq", "--text 'two 日' --target 'TWO жук'", ["日", "жук"]),
    ("bert", "--text 'a good film'", []),
    ("mlm", "--text 'a [MASK] film'", []),
    ("lm", "--text 'a жук film'", []),  # of bytes
    ("seq2seq", "--text 'two three'", []),
])  # fmt: skip
def test_unknown_words_are_named(
    task: str, line: str, unknown: list[str], runs: Path, console: Console
) -> None:
    out, _ = console.printed(f"look --ckpt_path {runs}/{task} {line} {FAST}", task)
    said = [text for text in out.splitlines() if "does not know" in text]
    for text, word in zip(said, unknown, strict=True):
        assert f"does not know {word!r}: " in text and "[UNK]" in text


def test_only_the_first_ten_unknown_words_are_named(runs: Path, console: Console) -> None:
    words = [f"{letter}ж" for letter in "abcdefghijkl"]
    line = f"look --ckpt_path {runs}/bert --text '{' '.join(words)}' {FAST}"
    (said,) = [
        text for text in console.printed(line, "bert")[0].splitlines() if "does not know" in text
    ]
    assert all((repr(word) in said) == (word < "k") for word in words) and ", ...:" in said
