"""Data that no model should learn from: one sentence that names file and row, before training."""

import gzip
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from datamodules.images import ImageData
from datamodules.reviews import ReviewData
from datamodules.sources import DOCUMENTS, CorpusOptions, TextDatasetOptions
from datamodules.utils.errors import DataError
from tests.tasks.command import PAIRS, SMALL_LM, SMALL_S2S, picture, run, write_images, write_pairs
from tests.tasks.test_bad_input import FAILED, USER, assert_refused, nothing

pytestmark = pytest.mark.timeout(120)  # a pipe or a device would be read for ever

Make = Callable[[], Any]
NAMES = {
    b"huggingface": b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["bad", "good"]}}}}'
}
TEXTS, LABELS = [f"film number {i}" for i in range(20)], [i % 2 for i in range(20)]
DEEP = "[" * 200_000 + "]" * 200_000
DIGITS = "9" * 5000
OUT = "/etc/hostname"


def lines(name: str, bad: str | bytes, good: str, head: str = "") -> None:
    """A file of 20 good lines with a bad one after the tenth."""
    rows = [
        good.replace("NUMBER", str(i)).replace("CLASS", ("bad", "good")[i % 2]) for i in range(20)
    ]
    middle = bad if isinstance(bad, bytes) else bad.encode()
    Path(name).parent.mkdir(exist_ok=True)
    parts = [*(row.encode() for row in rows[:10]), middle, *(row.encode() for row in rows[10:])]
    Path(name).write_bytes(head.encode() + b"\n".join(parts) + b"\n")


def jsonl(bad: str) -> Make:
    return partial(lines, "d/train.jsonl", bad, '{"text": "film number NUMBER", "label": "CLASS"}')


def csv(bad: str | bytes, head: str = "text,label\n") -> Make:
    return partial(lines, "d/train.csv", bad, "film number NUMBER,CLASS", head)


def json_pairs(bad: str) -> Make:
    return partial(
        lines, "pairs/train.jsonl", bad, '{"translation": {"en": "two NUMBER", "up": "TWO NUMBER"}}'
    )


def table(
    column: Any, schema: dict[bytes, bytes] | None = None, texts: Any = TEXTS, twice: bool = False
) -> Make:
    """A Parquet file `d/train-0.parquet` of 20 texts with this column of labels."""

    def make() -> None:
        Path("d").mkdir()
        names = ["text", "label", *(["label"] if twice else [])]
        columns = [pa.array(texts), pa.array(column), *([pa.array(column)] if twice else [])]
        parquet.write_table(
            pa.table(columns, names=names).replace_schema_metadata(schema), "d/train-0.parquet"
        )

    return make


def with_last(value: int) -> list[int]:
    return [*LABELS[:-1], value]


def cut(name: str, kind: Make) -> Make:
    """The compressed file `NAME.gz` or `.zst` without its end, in place of the file."""

    def make() -> None:
        kind()
        path = Path(name).with_suffix("")
        with pa.output_stream(
            name, compression={".gz": "gzip", ".zst": "zstd"}[Path(name).suffix]
        ) as file:
            file.write(path.read_bytes())
        path.unlink()
        Path(name).write_bytes(Path(name).read_bytes()[:-9])

    return make


