"""Bad texts, pairs and documents are named by line and option, or skipped and counted."""

import gzip
import subprocess
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet as parquet_format

from datamodules.utils.errors import DataError, UsageError
from tests.helpers.refusals import refused
from tests.helpers.sources import build
from tests.helpers.tables import compressed, table_bytes, write

Files = dict[str, Any]  # content by path in d/
ROWS = [{"text": f"film {i}", "label": ("bad", "good")[i % 2]} for i in range(20)]
PAIRS = [{"en": f"two {i}", "de": f"zwei {i}"} for i in range(20)]
NESTED = [{"translation": row} for row in PAIRS]
DEEP = "[" * 200_000 + "]" * 200_000
DIGITS = "9" * 5000
TWO = "2 classes: bad, good"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESSERA_DATA", raising=False)


def count(source: Any, split: str = "train") -> int:
    """The samples of a split, read as a run does."""
    source.prepare()
    if hasattr(source, "statistics"):
        source.split(split)
        return source.statistics(split).documents
    if source.labelled:
        source.checked_class_names()
    source.split(split)
    return len(source.records(split) or ())


def csv(bad: bytes | str, head: str = "text,label") -> Files:
    """Lines of CSV; the third is bad."""
    _, first, *others = table_bytes(ROWS, ".csv").splitlines()
    bad = bad if isinstance(bad, bytes) else bad.encode()
    return {"train.csv": b"\n".join([head.encode(), first, bad, *others])}


def jsonl(bad: bytes | str, rows: Any = ROWS) -> Files:
    """Lines of JSON; the second is bad."""
    first, *others = table_bytes(rows, ".jsonl").splitlines()
    bad = bad if isinstance(bad, bytes) else bad.encode()
    return {"train.jsonl": b"\n".join([first, bad, *others])}


def parquet(**columns: Any) -> Files:
    """A table of 20 texts with these columns instead, or more."""
    texts = [row["text"] for row in ROWS]
    labels = [i % 2 for i in range(20)]
    return {"train-0.parquet": {"text": texts, "label": labels, **columns}}


def last(value: int) -> Files:
    """A table with this as the last label."""
    return parquet(label=[i % 2 for i in range(19)] + [value])


def raw(*texts: bytes) -> pa.Array:
    """Texts in Arrow that need not be UTF-8."""
    return pa.array(texts).view(pa.string())


def aligned(bad: bytes) -> Files:
    """Lines of aligned files; the second of train.de is bad."""
    files = {}
    for name, line in (("en", b"a"), ("de", bad)):
        first, *others = (row[name].encode() for row in PAIRS)
        files[f"train.{name}"] = b"\n".join([first, line, *others])
    return files


def write_all(files: Files) -> None:
    for name, content in files.items():
        if isinstance(content, dict):
            metadata = content.pop("metadata", None)
            table = pa.table(content).replace_schema_metadata(metadata)
            Path("d").mkdir(exist_ok=True)
            parquet_format.write_table(table, f"d/{name}")
        else:
            write(Path("d", name), content)


