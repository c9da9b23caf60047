"""The path shows which source reads it, in every task; else the choices are named."""

from pathlib import Path

import pytest

from datamodules.sources import (
    CORPORA,
    DOCUMENTS,
    PARALLEL,
    SOURCES,
    TEXT_SOURCES,
    CorpusOptions,
    choose_source,
    open_source,
)
from datamodules.sources.base import HubOptions
from datamodules.utils.errors import UsageError
from tests.helpers.refusals import refused
from tests.helpers.tables import write

TASKS = {"images": SOURCES, "texts": TEXT_SOURCES, "corpus": CORPORA, "documents": DOCUMENTS}
TASKS["pairs"] = PARALLEL
SHOWN = [  # task, files in d/, path, source
    ("images", "train/cat/1.PNG train/dog/a/2.jpg README.md", "d", "folder"),
    ("images", "cat/1.png dog/a/2.jpg README.md", "d", "folder"),
    ("images", "train/cat/1.png cat/1.png my.csv", "d", "folder"),
    ("images", "data/train-00000-of-00001.parquet README.md", "d", "hub"),
    ("images", "a.parquet", "d/a.parquet", "hub"),
    ("texts", "train.csv README.txt", "d", "csv"),
    ("texts", "my.tsv.gz", "d/my.tsv.gz", "csv"),
    ("texts", "my.csv", "d", "csv"),
    ("texts", "train.jsonl val.jsonl", "d", "jsonl"),
    ("texts", "my.json", "d/my.json", "jsonl"),
    ("texts", "train/pos/1.txt train/neg/1.txt unsup/1.txt readme.csv", "d", "folder"),
    ("texts", "pos/1.txt neg/1.txt readme.txt", "d", "folder"),
    ("texts", "train/data.arrow train/state.json dataset_dict.json", "d", "hub"),
    ("texts", "missing.csv", "d/no.csv", "csv"),
    ("corpus", "train/pos/1.txt train/unsup/2.txt", "d", "folder"),
    ("corpus", "unsup/1.txt train/pos/1.txt", "d", "folder"),
    ("corpus", "books/fiction/1.txt books/2.txt", "d", "txt"),
    ("corpus", "train/1.txt val/2.txt", "d", "txt"),
    ("corpus", "book.txt", "d/book.txt", "txt"),
    ("corpus", "train.csv", "d", "csv"),
    ("documents", "a.txt b/c.md e.txt.gz .hidden.jsonl", "d", "txt"),
    ("documents", "a.jsonl.zst", "d", "jsonl"),
    ("documents", "my.csv", "d/my.csv", "csv"),
    ("documents", "train/pos/1.txt train/neg/1.txt", "d", "txt"),
    ("documents", "000.parquet 001.parquet", "d", "hub"),
    ("documents", "train-0.parquet README.md", "d", "hub"),
    ("pairs", "train.en train.de val.en val.de README.md", "d", "txt"),
    ("pairs", "train/a.en.gz train/a.de.gz", "d", "txt"),
    ("pairs", "my.tsv", "d/my.tsv", "csv"),
    ("pairs", "train.jsonl", "d", "jsonl"),
    ("pairs", "train.parquet", "d", "hub"),
]
UNTOLD = [  # task, files in d/, path, what is named
    ("images", "train/cat/1.png train.parquet", "d", ["folder or hub", "cat/1.png", "n.parquet"]),
    ("images", "1.png 2.JPG a.md", "d", ["d holds 2 images but no class", " CLASS/*.jpg", "csv"]),
    ("images", "a.md", "d", ["no files of a known kind", "train/CLASS/*.jpg (folder)"]),
    ("images", "cat/1.png my.csv", "d", ["set --data.source folder or csv"]),
    ("images", "val/1.png", "d", ["d holds 1 image but no class folders"]),
    ("images", "photo.png", "d/photo.png", ["photo.png is one image", "train/CLASS/*.jpg;"]),
    ("texts", "train.csv train.jsonl", "d", ["set --data.source csv or jsonl"]),
    ("texts", "train/a/1.txt train.csv", "d", ["--data.source csv or folder", "d/train.csv"]),
    ("texts", "1.txt 2.txt", "d", ["d holds 2 texts but no class folders", "CLASS/*.txt", "csv"]),
    ("texts", "", "nowhere", ["nowhere does not exist", "train.csv (csv)"]),
    ("corpus", "a.txt b.csv", "d", ["csv or txt", "d/a.txt", "d/b.csv"]),
    ("documents", "a.txt b.jsonl", "d", ["txt or jsonl"]),
    ("documents", "tales.txt", "d/tales", ["d/tales does", "mean d/tales.txt", "*.csv (csv)"]),
    ("documents", "a.pdf", "d/a.pdf", ["a.pdf is of no known kind", "*.txt (txt)"]),
    ("pairs", "train.en train.de train.tsv", "d", ["txt or csv"]),
    ("pairs", "a.en", "d", ["train.en and train.de (txt)"]),
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    Path("d").mkdir()


def touch(files: str) -> None:
    for name in files.split():
        write(Path("d", name), b"")


@pytest.mark.parametrize(("task", "files", "path", "name"), SHOWN)
def test_the_path_shows_its_kind(task: str, files: str, path: str, name: str) -> None:
    touch(files)
    assert choose_source(TASKS[task], None, path, HubOptions()) == name


@pytest.mark.parametrize(("task", "files", "path", "names"), UNTOLD)
def test_what_cannot_be_told_names_the_choices(
    task: str, files: str, path: str, names: list[str]
) -> None:
    touch(files)
    with refused(UsageError, *names):
        choose_source(TASKS[task], None, path, HubOptions())


@pytest.mark.parametrize("path", ["d/talse.txt", "d/tales.tx"])
def test_a_missing_file_is_told_with_the_nearest_and_what_else_is_read(path: str) -> None:
    touch("tales.txt other.md")
    for name in (None, "txt"):
        with refused(UsageError, path, "d/tales.txt", "*.csv", "*.jsonl", "*.parquet"):
            source = open_source(DOCUMENTS, name, path, CorpusOptions())
            source.prepare()


def test_a_name_that_is_not_near_is_not_suggested() -> None:
    touch("dates/a.txt")
    with pytest.raises(UsageError) as caught:
        choose_source(DOCUMENTS, None, "d/data", HubOptions())
    assert "dates" not in str(caught.value)


def test_a_kind_of_file_has_the_same_name_in_all_tasks() -> None:
    expected = {"train.csv": "csv", "train.tsv": "csv", "train.jsonl": "jsonl"}
    expected |= {"train.parquet": "hub", "train.arrow": "hub"}
    for file, name in expected.items():
        pairs = [pair for sources in TASKS.values() for pair in sources.items()]
        names = [found for found, source in pairs if source.reads(Path(file))]
        assert set(names) == {name} and len(names) > 2


def test_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named data set, its copy below TESSERA_DATA, or else what is embedded."""
    embedded = {"images": "digits", "texts": "reviews", "pairs": "dates"}
    for task, sources in TASKS.items():
        assert choose_source(sources, None, None, HubOptions()) == embedded.get(task, "reference")
        assert choose_source(sources, None, None, HubOptions(name="me/it")) == "hub"
    touch("train.csv")
    monkeypatch.setenv("TESSERA_DATA", str(Path.cwd()))
    assert choose_source(TEXT_SOURCES, None, None, HubOptions(local="d")) == "csv"


def test_a_path_may_be_the_id_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DATA", str(Path.cwd()))
    for name in (None, "hub"):
        source = open_source(DOCUMENTS, name, "me/it", CorpusOptions(local="d"))
        assert source.name == "hub" and source.origin == "me/it" and source.path is None
    touch("x.parquet")
    assert open_source(DOCUMENTS, None, "d/x.parquet", CorpusOptions()).origin == "d/x.parquet"
    with refused(UsageError, "d/typo does not exist"):  # beside files, so it is one
        choose_source(DOCUMENTS, None, "d/typo", CorpusOptions())
