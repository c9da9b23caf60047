"""What `look` says of inputs that the network does not read as they are, or that are missing."""

import re
from pathlib import Path

import pytest
import tessera
import torch

from tasks.look.inspectors import inspector_of
from tests.helpers.command import Console
from tests.helpers.page import content, tab_views
from tests.helpers.tiny import picture

FAST = "--effects false --figures false --output out"
LONG = "two " * 200


@pytest.mark.parametrize("task, line, said, shape", [
    ("bert", f"--text '{LONG}'", "1 of 1 texts: truncated to 64", [64, 64]),
    ("mlm", f"--text '{LONG}'", "1 of 1 texts: truncated to 48", [48, 48]),
    ("lm", f"--text '{LONG}'", "1 of 1 texts: truncated to 32", [32, 32]),
    ("seq2seq", f"--text '{LONG}' --target TWO", "1 of 1 sentences: truncated to 24", [2, 24]),
    ("seq2seq", f"--text two --target '{LONG}'", "the translation: truncated to 24", [24, 2]),
])  # fmt: skip
def test_a_long_text_is_cut_and_said(
    task: str, line: str, said: str, shape: list[int], runs: Path, console: Console
) -> None:
    out, _ = console.printed(f"look --ckpt_path {runs}/{task} {line} {FAST}", task)
    assert f"{said} tokens, keeping the head\n" in out
    view, *_ = tab_views(content(Path("out/look.html")))["attention"]  # cross-attention first
    assert view["shape"][-2:] == shape


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


def test_unknown_words_of_test_samples_are_counted(tmp_path: Path, console: Console) -> None:
    options = "--data.tokenizer.kind word --data.tokenizer.vocabulary 40 --trainer.max_steps 2"
    small = "--model.net.stack.width 16 --model.net.stack.depth 1 --model.net.stack.heads 2"
    run_dir = f"--trainer.limit_test_batches 1 --run_dir {tmp_path / 'r'}"
    console.printed(f"fit {options} {small} {run_dir}", "bert")
    out, _ = console.printed(f"look --ckpt_path {tmp_path / 'r'} --samples 1 {FAST}", "bert")
    assert re.search(r"does not know \d+ tokens of a test sample", out)


def test_a_chunk_begins_with_a_word(runs: Path) -> None:
    """The pieces of a word that it cuts would be read as others."""
    model = tessera.load(runs / "mlm", kind=tessera.MaskedLanguageModel)
    inspector = inspector_of("mlm", model)
    tokenizer = model.tokenizer
    pieces = [token for token, starts in enumerate(tokenizer.starts_word) if not starts][:2]
    words = model.token_ids("a good film")
    row = torch.tensor([[words[0], *pieces, *words[1:]]])
    ((text,),) = inspector.inputs({"tokens": row})
    assert len(pieces) == 2 and model.token_ids(text) == words


def test_only_the_first_ten_unknown_words_are_named(runs: Path, console: Console) -> None:
    words = [f"{letter}ж" for letter in "abcdefghijkl"]
    line = f"look --ckpt_path {runs}/bert --text '{' '.join(words)}' {FAST}"
    (said,) = [
        text for text in console.printed(line, "bert")[0].splitlines() if "does not know" in text
    ]
    assert all((repr(word) in said) == (word < "k") for word in words) and ", ...:" in said


@pytest.mark.parametrize("task", ["vit", "mae", "igpt"])
def test_the_option_of_a_picture_that_is_missing_is_named(
    task: str, runs: Path, tmp_path: Path, console: Console
) -> None:
    picture(8, "L").save(tmp_path / "photo.png")
    line = f"look --ckpt_path {runs}/{task} --image"
    console.refused(f"{line} none.png", "--image none.png does not exist", task=task)
    console.refused(f"{line} {tmp_path}", f"--image {tmp_path} is a folder", task=task)
    line += f" {tmp_path}/photo.png --patch 0 --patch_from"
    console.refused(f"{line} none.png", "--patch_from none.png does not exist", task=task)
