"""Texts, pairs and documents are the same however they are stored."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from datamodules.masked_text import MaskedTextData
from datamodules.sources.readers.formats import read_csv
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.data_modules import WORDS
from tests.helpers.refusals import refused
from tests.helpers.sources import build, read
from tests.helpers.tables import compressed, write

Row = dict[str, Any]
FORMATS = [  # kind of data and source, how it is stored
    *((f"{kind} csv", "csv") for kind in ("texts", "corpus")),
    *((f"{kind} jsonl", "jsonl") for kind in ("texts", "corpus")),
    *((f"{kind} folder", "txt") for kind in ("texts", "corpus")),
    *((f"{kind} hub", name) for kind in ("texts", "corpus") for name in ("parquet", "features")),
    *(("documents txt", name) for name in ("txt", "txt.gz", "txt.zst")),
    *(("documents jsonl", name) for name in ("jsonl", "jsonl.gz", "jsonl.zst")),
    *(("documents csv", name) for name in ("csv", "csv.gz", "tsv.zst")),
    *(("documents hub", name) for name in ("parquet", "arrow")),
    *(("pairs txt", name) for name in ("aligned", "aligned.gz")),
    *(("pairs csv", name) for name in ("csv", "csv.zst", "tsv", "tsv.gz")),
    *(("pairs jsonl", name) for name in ("jsonl", "jsonl.gz", "nested")),
    *(("pairs hub", "nested parquet"), ("pairs hub", "parquet")),
]
FEATURES = datasets.Features(
    {name: datasets.Value("string") for name in ("text", "de", "en", "note")}
    | {"mood": datasets.ClassLabel(names=["bad", "good"])}
)
every_format = pytest.mark.parametrize(("source", "stored"), FORMATS)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESSERA_DATA", raising=False)


def row(number: int) -> Row:
    """Two texts with what formats may stumble over, and a class."""
    english = f'the dog, "number" {number}'
    german = f"der Hund,\u2028 „Nummer“ {number}\x85"
    mood = ("bad", "good")[number % 2]
    return {"text": english, "label": mood, "de": german, "note": "x", "en": english}


ROWS = [row(i) for i in range(40)]


def save(folder: str, source: str, stored: str, split: str, rows: list[Row]) -> None:
    """Stores rows in one of the formats, perhaps compressed."""
    kind = source.split()[0]
    name, _, codec = stored.partition(".")
    codec = f".{codec}" if codec else ""
    if name == "txt":
        for i, cells in enumerate(rows):
            path = Path(folder, split, "" if kind == "documents" else cells["label"])
            write(path / f"{i:02}.txt{codec}", compressed(cells["text"].encode(), codec))
    elif name == "aligned":
        for language in ("en", "de"):
            content = "".join(f"{cells[language]}\n" for cells in rows).encode()
            write(Path(folder, f"{split}.{language}{codec}"), compressed(content, codec))
    elif name == "features":
        moods = [{**cells, "mood": cells["label"] == "good"} for cells in rows]
        moods = [{name: cells[name] for name in FEATURES} for cells in moods]
        write(Path(folder, f"{split}-0.parquet"), moods, FEATURES)
    elif "nested" in name:
        pairs = [{"en": cells["en"], "de": cells["de"]} for cells in rows]
        nested = [{"id": i, "translation": pair} for i, pair in enumerate(pairs)]
        write(Path(folder, f"{split}.{'jsonl' if name == 'nested' else 'parquet'}"), nested)
    else:
        write(Path(folder, f"{split}.{stored}"), rows)


def expected(source: str, rows: list[Row]) -> list[Any]:
    """What `read` must find."""
    kind = source.split()[0]
    if kind == "documents":
        return [cells["text"] for cells in rows]
    names = {"texts": ("text", "label"), "corpus": ("text",), "pairs": ("en", "de")}[kind]
    return [tuple(cells[name] for name in names) for cells in rows]


@every_format
def test_every_format_gives_the_same_samples(source: str, stored: str) -> None:
    save("d", source, stored, "train", ROWS)
    whole = expected(source, ROWS)
    if not source.startswith("documents"):  # of which the end is held out
        Path("d/README.md").write_text("about it")
        found = build(f"{source} d", val_fraction=0.2)
        train, val = read(found, "train"), read(found, "val")
        assert len(val) == 8 and sorted(train + val) == sorted(whole)
        with pytest.warns(UserWarning, match="test split"):
            assert read(found, "test") == val
        assert read(build(f"{source} d", val_fraction=0.2, split_seed=1), "val") != val
    for split, rows in (("val", ROWS[:4]), ("test", ROWS[5:9])):
        save("d", source, stored, split, rows)
    found = build(f"{source} d")
    found.prepare()
    assert found.origin == "d"
    for split, rows in (("train", ROWS), ("val", ROWS[:4]), ("test", ROWS[5:9])):
        got = read(found, split)
        if stored == "txt":  # in the order of classes
            got = sorted(got, key=str)
            rows = sorted(rows, key=lambda cells: cells["text"])
        assert got == expected(source, rows)


@pytest.mark.parametrize(
    ("source", "stored"),
    [pair for pair in FORMATS if pair[1].split(".")[0] in ("csv", "tsv", "jsonl", "parquet")],
)
def test_single_files_and_columns_of_other_names(source: str, stored: str) -> None:
    names = {"text": "body", "label": "stars", "en": "english", "de": "german"}
    rows = [{names.get(key, key): value for key, value in cells.items()} for cells in ROWS]
    options = {"text_column": "body", "label_column": "stars"}
    if source.startswith("pairs"):
        options = {"source_column": "english", "target_column": "german"}
    if source.startswith("documents"):
        options = {"text_column": "body"}
    path = "d" if source.endswith("hub") else f"d/some.{stored}"
    write(Path("d", f"{'train' if path == 'd' else 'some'}.{stored}"), rows)
    found = build(f"{source} {path}", val_fraction=0.1, **options)
    train, val = read(found, "train"), read(found, "val")
    if source.startswith("documents"):
        assert "".join(train + val) == "".join(expected(source, ROWS))
    else:
        assert len(val) == 4 and sorted(train + val) == sorted(expected(source, ROWS))


@pytest.mark.parametrize("source", ["texts hub", "corpus hub", "documents hub", "pairs hub"])
def test_data_sets_of_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded by name, perhaps a part of it, or in the folder TESSERA_DATA."""
    splits = {"train": ROWS[:20], "validation": ROWS[20:26], "test": ROWS[30:]}
    tables = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    known = {("me/it", "a-part"): datasets.DatasetDict(tables)}
    monkeypatch.setattr(datasets, "load_dataset", lambda *asked: known[asked])
    for name, rows in splits.items():
        write(Path("data/it", f"{name}-0.parquet"), rows)
    Path("data/it/README.md").write_text("about it")
    online = build(source, name="me/it", subset="a-part")
    monkeypatch.setenv("TESSERA_DATA", str(Path("data").resolve()))
    here = build(source, name="no/no", local="it")
    for found in (online, here, build(f"{source} data/it")):
        found.prepare()
        for split, rows in zip(("train", "val", "test"), splits.values(), strict=True):
            assert read(found, split) == expected(source, rows)
    assert online.origin == "me/it"
    with refused(DataError, "me/other", "--data.path"):
        build(source, name="me/other").prepare()


