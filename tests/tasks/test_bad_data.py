"""Data that no model should learn from: one sentence that names file and row, before training."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from datamodules.images import ImageData
from datamodules.reviews import ReviewData
from datamodules.sources import CorpusOptions, document_source
from datamodules.utils.errors import DataError
from tests.tasks.command import SMALL_LM, SMALL_S2S, picture, run, write_images, write_pairs
from tests.tasks.test_bad_input import FAILED, USER, assert_refused

pytestmark = pytest.mark.timeout(120)  # a pipe or a device would be read for ever

Make = Callable[[], Any]
Capture = pytest.CaptureFixture[str]
FIT = (
    "fit --model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 "
    "--trainer.max_epochs 1 --data.tokenizer.vocabulary 300 --data.batch_size 8"
)
LINES = {  # by task; a source and options follow, and what is read lies in d/
    "vit": "fit --preset digits --model.net.channels null --data.path d --data.source",
    "bert": f"{FIT} --data.path d --data.source",
    "mlm": f"{FIT} --data.path d --data.source",
    "lm": f"fit {SMALL_LM} --data.path d --data.source",
    "seq2seq": f"fit {SMALL_S2S} --data.path d --data.languages en-up --data.source",
}
CLASSES = ("bad", "good")
TEXTS = [f"film number {i}" for i in range(20)]
LABELS = [i % 2 for i in range(20)]
DEEP = "[" * 200_000 + "]" * 200_000
DIGITS = "9" * 5000


# What is read: each of these makes a file when it is called.


def lines(name: str, good: list[str], bad: str | bytes | None, head: str = "") -> Make:
    """A file of 20 good lines with a bad one after the tenth."""

    def make() -> None:
        rows = [row.encode() for row in good]
        if bad is not None:
            rows.insert(10, bad if isinstance(bad, bytes) else bad.encode())
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(os.fsencode(head) + b"\n".join(rows) + b"\n")

    return make


def jsonl(bad: str | None = None) -> Make:
    rows = [{"text": text, "label": CLASSES[i]} for text, i in zip(TEXTS, LABELS, strict=True)]
    return lines("d/train.jsonl", [json.dumps(row) for row in rows], bad)


def csv(bad: str | bytes | None = None, head: str = "text,label\n") -> Make:
    rows = [f"{text},{CLASSES[i]}" for text, i in zip(TEXTS, LABELS, strict=True)]
    return lines("d/train.csv", rows, bad, head)


def json_pairs(bad: str) -> Make:
    rows = [{"translation": {"en": f"two {i}", "up": f"TWO {i}"}} for i in range(20)]
    return lines("d/train.jsonl", [json.dumps(row) for row in rows], f'{{"translation": {bad}}}')


def table(last: Any, described: bool = False, **columns: Any) -> Make:
    """A Parquet file of 20 texts whose last label is this."""
    columns = {"text": TEXTS, "label": pa.array([*LABELS[:-1], last]), **columns}
    feature = {"_type": "ClassLabel", "names": CLASSES}
    description = json.dumps({"info": {"features": {"label": feature}}})
    if last is None:
        description = '{"info": 3}'

    def make() -> None:
        Path("d").mkdir()
        found = pa.table({name: pa.array(column) for name, column in columns.items()})
        if described:
            found = found.replace_schema_metadata({b"huggingface": description.encode()})
        parquet.write_table(found, "d/train-0.parquet")

    return make


def repeated_column() -> None:
    table(1)()
    found = parquet.read_table("d/train-0.parquet")
    parquet.write_table(found.append_column("label", found["label"]), "d/train-0.parquet")


def compress(content: bytes, codec: str) -> bytes:
    return gzip.compress(content) if codec == "gz" else pa.compress(content, "zstd", asbytes=True)


def cut(name: str, make_whole: Make) -> Make:
    """A compressed file without its end, in place of the file."""

    def make() -> None:
        make_whole()
        path = Path(name)
        content = compress(path.with_suffix("").read_bytes(), path.suffix[1:])
        path.with_suffix("").unlink()
        path.write_bytes(content[:-9])

    return make


def validation(line: str) -> Make:
    """Good texts to train on, and a validation file with this line, number 2."""

    def make() -> None:
        csv()()
        Path("d/validation.csv").write_text(f"text,label\n{line}\n")

    return make


def texts() -> None:
    for i, text in enumerate(TEXTS):
        path = Path("d/train", ("cat", "dog")[i % 2], f"{i}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def images() -> None:
    write_images(Path("d"))


JSON_ROW, CSV_ROW = "line 11 of d/train.jsonl", "line 12 of d/train.csv"
ROW = "row 19 of the train split of d"
TWO = "2 classes: bad, good"
JSON: dict[str, tuple[str, str]] = {  # a bad line, what is said of it
    "list as label": ('{"text": "fine", "label": ["bad"]}', "as label"),
    "object as label": ('{"text": "fine", "label": {"a": 1}}', "as label"),
    "fraction as label": ('{"text": "fine", "label": 0.5}', "as label"),
    "NaN as label": ('{"text": "fine", "label": NaN}', "as label"),
    "true as label": ('{"text": "fine", "label": true}', "as label"),
    "list as text": ('{"text": ["fine"], "label": "bad"}', "as text"),
    "number as text": ('{"text": 3, "label": "bad"}', "as text"),
    "deep nesting": (f'{{"text": "fine", "label": "bad", "x": {DEEP}}}', "nested"),
    "digits": (f'{{"text": "fine", "label": {DIGITS}}}', "digits"),
}
CLASS_OPTION = "--data.dataset.class_names"
# task and source, what is read, exit code, names
CASES: list[tuple[str, Make, int, tuple[str, ...]]] = [
    *(("bert jsonl", jsonl(bad), FAILED, (JSON_ROW, word)) for bad, word in JSON.values()),
    ("bert jsonl", jsonl('{"text": "a", "label": -1}'), FAILED, (JSON_ROW, "-1", CLASS_OPTION)),
    ("bert jsonl", jsonl(f'{{"text": "a", "label": {10**12}}}'), FAILED, (JSON_ROW, f"{10**12}")),
    ("mlm jsonl", jsonl('{"text": ["a"]}'), FAILED, (JSON_ROW, "as text")),
    ("lm files", jsonl('{"text": ["a"]}'), FAILED, (JSON_ROW, "as text")),
    ("lm files", jsonl('{"text": 3.5}'), FAILED, (JSON_ROW, "as text")),
    ("lm files", jsonl(f'{{"x": {DEEP}}}'), FAILED, (JSON_ROW, "nested")),
    ("seq2seq table", json_pairs('{"en": ["a"], "up": "A"}'), FAILED, (JSON_ROW, "translation.en")),
    ("seq2seq table", json_pairs('{"en": "a", "up": 2}'), FAILED, (JSON_ROW, "translation.up")),
    ("bert csv", csv("a,bad", "text,text\n"), FAILED, ("line 1 of d/train.csv", "text")),
    ("bert csv", lines("d/train.csv", ["a,b"], b"a,b", "\udce9"), FAILED, ("line 1 of", "UTF-8")),
    ("bert csv", csv(b"fi\0ne,bad"), FAILED, (CSV_ROW, "NUL")),
    ("bert csv", csv("fine,0.5"), FAILED, (CSV_ROW, "label 0.5")),
    ("bert csv", csv(f"fine,{DIGITS}"), FAILED, (CSV_ROW, "label 999")),
    ("bert csv", csv("x" * 200_000 + ",bad"), FAILED, (CSV_ROW, "word")),
    ("bert csv --data.skip_bad true", csv("fine,"), FAILED, (CSV_ROW, "no label", TWO)),
    ("bert csv", validation("a,odd"), FAILED, ("line 2 of d/validation.csv", "label odd", TWO)),
    ("bert csv", validation("a,  "), FAILED, ("line 2 of d/validation.csv", "no label", TWO)),
    ("bert csv", csv(head="body,label\n"), USER, ("column text", "text_column", "body, label")),
    ("bert csv", csv(head="text,mood\n"), USER, ("column label", "label_column", "text, mood")),
    ("bert csv --data.dataset.text_column x", csv(), USER, ("column x", "text, label")),
    (f"bert csv {CLASS_OPTION} [bad,good,odd]", csv(), USER, ("class odd", CLASS_OPTION)),
    ("bert csv", lines("d/train.csv", ["a,bad", "b,bad"], None, "text,label\n"), USER, ("(bad)",)),
    ("bert csv", lambda: None, USER, ("d does not exist",)),
    ("bert txt", lambda: None, USER, ("d does not exist",)),
    ("bert jsonl", csv(), USER, ("--data.source csv",)),
    ("bert hub", table(-1), FAILED, (ROW, "label -1")),
    ("bert hub", table(10**12), FAILED, (ROW, f"label {10**12}")),
    ("bert hub", table(-1, True), FAILED, (ROW, "label -1", TWO)),
    ("bert hub", table(10**12, True), FAILED, (ROW, f"label {10**12}", TWO)),
    ("bert hub", table(None, True), FAILED, ("description",)),
    ("bert hub", table(0, label=[[0], [1]] * 10), USER, ("column label of d", "list")),
    ("bert hub", table(0, label=[0.5, 1] * 10), USER, ("column label of d", "double")),
    ("bert hub", table(0, text=[[text] for text in TEXTS]), USER, ("column text of d", "list")),
    ("lm files", table(0, text=[[text] for text in TEXTS]), USER, ("column text of d", "list")),
    ("bert hub", repeated_column, FAILED, ("d/train-0.parquet", "label")),
    (
        "bert hub",
        table(0, label=pa.array([b"bad"] * 19 + [b"g\xe9"]).view(pa.string())),
        FAILED,
        (ROW, "UTF-8"),
    ),
    ("bert jsonl", cut("d/train.jsonl.gz", jsonl()), FAILED, ("d/train.jsonl.gz",)),
    ("bert csv", cut("d/train.csv.zst", csv()), FAILED, ("d/train.csv.zst",)),
    ("lm files", cut("d/train.jsonl.gz", jsonl()), FAILED, ("d/train.jsonl.gz",)),
]


def line_of(command: str) -> tuple[str, str]:
    """The task, and the command line that fits a small model."""
    task, _, options = command.partition(" ")
    return task, f"{LINES[task]} {options}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_bad_rows_and_columns_are_named(case: Any, capsys: Capture) -> None:
    command, make, code, names = case
    make()
    task, line = line_of(command)
    assert_refused(line, code, names, capsys, task)


@pytest.mark.parametrize("case", JSON)
def test_bad_rows_can_be_skipped(case: str) -> None:
    jsonl(JSON[case][0])()
    data = ReviewData("jsonl", "d", skip_bad=True)
    data.setup("fit")
    assert data.metadata()["class_names"] == ["bad", "good"] and data.skipped == [JSON_ROW]
    assert len(data.dataset("train")) + len(data.dataset("val")) == 20


def test_skipped_texts_are_counted_and_predictions_skip_them(capsys: Capture) -> None:
    csv(",good")()
    line = f"{LINES['bert']} csv"
    assert_refused(line, FAILED, (CSV_ROW, "no text", "--data.skip_bad true"), capsys, "bert")
    assert run(f"{line} --data.skip_bad true --run_dir r", "bert") == 0
    assert json.loads(Path("r/summary.json").read_text())["skipped"] == 1
    assert "skipped" in capsys.readouterr().out
    Path("asked.txt").write_bytes(b"fine\n \ncaf\xe9\n")
    line = "predict --ckpt_path r/checkpoints/best.ckpt --data.predict_path"
    assert_refused(f"{line} nowhere.txt", USER, "nowhere.txt", capsys, "bert")
    assert_refused(f"{line} asked.txt", FAILED, ("line 3 of asked.txt", "UTF-8"), capsys, "bert")
    assert run(f"{line} asked.txt --data.skip_bad true", "bert") == 0
    assert "2 bad lines skipped" in capsys.readouterr().out
    assert len(Path("predictions.csv").read_text().splitlines()) == 2


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


def not_readable(name: str) -> None:
    Path(name).mkdir(mode=0)


PLACES: dict[str, tuple[Make, str]] = {  # good data, where something odd is put
    "vit folder": (images, "d/train/cat/bad.png"),
    "bert txt": (texts, "d/train/cat/bad.txt"),
    "lm files": (texts, "d/train/bad.txt"),
    "bert csv": (csv(), "d/test.bad.csv"),
    "bert hub": (table(1), "d/test-bad.parquet"),
    "seq2seq files": (lambda: write_pairs(Path("d")), "d/bad.en"),
}
ODD: list[tuple[str, Callable[[str], None]]]
ODD = [(place, odd) for place in PLACES for odd in (pipe, broken_link, not_readable)]
ODD += [("vit folder", folder_link), ("bert txt", device_link), ("lm files", not_utf8)]
ODD += [("bert hub", loop)]


@pytest.mark.parametrize(("command", "odd"), ODD)
def test_what_is_no_file_is_named(
    command: str, odd: Callable[[str], None], capsys: Capture
) -> None:
    if odd is not_readable and os.geteuid() == 0:
        pytest.skip("root reads every folder")
    make, name = PLACES[command]
    make()
    odd(name)
    task, line = line_of(command)
    named = name.replace("bad", "b\\xe9d") if odd is not_utf8 else name
    assert_refused(line, FAILED, named, capsys, task)


@pytest.mark.parametrize("name", ["d\\xf6g", "bad"])
def test_what_is_no_class_is_named(name: str, capsys: Capture) -> None:
    images()
    path = os.fsdecode(b"d/train/" + name.encode().replace(b"\\xf6", b"\xf6"))
    if name == "bad":
        broken_link(path)
    else:
        Path(path).mkdir()
    assert_refused(f"{LINES['vit']} folder", FAILED, f"d/train/{name}", capsys)


def test_links_to_files_are_followed() -> None:
    images()
    Path("elsewhere").mkdir()
    for path in list(Path("d/train/cat").iterdir()):
        target = path.rename(Path("elsewhere", path.name)).absolute()
        path.symlink_to(target)
    data = ImageData("folder", "d")
    data.setup("fit")
    assert data.metadata()["class_names"] == ["cat", "dog"] and not data.skipped


ASKED = {  # task and command, and the fixture that trains its checkpoint
    "vit predict --data.predict_path": "best",
    "bert predict --data.predict_path": "reviewer",
    "lm generate --prompt_file": "lm_letters",
    "lm score --data.path": "lm_letters",
    "seq2seq translate --file": "translator",
    "vit fit --preset digits --data.source folder --data.path": None,
    "bert fit --data.source csv --data.path": None,
    "mlm fit --data.source txt --data.path": None,
    "lm fit --data.source files --data.path": None,
    "seq2seq fit --data.source table --data.languages en-de --data.path": None,
}


@pytest.fixture(scope="module")
def reviewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny classifier of texts."""
    folder = tmp_path_factory.mktemp("reviewer")
    (folder / "a.csv").write_text("text,label\n" + "a good film,good\na bad film,bad\n" * 10)
    assert (
        run(f"{FIT} --data.source csv --data.path {folder}/a.csv --run_dir {folder}/run", "bert")
        == 0
    )
    return folder / "run" / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
