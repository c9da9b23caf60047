"""Classes whose labels in the data have other names, when only some of them are tested."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from datamodules.reviews import ReviewData
from datamodules.sources import TEXT_SOURCES, TextDatasetOptions
from datamodules.tokenizers import TokenizerConfig
from datamodules.utils.errors import DataError, UsageError


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


NAMES = ["awful", "bad", "fair", "good", "great"]


def table(path: str, labels: list[Any]) -> str:
    """A table with four texts for each label."""
    Path(path).parent.mkdir(exist_ok=True)
    rows = [f"it is {label} {i},{label}" for i in range(4) for label in labels]
    Path(path).write_text("\n".join(["text,label", *rows]) + "\n")
    return path


def reviews(path: str, **options: Any) -> ReviewData:
    dataset = TextDatasetOptions(**options)
    return ReviewData(path=path, dataset=dataset, tokenizer=TokenizerConfig(vocabulary=100))


def classes_of(path: str, trained: ReviewData) -> set[tuple[int, int]]:
    """The labels of a table and the classes that a model of other data is tested with."""
    data = reviews(path)
    data.set_metadata(trained.metadata())
    data.prepare_data()
    data.setup("test")
    split = data.source.split("test")
    raw = [int(text.split()[2]) for text in split.column.to_pylist()]
    return set(zip(raw, split.labels.tolist(), strict=True))


@pytest.mark.parametrize("first", [0, 1, 7])
def test_labels_of_a_test_mean_what_they_meant_in_training(first: int) -> None:
    labels = [*range(first, first + 5)]
    trained = reviews(table("train.csv", labels), class_names=NAMES)
    trained.prepare_data()
    trained.setup("fit")
    for some in (labels, labels[:4], labels[1:], labels[2:3]):
        for path in ("some.csv", "folder/test.csv"):
            expected = {(label, label - first) for label in some}
            assert classes_of(table(path, some), trained) == expected


def test_names_may_be_numbers_that_are_other_labels() -> None:
    trained = reviews(table("train.csv", [*range(5)]), class_names=["1", "2", "3", "4", "5"])
    trained.prepare_data()
    trained.setup("fit")
    assert classes_of(table("some.csv", [1, 2]), trained) == {(1, 1), (2, 2)}


@pytest.mark.parametrize("name", [False, True, None, ["b"], {"b": "c"}], ids=str)
def test_names_that_yaml_does_not_take_for_texts_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="quotes"):
        TextDatasetOptions(class_names=["a", name])


@pytest.mark.parametrize("form", ["['green', 'red']", '[""green"", ""red""]', "green,red"])
def test_lists_of_labels_as_pandas_json_and_people_write_them(form: str) -> None:
    rows = [f'one,"{form}"', 'two,"[]"' if form[0] == "[" else "two,", "three,red"]
    Path("sets.csv").write_text("\n".join(["text,labels", *rows]))
    options = TextDatasetOptions(problem_type="multi_label_classification")
    source = TEXT_SOURCES["csv"]("sets.csv", options)
    assert source.class_names == ["green", "red"]
    assert torch.equal(source.labels("train"), torch.tensor([[1.0, 1.0], [0, 0], [0, 1]]))


@pytest.mark.parametrize("text", ["['green' 'red']", "[...]", "[0x10]", "[{[]}]"])
def test_text_in_brackets_that_is_no_list_is_a_label(text: str) -> None:
    Path("sets.csv").write_text(f"text,labels\none,{text}\n")
    options = TextDatasetOptions(problem_type="multi_label_classification")
    assert TEXT_SOURCES["csv"]("sets.csv", options).class_names == [text]


def boolean_labels(kind: str) -> str:
    """Path of a table in which texts have true or false as label."""
    columns = {"text": ["one", "two", "three"], "label": [True, False, True]}
    path = f"booleans.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        rows = [
            dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)
        ]
        Path(path).write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_booleans_are_classes(kind: str) -> None:
    name = "hub" if kind == "parquet" else kind
    found = TEXT_SOURCES[name](boolean_labels(kind), TextDatasetOptions())
    assert found.class_names == ["false", "true"]
    assert found.labels("train").tolist() == [1, 0, 1]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_booleans_are_not_numbers(kind: str) -> None:
    name = "hub" if kind == "parquet" else kind
    options = TextDatasetOptions(problem_type="regression")
    with pytest.raises((DataError, UsageError), match="holds bool|has true as label"):
        TEXT_SOURCES[name](boolean_labels(kind), options).labels("train")


@pytest.mark.parametrize("labels", [["False", "True"], ["false", "true"]])
def test_booleans_of_arrow_and_of_pandas_are_the_same_classes(labels: list[str]) -> None:
    """A model that has seen one spelling is tested with the other."""
    trained = reviews(table("train.csv", labels * 5))
    trained.prepare_data()
    trained.setup("fit")
    for others in (["False", "True"], ["false", "true"]):
        data = reviews(table("some.csv", others * 5))
        data.set_metadata(trained.metadata())
        data.prepare_data()
        data.setup("test")
        split = data.source.split("test")
        found = {
            text.split()[2]: label
            for text, label in zip(split.column.to_pylist(), split.labels.tolist(), strict=True)
        }
        assert data.source.class_names == labels and found == {others[0]: 0, others[1]: 1}
