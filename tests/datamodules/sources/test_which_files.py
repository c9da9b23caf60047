"""Which files of a folder are read, as which split, and what is said of the others."""

import gzip
import os
import unicodedata
from pathlib import Path
from typing import Any

import datasets
import pytest

from datamodules.corpus import CorpusData, CorpusLoading
from datamodules.images import UnlabelledImageData
from datamodules.sources import CorpusOptions
from datamodules.tokenizers import Tokenizer, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.refusals import refused
from tests.helpers.sources import build, read
from tests.helpers.tables import write
from tests.helpers.tiny import picture

ROWS = [{"text": f"text {number}", "label": "ab"[number % 2]} for number in range(20)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ["texts", "corpus", "documents"])
def test_a_part_of_a_local_repository(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("one", "two"):
        rows = [{"text": f"{part} {row['text']}", "label": row["label"]} for row in ROWS]
        write(Path("data/it", part, "train-0.parquet"), rows)
    monkeypatch.setenv("TESSERA_DATA", str(Path("data").resolve()))
    found = build(f"{kind} hub", name="me/it", local="it", subset="two", val_fraction=0.1)
    said = str(read(found, "train"))
    assert "two text 3" in said and "one" not in said


def test_several_splits_of_the_hub_of_one_kind_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train_r1": ROWS[:10], "train_r2": ROWS[10:], "test_r1": ROWS[:4]}
    tables = {name: datasets.Dataset.from_list(rows) for name, rows in parts.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(tables))
    found = build("texts hub", name="me/it", val_fraction=0.1)
    assert len(read(found, "train")) + len(read(found, "val")) == 20
    tables["test_r2"] = datasets.Dataset.from_list([{"other": "a"}])
    assert read(build("texts hub", name="me/it"), "train")
    with refused(DataError, "test_r2", "other columns than test_r1"):
        read(build("texts hub", name="me/it"), "test")
    tables["train"] = datasets.Dataset.from_list(ROWS[:6])  # the others may be parts of it
    found = build("texts hub", name="me/it", val_fraction=0.4)
    assert len(read(found, "train")) + len(read(found, "val")) == 6


@pytest.mark.parametrize("kind", ["texts", "corpus", "documents"])
def test_a_folder_of_datasets_is_read_once(kind: str) -> None:
    """`map` leaves its results beside the data."""
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk("d")
    loaded = datasets.load_from_disk("d")
    loaded.map(lambda row: {"text": row["text"].upper()})
    assert len([*Path("d/train").glob("*.arrow")]) == 2
    train = str(read(build(f"{kind} null d", val_fraction=0.1), "train"))
    assert "text 3" in train and "TEXT" not in train


def test_two_folders_or_files_of_a_split_are_refused() -> None:
    for folder in ("train", "val", "dev"):
        for name in "ab":
            write(Path("texts", folder, name, "1.txt"), "a text")
    with refused(UsageError, "val", "dev", "join them"):
        read(build("texts folder texts"), "val")
    write(Path("books/a.txt"), "a text")
    Path("books/a.txt.gz").write_bytes(gzip.compress(b"a text"))
    with refused(UsageError, "a.txt.gz", "remove one"):
        read(build("documents txt books"), "train")


def test_tables_of_no_split_are_named() -> None:
    for name in ("train", "evaluation"):
        write(Path("d", f"{name}.csv"), ROWS)
    with pytest.warns(UserWarning, match="left out 1 of 2 files, .*evaluation.csv"):
        read(build("texts csv d"), "train")


def test_images_of_a_split_called_unlabeled_are_training_images() -> None:
    for number in range(12):
        folder = Path("images", "unlabeled" if number > 3 else "train")
        folder.mkdir(parents=True, exist_ok=True)
        picture(8).save(folder / f"{number}.png")
    data = UnlabelledImageData(path="images")
    data.setup("fit")
    assert len(data.dataset("train")) + len(data.dataset("val")) == 12


def test_a_file_that_was_replaced_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by one of the same size and time."""
    monkeypatch.setenv("TESSERA_CACHE", str(Path("cache").resolve()))
    Path("t.json").write_text(
        Tokenizer.train(["abcdefgh "], TokenizerConfig("character", 20, 1)).to_json()
    )
    digests = []
    for text in ("abcd abcd ", "efgh efgh "):
        Path("a.txt").write_text(text * 200)
        os.utime("a.txt", (1e9, 1e9))
        config = TokenizerConfig(file="t.json")
        data = CorpusData(path="a.txt", max_length=16, tokenizer=config)
        data.setup("fit")
        tokens = data.dataset("train").file.tokens
        assert set(data.tokenizer.decode(tokens[:50])) <= set(text)
        digests.append(data.training_digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("kind", ["texts", "corpus"])
def test_a_split_without_texts_is_named(kind: str) -> None:
    write(Path("d/train.parquet"), ROWS)
    empty = datasets.Dataset.from_list(ROWS).select([])
    empty.to_parquet("d/test.parquet")
    with refused(DataError, "the test split of d has no"):
        read(build(f"{kind} hub d"), "test")


def test_classes_that_differ_in_their_unicode_form() -> None:
    names = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    rows = [{"text": f"text {number}", "label": names[number % 2]} for number in range(8)]
    write(Path("a.csv"), rows)
    with pytest.warns(UserWarning, match="Unicode form"):
        read(build("texts csv a.csv", val_fraction=0.3), "train")


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Any) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TESSERA_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    write(Path("a.txt"), "some text " * 100)
    with refused(DataError, "TESSERA_CACHE"):
        CorpusData(path="a.txt", dataset=CorpusOptions()).setup("fit")


def test_any_seed_orders_a_corpus() -> None:
    write(Path("a.txt"), "some text " * 400)
    data = CorpusData(path="a.txt", max_length=16, loading=CorpusLoading(seed=-1))
    data.setup("fit")
    assert next(iter(data.train_dataloader()))["tokens"].shape[1] == 16
