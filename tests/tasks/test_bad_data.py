"""Data that no model should learn from: one sentence that names file and row, before training."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from datamodules.images import ImageData
from tests.helpers.command import Console, run
from tests.helpers.marks import slow_except
from tests.helpers.results import logged, summary
from tests.helpers.tables import write
from tests.helpers.tiny import (
    FEW_STEPS,
    NET,
    SMALL_LM,
    SMALL_S2S,
    picture,
    write_images,
    write_pairs,
)

pytestmark = pytest.mark.timeout(120)  # a pipe or a device would be read for ever

Make = Callable[[str], Any]
USER = 2
FAILED = 1
FIT = f"fit {NET} --trainer.max_epochs 1 --data.tokenizer.vocabulary 300 --data.batch_size 8"
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


def csv(bad: bytes = b"") -> None:
    lines = [f"{text},{CLASSES[i % 2]}\n" for i, text in enumerate(TEXTS)]
    write(Path("d/train.csv"), b"text,label\n" + "".join(lines).encode() + bad)


def tables() -> None:
    rows = [{"text": text, "label": CLASSES[i % 2]} for i, text in enumerate(TEXTS)]
    write(Path("d/train-0.parquet"), rows)


def texts() -> None:
    for i, text in enumerate(TEXTS):
        write(Path("d/train", ("cat", "dog")[i % 2], f"{i}.txt"), text)


def images() -> None:
    write_images(Path("d"))


def pairs() -> None:
    write_pairs(Path("d"))


def line_of(command: str) -> tuple[str, str]:
    """The task, and the command line that trains a small model."""
    task, _, options = command.partition(" ")
    return task, f"{LINES[task]} {options}"


BAD: list[tuple[str, str, bytes, int, tuple[str, ...]]] = [  # task and source, file, content, names
    ("bert csv", "train.csv", b"text,label\na,bad\n", USER, ("bad",)),
    ("mlm jsonl", "train.jsonl", b'{"text": ["a"]}\n', FAILED, ("line 1 of d/train.jsonl",)),
    ("lm txt", "a.txt", b"one\n\xe9\n", FAILED, ("d/a.txt", "line 2")),
    ("lm txt", "a.txt.gz", b"no gzip", FAILED, ("d/a.txt.gz",)),
    ("seq2seq csv", "train.csv", b"en,xx\na,b\n", USER, ("--data.languages",)),
    ("seq2seq txt", "train.en", b"", USER, ("train.up",)),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case[0]}, {case[1]}")
def test_bad_data_stop_every_task_before_training(case: Any, console: Console) -> None:
    command, file, content, code, names = case
    write(Path("d", file), content)
    task, line = line_of(command)
    console.refused(line, *names, task=task, code=code)


def test_skipped_texts_are_counted_and_predictions_skip_them(console: Console) -> None:
    csv(b",good\n")
    line = f"{LINES['bert']} csv"
    names = ("line 22 of d/train.csv", "--data.skip_bad true")
    console.refused(line, *names, task="bert", code=FAILED)
    assert "skipped" in console.printed(f"{line} --data.skip_bad --run_dir r", "bert")[0]
    assert summary("r")["skipped"] == 1
    Path("asked.txt").write_bytes(b"fine\n \n" + b"fine\n" * 7 + b"caf\xe9\n")
    line = "predict --ckpt_path r/checkpoints/best.ckpt --input asked.txt"
    strict = f"{line} --data.skip_bad false"
    console.refused(strict, "line 10 of asked.txt", "UTF-8", task="bert", code=FAILED)
    out, _ = console.printed(f"{line} --data.skip_bad true", "bert")
    assert "2 bad lines skipped: line 2 of asked.txt, line 10 of asked.txt" in out
    lines = Path("predictions.skipped.txt").read_text().splitlines()
    assert lines == ["line 2 of asked.txt", "line 10 of asked.txt"]
    assert len(Path("predictions.csv").read_text().splitlines()) == 9


# Files that are none ------------------------------------------------------------------------------


def pipe(name: str) -> None:
    os.mkfifo(name)


def link_to(target: str) -> Make:
    return lambda name: Path(name).symlink_to(target)


def not_utf8(name: str) -> None:
    Path(os.fsdecode(os.fsencode(name).replace(b"bad", b"b\xe9d"))).touch()


ODD_FILES: dict[str, tuple[Callable[[], Any], str]] = {  # good data, where something odd is put
    "vit folder": (images, "d/train/cat/bad.png"),
    "bert folder": (texts, "d/train/cat/bad.txt"),
    "lm txt": (texts, "d/train/bad.txt"),
    "bert csv": (csv, "d/test.bad.csv"),
    "bert hub": (tables, "d/test-bad.parquet"),
    "seq2seq txt": (pairs, "d/bad.en"),
}
ODD: list[tuple[str, Make]]
ODD = [(command, odd) for command in ODD_FILES for odd in (pipe, link_to("nowhere"))]
ODD += [("vit folder", link_to("/tmp")), ("bert folder", link_to("/dev/zero"))]
ODD += [("lm txt", not_utf8), ("bert hub", link_to("test-bad.parquet"))]


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(("command", "odd"), ODD)
def test_what_is_no_file_is_named(command: str, odd: Make, console: Console) -> None:
    make, name = ODD_FILES[command]
    make()
    odd(name)
    task, line = line_of(command)
    named = name.replace("bad", "b\\xe9d") if odd is not_utf8 else name
    console.refused(line, named, task=task, code=FAILED)


def test_what_is_no_class_is_named(console: Console) -> None:
    images()
    link_to("nowhere")("d/train/bad")
    console.refused(f"{LINES['vit']} folder", "d/train/bad", code=FAILED)
    Path("d/train/bad").unlink()
    Path(os.fsdecode(b"d/train/d\xf6g")).mkdir()
    console.refused(f"{LINES['vit']} folder", "d/train/d\\xf6g", code=FAILED)


ASKED = {  # task and command, and the fixture that trains its checkpoint
    "vit predict --input": "best",
    "bert predict --input": "reviewer",
    "lm generate --input": "lm_letters",
    "lm score --input": "lm_letters",
    "seq2seq translate --input": "translator",
    "vit fit --preset digits --data.source folder --data.path": None,
    "bert fit --data.source csv --data.path": None,
    "mlm fit --data.path": None,
    "lm fit --data.path": None,
    "seq2seq fit --data.languages en-de --data.path": None,
}


@pytest.fixture(scope="module")
def reviewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny classifier of texts."""
    folder = tmp_path_factory.mktemp("reviewer")
    write(folder / "a.csv", "text,label\n" + "a good film,good\na bad film,bad\n" * 10)
    line = f"{FIT} --data.source csv --data.path {folder}/a.csv --run_dir {folder}/run"
    assert run(line, "bert") == 0
    return folder / "run" / "checkpoints" / "best.ckpt"