def test_pairs_in_the_folder_of_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(Path("data").resolve()))
    for source, stored in (("pairs txt", "aligned"), ("pairs csv", "tsv")):
        save("data/mine", source, stored, "train", ROWS)
        assert len(read(build(source, local="mine"), "train")) == 39
    with refused(UsageError, "--data.path", "train.en and train.de"):
        build("pairs txt", local="yours").prepare()


# Pairs -------------------------------------------------------------------------------------------


def test_languages_can_be_turned() -> None:
    save("d", "pairs txt", "aligned", "train", ROWS)
    whole = build("pairs txt d languages=de-en").records("train").columns
    assert [column.to_pylist() for column in whole] == [
        [cells[language] for cells in ROWS] for language in ("de", "en")
    ]


@pytest.mark.parametrize(
    ("ending", "between"), [("tsv", "\t"), ("csv", ","), ("csv", ";"), ("csv", "\t"), ("tsv", "|")]
)
def test_tables_without_a_header(ending: str, between: str) -> None:
    lines = [f"a {i}{between}ein {i}{between}cc by\n" for i in range(10)]
    path = write(Path(f"pairs.{ending}"), "".join(lines))
    found = build(f"pairs null {path}", header=False).records("train")
    assert [column[3].as_py() for column in found.columns] == ["a 3", "ein 3"]
    assert found.name(0) == f"line 1 of {path}"
    turned = build(f"pairs null {path} source_column=2 target_column=1", header=False)
    assert [column[3].as_py() for column in turned.records("train").columns] == ["ein 3", "a 3"]