@pytest.mark.parametrize("command", ASKED)
def test_only_regular_files_are_asked_for(
    command: str, name: str, request: pytest.FixtureRequest, capsys: Capture
) -> None:
    pipe("pipe")
    task, _, line = command.partition(" ")
    checkpoint = ASKED[command]
    if checkpoint is not None:
        verb, _, option = line.partition(" ")
        line = f"{verb} --ckpt_path {request.getfixturevalue(checkpoint)} {option}"
    assert_refused(f"{line} {name}", USER, name, capsys, task)


# Images that a table names.


def write_pictures(path: str) -> None:
    """A table of 20 images, of which the last is a path."""
    Path("d").mkdir()
    picture(8).save("good.png")
    picture(8).save("d/inside.png")
    pipe("d/pipe")
    for link, target in (("out", "good.png"), ("zero", "/dev/zero"), (".folder", ".")):
        Path("d", link).symlink_to(Path(target).absolute())
    images = [{"bytes": Path("good.png").read_bytes(), "path": "good.png"}] * 19
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    path = path.replace("HERE", str(Path().absolute()))
    columns = {"image": pa.array([*images, {"bytes": None, "path": path}], kind), "label": LABELS}
    parquet.write_table(pa.table(columns), "d/train-0.parquet")


OUTSIDE = ["good.png", "../good.png", "HERE/good.png", "/etc/hostname", "/dev/zero", "out"]
OUTSIDE += [".folder/good.png"]
NO_FILES = ["pipe", "zero", "a\0b", "", "."]