@pytest.mark.parametrize("command", slow_except([*ASKED][::3], ASKED))
def test_only_regular_files_are_asked_for(
    command: str, request: pytest.FixtureRequest, console: Console
) -> None:
    pipe("pipe")
    task, _, line = command.partition(" ")
    checkpoint = ASKED[command]
    if checkpoint is not None:
        verb, _, option = line.partition(" ")
        line = f"{verb} --ckpt_path {request.getfixturevalue(checkpoint)} {option}"
    for name in ("pipe", "/dev/zero"):
        console.refused(f"{line} {name}", name, task=task)


# Images that a table names ------------------------------------------------------------------------


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


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("path", [*OUTSIDE, *NO_FILES])
def test_rows_name_files_in_the_data_folder_only(path: str, console: Console) -> None:
    write_pictures(path)
    names = ("row 19 of the train split of d", "--data.skip_bad")
    console.refused(f"{LINES['vit']} hub", *names, code=FAILED)


def test_files_that_may_be_read() -> None:
    """Those that rows name in the data folder, and links in folders of images."""
    for name in ("inside.png", "HERE/d/inside.png"):
        write_pictures(name)
        data = ImageData("hub", "d")
        data.setup("fit")
        assert len(data.source.split("train")) == 18 and not data.skipped
        Path("d").rename(f"d{len(name)}")
    images()
    for path in list(Path("d/train/cat").iterdir()):
        path.symlink_to(path.rename(f"elsewhere-{path.name}").absolute())
    data = ImageData("folder", "d")
    data.setup("fit")
    assert data.metadata()["class_names"] == ["cat", "dog"] and not data.skipped