BERT = (
    "fit --model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --trainer.max_epochs 1 "
    "--data.tokenizer.vocabulary 300 --data.batch_size 8 --data.path d --data.source"
)
MLM, LM = BERT, f"fit {SMALL_LM} --data.source files --data.path d"
TABLE = f"fit {SMALL_S2S} {PAIRS.replace('files', 'table')}"
FILES = f"fit {SMALL_S2S} {PAIRS}"
JSON_ROW, CSV_ROW, ROW = (
    "line 11 of d/train.jsonl",
    "line 12 of d/train.csv",
    "row 19 of the train split of d",
)
GOOD = pa.array(LABELS)
Case = tuple[str, str, Make, int, tuple[str, ...]]  # task, command line, files, exit code, words
JSON: dict[str, tuple[str, str]] = {  # a bad line, what is said of it
    "a list as label": ('{"text": "fine", "label": ["bad"]}', "a list as label"),
    "an object as label": ('{"text": "fine", "label": {"a": 1}}', "an object as label"),
    "a fraction as label": ('{"text": "fine", "label": 0.5}', "as label"),
    "NaN as label": ('{"text": "fine", "label": NaN}', "as label"),
    "true as label": ('{"text": "fine", "label": true}', "true or false as label"),
    "a list as text": ('{"text": ["fine"], "label": "bad"}', "a list as text"),
    "an object as text": ('{"text": {"en": "fine"}, "label": "bad"}', "an object as text"),
    "a number as text": ('{"text": 3, "label": "bad"}', "a number as text"),
    "NaN as text": ('{"text": NaN, "label": "bad"}', "as text"),
    "deep nesting": (f'{{"text": "fine", "label": "bad", "x": {DEEP}}}', "nested"),
    "thousands of digits": (f'{{"text": "fine", "label": {DIGITS}}}', "digits"),
}
CASES: dict[str, Case] = {
    **{
        f"json: {name}": ("bert", f"{BERT} jsonl", jsonl(bad), FAILED, (JSON_ROW, w))
        for name, (bad, w) in JSON.items()
    },
    "json: a negative label": (
        *("bert", f"{BERT} jsonl", jsonl('{"text": "fine", "label": -1}'), FAILED),
        (JSON_ROW, "label -1", "--data.dataset.class_names"),
    ),
    "json: a huge label": (
        *("bert", f"{BERT} jsonl", jsonl(f'{{"text": "fine", "label": {10**12}}}'), FAILED),
        (JSON_ROW, f"label {10**12}"),
    ),
    "json to pretrain": (
        "mlm",
        f"{MLM} jsonl",
        jsonl('{"text": ["a"]}'),
        FAILED,
        (JSON_ROW, "a list as text"),
    ),
    "json of a language model": (
        "lm",
        LM,
        jsonl('{"text": ["a"]}'),
        FAILED,
        (JSON_ROW, "a list as text"),
    ),
    "numbers of a language model": (
        "lm",
        LM,
        jsonl('{"text": 3.5}'),
        FAILED,
        (JSON_ROW, "as text"),
    ),
    "deep json of a language model": (
        "lm",
        LM,
        jsonl(f'{{"x": {DEEP}}}'),
        FAILED,
        (JSON_ROW, "nested"),
    ),
    "json of pairs": (
        *("seq2seq", TABLE, json_pairs('{"translation": {"en": ["two"], "up": "TWO"}}'), FAILED),
        ("line 11 of pairs/train.jsonl", "a list as translation.en"),
    ),
    "json numbers of pairs": (
        *("seq2seq", TABLE, json_pairs('{"translation": {"en": "two", "up": 2}}'), FAILED),
        ("line 11 of pairs/train.jsonl", "a number as translation.up"),
    ),
    "csv: a column twice": (
        "bert",
        f"{BERT} csv",
        csv("fine,bad", "text,text\n"),
        FAILED,
        ("line 1 of d/train.csv", "text"),
    ),
    "csv: NUL bytes": (
        "bert",
        f"{BERT} csv",
        csv(b"fi\0ne,bad"),
        FAILED,
        ("d/train.csv", "12", "NUL"),
    ),
    "csv: a fraction as label": (
        "bert",
        f"{BERT} csv",
        csv("fine,0.5"),
        FAILED,
        (CSV_ROW, "label 0.5"),
    ),
    "csv: a huge label": (
        "bert",
        f"{BERT} csv",
        csv(f"fine,{DIGITS}"),
        FAILED,
        (CSV_ROW, "label 999"),
    ),
    "csv: a word of 20 MB": (
        "bert",
        f"{BERT} csv",
        csv("x" * 20_000_000 + ",bad"),
        FAILED,
        (CSV_ROW, "a word of more"),
    ),
    "csv: a line of 140 MB": (
        "bert",
        f"{BERT} csv",
        csv("x " * 70_000_000 + ",bad"),
        FAILED,
        (CSV_ROW, "characters"),
    ),
    "parquet: a negative label": (
        "bert",
        f"{BERT} hub",
        table(with_last(-1)),
        FAILED,
        (ROW, "label -1"),
    ),
    "parquet: a huge label": (
        "bert",
        f"{BERT} hub",
        table(with_last(10**12)),
        FAILED,
        (ROW, f"label {10**12}"),
    ),
    "parquet: a negative label beside names": (
        *("bert", f"{BERT} hub", table(with_last(-1), NAMES), FAILED),
        (ROW, "label -1", "2 classes: bad, good"),
    ),
    "parquet: a huge label beside names": (
        *("bert", f"{BERT} hub", table(with_last(10**12), NAMES), FAILED),
        (ROW, f"label {10**12}", "2 classes: bad, good"),
    ),
    "parquet: lists as labels": (
        "bert",
        f"{BERT} hub",
        table([[0], [1]] * 10),
        USER,
        ("column label of d", "list"),
    ),
    "parquet: fractions as labels": (
        "bert",
        f"{BERT} hub",
        table([0.5, 1] * 10),
        USER,
        ("column label of d", "double"),
    ),
    "parquet: lists as texts": (
        *("bert", f"{BERT} hub", table(LABELS, texts=[[text] for text in TEXTS]), USER),
        ("column text of d", "list"),
    ),
    "parquet: a column twice": (
        "bert",
        f"{BERT} hub",
        table(LABELS, twice=True),
        FAILED,
        ("d/train-0.parquet", "label"),
    ),
    "parquet: labels that are not UTF-8": (
        *(
            "bert",
            f"{BERT} hub",
            table(pa.array([b"bad"] * 19 + [b"g\xe9"]).view(pa.string())),
            FAILED,
        ),
        (ROW, "UTF-8"),
    ),
    "parquet: a damaged description": (
        *("bert", f"{BERT} hub", table(LABELS, {b"huggingface": b'{"info": 3}'}), FAILED),
        ("description",),
    ),
    "lists as texts of a language model": (
        *("lm", LM, table(LABELS, texts=[[text] for text in TEXTS]), USER),
        ("column text of d", "list"),
    ),
    "a truncated gz": (
        "bert",
        f"{BERT} jsonl",
        cut("d/train.jsonl.gz", jsonl("")),
        FAILED,
        ("d/train.jsonl.gz",),
    ),
    "a truncated zst": (
        "bert",
        f"{BERT} csv",
        cut("d/train.csv.zst", csv("a,bad")),
        FAILED,
        ("d/train.csv.zst",),
    ),
    "a truncated gz of a language model": (
        "lm",
        LM,
        cut("d/train.jsonl.gz", jsonl("")),
        FAILED,
        ("d/train.jsonl.gz",),
    ),
    "a language twice": (
        "seq2seq",
        FILES.replace("en-up", "en-en"),
        nothing,
        USER,
        ("--data.languages", "en-en"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_rows_and_columns_are_named(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    task, line, make, code, words = CASES[case]
    make()
    assert_refused(line, code, words, capsys, task)


@pytest.mark.parametrize("case", JSON)
def test_bad_rows_can_be_skipped(case: str) -> None:
    jsonl(JSON[case][0])()
    data = ReviewData("jsonl", "d", skip_bad=True)
    assert data.metadata()["class_names"] == ["bad", "good"]
    data.setup("fit")
    assert (
        data.skipped == [JSON_ROW] and len(data.dataset("train")) + len(data.dataset("val")) == 20
    )


@pytest.mark.parametrize("source", ("jsonl", "csv", "hub"))
def test_whole_numbers_are_classes(source: str) -> None:
    {
        "hub": table(LABELS),
        "csv": partial(lines, "d/train.csv", "fine,1", "film NUMBER,0", "text,label\n"),
    }.get(
        source,
        partial(
            lines, "d/train.jsonl", '{"text": "fine", "label": 1}', '{"text": "a", "label": 0}'
        ),
    )()
    assert ReviewData(source, "d").metadata()["class_names"] == ["0", "1"]  # type: ignore[arg-type]


def test_named_classes_may_have_any_numbers() -> None:
    table([-1, 10**12] * 10)()
    data = ReviewData("hub", "d", dataset=TextDatasetOptions(class_names=["bad", "good"]))
    data.setup("fit")
    assert data.metadata()["class_names"] == ["bad", "good"]


# Files that are none.


def pipe(name: str) -> None:
    os.mkfifo(name)


def broken_link(name: str) -> None:
    Path(name).symlink_to("nowhere")


def folder_link(name: str) -> None:
    Path("elsewhere").mkdir()
    Path(name).symlink_to(Path("elsewhere").absolute())


def device_link(name: str) -> None:
    Path(name).symlink_to("/dev/zero")


def loop(name: str) -> None:
    Path(name).symlink_to(Path(name).name)


def not_utf8(name: str) -> None:
    Path(os.fsdecode(os.fsencode(name).replace(b"bad", b"b\xe9d"))).touch()


def images() -> None:
    write_images(Path("d"))


def texts() -> None:
    for i in range(20):
        path = Path("d/train", ("cat", "dog")[i % 2], f"{i}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"film number {i}")


VIT = "fit --preset digits --model.net.channels null --data.path d --data.source"
PLACES: dict[
    str, tuple[str, str, Make, str]
] = {  # task, command line, good data, where something odd is put
    "image": ("vit", f"{VIT} folder", images, "d/train/cat/bad.png"),
    "image class": ("vit", f"{VIT} folder", images, "d/train/bad"),
    "text": ("bert", f"{BERT} txt", texts, "d/train/cat/bad.txt"),
    "document": ("lm", LM, texts, "d/train/bad.txt"),
    "table": ("bert", f"{BERT} csv", csv("fine,bad"), "d/test.bad.csv"),
    "parquet": ("bert", f"{BERT} hub", table(LABELS), "d/test-bad.parquet"),
    "aligned file": (
        "seq2seq",
        FILES.replace("pairs", "d"),
        lambda: write_pairs(Path("d")),
        "d/bad.en",
    ),
}


SEEN = [
    (place, odd) for place in PLACES for odd in (pipe, broken_link)
]  # else one place is as another
SEEN += [("image", folder_link), ("text", device_link), ("document", not_utf8), ("parquet", loop)]


@pytest.mark.parametrize("place, odd", SEEN, ids=lambda value: getattr(value, "__name__", value))
def test_what_is_no_file_is_named(
    place: str, odd: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    task, line, make, name = PLACES[place]
    make()
    odd(name)
    named = name.replace("bad", "b\\xe9d") if odd is not_utf8 else name
    assert_refused(line, FAILED, named, capsys, task)


def test_a_class_whose_name_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    images()
    Path("d/train/dog").rename(os.fsdecode(b"d/train/d\xf6g"))
    assert_refused(f"{VIT} folder", FAILED, ("d/train/d\\xf6g", "UTF-8"), capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
@pytest.mark.parametrize("place", PLACES)
def test_folders_that_cannot_be_read_are_named(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task, line, make, name = PLACES[place]
    make()
    folder = Path(name)
    folder.mkdir()
    folder.chmod(0)
    assert_refused(line, FAILED, name, capsys, task)
    folder.chmod(0o700)


def test_links_to_files_are_followed() -> None:
    images()
    Path("elsewhere").mkdir()
    for path in list(Path("d/train/cat").iterdir()):
        target = path.rename(Path("elsewhere", path.name)).absolute()
        path.symlink_to(target)
    data = ImageData("folder", "d")
    data.setup("fit")
    assert data.metadata()["class_names"] == ["cat", "dog"] and not data.skipped


PREDICT = {  # task, command line
    "images": ("vit", "predict --ckpt_path VIT --data.predict_path"),
    "texts": ("bert", "predict --ckpt_path BERT --data.predict_path"),
    "prompts": ("lm", "generate --ckpt_path LM --prompt_file"),
    "score": ("lm", "score --ckpt_path LM --data.path"),
    "translate": ("seq2seq", "translate --ckpt_path SEQ2SEQ --file"),
    "fit images": ("vit", "fit --preset digits --data.source folder --data.path"),
    "fit tables": ("bert", "fit --data.source csv --data.path"),
    "fit texts": ("mlm", "fit --data.source txt --data.path"),
    "fit documents": ("lm", f"fit {SMALL_LM} --data.source files --data.path"),
    "fit pairs": (
        "seq2seq",
        f"fit {SMALL_S2S} --data.source table --data.languages en-de --data.path",
    ),
}


@pytest.fixture(scope="module")
def reviewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny classifier of texts."""
    folder = tmp_path_factory.mktemp("reviewer")
    (folder / "a.csv").write_text("text,label\n" + "a good film,good\na bad film,bad\n" * 10)
    line = f"{BERT} csv --run_dir {folder}/run".replace(
        "--data.path d", f"--data.path {folder}/a.csv"
    )
    assert run(line, "bert") == 0
    return folder / "run" / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize("name", ("pipe", "/dev/zero"))
@pytest.mark.parametrize("case", PREDICT)
def test_only_regular_files_are_asked_for(
    case: str,
    name: str,
    best: Path,
    reviewer: Path,
    lm_letters: Path,
    translator: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    task, line = PREDICT[case]
    pipe("pipe")
    for word, path in {
        "VIT": best,
        "BERT": reviewer,
        "LM": lm_letters,
        "SEQ2SEQ": translator,
    }.items():
        line = line.replace(f"path {word} ", f"path {path} ")
    assert_refused(f"{line} {name}", USER, name, capsys, task)


# Images that a table names.


def pictures(path: str, data: bytes | None = None) -> None:
    """A table of 20 images, of which the last is a path."""
    Path("d").mkdir(exist_ok=True)
    picture(8).save("good.png")
    good = {"bytes": Path("good.png").read_bytes(), "path": "good.png"}
    rows = {"image": [*[good] * 19, {"bytes": data, "path": path}], "label": LABELS}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = pa.table({"image": pa.array(rows["image"], kind), "label": LABELS})
    parquet.write_table(columns, "d/train-0.parquet")
    Path("d/inside.png").write_bytes(Path("good.png").read_bytes())
    pipe("d/pipe")
    for link, target in (("out", "good.png"), ("zero", "/dev/zero"), (".folder", ".")):
        Path("d", link).symlink_to(Path(target).absolute())


OUTSIDE = ("good.png", "../good.png", "OUT/good.png", OUT, "/dev/zero", "out", ".folder/good.png")
NO_FILES = ("pipe", "zero", "a\0b", "", ".")


@pytest.mark.parametrize("path", (*OUTSIDE, *NO_FILES))
def test_rows_name_files_in_the_data_folder_only(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(path.replace("OUT", str(Path().absolute())))
    assert_refused(
        f"{VIT} hub", FAILED, (ROW, "is not a readable image", "--data.skip_bad"), capsys
    )


@pytest.mark.parametrize("path", ("inside.png", "HERE/d/inside.png"))
def test_rows_may_name_files_in_the_data_folder(path: str) -> None:
    pictures(path.replace("HERE", str(Path().absolute())))
    data = ImageData("hub", "d")
    data.setup("fit")
    assert len(data.source.records("train")) == 20 and not data.skipped  # type: ignore[arg-type]


# Options that mean nothing to a source.


UNUSED = {  # task, options
    "columns of digits": ("vit", "--data.source digits --data.dataset.image_column img"),
    "columns of image folders": (
        "vit",
        "--data.source folder --data.path d --data.dataset.label_column y",
    ),
    "a column of generated texts": (
        "bert",
        "--data.source reviews --data.dataset.text_column body",
    ),
    "a share of what is split": ("bert", "--data.source reviews --data.dataset.val_fraction 0.3"),
    "a data set of the hub for tables": (
        "bert",
        "--data.source csv --data.path d --data.dataset.name a/b",
    ),
    "columns of text folders": (
        "bert",
        "--data.source txt --data.path d --data.dataset.text_column body",
    ),
    "classes to pretrain": ("mlm", "--data.source reference --data.dataset.class_names [a,b]"),
    "blank lines of the reference": (
        "lm",
        "--data.source reference --data.dataset.blank_lines true",
    ),
    "a part of files": ("lm", "--data.source files --data.path d --data.dataset.subset en"),
    "columns of dates": ("seq2seq", "--data.source dates --data.dataset.source_column en"),
    "a header of aligned files": (
        "seq2seq",
        "--data.source files --data.path d --data.languages en-up --data.dataset.header false",
    ),
    "a test set of tables": (
        "seq2seq",
        "--data.source table --data.path d --data.languages en-up --data.dataset.test t",
    ),
}


@pytest.mark.parametrize("case", UNUSED)
def test_options_that_a_source_does_not_use(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    task, options = UNUSED[case]
    *_, option, _ = options.split()
    Path("d").mkdir()
    assert_refused(f"fit {options}", USER, option, capsys, task)


def test_a_config_with_options_that_a_source_does_not_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("more.yaml").write_text("data: {source: digits, dataset: {image_column: img}}\n")
    assert_refused("fit --config more.yaml", USER, "--data.dataset.image_column img", capsys)


def test_options_of_a_checkpoint_are_not_refused(capsys: pytest.CaptureFixture[str]) -> None:
    table(["bad", "good"] * 10)()
    line = f"{BERT} hub --data.dataset.label_column label --data.dataset.name a/b --run_dir r"
    assert run(line, "bert") == 0
    Path("t/test/bad").mkdir(parents=True)
    Path("t/test/bad/1.txt").write_text("film number 3")
    test = "test --ckpt_path r/checkpoints/best.ckpt --data.source txt --data.path t"
    assert run(test, "bert") == 0
    assert run(f"{test} --data.dataset.subset x", "bert") == USER
    assert "--data.dataset.subset" in capsys.readouterr().err


# Every place where a compressed file may end too early.


@pytest.mark.parametrize("ending", (".gz", ".zst"))
def test_compressed_files_that_end_too_early(ending: str) -> None:
    rows = "".join(json.dumps({"text": f"film number {i}"}) + "\n" for i in range(200)).encode()
    with pa.output_stream(
        f"a.jsonl{ending}", compression={".gz": "gzip", ".zst": "zstd"}[ending]
    ) as file:
        file.write(rows)
    path = Path(f"a.jsonl{ending}")
    whole = path.read_bytes()
    sizes = [*range(0, len(whole) - 20, 61), *range(len(whole) - 20, len(whole))]
    contents = [whole[:size] for size in sizes]
    contents += (
        [gzip.compress(rows) + gzip.compress(rows)[:size] for size in (1, 9, 20, 60)]
        if ending == ".gz"
        else []
    )
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name):
            list(DOCUMENTS["files"](str(path), CorpusOptions()).read("train"))  # type: ignore[attr-defined]