@pytest.mark.parametrize("path", [*OUTSIDE, *NO_FILES])
def test_rows_name_files_in_the_data_folder_only(path: str, capsys: Capture) -> None:
    write_pictures(path)
    assert_refused(f"{LINES['vit']} hub", FAILED, (ROW, "--data.skip_bad"), capsys)


@pytest.mark.parametrize("path", ["inside.png", "HERE/d/inside.png"])
def test_rows_may_name_files_in_the_data_folder(path: str) -> None:
    write_pictures(path)
    data = ImageData("hub", "d")
    data.setup("fit")
    assert len(data.source.split("train")) == 18 and not data.skipped


# Options that mean nothing to a source.

UNUSED = [  # task and source, an option
    ("vit digits", "image_column img"),
    ("vit folder", "label_column y"),
    ("bert reviews", "text_column body"),
    ("bert reviews", "val_fraction 0.3"),
    ("bert csv", "name a/b"),
    ("bert txt", "text_column body"),
    ("mlm reference", "class_names [a,b]"),
    ("lm reference", "blank_lines true"),
    ("lm files", "subset en"),
    ("seq2seq dates", "source_column en"),
    ("seq2seq files", "header false"),
    ("seq2seq table", "test t"),
]


@pytest.mark.parametrize(("command", "option"), UNUSED)
def test_options_that_a_source_does_not_use(command: str, option: str, capsys: Capture) -> None:
    Path("d").mkdir()
    task, line = line_of(command)
    if command.split()[1] in ("digits", "reviews", "reference", "dates"):
        line = line.replace("--data.path d", "")
    name = f"--data.dataset.{option.split()[0]}"
    assert_refused(f"{line} --data.dataset.{option}", USER, name, capsys, task)