def rejected(place: str, fault: str) -> None:
    raise AssertionError(f"{place} {fault}")


def test_texts_without_a_header_keep_their_marks() -> None:
    path = write(Path("pairs.csv"), "so; it is\n" + "a text\n" * 9)
    assert next(iter(read_csv(path, rejected, header=False)))[1] == {"1": "so; it is"}
    with refused(UsageError, "no column de") as error:
        build(f"pairs null {path}", header=False).records("train")
    assert "header false" not in str(error.value)


@pytest.mark.parametrize(("ending", "between"), [("csv", ";"), ("csv", "\t"), ("tsv", "|")])
def test_other_marks_between_cells_are_told_by_the_header(ending: str, between: str) -> None:
    rows = [("en", "de"), *((f'"a, {i}"', f"ein, {i}") for i in range(10))]
    path = write(Path(f"pairs.{ending}"), "".join(f"{between.join(row)}\n" for row in rows))
    found = build(f"pairs null {path}").records("train")
    expected = {"csv": "a, 3", "tsv": '"a, 3"'}[ending]
    assert [column[3].as_py() for column in found.columns] == [expected, "ein, 3"]


@pytest.mark.parametrize(
    ("head", "row", "cells"),
    [
        ("text;label, old;id", "good;1;7", {"text": "good", "label, old": "1", "id": "7"}),
        ("text;label, old;id", "so, so;1;7", {"text": "so, so", "label, old": "1", "id": "7"}),
        ("text,label;old", "good; so,1", {"text": "good; so", "label;old": "1"}),
        ("text;label", "so, so;1", {"text": "so, so", "label": "1"}),
        ("text,label", "a;|b,1", {"text": "a;|b", "label": "1"}),
        ("text|label;a, b", "good|1", {"text": "good", "label;a, b": "1"}),
    ],
)
def test_marks_within_the_header(head: str, row: str, cells: Row) -> None:
    faulty = "one cell"
    path = write(Path("train.csv"), "\n".join([head, row, faulty, *[row] * 30]))
    table = build(f"texts csv {path}", skip_bad=True).table("train").columns
    assert table.to_pylist() == [cells] * 31


def test_aligned_files_of_other_suffixes() -> None:
    write(Path("d/train.english"), "a\n" * 9)
    write(Path("d/train.german"), "b\n" * 9)
    found = build("pairs txt d source_column=english target_column=german")
    assert read(found, "train")[:1] == [("a", "b")]


def test_test_sets_are_chosen_by_name() -> None:
    names = ("test_2016_flickr", "test_2017_flickr")
    for i, name in enumerate(("train", *names)):
        save("d", "pairs txt", "aligned.gz", name, ROWS[i : i + 2])
    with refused(UsageError, *(f"{name}.en.gz" for name in names), "--data.dataset.test"):
        build("pairs txt d").prepare()
    found = build("pairs txt d", test=names[1])
    assert read(found, "test") == expected("pairs txt", ROWS[2:4])


def test_folders_named_by_split() -> None:
    for split in ("train", "val"):
        save(f"d/{split}", "pairs txt", "aligned", "news", ROWS[:5])
    assert read(build("pairs txt d"), "val") == expected("pairs txt", ROWS[:5])


def test_byte_order_marks_and_ends_of_lines_are_no_text() -> None:
    write(Path("d/train.en"), "\ufeffone\r\ntwo\r\nthree".encode())
    write(Path("d/train.de"), b"eins\nzwei\ndrei\n")
    write(Path("d/train.fr.gz"), b"no gzip")  # a damaged file of another language is left alone
    whole = build("pairs txt d").records("train").columns
    assert [column.to_pylist() for column in whole] == [
        ["one", "two", "three"],
        ["eins", "zwei", "drei"],
    ]


