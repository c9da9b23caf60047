"""Pairs of texts from every source, and what is said of those that cannot be used."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from datamodules.sources import PARALLEL, ParallelOptions, ParallelSource, TextSamples
from datamodules.utils.errors import UsageError
from tests.helpers.refusals import refused
from tests.helpers.tables import compressed, write

Rows = list[tuple[str, str]]
ROWS = [(f'the dog, "number" {i}', f"der Hund,\u2028 „Nummer“ {i}\x85") for i in range(40)]
SOURCES = {  # by format
    **dict.fromkeys(("plain", "plain.gz"), "files"),
    **dict.fromkeys(("csv", "csv.zst", "tsv", "tsv.gz", "jsonl", "jsonl.gz", "nested"), "table"),
    **dict.fromkeys(("columns", "translation"), "hub"),
}


def save(folder: Path, name: str, split: str, rows: Rows) -> None:
    """The rows in one of the formats, perhaps compressed."""
    kind, _, codec = name.partition(".")
    codec = f".{codec}" if codec else ""
    if kind == "plain":
        for side, language in enumerate(("en", "de")):
            content = "".join(f"{row[side]}\n" for row in rows).encode()
            write(folder / f"{split}.{language}{codec}", compressed(content, codec))
        return
    cells: list[dict[str, Any]] = [{"de": de, "note": "x", "en": en} for en, de in rows]
    if kind in ("nested", "translation"):
        cells = [{"id": i, "translation": row} for i, row in enumerate(cells)]
    suffix = {"nested": "jsonl", "columns": "parquet", "translation": "parquet"}.get(kind, kind)
    write(folder / f"{split}.{suffix}{codec}", cells)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Aligned files in English and German."""
    save(tmp_path, "plain", "train", ROWS)
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
    save(tmp_path, name, "train", ROWS)
    found = source(tmp_path, SOURCES[name], val_fraction=0.2)
    train, val = rows_of(found.split("train")), rows_of(found.split("val"))
    assert len(val) == 8 and sorted(train + val) == sorted(ROWS)
    with pytest.warns(UserWarning, match="test split"):
        assert rows_of(found.split("test")) == val
    other = source(tmp_path, SOURCES[name], val_fraction=0.2, split_seed=1)
    assert rows_of(other.split("val")) != val
    for split, rows in (("val", ROWS[:3]), ("test", ROWS[5:9])):
        save(tmp_path, name, split, rows)
    found = source(tmp_path, SOURCES[name])
    assert found.origin == str(tmp_path)
    for split, rows in (("train", ROWS), ("val", ROWS[:3]), ("test", ROWS[5:9])):
        assert rows_of(found.split(split)) == rows
    turned = source(tmp_path, SOURCES[name], "de-en")
    assert rows_of(turned.split("test")) == [(de, en) for en, de in ROWS[5:9]]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_a_single_table_is_the_training_split(ending: str, tmp_path: Path) -> None:
    save(tmp_path, ending, "pairs", ROWS)
    found = source(tmp_path / f"pairs.{ending}", "table", val_fraction=0.1)
    assert len(found.split("train")) == 36


@pytest.mark.parametrize(("ending", "between"), [("tsv", "\t"), ("csv", ",")])
def test_tables_without_a_header(ending: str, between: str, tmp_path: Path) -> None:
    path = tmp_path / f"pairs.{ending}"
    path.write_text("".join(f"a {i}{between}ein {i}{between}cc by\n" for i in range(10)))
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
        save(folder, "plain.gz", name, ROWS[i : i + 2])
    with refused(UsageError, *(f"{name}.en.gz" for name in names), "--data.dataset.test"):
        source(folder)
    assert rows_of(source(folder, test=names[1]).split("test")) == ROWS[1:3]


def test_folders_named_by_split(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(tmp_path / split, "plain", "news", ROWS[:5])
    assert rows_of(source(tmp_path).split("val")) == ROWS[:5]


def test_the_data_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(tmp_path))
    for name in ("plain", "tsv", "translation"):
        save(tmp_path / "mine", name, "train", ROWS)
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


def test_byte_order_marks_and_ends_of_lines_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_bytes("\ufeffone\r\ntwo\r\nthree".encode())
    (tmp_path / "train.de").write_bytes(b"eins\nzwei\ndrei\n")
    expected = [("one", "eins"), ("two", "zwei"), ("three", "drei")]
    assert rows_of(source(tmp_path).records("train")) == expected


def test_a_damaged_file_of_another_language_is_left_alone(folder: Path) -> None:
    for name in ("train.fr", "train.fr.gz"):
        (folder / name).write_bytes(b"no gzip")
    assert source(folder).split("train")


def test_multi30k_is_whole(real_data: Path) -> None:
    for pair in ("en-de", "fr-en"):
        found = source(real_data / "multi30k", pair=pair)
        sizes = [len(found.split(split)) for split in ("train", "val", "test")]
        assert sizes == [29_000, 1_014, 1_000]
    first = rows_of(found.split("test"))[0][1]
    assert first == "A man in an orange hat starring at something."
    with refused(UsageError, "no test_2016_flickr.cs", "{de,en,fr}"):
        source(real_data / "multi30k", pair="en-cs")