def test_unused_options_of_config_files_and_checkpoints(capsys: Capture) -> None:
    """Those of a checkpoint are not refused."""
    Path("more.yaml").write_text("data: {source: digits, dataset: {image_column: img}}\n")
    assert_refused("fit --config more.yaml", USER, "--data.dataset.image_column img", capsys)
    table("good", label=["bad", "good"] * 10)()
    options = "--data.dataset.label_column label --data.dataset.name a/b"
    assert run(f"{LINES['bert']} hub {options} --run_dir r", "bert") == 0
    Path("t/test/bad").mkdir(parents=True)
    Path("t/test/bad/1.txt").write_text("film number 3")
    test = "test --ckpt_path r/checkpoints/best.ckpt --data.source txt --data.path t"
    assert run(test, "bert") == 0
    assert run(f"{test} --data.dataset.subset x", "bert") == USER
    assert "--data.dataset.subset" in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["gz", "zst"])
def test_compressed_files_that_end_too_early(codec: str) -> None:
    """Wherever they end."""
    rows = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 10).encode()
    whole = compress(rows, codec)
    sizes = [*range(0, len(whole) - 20, 61), *range(len(whole) - 20, len(whole))]
    contents = [whole[:size] for size in sizes]
    if codec == "gz":
        contents += [whole + whole[:size] for size in (1, 9, 20, 60)]
    path = Path(f"a.jsonl.{codec}")
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(DataError, match=path.name):
            list(document_source("files", str(path), CorpusOptions()).read("train"))
