"""Folders of classes without train/ are the training split; a test may lack some classes."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from datamodules.images import ImageData
from datamodules.reviews import ReviewData
from datamodules.sources import (
    SOURCES,
    TEXT_SOURCES,
    DatasetOptions,
    TextDatasetOptions,
    choose_source,
    open_source,
)
from datamodules.tokenizers import TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.images import METADATA, save_image
from tests.helpers.refusals import refused
from tests.helpers.tables import write

WORDS = TokenizerConfig("whitespace", min_frequency=1, lowercase=False)
STARS = [{"text": f"film {i}", "label": 1 + i % 5} for i in range(50)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TESSERA_DATA", raising=False)


def save(folder: Path, kind: str, count: int = 10) -> None:
    """Two classes below a folder, at two depths."""
    for name in ("bee", "ant"):
        for i in range(count):
            path = folder / name / ("deeper" if i % 2 else "") / f"{i}.png"
            if kind == "images":
                save_image(path, i)
            else:
                write(path.with_suffix(".txt"), f"{name} {i}")


def found(kind: str, path: str, split: str) -> list[tuple[str, int]]:
    """Names of files or texts, and labels."""
    if kind == "images":
        images = open_source(SOURCES, None, path, DatasetOptions()).split(split)
        names = [Path(images.name(i)).relative_to(path) for i in range(len(images))]
        parts = ["/".join(name.parts[name.parts[0] == "train" :]) for name in names]
        return [*zip(parts, images.labels.tolist(), strict=True)]
    texts = open_source(TEXT_SOURCES, None, path, TextDatasetOptions()).split(split)
    return [*zip(texts.column.to_pylist(), texts.labels.tolist(), strict=True)]


@pytest.mark.filterwarnings("ignore:The data have no test split")
@pytest.mark.parametrize("kind", ["images", "texts"])
def test_classes_without_train_are_the_training_split(kind: str) -> None:
    save(Path("nested/train"), kind)
    save(Path("flat"), kind)
    Path("flat/README.md").write_text("about it")
    for name in (".ipynb_checkpoints", "__MACOSX", "ant/__MACOSX"):
        Path("flat", name).mkdir()
    Path("flat/ant/__MACOSX/a.txt").write_text("no text")
    for split, size in (("train", 18), ("val", 2), ("test", 2)):
        assert found(kind, "flat", split) == found(kind, "nested", split)
        assert len(found(kind, "flat", split)) == size
    save(Path("flat/train"), kind, 5)  # beside the folders of classes: only this one is read
    Path("flat/notes").mkdir()
    with pytest.warns(UserWarning, match="flat: ant/, bee/ belong to no split"):
        assert len(found(kind, "flat", "train")) == 8


@pytest.mark.filterwarnings("ignore:The data have no test split")
@pytest.mark.parametrize("kind", ["images", "texts"])
def test_links_to_folders_are_followed(kind: str) -> None:
    """As a split or as a class; a link to where it lies is not an endless loop."""
    save(Path("elsewhere"), kind)
    save(Path("whole/train"), kind)
    Path("classes").mkdir()
    for name in ("ant", "bee"):
        Path("classes", name).symlink_to(Path("elsewhere", name).absolute())
    Path("whole/test").symlink_to("../elsewhere")
    Path("test_only").mkdir()
    Path("test_only/test").symlink_to("../elsewhere")
    for path, split, size in (("classes", "train", 18), ("whole", "test", 20)):
        assert len(found(kind, path, split)) == size
    sources = SOURCES if kind == "images" else TEXT_SOURCES
    assert choose_source(sources, None, "test_only", DatasetOptions()) == "folder"
    Path("whole/val").symlink_to(".")
    assert choose_source(sources, None, "whole", DatasetOptions()) == "folder"


def test_links_to_folders_of_tables_are_followed() -> None:
    write(Path("d/train.csv"), STARS)
    write(Path("elsewhere/table.csv"), STARS[:20])
    Path("d/test").symlink_to("../elsewhere")
    source = open_source(TEXT_SOURCES, None, "d", TextDatasetOptions())
    assert len(source.split("test")) == 20
    Path("d/more").symlink_to("../elsewhere")
    with refused(DataError, "d/more is a link to a folder"):
        open_source(TEXT_SOURCES, "csv", "d", TextDatasetOptions()).split("test")


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_classes_beside_another_split_are_refused(kind: str) -> None:
    save(Path("flat"), kind)
    save(Path("flat/test"), kind)
    with refused(UsageError, "no folder train/, only test/", "flat/train/CLASS/"):
        data = ImageData(path="flat") if kind == "images" else ReviewData(path="flat")
        data.setup("fit")


def test_too_few_images_of_which_some_are_corrupt() -> None:
    for skip_bad in (False, True):
        save(Path("few"), "images", 1)
        with refused(UsageError, "too few training images to hold some out: add"):
            ImageData(path="few", skip_bad=skip_bad).setup("fit")
        Path("few/bee/0.png").write_text("no image")
        with refused(UsageError, "too few", "1 of the 2 cannot be read", "few/bee/0.png"):
            ImageData(path="few", skip_bad=skip_bad).setup("fit")


# A model is tested on data with some of its classes.


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.filterwarnings("ignore:The data have no test split")
def test_images_of_some_classes(stage: Any) -> None:
    """The classes of METADATA are ant, bee, cat."""
    for name in ("bee", "cat"):
        for i in range(10):
            save_image(Path(f"some/{name}/{i}.png"), i)
    data = ImageData(path="some", image_size=8)
    data.set_metadata(METADATA)
    data.setup(stage)
    assert data.source.class_names == METADATA["class_names"]
    split = "val" if stage == "validate" else "test"
    records = data._split(split)
    names = [Path(records.name(i)).parent.name for i in range(len(records))]
    labels = data.dataset(split).labels.tolist()
    assert [*zip(names, labels, strict=True)] == [("bee", 1), ("cat", 2)]
    options = DatasetOptions(class_names=METADATA["class_names"])
    with refused(UsageError, "class ant has no images"):
        ImageData(path="some", image_size=8, dataset=options).setup("fit")


def trained(rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """The metadata of a model of texts."""
    write(Path("train.csv"), rows)
    data = ReviewData(path="train.csv", tokenizer=WORDS, dataset=TextDatasetOptions(**options))
    data.setup("fit")
    return data.metadata()


def labels_tested(metadata: dict[str, Any], path: str, **options: Any) -> dict[str, int]:
    """The labels of the texts that are tested."""
    data = ReviewData(path=path, tokenizer=WORDS, dataset=TextDatasetOptions(**options))
    data.set_metadata(metadata)
    data.setup("test")
    assert data.source.checked_class_names() == metadata["class_names"]
    texts = data.source.split("test")
    return dict(zip(texts.column.to_pylist(), texts.labels.tolist(), strict=True))


@pytest.mark.filterwarnings("ignore:The data have no test split")
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("path", ["other.{}", "d"])  # all of its texts are in d/test.SUFFIX
@pytest.mark.parametrize("words", [False, True])
def test_labels_of_a_table_mean_the_classes_of_the_model(
    words: bool, path: str, suffix: str
) -> None:
    """Numbers from 1 on, or words, of which the table has two."""
    names = ["awful", "bad", "fair", "good", "great"] if words else ["1", "2", "3", "4", "5"]
    metadata = trained([{**row, "label": names[row["label"] - 1]} for row in STARS])
    assert metadata["class_names"] == names
    rows = [{"text": f"new {i}", "label": names[(1, 3)[i % 2]]} for i in range(40)]
    if not words and suffix != "csv":
        rows = [{**row, "label": int(row["label"])} for row in rows]
    path = path.format(suffix)
    write(Path("d", f"test.{suffix}") if path == "d" else Path(path), rows)
    labels = labels_tested(metadata, path)
    assert len(labels) == (40 if path == "d" else 4)
    assert all(label == (1, 3)[int(text.split()[1]) % 2] for text, label in labels.items())


@pytest.mark.parametrize("kind", ["csv", "folder"])
def test_a_class_without_training_texts(kind: str) -> None:
    """Naming it as a class does not help; texts of it do, and so does removing it."""

    def add(split: str, name: str) -> None:
        texts.setdefault(split, []).append({"text": f"a {name}", "label": name})
        for split, rows in texts.items():
            if kind == "csv":
                write(Path("d", f"{split}.csv"), rows)
            for i, row in enumerate(rows if kind == "folder" else []):
                write(Path("d", split, row["label"], f"{i}.txt"), row["text"])

    def tested(**options: Any) -> int:
        source = open_source(TEXT_SOURCES, None, "d", TextDatasetOptions(**options))
        source.checked_class_names()
        source.records("train")
        return len(source.split("test"))

    texts: dict[str, list[dict[str, Any]]] = {}
    for name in ("ant", "bee", "ant", "bee"):
        add("train", name)
    for name in ("ant", "wolf"):
        add("test", name)
    advice = {"csv": "add training texts", "folder": "put training texts into d/train/wolf"}
    with refused(Exception, "wolf", advice[kind], "or remove"):
        tested()
    with refused(UsageError, "class wolf", "--data.dataset.class_names", "the other splits"):
        tested(class_names=["ant", "bee", "wolf"])
    add("train", "wolf")
    assert tested() == 2


@pytest.mark.parametrize(
    "names", [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], ["awful", "bad", "fair", "good", "great"]]
)
def test_names_of_labels_from_1_to_5(names: Any) -> None:
    """Words name the labels in their order; numbers are the labels themselves, in this order."""
    write(Path("train.csv"), STARS)
    options = TextDatasetOptions(class_names=names)
    source = open_source(TEXT_SOURCES, None, "train.csv", options)
    assert source.checked_class_names() == [str(name) for name in names]
    expected = [names.index(row["label"]) if 1 in names else row["label"] - 1 for row in STARS]
    samples = source.records("train")
    assert samples is not None and samples.labels.tolist() == expected


def test_numbers_that_are_no_class_of_the_model_are_refused() -> None:
    """Stars from 0 on are not taken for positions among the classes 1 to 5."""
    metadata = trained(STARS)
    rows = [{"text": f"new {i}", "label": i % 5} for i in range(40)]
    write(Path("d/test.csv"), rows)
    with refused(Exception, "line 2 of d/test.csv has the label 0", "1, 2, 3, 4, 5"):
        labels_tested(metadata, "d")
    write(Path("other.csv"), rows)
    with refused(Exception, "of other.csv has the label 0", "1, 2, 3, 4, 5"):
        labels_tested(metadata, "other.csv")
    write(Path("other.csv"), [{"text": f"new {i}", "label": 2 + i % 5} for i in range(40)])
    with refused(Exception, "of other.csv has the label 6", "1, 2, 3, 4, 5"):
        labels_tested(metadata, "other.csv")


@pytest.mark.filterwarnings("ignore:The data have no test split")
def test_numbers_in_place_of_words_are_positions() -> None:
    names = ["bad", "fair", "good"]
    metadata = trained([{"text": f"film {i}", "label": names[i % 3]} for i in range(30)])
    write(Path("other.csv"), [{"text": f"new {i}", "label": 1} for i in range(20)])
    with pytest.warns(UserWarning, match="numbers in place of words: 0 is read as bad, 2 as good"):
        assert set(labels_tested(metadata, "other.csv").values()) == {1}


@pytest.mark.filterwarnings("ignore:The data have no test split")
def test_numbers_whose_classes_were_named_are_positions() -> None:
    rows = [{"text": f"film {i}", "label": i % 3} for i in range(30)]
    names = ["bad", "fair", "good"]
    metadata = trained(rows, class_names=names)
    for path in ("d/test.csv", "other.csv"):
        write(Path(path), [{"text": f"new {i}", "label": 2} for i in range(20)])
    assert set(labels_tested(metadata, "d").values()) == {2}
    assert set(labels_tested(metadata, "other.csv", class_names=names).values()) == {2}


def test_a_description_of_other_classes_is_refused() -> None:
    """The hub's description names the numbers: the order may be another one."""
    metadata = trained([{"text": f"film {i}", "label": ("neg", "pos")[i % 2]} for i in range(30)])
    names = datasets.ClassLabel(names=["pos", "neg"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    write(
        Path("d/test.parquet"), [{"text": f"new {i}", "label": i % 2} for i in range(9)], features
    )
    with refused(UsageError, "(pos, neg)", "(neg, pos)"):
        labels_tested(metadata, "d")


def test_the_missing_test_split_is_told_once(recwarn: pytest.WarningsRecorder) -> None:
    rows = [{"text": f"film {i}", "label": i % 2} for i in range(30)]
    write(Path("train.csv"), rows)
    source = open_source(TEXT_SOURCES, None, "train.csv", TextDatasetOptions())
    for _ in range(2):
        source.split("test")
    assert sum("no test split" in str(warning.message) for warning in recwarn) == 1
