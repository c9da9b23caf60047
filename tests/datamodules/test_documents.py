"""Documents are the same text however they are stored, and nothing bad goes unsaid."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from datamodules.sources import (
    CorpusOptions,
    DocumentSource,
    Piece,
    document_files,
    document_source,
    documents,
)
from datamodules.sources.documents import PIECE_SIZE, split_pieces
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError

TEXTS = [
    "One.\n\nTwo, of café and “quotes”.\n",
    "a line\n" * 30_000,
    "x" * 200_000,
    "words and words " * 20_000,
    "end",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))


def joined(stream: Any) -> list[str]:
    """The documents of a stream of pieces, each as one text."""
    found: list[str] = []
    closed = True
    for piece in stream:
        assert piece.text and (piece.opens or not closed)
        found = [*found, piece.text] if piece.opens else [*found[:-1], found[-1] + piece.text]
        closed = piece.closes
    return found


def source(
    path: Path | str | None, kind: str = "files", skip_bad: bool = False, **options: Any
) -> DocumentSource:
    return document_source(
        kind, None if path is None else str(path), CorpusOptions(**options), skip_bad
    )


def zst(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zst}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("ending", [".txt", ".md"])
def test_plain_text(ending: str, packed: str, tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}{ending}{packed}").write_bytes(
            PACKED[packed](text.encode())
        )
    found = source(tmp_path / "texts")
    assert joined(found.read("train")) == TEXTS
    assert all(len(piece.text) <= PIECE_SIZE for piece in found.read("train"))
    assert found.statistics("train").documents == 5
    assert found.statistics("train").characters == sum(map(len, TEXTS))
    assert joined(source(tmp_path / "texts" / f"1{ending}{packed}").read("train")) == [TEXTS[1]]


def write_rows(
    path: Path, column: str = "text", texts: Sequence[str | None] = (*TEXTS, "", None)
) -> None:
    """A file of rows with a text and a number in each."""
    rows = [{"id": number, column: text} for number, text in enumerate(texts)]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), (table := pa.Table.from_pylist(rows)).schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        content = "".join(json.dumps(row, ensure_ascii=bool(row["id"])) + "\n" for row in rows)
        path.write_bytes(PACKED["" if path.suffix == ".jsonl" else path.suffix](content.encode()))


ROWS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"]


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, tmp_path: Path) -> None:
    write_rows(tmp_path / name)
    assert joined(source(tmp_path / name).read("train")) == TEXTS  # without the empty ones
    write_rows(tmp_path / name, "body")
    assert joined(source(tmp_path / name, text_column="body").read("train")) == TEXTS
    with pytest.raises(
        UsageError, match="no column text in .*set --data.dataset.text_column to one of id, body"
    ):
        list(source(tmp_path / name).read("train"))


def test_a_large_parquet_file_is_read_in_parts(tmp_path: Path) -> None:
    texts = [f"text {i} " * 9 for i in range(3000)]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1000)
    assert joined(source(tmp_path / "a.parquet").read("train")) == texts


@pytest.mark.parametrize("block", [1, 2, 7, 2**20])
def test_blank_lines_part_documents(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_files, "TEXT_BLOCK", block)
    (tmp_path / "a.txt").write_bytes("\n \none é\ntwo\n \t\n\n  three\n\r\nfour\n\n\n".encode())
    assert joined(source(tmp_path / "a.txt", blank_lines=True).read("train")) == [
        "one é\ntwo",
        "three",
        "four",
    ]
    (text,) = joined(source(tmp_path / "a.txt").read("train"))
    assert text == (tmp_path / "a.txt").read_bytes().decode()


def test_pieces_do_not_depend_on_blocks() -> None:
    draw = Random(0)
    text = "".join(draw.choice("ab \n\n.é") for _ in range(5000))
    whole = list(split_pieces([(text, True)], 100))
    for _ in range(20):
        cuts = [0, *sorted(draw.sample(range(len(text)), draw.randrange(60))), len(text)]
        parts = [(text[a:b], False) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert list(split_pieces([*parts, ("", True)], 100)) == whole
    assert (
        "".join(piece.text for piece in whole) == text
        and max(len(piece.text) for piece in whole) == 100
    )
    assert [whole[0].opens, whole[-1].closes] == [True, True]
    assert not any(piece.opens for piece in whole[1:]) and not any(
        piece.closes for piece in whole[:-1]
    )


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "word", "whitespace", "character"])
def test_no_tokenizer_notices_the_cuts(kind: str) -> None:
    draw = Random(1)
    lines = [
        " ".join(draw.choices(["the", "cat", "isn't", "on", "3.5", "a", "mat,"], k=9))
        for _ in range(400)
    ]
    text = "".join(line + draw.choice(["\n", "\n", "\n\n", " \n", "\n  "]) for line in lines)
    tokenizer = Tokenizer.train([text], TokenizerConfig(kind, 400, 1, False))  # type: ignore[arg-type]
    parts = [piece.text for piece in split_pieces([(text, True)], 500)]
    assert len(parts) > 30
    tokens, sizes = tokenizer.encode_concatenated(parts)
    assert tokens.tolist() == tokenizer.encode_batch([text])[0]
    assert sizes.tolist() == [len(ids) for ids in tokenizer.encode_batch(parts)]


def test_the_tail_is_held_back(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ä" * 1000)
    found = source(tmp_path / "a.txt")
    assert found.has("train") and not found.has("val")
    assert list(found.split("train")) == [Piece("ä" * 900, True, False)]
    assert list(found.split("val")) == [Piece("ä" * 100, True, True)]
    with pytest.warns(UserWarning, match="no test split: the validation split is tested"):
        assert list(found.split("test")) == list(found.split("val"))
    assert len({found.split(split).digest for split in ("train", "val")}) == 2
    for share in (0.5, 0.25, 0.01):
        other = source(tmp_path / "a.txt", val_fraction=share)
        assert (
            other.split("train").characters
            == 1000 - other.split("val").characters
            == int(1000 * (1 - share))
        )


def test_a_tail_of_several_documents(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", texts=["abcd" * 10, "efgh" * 10, "ijkl" * 5])
    found = source(tmp_path / "a.jsonl", val_fraction=0.3)
    assert joined(found.split("train")) == ["abcd" * 10, "efgh" * 7 + "ef"]
    assert joined(found.split("val")) == ["gh" + "efgh" * 2, "ijkl" * 5]
    assert [piece.closes for piece in found.split("train")] == [True, False]
    assert "".join(found.split("train").sample(50)) == "abcd" * 10 + "efgh" * 2 + "ef"
    assert "".join(found.split("val").sample(9**9)) == "gh" + "efgh" * 2 + "ijkl" * 5


def test_splits_by_name(tmp_path: Path) -> None:
    files = {
        "train/b.txt": "B",
        "train-0.md": "A",
        "valid.txt": "V",
        "test/x/y.txt": "T",
        "notes.txt": "N",
    }
    for name, text in files.items():
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(text)
    with pytest.warns(UserWarning, match="1 of the files in .* left out: .*notes.txt"):
        found = source(tmp_path / "d")
        texts = {split: joined(found.split(split)) for split in ("train", "val", "test")}
    assert texts == {"train": ["B", "A"], "val": ["V"], "test": ["T"]}
    for name in ("train/b.txt", "train-0.md"):
        (tmp_path / "d" / name).unlink()
    other = source(tmp_path / "d")
    assert joined(other.read("train")) == ["N", "T", "V"] and not other.has("val")


def test_all_there_is_or_the_test_split(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name, text in (("train", "a" * 90), ("val", "b" * 9), ("test", "c" * 5)):
        before = source(tmp_path / "d").whole() if name != "train" else None
        (tmp_path / "d" / f"{name}.txt").write_text(text)
        found = source(tmp_path / "d").whole()
        assert found.characters == sum(len(piece.text) for piece in found)
        assert before is None or found.digest != before.digest
        assert (
            joined(found)
            == {"train": ["a" * 90], "val": ["a" * 90, "b" * 9], "test": ["c" * 5]}[name]
        )
    assert joined(source(tmp_path / "d" / "val.txt").whole()) == ["b" * 9]


def test_the_reference() -> None:
    found = source(None, "reference")
    assert sum(found.split(split).characters for split in ("train", "val", "test")) > 250_000
    with pytest.raises(
        UsageError, match="the source reference has no files; try --data.source files"
    ):
        source("a.txt", "reference").prepare()


def test_a_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    splits = {"train": ["a", "b"], "unsupervised": ["c"], "test": ["d"]}
    held = datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": t}) for name, t in splits.items()}
    )
    asked: list[str] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, subset: asked.append(name) or held)
    for found in (source(None, "hub", name="me/it"), source("me/it"), source("me/it", "hub")):
        found.prepare()
        assert [joined(found.read(split)) for split in ("train", "test")] == [
            ["a", "b", "c"],
            ["d"],
        ]
        assert found.origin == "me/it" and not found.has("val")
    assert asked == ["me/it"] * 3
    folder = tmp_path / "data" / "it"
    folder.mkdir(parents=True)
    for name, texts in splits.items():
        write_rows(folder / f"{name}-0.parquet", texts=texts)
    (folder / "README.md").write_text("about it")
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path / "data"))
    for found in (
        source(None, "hub", name="me/it", local="it"),
        source(folder, "hub"),
        source(folder),
    ):
        assert [joined(found.read(split)) for split in ("train", "test")] == [
            ["a", "b", "c"],
            ["d"],
        ]
    assert len(asked) == 3


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(name: str, subset: str | None) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(
        DataError, match="me/it is no file or folder here, and as a data set: could not get me/it"
    ):
        source("me/it").prepare()
    with pytest.raises(UsageError, match="needs --data.dataset.name ID"):
        source(None, "hub").prepare()


def test_statistics_are_computed_once_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text")
    first = source(path).statistics("train")
    read = documents.DocumentSource._measure
    calls: list[str] = []
    monkeypatch.setattr(
        documents.DocumentSource, "_measure", lambda *args: calls.append(args[1]) or read(*args)
    )
    assert source(path).statistics("train") == first and not calls
    (stored,) = (tmp_path / "cache" / "statistics").iterdir()
    stored.write_text("{")  # damaged
    assert source(path).statistics("train") == first and len(calls) == 1
    path.write_text("other text")
    assert source(path).statistics("train").characters == 10 and len(calls) == 2
    assert source(path, blank_lines=True).statistics("train").documents == 1 and len(calls) == 3


def bad(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "texts").mkdir()
        (folder / "texts" / "good.txt").write_text("good")
        (folder / "texts" / name).write_bytes(content)
        return folder / "texts"

    return make


GOOD_LINE = b'{"text": "fine"}\n'
SKIPPABLE: dict[str, tuple[Callable[[Path], Path], str, list[str]]] = {
    "latin-1": (
        bad("a.txt", b"one\ntwo\ncaf\xe9"),
        r"a.txt holds bytes that are not UTF-8 in line 3",
        ["good"],
    ),
    "cut off": (
        bad("a.txt", "é".encode()[:1]),
        r"a.txt holds bytes that are not UTF-8 in line 1",
        ["good"],
    ),
    "latin-1 far in": (
        bad("a.txt", b"one\n" * 600_000 + b"\xe9"),
        r"UTF-8 in line 600001",
        ["good"],
    ),
    "latin-1 in gz": (
        bad("a.txt.gz", gzip.compress(b"\xe9")),
        r"a.txt.gz holds bytes that",
        ["good"],
    ),
    "another kind": (bad("a.pdf", b"%PDF"), r"a.pdf is not one of the kinds txt, md", ["good"]),
    "another kind in gz": (
        bad("a.pdf.gz", b"%PDF"),
        r"a.pdf.gz is not one of the kinds .txt",
        ["good"],
    ),
    "table in gz": (
        bad("a.parquet.gz", b"?"),
        r"a.parquet.gz is not one of the kinds .txt",
        ["good"],
    ),
    "not JSON": (
        bad("a.jsonl", GOOD_LINE + b'{"text": \n'),
        r"line 2 of .* not JSON .* at character 9",
        ["fine", "good"],
    ),
    "no object": (
        bad("a.jsonl", GOOD_LINE + b"[1]\n"),
        r"line 2 of .*a.jsonl is not a JSON object",
        ["fine", "good"],
    ),
    "no text": (
        bad("a.jsonl", GOOD_LINE + b'{"t": "?"}\n'),
        r"line 2 of .*a.jsonl has no text",
        ["fine", "good"],
    ),
    "latin-1 in JSON": (
        bad("a.jsonl", GOOD_LINE + b'{"text": "\xe9"}'),
        r"line 2 of .* UTF-8",
        ["fine", "good"],
    ),
}


@pytest.mark.parametrize("case", SKIPPABLE)
def test_what_cannot_be_used_is_named_or_skipped(case: str, tmp_path: Path) -> None:
    make, words, rest = SKIPPABLE[case]
    path = make(tmp_path)
    with pytest.raises(DataError, match=words) as caught:
        source(path).statistics("train")
    assert "--data.skip_bad true" in str(caught.value)
    lenient = source(path, skip_bad=True)
    for _ in range(2):
        assert joined(lenient.read("train")) == rest
    assert len(set(lenient.skipped)) == 1
    again = source(path, skip_bad=True)
    assert again.statistics("train").documents == len(rest) and again.skipped


def test_text_in_tables_that_is_not_utf8(tmp_path: Path) -> None:
    array = pa.array([b"good", b"\xe9", b"more"]).view(pa.string())
    parquet.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"row 1 of .*a.parquet holds bytes that are not UTF-8"):
        list(source(tmp_path / "a.parquet").read("train"))
    assert joined(source(tmp_path / "a.parquet", skip_bad=True).read("train")) == ["good", "more"]


DAMAGED = {
    "half.txt.gz": gzip.compress(b"some text" * 1000)[:-20],
    "other.txt.gz": b"not compressed",
    "half.txt.zst": zst(b"some text" * 1000)[:-5],
    "other.jsonl.zst": b"not compressed",
    "other.parquet": b"PAR1 not a table",
    "other.arrow": b"not a table",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(DAMAGED[name])
    with pytest.raises(DataError, match=rf"{name} cannot be read \(.*\): fetch"):
        source(tmp_path / name).statistics("train")


def empty(folder: Path) -> Path:
    (folder / "a.txt").write_text(" \n\n")
    return folder / "a.txt"


def nothing(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (
        lambda folder: folder / "nowhere.txt",
        "nowhere.txt does not exist: --data.path takes a file",
    ),
    "missing folder": (lambda folder: folder / "nowhere", "nowhere does not exist"),
    "no path": (lambda folder: None, "the source files needs --data.path"),
    "no file": (nothing, "empty holds no files: --data.path takes"),
    "no text": (empty, "^[^ ]*a.txt holds no text"),
    "no documents": (
        lambda folder: write_rows(folder / "a.jsonl", texts=[""]) or folder / "a.jsonl",
        "holds no text",
    ),
    "another kind": (
        lambda folder: bad("a.pdf", b"")(folder) / "a.pdf",
        "a.pdf is of another kind: --data.path takes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read(case: str, tmp_path: Path) -> None:
    make, words = REFUSED[case]
    with pytest.raises((UsageError, DataError), match=words):
        source(make(tmp_path)).statistics("train")


@pytest.mark.parametrize("options", [{"val_fraction": 0}, {"val_fraction": 1.0}, {"sample": 0}])
def test_options_out_of_range(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="val_fraction is|sample is"):
        CorpusOptions(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="source is web, but must be one of reference, files, hub"):
        document_source("web", None, CorpusOptions())
