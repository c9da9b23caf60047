"""Texts that cannot be used, from the command line: named by file and line, or skipped and counted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.command import process, run
from tests.tasks.test_bad_input import FAILED, USER, assert_refused, nothing

FIT = (
    "fit --model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --trainer.max_epochs 1 "
    "--data.tokenizer.vocabulary 300 --data.batch_size 8"
)
LINES = {  # by source: a good line, from its number and label
    "csv": "film number {},{}\n",
    "jsonl": '{{"text": "film number {}", "label": "{}"}}\n',
}


def table(source: str, bad: bytes = b"", header: str = "text,label\n") -> bytes:
    """A file of 20 good texts, with a bad line after the tenth."""
    lines = [LINES[source].format(i, ("bad", "good")[i % 2]).encode() for i in range(20)]
    return b"".join([header.encode() if source == "csv" else b"", *lines[:10], bad, *lines[10:]])


def write(source: str, bad: bytes = b"", header: str = "text,label\n") -> Callable[[], None]:
    """Writes `texts/train.csv` or `texts/train.jsonl` with this bad line, number 12 or 11."""

    def make() -> None:
        Path("texts").mkdir()
        Path("texts", f"train.{source}").write_bytes(table(source, bad, header))

    return make


def validation(line: str) -> Callable[[], None]:
    """Good texts for training, and `texts/validation.csv` with this line, number 2."""

    def make() -> None:
        write("csv")()
        Path("texts/validation.csv").write_text(f"text,label\n{line}\n")

    return make


def files(content: bytes) -> Callable[[], None]:
    """`texts/train/CLASS/*.txt`, one of them with this content."""

    def make() -> None:
        for i in range(20):
            path = Path("texts/train", ("bad", "good")[i % 2], f"{i}.txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"film number {i}")
        path.write_bytes(content)

    return make


def one_class() -> None:
    Path("one.csv").write_text("text,label\nfilm one,bad\nfilm two,bad\n")


CSV, JSONL = "texts/train.csv", "texts/train.jsonl"
LATIN = "one\ntwo\ncafé".encode("latin-1")
SKIPPABLE: dict[
    str, tuple[str, Callable[[], None], tuple[str, ...]]
] = {  # what is wrong: source, file, words
    "empty": ("csv", write("csv", b",good\n"), (f"line 12 of {CSV}", "holds no text")),
    "latin-1 in txt": ("txt", files(LATIN), ("texts/train/good/19.txt", "UTF-8 in line 3")),
    "not JSON": (
        "jsonl",
        write("jsonl", b'{"text": "fine", "label"\n'),
        (f"line 11 of {JSONL}", "not JSON"),
    ),
}
NO_TEXT = ("no column text in texts", "--data.dataset.text_column to one of body, label.")
NO_LABEL = ("no column label in texts", "--data.dataset.label_column to one of text, mood.")
OTHERS: dict[
    str, tuple[str, Callable[[], None], int, tuple[str, ...]]
] = {  # options, file, exit code, words
    "no text column": ("csv --data.path texts", write("csv", header="body,label\n"), USER, NO_TEXT),
    "no label column": (
        "csv --data.path texts",
        write("csv", header="text,mood\n"),
        USER,
        NO_LABEL,
    ),
    "another column": (
        "csv --data.path texts --data.dataset.text_column body",
        write("csv"),
        USER,
        ("no column body in texts", "text, label"),
    ),
    "unknown label": (
        "csv --data.path texts",
        validation("fine,neutral"),
        FAILED,
        ("line 2 of texts/validation.csv", "label neutral", "2 classes: bad, good"),
    ),
    "no label": (
        "csv --data.path texts --data.skip_bad true",
        write("csv", b"fine,\n"),
        FAILED,
        ("line 12 of texts/train.csv", "has no label", "2 classes: bad, good"),
    ),
    "blank label": (
        "csv --data.path texts",
        validation("fine,  "),
        FAILED,
        ("line 2 of texts/validation.csv", "has no label", "2 classes: bad, good"),
    ),
    "missing class": (
        "csv --data.path texts --data.dataset.class_names [bad,good,odd]",
        write("csv"),
        USER,
        ("class odd is missing from the training split of texts",),
    ),
    "one class": ("csv --data.path one.csv", one_class, USER, ("one class only (bad)",)),
    "missing file": ("csv --data.path nowhere.csv", nothing, USER, ("nowhere.csv does not exist",)),
    "missing folder": ("txt --data.path nowhere", nothing, USER, ("nowhere does not exist",)),
    "no file": ("jsonl", nothing, USER, ("--data.path", "train.jsonl")),
    "another kind": ("jsonl --data.path texts", write("csv"), USER, ("try --data.source csv",)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_was_said_is_wrong(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, make, code, words = OTHERS[case]
    make()
    assert_refused(f"{FIT} --data.source {options}", code, words, capsys, "bert")


@pytest.mark.parametrize("case", SKIPPABLE)
def test_texts_are_named_or_skipped(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, make, words = SKIPPABLE[case]
    make()
    line = f"{FIT} --data.source {source} --data.path texts"
    assert_refused(line, FAILED, (*words, "--data.skip_bad true"), capsys, "bert")
    assert run(f"{line} --data.skip_bad true --run_dir r", "bert") == 0
    assert json.loads(Path("r/summary.json").read_text())["skipped"] == 1
    assert "skipped" in capsys.readouterr().out


def test_texts_to_label_are_named_or_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    write("csv")()
    assert run(f"{FIT} --data.source csv --data.path texts --run_dir r", "bert") == 0
    Path("asked.txt").write_bytes(b"fine\n \ncaf\xe9\n")
    capsys.readouterr()
    line = "predict --ckpt_path r/checkpoints/best.ckpt --data.predict_path"
    assert_refused(f"{line} nowhere.txt", USER, ("nowhere.txt does not exist",), capsys, "bert")
    assert_refused(f"{line} asked.txt", FAILED, ("line 3 of asked.txt", "UTF-8"), capsys, "bert")
    assert run(f"{line} asked.txt --data.skip_bad true", "bert") == 0
    assert "1 texts labelled" in (said := capsys.readouterr().out) and "2 bad lines skipped" in said
    assert len(Path("predictions.csv").read_text().splitlines()) == 2


def test_a_process_ends_with_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    write("csv", b"caf\xe9,good\n")()
    before = sorted(tmp_path.rglob("*"))
    done = process(f"{FIT} --data.source csv --data.path texts", task="bert", cwd=tmp_path)
    assert done.returncode == FAILED
    assert done.stderr.startswith(f"error: line 12 of {CSV} ") and done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
