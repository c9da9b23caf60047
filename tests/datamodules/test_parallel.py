"""Pairs of texts from every source, and what is said of those that cannot be used."""

import csv
import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from datamodules.sources import PARALLEL, ParallelOptions, ParallelSource, TextSamples
from datamodules.utils.errors import DataError, UsageError

ROWS = [(f'the dog, "number" {i}', f"der Hund,\u2028 „Nummer“ {i}\x85") for i in range(40)]
FORMATS = (
    "plain",
    "gz",
    "csv",
    "tsv",
    "jsonl",
    "nested",
    "translation",
    "columns",
    "tsv.gz",
    "csv.zst",
    "jsonl.gz",
)
SOURCES = {"plain": "files", "gz": "files", "translation": "hub", "columns": "hub"}  # else table


def write(folder: Path, name: str, split: str, rows: list[tuple[str, str]]) -> None:
    """The rows in one of the formats."""
    import pyarrow as pa
    from pyarrow import parquet

    nested = [{"id": i, "translation": {"en": en, "de": de}} for i, (en, de) in enumerate(rows)]
    if name in ("plain", "gz"):
        for side, language in enumerate(("en", "de")):
            content = "".join(f"{row[side]}\n" for row in rows).encode()
            if name == "gz":
                (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / f"{split}.{language}").write_bytes(content)
    elif name == "csv":
        with open(folder / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("de", "note", "en"), *((de, "x", en) for en, de in rows)])
    elif name == "tsv":
        lines = ["en\tde", *(f"{en}\t{de}" for en, de in rows)]
        (folder / f"{split}.tsv").write_bytes("".join(f"{line}\r\n" for line in lines).encode())
    elif name in ("tsv.gz", "csv.zst", "jsonl.gz"):
        kind, _, codec = name.partition(".")
        write(folder, kind, split, rows)
        plain = folder / f"{split}.{kind}"
        with pa.output_stream(
            f"{plain}.{codec}", compression={"gz": "gzip", "zst": "zstd"}[codec]
        ) as file:
            file.write(plain.read_bytes())
        plain.unlink()
    elif name in ("jsonl", "nested"):
        objects = nested if name == "nested" else [{"de": de, "en": en} for en, de in rows]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in objects))
    else:
        columns = nested if name == "translation" else [{"en": en, "de": de} for en, de in rows]
        parquet.write_table(
            pa.Table.from_pylist(columns), folder / f"{split}-00000-of-00001.parquet"
        )


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Aligned files in English and German."""
    write(tmp_path, "plain", "train", ROWS)
    return tmp_path


def source(
    folder: Path | str | None, kind: str = "files", pair: str = "en-de", **options: Any
) -> ParallelSource:
    path, skip_bad = None if folder is None else str(folder), options.pop("skip_bad", False)
    found = PARALLEL[kind](path, ParallelOptions(**options), pair.split("-"), skip_bad)
    found.prepare()
    return found


def rows_of(pairs: TextSamples) -> list[tuple[str, str]]:
    return list(zip(*(column.to_pylist() for column in pairs.columns), strict=True))


def refused(error: type[Exception], *words: str, **options: Any) -> None:
    with pytest.raises(error) as caught:
        source(**options).split("train")
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message
    for word in words:
        assert word in message, message


def test_every_format_gives_the_same_pairs(format: str, tmp_path: Path) -> None:
    for split, rows in (("train", ROWS), ("val", ROWS[:3]), ("test", ROWS[5:9])):
        write(tmp_path, format, split, rows)
    (tmp_path / "README.md").write_text("about it")
    found = source(tmp_path, SOURCES.get(format, "table"))
    assert found.origin == str(tmp_path)
    for split, rows in (("train", ROWS), ("val", ROWS[:3]), ("test", ROWS[5:9])):
        assert rows_of(found.split(split)) == rows
    turned = source(tmp_path, SOURCES.get(format, "table"), "de-en")
    assert rows_of(turned.split("test")) == [(de, en) for en, de in ROWS[5:9]]


def test_pairs_are_held_back_where_there_are_none_to_validate_with(
    format: str, tmp_path: Path
) -> None:
    write(tmp_path, format, "train", ROWS)
    found = source(tmp_path, SOURCES.get(format, "table"), val_fraction=0.2)
    train, val = rows_of(found.split("train")), rows_of(found.split("val"))
    assert len(val) == 8 and sorted(train + val) == sorted(ROWS)
    with pytest.warns(UserWarning, match="no test split"):
        assert rows_of(found.split("test")) == val
    other = source(tmp_path, SOURCES.get(format, "table"), val_fraction=0.2, split_seed=1)
    assert rows_of(other.split("val")) != val


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_a_single_table_is_the_training_split(ending: str, tmp_path: Path) -> None:
    write(tmp_path, ending, "pairs", ROWS)
    assert len(source(tmp_path / f"pairs.{ending}", "table", val_fraction=0.1).split("train")) == 36


def test_tables_without_a_header(tmp_path: Path) -> None:
    for ending, between in (("tsv", "\t"), ("csv", ",")):
        path = tmp_path / f"pairs.{ending}"
        path.write_text("".join(f"a {i}{between}ein {i}{between}cc by\n" for i in range(10)))
        refused(
            UsageError,
            "no column en",
            "a 0, ein 0, cc by",
            "header false",
            folder=path,
            kind="table",
        )
        found = source(path, "table", header=False, val_fraction=0.1)
        everything = rows_of(found.split("train")) + rows_of(found.split("val"))
        assert sorted(everything) == [(f"a {i}", f"ein {i}") for i in range(10)]
        assert "line 1 of" in found.records("train").name(0)  # type: ignore[union-attr]
        swapped = source(path, "table", header=False, source_column="2", target_column="1")
        assert set(rows_of(swapped.split("train"))) <= {(f"ein {i}", f"a {i}") for i in range(10)}


def test_columns_and_endings_of_other_names(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("english,german\n" + "a,b\n" * 9)
    named = {"source_column": "english", "target_column": "german"}
    assert set(rows_of(source(path, "table", **named).split("train"))) == {("a", "b")}
    for name in named.values():
        (tmp_path / f"train.{name}").write_text("a\n" * 9)
    assert set(rows_of(source(tmp_path, **named).split("train"))) == {("a", "a")}


def test_a_file_is_there_once(folder: Path) -> None:
    content = (folder / "train.de").read_bytes()
    (folder / "train.fr.gz").write_bytes(gzip.compress(content))
    (folder / "train.fr").write_bytes(content)
    assert rows_of(source(folder).split("train"))  # of languages that are not asked for
    (folder / "train.de.gz").write_bytes(gzip.compress(content))
    refused(UsageError, "train.de and", "train.de.gz", "remove one", folder=folder)


def test_a_damaged_table(tmp_path: Path) -> None:
    write(tmp_path, "tsv.gz", "train", ROWS)
    whole = (tmp_path / "train.tsv.gz").read_bytes()
    (tmp_path / "train.tsv.gz").write_bytes(whole[:40] + bytes(40) + whole[80:])
    refused(DataError, "train.tsv.gz cannot be read", folder=tmp_path, kind="table")


def test_test_sets_are_chosen_by_name(folder: Path) -> None:
    for i, name in enumerate(("test_2016_flickr", "test_2017_flickr")):
        write(folder, "gz", name, ROWS[i : i + 2])
    refused(
        UsageError,
        "test_2016_flickr.en.gz",
        "test_2017_flickr.en.gz",
        "--data.dataset.test",
        folder=folder,
    )
    assert rows_of(source(folder, test="test_2017_flickr").split("test")) == ROWS[1:3]
    refused(UsageError, "no test_2018.en", "--data.dataset.test", folder=folder, test="test_2018")
    write(folder, "plain", "train.more", ROWS)
    refused(UsageError, "train split: join them", folder=folder, test="test_2017_flickr")


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
        assert len(source(None, SOURCES.get(name, "table"), local="mine").split("train")) == 39
    refused(
        UsageError,
        "source files needs --data.path",
        "train.en and train.de",
        folder=None,
        local="yours",
    )


def test_a_part_of_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    columns = {"translation": [{"de": de, "en": en} for en, de in ROWS]}
    held = datasets.DatasetDict({"validation": datasets.Dataset.from_dict(columns)})
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, subset: asked.append((name, subset)) or held
    )
    found = source(None, "hub", name="wmt/wmt16", subset="de-en")
    assert rows_of(found.split("val")) == ROWS and asked == [("wmt/wmt16", "de-en")]


# What cannot be used.


def test_files_of_different_line_counts_are_refused_with_both(folder: Path) -> None:
    with open(folder / "train.de", "a") as file:
        file.write("noch eine\n" * 1960)
    for skip_bad in (False, True):
        words = [f"{folder / 'train.en'} has 40 lines", f"{folder / 'train.de'} 2,000"]
        refused(DataError, *words, folder=folder, skip_bad=skip_bad)


def test_empty_lines_are_dropped_in_pairs_and_counted(folder: Path) -> None:
    english, german = ([*side] for side in zip(*ROWS, strict=True))
    english[3], german[3], german[7], english[9] = "", "", " \t", "\r"
    for name, side in (("en", english), ("de", german)):
        (folder / f"train.{name}").write_bytes("".join(f"{text}\n" for text in side).encode())
    found = source(folder, val_fraction=0.1)
    with pytest.warns(
        UserWarning,
        match=r"^3 of the 40 pairs of the train split .* an empty side .* line 4 of .*en",
    ):
        kept = rows_of(found.split("train"))
    assert len(found.skipped) == 3 and "line 10 of" in found.skipped[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        kept += rows_of(found.split("val"))
    assert sorted(kept) == sorted(row for i, row in enumerate(ROWS) if i not in (3, 7, 9))


@pytest.mark.parametrize("name", ["csv", "tsv", "jsonl", "translation"])
def test_empty_cells_are_dropped_in_pairs_and_counted(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "train", [*ROWS, ("text", " "), ("", "Text")])
    found = source(tmp_path, SOURCES.get(name, "table"))
    with pytest.warns(UserWarning, match="^2 of the 42 pairs"):
        found.split("train")
    assert len(found.skipped) == 2


@pytest.mark.filterwarnings("ignore:.*empty side")
def test_nothing_usable(folder: Path) -> None:
    (folder / "train.en").write_text("\n" * 40)
    refused(DataError, "no pair of the train split", "text on both sides", folder=folder)
    for name in ("en", "de"):
        (folder / f"train.{name}").write_text("")
    refused(DataError, "train.en is empty", folder=folder)


def test_a_language_without_files(folder: Path) -> None:
    words = [f"{folder} holds train.en but no train.xx", "train.{de,en}", "--data.languages"]
    refused(UsageError, *words, folder=folder, pair="en-xx")
    refused(
        UsageError, "no train.fr and train.cs, only train.de, train.en", folder=folder, pair="fr-cs"
    )


def test_bytes_that_are_not_utf8_are_named_or_skipped_and_counted(folder: Path) -> None:
    lines = (folder / "train.de").read_bytes().split(b"\n")
    lines[6] = b"Stra\xdfe"
    (folder / "train.de").write_bytes(b"\n".join(lines))
    refused(
        DataError,
        f"line 7 of {folder / 'train.de'}",
        "UTF-8",
        "--data.skip_bad true",
        folder=folder,
    )
    found = source(folder, skip_bad=True)
    kept = rows_of(found.split("train")) + rows_of(found.split("val"))
    assert (
        sorted(kept) == sorted(row for i, row in enumerate(ROWS) if i != 6)
        and len(found.skipped) == 1
    )
    assert "line 8 of" in found.records("train").name(6)  # type: ignore[union-attr]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, "gz", "train", ROWS)
    content = (tmp_path / "train.de.gz").read_bytes()
    for broken in (content[: len(content) // 2], b"no gzip"):
        (tmp_path / "train.de.gz").write_bytes(broken)
        refused(DataError, f"{tmp_path / 'train.de.gz'} cannot be read", folder=tmp_path)


def test_byte_order_marks_and_ends_of_lines_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "train.en").write_bytes("\ufeffone\r\ntwo\r\nthree".encode())
    (tmp_path / "train.de").write_bytes(b"eins\nzwei\ndrei\n")
    found = source(tmp_path, val_fraction=0.3)
    assert sorted(rows_of(found.split("train")) + rows_of(found.split("val"))) == [
        ("one", "eins"),
        ("three", "drei"),
        ("two", "zwei"),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"folder": "/nowhere"}, ["/nowhere does not exist", "train.en and train.de"]),
        ({"folder": "{}/train.en"}, ["is a file"]),
        ({"folder": "{}/empty"}, ["holds no train.en and train.de: choose"]),
        ({"folder": "{}/tables"}, ["try --data.source table"]),
        ({"folder": "{}/tables/train.tsv"}, ["is a file; try --data.source table"]),
        ({"folder": "{}/tables", "kind": "hub"}, ["parquet", "try --data.source table"]),
        (
            {"folder": "{}/parquet", "kind": "table"},
            ["CSV, TSV or JSON Lines", "try --data.source hub"],
        ),
        ({"folder": None, "kind": "table"}, ["needs --data.path", "CSV, TSV or JSON Lines"]),
        ({"folder": None, "kind": "hub"}, ["needs --data.dataset.name"]),
        (
            {"folder": "{}/tables", "kind": "table", "pair": "en-xx"},
            ["no column xx", "target_column", "en, de"],
        ),
        (
            {"folder": "{}/numbers.jsonl", "kind": "table", "pair": "en-xx"},
            ["translation.en, translation.de"],
        ),
        (
            {"folder": "{}/parquet", "kind": "hub", "pair": "id-en"},
            ["column id", "int64, not text"],
        ),
        (
            {"folder": "{}", "kind": "dates", "pair": "en-fr"},
            ["has no files", "try --data.source table"],
        ),
        ({"folder": None, "kind": "dates"}, ["en-fr or fr-en, not en-de"]),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: list[str], folder: Path) -> None:
    for name in ("empty", "tables", "parquet"):
        (folder / name).mkdir()
    write(folder / "tables", "tsv", "train", ROWS)
    write(folder / "parquet", "translation", "train", ROWS)
    write(folder, "nested", "numbers", ROWS)
    if options["folder"]:
        options = options | {"folder": options["folder"].format(folder)}
    refused(UsageError, *words, **options)


def test_multi30k_is_whole(real_data: Path) -> None:
    for pair in ("en-de", "fr-en"):
        found = source(real_data / "multi30k", pair=pair)
        assert [len(found.split(split)) for split in ("train", "val", "test")] == [
            29_000,
            1_014,
            1_000,
        ]
    assert rows_of(found.split("test"))[0][1] == "A man in an orange hat starring at something."
    refused(
        UsageError,
        "no test_2016_flickr.cs",
        "{de,en,fr}",
        folder=real_data / "multi30k",
        pair="en-cs",
    )