TXT = {f"train/{row['label']}/{i}.txt": row["text"] for i, row in enumerate(ROWS)}
IDS = [{"text": f"a {i}", "label": "ab"[i % 2], "id": i} for i in range(60)]
GOOD = {f"good/{i}.txt": row["text"] for i, row in enumerate(ROWS)}
NOT_UTF8 = BOM_UTF8 + b"a\n\xff"
LONG_CSV = f"{'a good ' * 99},good\n" * 9  # no line that names the columns
LATIN = parquet(text=raw(*[b"a"] * 20, b"\xe9"), label=[*[0, 1] * 10, 1])
CSV_LINE = "line 3 of d/train.csv"
JSON_LINE = "line 2 of d/train.jsonl"
BAD_EN = '{"translation": {"en": [], "de": "a"}}'
BAD_DE = '{"translation": {"en": "a", "de": 2}}'
JSON = [  # a line that holds no text and label, a word of what is said of it
    (b'{"text": "caf\xe9", "label": "bad"}', "UTF-8"),
    (b'{"text": "", "label": "bad"}', "no text"),
    (b'{"label": "bad"}', "no text"),
    (b'{"text": "\\ud83d", "label": "bad"}', "surrogate"),
    (b'{"text": "ok", "label"}', "JSON"),
    (b"[1]", "JSON object"),
    (b'{"text": "ok", "label": ["bad"]}', "as label"),
    (b'{"text": "ok", "label": {"a": 1}}', "as label"),
    (b'{"text": "ok", "label": 0.5}', "as label"),
    (b'{"text": "ok", "label": NaN}', "as label"),
    (b'{"text": "ok", "label": {"a": 1}}', "as label"),
    (b'{"text": ["ok"], "label": "bad"}', "as text"),
    (b'{"text": 3, "label": "bad"}', "as text"),
    (f'{{"text": "ok", "label": "bad", "x": {DEEP}}}'.encode(), "nested"),
    (f'{{"text": "ok", "label": {DIGITS}}}'.encode(), "digits"),
]
# Command, files, location, word; 20 samples are good.
SKIPPABLE: list[tuple[str, Files, str, str]] = [
    *(("texts jsonl d", jsonl(line), JSON_LINE, word) for line, word in JSON),
    ("texts csv d", csv("  ,good"), CSV_LINE, "no text"),
    ("texts csv d", csv(b"caf\xe9,good"), CSV_LINE, "UTF-8"),
    ("texts csv d", csv(b'"3 lines,\r\n\ncaf\xe9,\n\xe9",bad'), "line 5 of d/train.csv", "UTF-8"),
    ("texts csv d", csv("a,b,c"), CSV_LINE, "3 cells"),
    ("texts csv d", csv("a\0b,bad"), CSV_LINE, "NUL"),
    ("texts csv d", csv("x" * 200_000 + ",bad"), CSV_LINE, "word"),
    ("texts hub d", LATIN, "row 20 of the train split of d", "UTF-8"),
    ("texts folder d", {**TXT, "train/bad/x.txt": " \n"}, "d/train/bad/x.txt", "no text"),
    ("texts folder d", {**TXT, "train/bad/x.txt": NOT_UTF8}, "d/train/bad/x.txt", "line 2"),
    ("texts folder d", {**TXT, "train/bad/x.pdf": b"a"}, "d/train/bad/x.pdf", ".txt"),
    ("corpus jsonl d", jsonl('{"text": ["a"]}'), JSON_LINE, "as text"),
    ("documents jsonl d", jsonl('{"text": ["a"]}'), JSON_LINE, "as text"),
    ("documents jsonl d", jsonl('{"text": 3}'), JSON_LINE, "as text"),
    ("documents jsonl d", jsonl('{"t": "a"}'), JSON_LINE, "no text"),
    ("documents jsonl d", jsonl(b'{"text": "\xe9"}'), JSON_LINE, "UTF-8"),
    ("documents jsonl d", jsonl(f'{{"x": {DEEP}}}'), JSON_LINE, "nested"),
    ("documents jsonl d", jsonl("[1]"), JSON_LINE, "JSON object"),
    ("documents hub d", LATIN, "row 20 of d/train-0.parquet", "UTF-8"),
    ("documents txt d", {**GOOD, "a.txt": b"one\ntwo\ncaf\xe9"}, "d/a.txt", "line 3"),
    ("documents txt d", {**GOOD, "a.txt": "é".encode()[:1]}, "d/a.txt", "line 1"),
    ("documents txt d", {**GOOD, "a.md": b"a\n" * 600_000 + b"\xe9"}, "d/a.md", "600001"),
    ("documents txt d", {**GOOD, "a.txt.gz": gzip.compress(b"\xe9")}, "d/a.txt.gz", "UTF-8"),
    ("documents txt d", {**GOOD, "a.pdf": b""}, "d/a.pdf", ".txt"),
    ("documents txt d", {**GOOD, "a.pdf.gz": b""}, "d/a.pdf.gz", ".txt"),
    ("documents txt d", {**GOOD, "a.parquet.gz": b""}, "d/a.parquet.gz", ".txt"),
    ("pairs txt d", aligned(b"\xdf"), "line 2 of d/train.de", "UTF-8"),
    ("pairs jsonl d", jsonl(BAD_EN, NESTED), JSON_LINE, "translation.en"),
    ("pairs jsonl d", jsonl(BAD_DE, NESTED), JSON_LINE, "translation.de"),
]  # fmt: skip


