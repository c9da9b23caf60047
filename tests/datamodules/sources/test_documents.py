"""Documents are the same text however they are stored, and nothing bad goes unsaid."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from datamodules.sources import (
    DOCUMENTS,
    CorpusOptions,
    DocumentSource,
    Piece,
    document_files,
    documents,
    open_source,
)
from datamodules.sources.documents import split_pieces
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.sources import joined
from tests.helpers.tables import compressed, write

TEXTS = [
    "One.\n\nTwo, of café and “quotes”.\n",
    "a line\n" * 30_000,
    "x" * 200_000,
    "words and words " * 20_000,
    "end",
]


def source(path: object, skip_bad: bool = False, **options: Any) -> Any:
    """The source that the path shows."""
    return open_source(DOCUMENTS, None, str(path), CorpusOptions(**options), skip_bad=skip_bad)


@pytest.mark.parametrize("codec", ["", ".gz", ".zst"])
def test_plain_text(codec: str, tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        name = f"{number}{('.txt', '.md')[number % 2]}{codec}"
        write(tmp_path / name, compressed(text.encode(), codec))
    found = source(tmp_path)
    assert joined(found.read("train")) == TEXTS
    statistics = found.statistics("train")
    assert (statistics.documents, statistics.characters) == (5, sum(map(len, TEXTS)))
    assert joined(source(tmp_path / f"1.md{codec}").read("train")) == [TEXTS[1]]


def write_rows(path: Path, texts: Sequence[str | None], column: str = "text") -> None:
    """A file of rows with a text and a number in each."""
    write(path, [{"id": number, column: text} for number, text in enumerate(texts)])


@pytest.mark.parametrize("block", [1, 2, 7, 2**20])
def test_blank_lines_split_documents(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_files, "TEXT_BLOCK", block)
    path = tmp_path / "a.txt"
    path.write_bytes("\n \none é\ntwo\n \t\n\n  three\n\r\nfour\r\nmore\r\n\r\nfive\r\n".encode())
    found = source(path, blank_lines=True)
    assert joined(found.read("train")) == ["one é\ntwo", "three", "four\r\nmore", "five"]
    assert joined(source(path).read("train")) == [path.read_bytes().decode()]


def test_pieces_do_not_depend_on_blocks() -> None:
    rng = Random(0)
    text = "".join(rng.choice("ab \n\n.é") for _ in range(5000))
    pieces = list(split_pieces([(text, True)], 100))
    for _ in range(20):
        cuts = [0, *sorted(rng.sample(range(len(text)), rng.randrange(60))), len(text)]
        parts = [(text[a:b], False) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert list(split_pieces([*parts, ("", True)], 100)) == pieces
    assert joined(pieces) == [text] and max(len(piece.text) for piece in pieces) == 100
    assert [piece.opens for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "word", "whitespace", "character"])
def test_no_tokenizer_notices_the_cuts(kind: Any) -> None:
    rng = Random(1)
    words = ["the", "cat", "isn't", "on", "3.5", "a", "mat,"]
    lines = [" ".join(rng.choices(words, k=9)) for _ in range(400)]
    text = "".join(line + rng.choice(["\n", "\n", "\n\n", " \n", "\n  "]) for line in lines)
    tokenizer = Tokenizer.train([text], TokenizerConfig(kind, 400, 1, False))
    parts = [piece.text for piece in split_pieces([(text, True)], 500)]
    tokens, sizes = tokenizer.encode_concatenated(parts)
    assert len(parts) > 30 and tokens.tolist() == tokenizer.encode_batch([text])[0]
    assert sizes.tolist() == [len(ids) for ids in tokenizer.encode_batch(parts)]


def test_the_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ä" * 1000)
    found = source(tmp_path / "a.txt")
    assert found.has("train") and not found.has("val")
    assert list(found.split("train")) == [Piece("ä" * 900, True, False)]
    assert list(found.split("val")) == [Piece("ä" * 100, True, True)]
    with pytest.warns(UserWarning, match="test split"):
        assert list(found.split("test")) == list(found.split("val"))
    assert found.split("train").digest != found.split("val").digest
    for fraction, size in ((0.5, 500), (0.25, 750), (0.01, 990)):
        other = source(tmp_path / "a.txt", val_fraction=fraction)
        sizes = (other.split("train").characters, other.split("val").characters)
        assert sizes == (size, 1000 - size)
    write_rows(tmp_path / "a.jsonl", ["abcd" * 10, "efgh" * 10, "ijkl" * 5])
    found = source(tmp_path / "a.jsonl", val_fraction=0.3)
    assert joined(found.split("train")) == ["abcd" * 10, "efgh" * 7 + "ef"]
    assert joined(found.split("val")) == ["gh" + "efgh" * 2, "ijkl" * 5]
    assert [piece.closes for piece in found.split("train")] == [True, False]
    assert "".join(found.split("train").sample(50)) == "abcd" * 10 + "efgh" * 2 + "ef"
    assert "".join(found.split("val").sample(9**9)) == "gh" + "efgh" * 2 + "ijkl" * 5


def test_splits_by_name(tmp_path: Path) -> None:
    names = {"train/b.txt": "B", "train-0.md": "A", "valid.txt": "V", "test/x/y.txt": "T"}
    for name, text in {**names, "notes.txt": "N"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.warns(UserWarning, match="1 of .*notes.txt"):
        found = source(tmp_path)
        texts = {split: joined(found.split(split)) for split in ("train", "val", "test")}
    assert texts == {"train": ["B", "A"], "val": ["V"], "test": ["T"]}
    for name in ("train/b.txt", "train-0.md"):
        (tmp_path / name).unlink()
    other = source(tmp_path)
    assert joined(other.read("train")) == ["N", "T", "V"] and not other.has("val")


def test_a_model_is_measured_on_the_test_split_or_on_everything(tmp_path: Path) -> None:
    digests = set()
    for name, text, expected in (
        ("train", "a" * 90, ["a" * 90]),
        ("val", "b" * 9, ["a" * 90, "b" * 9]),
        ("test", "c" * 5, ["c" * 5]),
    ):
        (tmp_path / f"{name}.txt").write_text(text)
        found = source(tmp_path).whole()
        assert joined(found) == expected and found.characters == len("".join(expected))
        digests.add(found.digest)
    assert len(digests) == 3
    assert joined(source(tmp_path / "val.txt").whole()) == ["b" * 9]


def test_statistics_are_computed_once_for_the_same_files(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    first = source(path).statistics("train")
    measure = documents.DocumentSource._measure
    calls: list[str] = []

    def counted(found: DocumentSource, split: str) -> Any:
        calls.append(split)
        return measure(found, split)

    monkeypatch.setattr(documents.DocumentSource, "_measure", counted)
    assert source(path).statistics("train") == first and not calls
    (stored,) = (cache / "statistics").iterdir()
    stored.write_text("{")  # damaged
    assert source(path).statistics("train") == first and len(calls) == 1
    path.write_text("other text")
    assert source(path).statistics("train").characters == 10 and len(calls) == 2
    assert source(path, blank_lines=True).statistics("train").documents == 1 and len(calls) == 3


QUOTES = {  # a TSV file, and the texts in it
    'text\tlabel\n"Great" film\t1\nplain\t0\n': ['"Great" film', "plain"],
    'text\tlabel\n"open\t1\nclosed"\t0\n': ['"open', 'closed"'],
    'text\tlabel\n"in ""quotes"""\t1\nplain\t0\n': ['in "quotes"', "plain"],
    'text\tlabel\n"two\nlines"\t1\n"a\ttab"\t0\n': ["two\nlines", "a\ttab"],
    'text\n"two\nlines"\n': ["two\nlines"],
    "text\tlabel\rone\t1\rtwo\t0\r": ["one", "two"],
    '"text"\t"label"\r"one"\t"1"\r': ["one"],
}