# Options that mean nothing to a source ------------------------------------------------------------

UNUSED = [  # task and source, an option
    ("vit digits", "image_column img"),
    ("vit folder", "label_column y"),
    ("bert reviews", "text_column body"),
    ("bert reviews", "val_fraction 0.3"),
    ("bert csv", "name a/b"),
    ("bert folder", "text_column body"),
    ("mlm reference", "class_names [a,b]"),
    ("lm reference", "blank_lines true"),
    ("lm txt", "subset en"),
    ("seq2seq dates", "source_column en"),
    ("seq2seq txt", "header false"),
    ("seq2seq csv", "test t"),
]


@pytest.mark.plain_every(3)
@pytest.mark.parametrize(("command", "option"), UNUSED)
def test_options_that_a_source_does_not_use(command: str, option: str, console: Console) -> None:
    Path("d").mkdir()
    task, line = line_of(command)
    if command.split()[1] in ("digits", "reviews", "reference", "dates"):
        line = line.replace("--data.path d", "")
    name = f"--data.dataset.{option.split()[0]}"
    console.refused(f"{line} --data.dataset.{option}", name, task=task)


def test_unused_options_of_config_files_and_checkpoints(console: Console) -> None:
    """Those of a checkpoint are not refused."""
    Path("more.yaml").write_text("data: {source: digits, dataset: {image_column: img}}\n")
    error = console.refused("fit --config more.yaml", "--data.dataset.image_column img")
    advice = error.rpartition("if a config sets it, add ")[2].strip()
    assert advice == "--data.dataset.image_column null"
    assert run(f"fit --config more.yaml {advice} --preset digits {FEW_STEPS}", "vit") == 0
    tables()
    options = "--data.dataset.label_column label --data.dataset.name a/b"
    assert run(f"{LINES['bert']} hub {options} --run_dir r", "bert") == 0
    Path("t/test/bad").mkdir(parents=True)
    Path("t/test/bad/1.txt").write_text("film number 3")
    test = "test --ckpt_path r/checkpoints/best.ckpt --data.path t"
    assert run(test, "bert") == 0
    console.refused(f"{test} --data.dataset.subset x", "--data.dataset.subset", task="bert")


@pytest.mark.parametrize("preset", ["digits", "swin_cifar"])
def test_images_of_one_colour(preset: str) -> None:
    """They have no variance to divide by."""
    for number in range(12):
        path = Path(f"images/train/{CLASSES[number % 2]}/{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (200, 10, 10)).save(path)
    net = f"--preset {preset} --model.net.channels null --model.net.image_size 8"
    if preset == "swin_cifar":
        net += " --model.net.window_size 1"
    line = f"fit {net} --data.path images --data.batch_size 4 --trainer.max_epochs 1"
    assert run(f"{line} --trainer.log_every_n_steps 1 --run_dir r") == 0
    losses = logged("r", "train/loss")
    assert losses and all(0 < loss < 10 for loss in losses)


def test_skip_bad_counts(console: Console) -> None:
    write_images(Path("images"))
    Path("images/train/cat/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")
    line = "fit --preset digits --model.net.channels null --data.source folder --data.path images"
    line += " --data.skip_bad --data.batch_size 2"
    out, _ = console.printed(f"{line} --trainer.max_epochs 1 --run_dir r")
    assert summary("r")["skipped"] == 1 and "skipped: images/train/cat/broken.jpg" in out
    assert Path("r/skipped.txt").read_text() == "images/train/cat/broken.jpg\n"
    Path("images/test").symlink_to("train")
    out, _ = console.printed("test --ckpt_path r --data.path images --output out")
    assert "skipped: images/test/cat/broken.jpg (all in out/test_skipped.txt)" in out
    assert Path("out/test_skipped.txt").read_text() == "images/test/cat/broken.jpg\n"