@pytest.mark.parametrize("case", SKIPPABLE, ids=lambda case: f"{case[0]}, {case[3]}")
def test_bad_samples_are_named_or_skipped_and_counted(case: Any) -> None:
    command, files, location, word = case
    write_all(files)
    with refused(DataError, location, word, "--data.skip_bad true"):
        count(build(command))
    for _ in range(2):  # what is skipped is counted anew
        source = build(command, skip_bad=True)
        assert count(source) == 20 and set(source.skipped) == {location}


@pytest.mark.parametrize("command", ["texts csv d", "texts folder d", "documents txt d"])
def test_other_encodings_are_converted_by_the_command_in_the_message(command: str) -> None:
    suffix = ".csv" if "csv" in command else ".txt"
    content = "text,label\nfine,bad\ncafé,good\n"
    path = write(Path("d/train/bad", f"a b{suffix}"), content.encode("cp1252"))
    write(Path("d/train/good/a.txt"), "fine")
    with refused(DataError, "line 3", str(path), "--data.skip_bad true") as caught:
        count(build(command))
    shell = str(caught.value).split("`")[1]
    subprocess.run(shell, shell=True, check=True)
    assert Path(f"new{suffix}").read_text(encoding="utf-8") == content


UTF_16 = {  # by command, a file and its content
    "texts csv d": ("d/train.csv", table_bytes(ROWS, ".csv")),
    "texts jsonl d": ("d/train.jsonl", table_bytes(ROWS, ".jsonl")),
    "documents txt d/a.txt": ("d/a.txt", b"one\ntwo\n"),
    "documents jsonl d": ("d/a.jsonl", table_bytes(ROWS, ".jsonl")),
    "corpus txt d/a.txt": ("d/a.txt", b"one\ntwo\n"),
}


@pytest.mark.parametrize("command", UTF_16)
def test_utf_16_is_converted_by_the_command_in_the_message(command: str) -> None:
    """Skipping would leave nothing, so it is not offered."""
    name, content = UTF_16[command]
    path = write(Path(name), content.decode().encode("utf-16"))
    with refused(DataError, name, "UTF-16") as caught:
        count(build(command))
    assert "skip_bad" not in str(caught.value)
    subprocess.run(str(caught.value).split("`")[1], shell=True, check=True)
    assert Path(f"new{path.suffix}").read_bytes() == content


@pytest.mark.parametrize("command", ["documents txt d/a.txt", "corpus txt d/a.txt"])
def test_skipping_the_only_file_is_not_offered(command: str) -> None:
    write(Path("d/a.txt"), "one\n\ncafé\n".encode("cp1252"))
    with refused(DataError, "d/a.txt", "line 3", "`iconv ") as caught:
        count(build(command))
    assert "skip_bad" not in str(caught.value)


def validation(line: str) -> Files:
    """Good texts to train on, and a validation file whose second line is this."""
    return {"train.csv": ROWS, "validation.csv": f"text,label\n{line}\n"}


