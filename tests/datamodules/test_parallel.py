"""Pairs of texts from every source, and what is said of those that cannot be used."""

import csv
import gzip
import io
import json
import warnings
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from datamodules.sources import PARALLEL, ParallelOptions, ParallelSource, TextSamples
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.refusals import refused

Rows = list[tuple[str, str]]
ROWS = [(f'the dog, "number" {i}', f"der Hund,\u2028 „Nummer“ {i}\x85") for i in range(40)]
SOURCES = {  # by format
    **dict.fromkeys(("plain", "plain.gz"), "files"),
    **dict.fromkeys(("csv", "csv.zst", "tsv", "tsv.gz", "jsonl", "jsonl.gz", "nested"), "table"),
    **dict.fromkeys(("columns", "translation"), "hub"),
}


def content_of(name: str, rows: Rows) -> dict[str, bytes]:
    """The rows in one of the formats, by the suffix of the file."""
    objects: list[dict[str, Any]] = [{"de": de, "en": en} for en, de in rows]
    if name in ("nested", "translation"):
        objects = [{"id": i, "translation": row} for i, row in enumerate(objects)]
    if name == "plain":
        return {
            language: "".join(f"{row[side]}\n" for row in rows).encode()
            for side, language in enumerate(("en", "de"))
        }
    if name == "csv":
        text = io.StringIO()
        csv.writer(text).writerows([("de", "note", "en"), *((de, "x", en) for en, de in rows)])
        return {"csv": text.getvalue().encode()}
    if name == "tsv":
        return {"tsv": "".join(f"{en}\t{de}\r\n" for en, de in [("en", "de"), *rows]).encode()}
    if name in ("jsonl", "nested"):
        return {"jsonl": "".join(json.dumps(row) + "\n" for row in objects).encode()}
    file = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(objects), file)
    return {"parquet": file.getvalue().to_pybytes()}