def test_multi30k_is_whole(real_data: Path) -> None:
    for pair in ("en-de", "fr-en"):
        found = build(f"pairs txt {real_data}/multi30k languages={pair}")
        sizes = [len(found.split(split)) for split in ("train", "val", "test")]
        assert sizes == [29_000, 1_014, 1_000]
    assert read(found, "test")[0][1] == "A man in an orange hat starring at something."
    with refused(UsageError, "no test_2016_flickr.cs", "{de,en,fr}"):
        build(f"pairs txt {real_data}/multi30k languages=en-cs").prepare()


# Corpora -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["csv", "jsonl", "folder", "hub"])
def test_texts_without_a_class_are_trained_on(name: str) -> None:
    """And the validation texts are those of the texts with classes."""
    stored = {"hub": "parquet", "folder": "txt"}.get(name, name)
    unlabelled = [{**cells, "label": "", "text": f"more {i}"} for i, cells in enumerate(ROWS[:9])]
    save("d", f"texts {name}", stored, "train", ROWS)
    if name == "folder":
        unlabelled = [{**cells, "label": "unsup"} for cells in unlabelled]
        for i, cells in enumerate(unlabelled):
            write(Path(f"d/train/unsup/{i}.txt"), cells["text"])
    else:
        rows = unlabelled
        if name == "hub":
            rows = [{**cells, "label": None} for cells in unlabelled]
        save("d", f"texts {name}", stored, "unsupervised", rows)
    texts = build(f"texts {name} d val_fraction=0.25")
    corpus = build(f"corpus {name} d val_fraction=0.25")
    assert corpus.corpus("val").to_pylist() == [text for text, _ in read(texts, "val")]
    train = [text for text, _ in read(texts, "train")]
    more = [cells["text"] for cells in unlabelled]
    assert sorted(corpus.corpus("train").to_pylist()) == sorted([*train, *more])


def test_plain_files_need_no_classes() -> None:
    write(Path("d/book.txt"), "one two\nthree\n\n\nfour five\n \nsix\n")
    write(Path("d/more/poem.txt"), "seven\n\neight")
    (column,) = build("corpus txt d/book.txt").records("train").columns
    assert column.to_pylist() == ["one two\nthree", "four five", "six"]
    (column,) = build("corpus txt d").records("train").columns
    assert [text.split()[0] for text in column.to_pylist()] == ["one", "seven"]
    write(Path("a.csv"), "content\n" + "words\n" * 20)
    write(Path("b.csv"), "text,label\n" + "words,\nmore,7\n" * 20 + "a,\n")
    for name, sizes in (("a", (18, 2)), ("b", (37, 4))):
        data = MaskedTextData("csv", f"{name}.csv", tokenizer=WORDS)
        assert (len(data.dataset("train")), len(data.dataset("val"))) == sizes


UNSEEN = {  # commands, and what is in the file
    "texts csv": [{"text": f"film {i}", "label": ("bad", "good")[i % 2]} for i in range(20)],
    "corpus jsonl": [{"text": f"film {i}"} for i in range(20)],
    "documents jsonl": [{"text": f"film {i}"} for i in range(20)],
    "pairs csv": [{"en": f"two {i}", "de": f"zwei {i}"} for i in range(20)],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("command", UNSEEN)
def test_unseen_data_without_splits_are_evaluated_whole(command: str, tmp_path: Path) -> None:
    rows = UNSEEN[command]
    suffix = command.split()[1]
    file = write(tmp_path / f"one.{suffix}", rows)
    held_out = read(build(f"{command} {file}"), "val")
    source = build(f"{command} {file}")
    source.unseen = True
    everything = read(source, "test")
    assert read(source, "val") == everything and len(everything) == 20 > len(held_out) > 0
    for split, some in (("train", rows[:16]), ("test", rows[16:])):
        write(tmp_path / "d" / f"{split}.{suffix}", some)
    source = build(f"{command} {tmp_path / 'd'}")
    source.unseen = True
    assert read(source, "test") == everything[16:]
