"""A path alone says what a run reads, and the run keeps to it."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml

from datamodules.sources import (
    CORPORA,
    DOCUMENTS,
    PARALLEL,
    SOURCES,
    TEXT_SOURCES,
    UNLABELLED_SOURCES,
    Source,
)
from tasks.checkpoints.reading import KEY
from tests.helpers.command import Console, run
from tests.helpers.results import checkpoint, summary
from tests.helpers.tables import write
from tests.helpers.tiny import NET, picture, write_images

FIT = f"fit {NET} --trainer.limit_test_batches 0 --trainer.max_steps 1 --run_dir r"
TEXTS = f"{FIT} --data.tokenizer.vocabulary 300 --data.batch_size 8 --data.path"


def rows(count: int) -> list[dict[str, str]]:
    return [{"text": f"film {i}", "label": ("bad", "good")[i % 2]} for i in range(count)]


def stored_sources() -> set[str]:
    """Of the run's config and of its checkpoint."""
    config = yaml.safe_load(Path("r/config.yaml").read_text())
    return {config["data"]["source"], checkpoint("r")[KEY]["config"]["data"]["source"]}


def test_a_run_keeps_the_source_that_its_path_showed(console: Console) -> None:
    write(Path("d/train.csv"), rows(40))
    assert run(f"{TEXTS} d", "bert") == 0
    assert stored_sources() == {"csv"}
    write(Path("d/train.jsonl"), rows(9))  # now the path does not say which is meant
    console.refused(f"{TEXTS} d", "--data.source csv or jsonl", task="bert")
    assert run("fit --resume r --trainer.max_steps 2", "bert") == 0
    test = "test --ckpt_path r --trainer.limit_test_batches 1"
    assert run(test, "bert") == 0
    write(Path("other.jsonl"), rows(30))  # of another kind
    assert run(f"{test} --data.path other.jsonl", "bert") == 0
    assert stored_sources() == {"csv"}


@pytest.mark.parametrize(
    ("task", "line", "source"),
    [
        ("vit", f"{FIT} --preset digits --model.net.channels null", "digits"),
        ("vit", f"{FIT} --preset digits --model.net.channels null --data.path images", "folder"),
        ("mlm", f"{TEXTS} book.txt --data.dataset.val_fraction 0.4", "txt"),
    ],
)
def test_other_tasks(task: str, line: str, source: str) -> None:
    if "images" in line:
        write_images(Path("images"))
    write(Path("book.txt"), "\n\n".join("some words " * 9 for _ in range(9)))
    assert run(line, task) == 0
    assert stored_sources() == {source}


@pytest.mark.parametrize("task", ["mae", "igpt"])
@pytest.mark.parametrize("folder", ["", "holiday", "train/holiday"])
def test_a_folder_of_images_without_labels(task: str, folder: str, console: Console) -> None:
    Path("images", folder).mkdir(parents=True)
    for number in range(10):
        picture(8).convert("L").save(Path("images", folder, f"{number}.png"))
    line = f"{FIT} --data.path images"
    size = "--preset digits --model.net.channels null" if task == "mae" else ""
    out, _ = console.printed(f"{line} {size}", task)
    assert out.splitlines()[0].startswith("data    images: 9 training and 1 validation images")
    assert stored_sources() == {"images"}
    write_images(Path("classes"), side=8)
    out, _ = console.printed("test --ckpt_path r --data.path classes", task)
    assert "all 8 images to test" in out
    fault = (
        "images has one class only (holiday)"
        if folder
        else "images holds 10 images but no class folders"
    )
    console.refused(line.replace("--run_dir r", "--run_dir other"), fault, task="vit")
    if task == "igpt":
        console.refused("probe --ckpt_path r", "needs images with one class each", task=task)
    else:
        console.refused("probe --ckpt_path r", "without images with classes", task="vit")


@pytest.mark.parametrize(
    ("task", "sources"),
    [
        ("vit", SOURCES),
        ("mae", UNLABELLED_SOURCES),
        ("igpt", UNLABELLED_SOURCES),
        ("bert", TEXT_SOURCES),
        ("mlm", CORPORA),
        ("lm", DOCUMENTS),
        ("seq2seq", PARALLEL),
    ],
)
def test_help_lists_every_source(
    task: str, sources: Mapping[str, type[Source]], console: Console
) -> None:
    text, _ = console.printed("fit --help data.source", task)
    listed = re.search(r"--data.source \{([\w,]+)\}", text)
    assert listed is not None
    assert {*listed[1].split(",")} == {*sources, "null"}


def test_the_first_line_of_a_run_counts_the_splits_and_names_the_columns(console: Console) -> None:
    texts = [{"id": str(i), "body": f"film {i}", "stars": 1 + i % 2} for i in range(40)]
    for split, count in (("train", 40), ("test", 12)):
        write(Path(f"d/{split}.csv"), texts[:count])
    columns = "--data.dataset.text_column body"
    line = FIT.replace("--trainer.limit_test_batches 0", "--trainer.limit_test_batches 1")
    line += f" --data.tokenizer.vocabulary 300 --data.path d {columns}"
    out, _ = console.printed(f"{line} --data.dataset.label_column stars", "bert")
    first = out.splitlines()[0]
    assert "36 training, 4 validation and 12 test texts, 2 classes (1, 2)" in first
    assert first.endswith("; text column body, label column stars")
    found = summary(Path("r"))
    number = torch.get_num_threads()
    assert out.splitlines()[1:4] == [
        f"model   BertClassifier, {found['parameters']:,} parameters",
        f"device  cpu, {number} thread{'s' * (number > 1)}, float32",
        f"run     1 optimizer step, in {Path('r').resolve()}",
    ]
    write(Path("new.csv"), [{"id": "1", "body": "film 2"}])  # texts to predict have no labels
    out, _ = console.printed("predict --ckpt_path r --input new.csv --output new.jsonl", "bert")
    assert out == "predictions for 1 text are in new.jsonl\n"
    for names, shown in (("[8,9]", "2 classes (8, 9);"), (f"[{'a' * 50},b]", "2 classes;")):
        shutil.rmtree("r")
        given = f"--data.dataset.label_column stars --data.dataset.class_names {names}"
        out, _ = console.printed(f"{line} {given}", "bert")
        assert shown in out.splitlines()[0]
    for _ in range(2):  # the second reads tokens from the cache
        shutil.rmtree("r")
        out, _ = console.printed(f"{line} --data.max_length 8", "lm")
        assert out.splitlines()[0].endswith("test rows; text column body")


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_a_text_that_is_cut_has_as_many_test_samples_as_are_tested(
    task: str, console: Console
) -> None:
    for split, count in (("train", 40), ("test", 12)):
        write(Path(f"d/{split}.csv"), rows(count))
    line = FIT.replace("--trainer.limit_test_batches 0", "--data.max_length 8")
    line += " --data.tokenizer.vocabulary 300 --data.batch_size 8 --data.path d"
    out, _ = console.printed(line, task)
    counted = re.search(r" validation and (\d+) test (rows|chunks)", out.splitlines()[0])
    assert counted is not None, out
    out, _ = console.printed("test --ckpt_path r", task)
    assert f" {counted[1]} {counted[2]} to test" in out.splitlines()[0]