def write(folder: Path, name: str, split: str, rows: Rows) -> None:
    """The rows in one of the formats, perhaps compressed."""
    kind, _, codec = name.partition(".")
    for suffix, content in content_of(kind, rows).items():
        path = folder / f"{split}.{suffix}"
        if codec == "gz":
            path, content = Path(f"{path}.gz"), gzip.compress(content)
        elif codec == "zst":
            path, content = Path(f"{path}.zst"), pa.compress(content, "zstd", asbytes=True)
        path.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Aligned files in English and German."""
    write(tmp_path, "plain", "train", ROWS)
    return tmp_path


def source(
    path: object, kind: str = "files", pair: str = "en-de", **options: Any
) -> ParallelSource:
    skip_bad = options.pop("skip_bad", False)
    path = None if path is None else str(path)
    found = PARALLEL[kind](path, ParallelOptions(**options), pair.split("-"), skip_bad)
    found.prepare()
    return found


def rows_of(*samples: TextSamples | None) -> Rows:
    rows: Rows = []
    for pairs in samples:
        assert pairs is not None
        rows += zip(*(column.to_pylist() for column in pairs.columns), strict=True)
    return rows


@pytest.mark.parametrize("name", SOURCES)
def test_every_format_gives_the_same_pairs(name: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about it")
    write(tmp_path, name, "train", ROWS)
    found = source(tmp_path, SOURCES[name], val_fraction=0.2)
    train, val = rows_of(found.split("train")), rows_of(found.split("val"))
    assert len(val) == 8 and sorted(train + val) == sorted(ROWS)
    with pytest.warns(UserWarning, match="test split"):
        assert rows_of(found.split("test")) == val
    other = source(tmp_path, SOURCES[name], val_fraction=0.2, split_seed=1)
    assert rows_of(other.split("val")) != val
    for split, rows in (("val", ROWS[:3]), ("test", ROWS[5:9])):
        write(tmp_path, name, split, rows)
    found = source(tmp_path, SOURCES[name])
    assert found.origin == str(tmp_path)
    for split, rows in (("train", ROWS), ("val", ROWS[:3]), ("test", ROWS[5:9])):
        assert rows_of(found.split(split)) == rows
    turned = source(tmp_path, SOURCES[name], "de-en")
    assert rows_of(turned.split("test")) == [(de, en) for en, de in ROWS[5:9]]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_a_single_table_is_the_training_split(ending: str, tmp_path: Path) -> None:
    write(tmp_path, ending, "pairs", ROWS)
    found = source(tmp_path / f"pairs.{ending}", "table", val_fraction=0.1)
    assert len(found.split("train")) == 36


@pytest.mark.parametrize(("ending", "between"), [("tsv", "\t"), ("csv", ",")])
def test_tables_without_a_header(ending: str, between: str, tmp_path: Path) -> None:
    path = tmp_path / f"pairs.{ending}"
    path.write_text("".join(f"a {i}{between}ein {i}{between}cc by\n" for i in range(10)))
    with refused(UsageError, "column en", "a 0, ein 0, cc by", "--data.dataset.header false"):
        source(path, "table").split("train")
    found = source(path, "table", header=False).records("train")
    assert rows_of(found) == [(f"a {i}", f"ein {i}") for i in range(10)]
    assert found is not None and found.name(0) == f"line 1 of {path}"
    turned = source(path, "table", header=False, source_column="2", target_column="1")
    assert rows_of(turned.records("train")) == [(f"ein {i}", f"a {i}") for i in range(10)]


def test_columns_and_suffixes_of_other_names(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("english,german\n" + "a,b\n" * 9)
    (tmp_path / "train.english").write_text("a\n" * 9)
    (tmp_path / "train.german").write_text("b\n" * 9)
    named = {"source_column": "english", "target_column": "german"}
    for found in (source(tmp_path / "t.csv", "table", **named), source(tmp_path, **named)):
        assert rows_of(found.records("train")) == [("a", "b")] * 9


def test_test_sets_are_chosen_by_name(folder: Path) -> None:
    names = ("test_2016_flickr", "test_2017_flickr")
    for i, name in enumerate(names):
        write(folder, "plain.gz", name, ROWS[i : i + 2])
    with refused(UsageError, *(f"{name}.en.gz" for name in names), "--data.dataset.test"):
        source(folder)
    assert rows_of(source(folder, test=names[1]).split("test")) == ROWS[1:3]
    with refused(UsageError, "no test_2018.en", "--data.dataset.test"):
        source(folder, test="test_2018")
    write(folder, "plain", "train.more", ROWS)
    with refused(UsageError, "train.en", "train.more.en"):
        source(folder, test=names[1])


def test_folders_named_by_split(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        write(tmp_path / split, "plain", "news", ROWS[:5])
    assert rows_of(source(tmp_path).split("val")) == ROWS[:5]


def test_the_data_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    for name in ("plain", "tsv", "translation"):
        write(tmp_path / "mine", name, "train", ROWS)
        assert len(source(None, SOURCES[name], local="mine").split("train")) == 39
    with refused(UsageError, "--data.path", "train.en and train.de"):
        source(None, local="yours")


def test_a_part_of_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"translation": [{"de": de, "en": en} for en, de in ROWS]}
    held = datasets.DatasetDict({"validation": datasets.Dataset.from_dict(columns)})
    known = {("wmt/wmt16", "de-en"): held}
    monkeypatch.setattr(datasets, "load_dataset", lambda *asked: known[asked])
    found = source(None, "hub", name="wmt/wmt16", subset="de-en")
    assert rows_of(found.split("val")) == ROWS


# What cannot be used.


@pytest.mark.parametrize("name", ["plain", "csv", "tsv", "jsonl", "translation"])
def test_pairs_with_an_empty_side_are_dropped_and_counted(name: str, tmp_path: Path) -> None:
    rows = [("text", " \t"), *ROWS, ("", ""), ("", "Text")]
    write(tmp_path, name, "train", [(en.strip(), de.replace("\t", "")) for en, de in rows])
    found = source(tmp_path, SOURCES[name], val_fraction=0.1)
    with pytest.warns(UserWarning, match="^3 of the 43 pairs of the train split"):
        kept = rows_of(found.split("train"))
    assert len(found.skipped) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        kept += rows_of(found.split("val"))
    assert sorted(kept) == sorted(ROWS)
    assert found.skipped[0].startswith({"plain": "line 1", "jsonl": "line 1"}.get(name, ""))


def test_bytes_that_are_not_utf8_are_named_or_skipped_and_counted(folder: Path) -> None:
    path = folder / "train.de"
    lines = path.read_bytes().split(b"\n")
    lines[6] = b"Stra\xdfe"
    path.write_bytes(b"\n".join(lines))
    with refused(DataError, f"line 7 of {path}", "UTF-8", "--data.skip_bad true"):
        source(folder).split("train")
    found = source(folder, skip_bad=True)
    kept = found.records("train")
    assert rows_of(kept) == [row for i, row in enumerate(ROWS) if i != 6]
    assert found.skipped == [f"line 7 of {path}"]
    assert kept is not None and "line 8 of" in kept.name(6)


def test_byte_order_marks_and_ends_of_lines_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_bytes("\ufeffone\r\ntwo\r\nthree".encode())
    (tmp_path / "train.de").write_bytes(b"eins\nzwei\ndrei\n")
    expected = [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    assert rows_of(source(tmp_path).records("train")) == expected


def damage(folder: Path, name: str, content: bytes | None) -> None:
    """Changes files as a test case says: `content` is written, or the file compressed and cut."""
    path = folder / name
    if content is None:
        plain = path.with_suffix("")
        content = gzip.compress(plain.read_bytes())[:60]
        plain.unlink()
    path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:.*empty side")
@pytest.mark.parametrize(
    ("kind", "name", "content", "error", "names"),
    [
        ("files", "train.de", b"eins\n" * 2000, DataError, ["train.en has 40", "train.de 2,000"]),
        ("files", "train.de", b"\n" * 40, DataError, ["train split"]),
        ("files", "train.de.gz", None, DataError, ["train.de.gz"]),
        ("files", "train.de.gz", b"no gzip", UsageError, ["train.de and", "train.de.gz"]),
        ("table", "train.tsv.gz", None, DataError, ["train.tsv.gz"]),
        ("table", "train.csv", b"en,de\n", UsageError, ["train.csv", "train.tsv"]),
    ],
)
def test_damaged_files_are_named(
    kind: str, name: str, content: bytes | None, error: Any, names: list[str], folder: Path
) -> None:
    write(folder, "tsv", "train", ROWS)
    damage(folder, name, content)
    for skip_bad in (False, True):
        with refused(error, *names):
            source(folder, kind, skip_bad=skip_bad).split("train")


def test_empty_files_are_named(folder: Path) -> None:
    for name in ("train.en", "train.de"):
        (folder / name).write_text("")
    with refused(DataError, "train.en"):
        source(folder).split("train")


def test_a_damaged_file_of_another_language_is_left_alone(folder: Path) -> None:
    for name in ("train.fr", "train.fr.gz"):
        (folder / name).write_bytes(b"no gzip")
    assert source(folder).split("train")


@pytest.mark.parametrize(
    ("path", "kind", "pair", "names"),
    [
        ("/nowhere", "files", "en-de", ["/nowhere", "train.en and train.de"]),
        ("{}/train.en", "files", "en-de", ["train.en is a file"]),
        ("{}/empty", "files", "en-de", ["{}/empty", "train.en and train.de"]),
        ("{}", "files", "en-xx", ["train.xx", "train.{{de,en}}", "--data.languages"]),
        ("{}", "files", "fr-cs", ["train.fr and train.cs", "train.de, train.en"]),
        ("{}/tables", "files", "en-de", ["--data.source table"]),
        ("{}/tables/train.tsv", "files", "en-de", ["is a file", "--data.source table"]),
        ("{}/tables", "hub", "en-de", ["parquet", "--data.source table"]),
        ("{}/parquet", "table", "en-de", ["TSV", "--data.source hub"]),
        (None, "table", "en-de", ["--data.path", "TSV"]),
        (None, "hub", "en-de", ["--data.dataset.name"]),
        ("{}/tables", "table", "en-xx", ["column xx", "target_column", "en, de"]),
        ("{}/numbers.jsonl", "table", "en-xx", ["translation.en, translation.de"]),
        ("{}/parquet", "hub", "id-en", ["column id", "int64"]),
        ("{}", "dates", "en-fr", ["--data.source table"]),
        (None, "dates", "en-de", ["en-fr or fr-en"]),
        ("{}", "files", "en-en", ["--data.languages is en-en"]),
    ],
)
def test_what_cannot_be_is_refused(
    path: str | None, kind: str, pair: str, names: list[str], folder: Path
) -> None:
    for name in ("empty", "tables", "parquet"):
        (folder / name).mkdir()
    write(folder / "tables", "tsv", "train", ROWS)
    write(folder / "parquet", "translation", "train", ROWS)
    write(folder, "nested", "numbers", ROWS)
    with refused(UsageError, *(name.format(folder) for name in names)):
        source(path and path.format(folder), kind, pair).split("train")


def test_multi30k_is_whole(real_data: Path) -> None:
    for pair in ("en-de", "fr-en"):
        found = source(real_data / "multi30k", pair=pair)
        sizes = [len(found.split(split)) for split in ("train", "val", "test")]
        assert sizes == [29_000, 1_014, 1_000]
    first = rows_of(found.split("test"))[0][1]
    assert first == "A man in an orange hat starring at something."
    with refused(UsageError, "no test_2016_flickr.cs", "{de,en,fr}"):
        source(real_data / "multi30k", pair="en-cs")