HALF = b"some text" * 1000
CLASS_OPTION = "--data.dataset.class_names"
ALIGNED = aligned(b"b")
EN = {"train.en": ALIGNED["train.en"]}
USAGE: list[tuple[str, Files, tuple[str, ...]]] = [  # command, files, what is named
    ("texts reviews d", {"a.csv": ROWS}, ("d", "--data.source csv")),
    ("texts csv", {}, ("--data.path", "train.csv")),
    ("texts csv nowhere", {}, ("nowhere does not exist",)),
    ("texts folder nowhere", {}, ("nowhere does not exist",)),
    ("texts csv d", parquet(), ("d", "--data.source hub")),
    ("texts hub d", {"a.csv": ROWS}, ("d", "--data.source csv")),
    ("texts folder d/train/bad/0.txt", TXT, ("0.txt", "train/CLASS/")),
    ("texts folder d", {"a.jsonl": ROWS}, ("train/CLASS/", "--data.source jsonl")),
    ("texts jsonl d", {"train.csv": ROWS}, ("--data.source csv",)),
    ("texts csv d", {"train.csv": ROWS, "train-2.csv": ROWS}, ("train.csv", "train-2.csv")),
    ("texts hub d label_column=id", parquet(), ("id", "label_column to label.")),
    ("texts hub d text_column=label", parquet(), ("label", "int64", "text_column to text.")),
    ("texts hub d", parquet(label=[[0], [1]] * 10), ("label of d", "list", "no other column")),
    ("texts hub d", parquet(text=[["a"]] * 20), ("column text of d", "list")),
    ("texts csv d", {"train.csv": "text\na\nb\n"}, ("(text): name the columns in the first",)),
    ("texts csv d", csv("a,bad", "body,label"), ("column text", "text_column", "body, label")),
    ("texts csv d", csv("a,bad", "body,mood"), ("column text", "column label", "label_column")),
    ("texts csv d label_column=y", csv("a,bad", "body,mood"), ("column text", "column y")),
    ("texts csv d", csv("a,bad", "text,mood"), ("column label", "label_column", "text, mood")),
    ("texts csv d text_column=Text label_column=x", csv("a,bad"), ("Text", "text_column text;")),
    ("texts csv d", csv("a,bad", "Text,mood"), ("column text", "Text, mood", "text_column Text;")),
    ("texts csv d label_column=text", csv("a,bad"), ("column text", "text_column or label_column")),
    ("texts hub d text_column=x label_column=y", parquet(), ("column x", "to text;", "column y")),
    ("texts csv d", {"train.csv": LONG_CSV}, ("(a good a good", "columns in the first line of")),
    ("texts csv d", {"train.csv": "a film,odd\n" * 9}, ("to a film or odd, or name the col",)),
    ("texts csv d class_names=bad,good,odd", csv("a,bad"), ("class odd", CLASS_OPTION)),
    ("texts csv d", {"train.csv": [ROWS[0]] * 9}, ("one class", "bad")),
    ("texts csv d label_column=id", {"train.csv": IDS}, ("id of d", "60 classes", "label_col")),
    ("texts folder d", {**TXT, "test/positive/1.txt": "a"}, ("test/positive", "2 classes")),
    ("corpus txt", {}, ("--data.path", ".txt")),
    ("corpus txt d", {".hidden": b""}, ("d holds no .txt",)),
    ("documents reference d", {"a.txt": b""}, ("d", "--data.source txt")),
    ("documents web", {}, ("--data.source is web", "reference, txt, csv, jsonl, hub")),
    ("documents txt", {}, ("--data.path",)),
    ("documents txt d/a.pdf", {"a.pdf": b""}, ("d/a.pdf",)),
    ("documents txt nowhere.txt", {}, ("nowhere.txt does not exist",)),
    ("documents txt nowhere", {}, ("nowhere does not exist",)),
    ("documents txt d", {".hidden": b""}, ("d holds no .txt",)),
    ("documents hub", {}, ("--data.dataset.name",)),
    ("documents hub d", parquet(text=[["a"]] * 20), ("column text of d", "list")),
    ("documents jsonl d", {"a.jsonl": [{"id": 1, "body": "a"}]}, ("no column text", "text_column")),
    ("documents hub d", {"a.arrow": [{"id": 1, "body": "a"}]}, ("text_column to body.",)),
    ("pairs txt", {}, ("--data.path", "train.en and train.de")),
    ("pairs txt nowhere", {}, ("nowhere does not exist", "train.en and train.de")),
    ("pairs txt d/train.en", EN, ("train.en is a file",)),
    ("pairs txt d", {".hidden": b""}, ("train.en and train.de",)),
    ("pairs txt d languages=en-xx", ALIGNED, ("train.xx", "train.{de,en}", "--data.languages")),
    ("pairs txt d languages=fr-cs", ALIGNED, ("train.fr and train.cs", "train.de, train.en")),
    ("pairs txt d languages=en-en", ALIGNED, ("--data.languages is en-en",)),
    ("pairs txt d", ALIGNED | {"train.de.gz": b""}, ("train.de and", "train.de.gz")),
    ("pairs txt d", ALIGNED | {"train.x.en": b"", "train.x.de": b""}, ("train.en", "train.x.en")),
    ("pairs txt d test=test_9", ALIGNED, ("no test_9.en", "--data.dataset.test")),
    ("pairs txt d", {"train.tsv": PAIRS}, ("--data.source csv",)),
    ("pairs txt d/train.tsv", {"train.tsv": PAIRS}, ("is a file", "--data.source csv")),
    ("pairs hub d", {"train.tsv": PAIRS}, ("parquet", "--data.source csv")),
    ("pairs hub", {}, ("--data.dataset.name",)),
    ("pairs hub d languages=n-en", parquet(n=[1] * 20, en=["a"] * 20), ("column n", "int64")),
    ("pairs csv", {}, ("--data.path", "TSV")),
    ("pairs csv d", parquet(), ("TSV", "--data.source hub")),
    ("pairs csv d languages=en-xx", {"train.tsv": PAIRS}, ("xx", "target_column", "en, de")),
    ("pairs csv d languages=xx-yy", {"train.tsv": PAIRS}, ("column xx", "column yy", "en, de")),
    ("pairs jsonl d languages=en-xx", {"train.jsonl": NESTED}, ("translation.en, translation.de",)),
    ("pairs csv d", {"train.tsv": "a 0\tein 0\n" * 9}, ("en", "a 0, ein 0", "header false")),
    ("pairs csv d", {"train.csv": PAIRS, "train.tsv": PAIRS}, ("train.csv", "train.tsv")),
    ("pairs dates d languages=en-fr", {"a.tsv": PAIRS}, ("--data.source csv",)),
    ("pairs dates", {}, ("en-fr or fr-en",)),
    *((f"{kind} val_fraction={x}", {"train.csv": ROWS}, (f"val_fraction is {x}",))
      for kind in ("documents reference", "texts csv d") for x in ("0.0", "1.0")),
]  # fmt: skip
ROW = "row 19 of the train split of d"
DATA: list[tuple[str, Files, tuple[str, ...]]] = [  # also with skip_bad
    ("texts jsonl d", {"train.jsonl": "\n"}, ("d/train.jsonl",)),
    ("texts csv d", {"train.csv": "text,label\n ,a\n ,b\n"}, ("line 2 of d/train.csv",)),
    ("texts csv d", {"train.csv": 'text,label\na,b\n"open,b\nc,b\n'}, ("line 4 of d/train.csv",)),
    ("texts csv d", {"train.csv": b"\xe9,label\na,b\n"}, ("line 1 of d/train.csv", "UTF-8")),
    ("texts csv d", {"train.csv": "text,text\na,b\n"}, ("line 1 of d/train.csv", "text")),
    ("texts csv d", csv("fine,0.5"), (CSV_LINE, "label 0.5")),
    ("texts hub d", parquet(label=[1, 0.5] * 10), ("row 1 of", "label 0.5", "regression")),
    ("texts csv d", csv(f"fine,{DIGITS}"), (CSV_LINE, "label 999")),
    ("texts csv d", csv("fine,"), (CSV_LINE, "no label", "2 classes")),
    ("texts csv d", csv("a,\nb,odd\nc, "), (CSV_LINE, "2 of 23 rows: 3, 5)", "remove")),
    ("texts csv d", validation("a,odd"), ("line 2 of d/validation.csv", "label odd", TWO)),
    ("texts csv d", validation("a,  "), ("line 2 of d/validation.csv", "no label", TWO)),
    ("texts jsonl d", jsonl('{"text": "a", "label": -1}'), (JSON_LINE, "label -1", CLASS_OPTION)),
    ("texts jsonl d", jsonl(f'{{"text": "a", "label": {10**12}}}'), (JSON_LINE, f"{10**12}")),
    ("texts hub d", last(10**12), (ROW, f"label {10**12}")),
    ("texts hub d", last(-1), (ROW, "label -1")),
    ("texts hub d", parquet(label=raw(*[b"a"] * 19, b"g\xe9")), (ROW, "UTF-8")),
    ("texts hub d", parquet(metadata={b"huggingface": b'{"info": 3}'}), ("description",)),
    ("texts hub d", {"train-0.parquet": ROWS, "train-1.parquet": PAIRS}, ("train-1", "train-0")),
    ("documents txt d", {"a.txt.gz": gzip.compress(HALF)[:-20]}, ("d/a.txt.gz",)),
    ("documents txt d", {"a.txt.gz": b"not compressed"}, ("d/a.txt.gz",)),
    ("documents txt d", {"a.txt.gz": b""}, ("d/a.txt.gz",)),
    ("documents txt d", {"a.md.zst": compressed(HALF, ".zst")[:-5]}, ("d/a.md.zst",)),
    ("documents jsonl d", {"a.jsonl.zst": b"not compressed"}, ("d/a.jsonl.zst",)),
    ("documents hub d", {"a.parquet": b"PAR1 not a table"}, ("d/a.parquet",)),
    ("documents hub d", {"a.arrow": b"not a table"}, ("d/a.arrow",)),
    ("documents txt d", {"a.txt": " \n\n"}, ("d holds no text",)),
    ("documents jsonl d", {"a.jsonl": '{"text": ""}'}, ("d holds no text",)),
    ("pairs txt d", EN | {"train.de": b"a\n" * 2000}, ("train.en has 21", "train.de 2,000")),
    ("pairs txt d", {"train.en": b"", "train.de": b""}, ("d/train.en",)),
    ("pairs txt d", {"train.en": b"\n" * 9, "train.de": b"a\n" * 9}, ("train split of d",)),
    ("pairs txt d", EN | {"train.de.gz": gzip.compress(HALF)[:-20]}, ("d/train.de.gz",)),
    ("pairs csv d", {"train.tsv.gz": gzip.compress(HALF)[:-20]}, ("d/train.tsv.gz",)),
]