@pytest.mark.parametrize("content", QUOTES)
def test_quotation_marks_and_line_ends_of_tables(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(content.encode())
    assert joined(source(path).read("train")) == QUOTES[content]


def test_a_carriage_return_in_a_line_ends_no_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text\none\rmore\ntwo\n")
    with pytest.raises(DataError, match="line 2 .*carriage return in a cell.*remove it"):
        [*source(tmp_path / "a.csv").read("train")]


@pytest.mark.parametrize("name", ["wiki_{}.txt", "wiki.{}.tokens.txt", "a-{}-1.txt"])
def test_files_that_seem_to_be_splits_are_named(name: str, tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        (tmp_path / name.format(split)).write_text(split)
    with pytest.warns(UserWarning, match=name.format("valid")):
        found = source(tmp_path)
        assert len([*found.read("train")]) == 3


def test_objects_of_json_need_not_have_the_same_names(tmp_path: Path) -> None:
    """The first one may lack the text, or have only another column that could hold it."""
    rows: list[Any] = [{"id": 1}, {"content": "a tag"}, {"id": 2, "text": "one", "content": "b"}]
    write(tmp_path / "a.jsonl", [*rows, {"text": None, "content": "c"}, {"text": "two"}])
    with pytest.raises(DataError, match=r"line 1 of .*a.jsonl has no text"):
        [*source(tmp_path / "a.jsonl").read("train")]
    found = source(tmp_path / "a.jsonl", skip_bad=True)
    assert joined(found.read("train")) == ["one", "two"]
    assert len(found.skipped) == 2
    write(tmp_path / "c.jsonl", [{"id": 1, "doc": {"body": text}} for text in ("one", "two")])
    nested = source(tmp_path / "c.jsonl", text_column="doc.body")
    assert joined(nested.read("train")) == ["one", "two"]
    write(tmp_path / "b.jsonl", [{"id": 1, "url": None, "body": "one"}, {"id": 2, "tags": ["a"]}])
    with pytest.raises(UsageError, match="set --data.dataset.text_column to body"):
        [*source(tmp_path / "b.jsonl").read("train")]


def test_a_split_that_starts_in_a_later_piece_opens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 200_000)
    validation = source(tmp_path / "a.txt").split("val")
    assert [piece.opens for piece in validation] == [True, False]


def test_the_digest_depends_on_where_a_split_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1003)
    splits = [source(tmp_path / "a.txt", val_fraction=part).split("train") for part in (0.1, 0.2)]
    assert splits[0].digest != splits[1].digest
    assert splits[0].characters == 902  # of 902.7, as in nanoGPT