@pytest.mark.filterwarnings("ignore:The data have no test split")
@pytest.mark.parametrize(
    ("error", "case"),
    [(UsageError, case) for case in USAGE] + [(DataError, case) for case in DATA],
    ids=lambda case: f"{case[0]}, {case[2][0]}" if isinstance(case, tuple) else case.__name__,
)
def test_what_cannot_be_read_is_named(error: type[Exception], case: Any) -> None:
    command, files, names = case
    write_all(files)
    for skip_bad in (False, True):
        with refused(error, *names) as found:
            source = build(command, skip_bad)
            for split in ("train", "val", "test"):
                count(source, split)
        assert len(str(found.value)) < 400


@pytest.mark.parametrize("codec", [".gz", ".zst"])
def test_compressed_files_that_end_too_early(codec: str) -> None:
    """Wherever they end."""
    whole = compressed(table_bytes(ROWS * 10, ".jsonl"), codec)
    sizes = [*range(0, len(whole) - 20, 61), *range(len(whole) - 20, len(whole))]
    contents = [whole[:size] for size in sizes]
    if codec == ".gz":
        contents += [whole + whole[:size] for size in (1, 9, 20, 60)]
    path = Path(f"a.jsonl{codec}")
    for content in contents:
        path.write_bytes(content)
        with refused(DataError, path.name):
            list(build(f"documents null {path}").read("train"))


@pytest.mark.filterwarnings("ignore:.*empty side")
@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_pairs_with_an_empty_side_are_dropped_and_counted(suffix: str) -> None:
    rows = [{"en": "a", "de": " "}, *PAIRS, {"en": "", "de": ""}, {"en": "", "de": "b"}]
    write_all({f"train.{suffix}": rows})
    source = build("pairs null d")
    assert count(source) == 20 and len(source.skipped) == 3
    if suffix == "csv":
        assert source.skipped[0] == "line 2 of d/train.csv"
