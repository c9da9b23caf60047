"""Targets in tables: sets of labels and numbers, in every format; images that a table names."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from datamodules.images import ImageData, LoadingOptions
from datamodules.reviews import ReviewData
from datamodules.sources import SOURCES, TEXT_SOURCES, DatasetOptions, TextDatasetOptions
from datamodules.utils.batching import BucketBatchSampler, ResumableBatchSampler, balanced_sample
from datamodules.utils.errors import DataError, UsageError
from datamodules.vision.decoding import decode
from tests.helpers.images import save_image

TEXTS = ["a b", "c d", "e f", "g h"]
SETS: list[list[str]] = [["war", "comedy"], [], ["war"], ["art"]]
EXPECTED = torch.tensor([[0, 1, 1], [0, 0, 0], [0, 0, 1], [1, 0, 0]]).float()  # art, comedy, war


def source(kind: str, path: Path, problem_type: Any, **options: Any) -> Any:
    return TEXT_SOURCES[kind](str(path), TextDatasetOptions(problem_type=problem_type, **options))


def write_sets(folder: Path, form: str) -> tuple[str, Path]:
    """The texts and their sets of labels in a file; the source that reads it."""
    path = folder / f"train.{form.partition('_')[0]}"
    if form == "csv":
        rows = [f'{text},"{" , ".join(labels)}"' for text, labels in zip(TEXTS, SETS, strict=True)]
        path.write_text("\n".join(["text,labels", *rows]))
        return "csv", path
    if form == "csv_json":
        path = folder / "train.tsv"
        rows = [f"{t}\t{json.dumps(s)}" for t, s in zip(TEXTS, SETS, strict=True)]
        path.write_text("\n".join(["text\tlabels", *rows]))
        return "csv", path
    if form == "jsonl":
        rows = [json.dumps({"text": t, "labels": s}) for t, s in zip(TEXTS, SETS, strict=True)]
        path.write_text("\n".join(rows))
        return "jsonl", path
    if form == "parquet":
        pq.write_table(pa.table({"text": TEXTS, "labels": SETS}), path)
        return "hub", path
    names = ["art", "comedy", "war"]  # parquet_classes: as the hub describes them
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "labels": datasets.Sequence(datasets.ClassLabel(names=names)),
        }
    )
    numbers = [[names.index(label) for label in labels] for labels in SETS]
    data = datasets.Dataset.from_dict({"text": TEXTS, "labels": numbers}, features=features)
    path = folder / "train.parquet"
    data.to_parquet(str(path))
    return "hub", path


@pytest.mark.parametrize("form", ["csv", "csv_json", "jsonl", "parquet", "parquet_classes"])
def test_sets_of_labels(form: str, tmp_path: Path) -> None:
    kind, path = write_sets(tmp_path, form)
    found = source(kind, path, "multi_label_classification")
    assert found.checked_class_names() == ["art", "comedy", "war"]
    torch.testing.assert_close(found.labels("train"), EXPECTED)


def test_labels_may_be_named_in_another_order_and_separated_by_another_character(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train.csv"
    path.write_text("text,genre\na,war; comedy\nb,art\n")
    options = {"label_column": "genre", "label_separator": ";"}
    names = ["war", "art", "comedy"]
    found = source("csv", path, "multi_label_classification", class_names=names, **options)
    assert found.labels("train").tolist() == [[1, 0, 1], [0, 1, 0]]
    names = ["war", "art"]
    found = source("csv", path, "multi_label_classification", class_names=names, **options)
    with pytest.raises(DataError, match=r"line 2 .* comedy"):
        found.labels("train")


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_numbers(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"train.{form}"
    numbers = [1.5, -2.0, 1e-3, 40.0]
    if form == "csv":
        rows = [f"{text},{number}" for text, number in zip(TEXTS, numbers, strict=True)]
        path.write_text("\n".join(["text,score", *rows]))
    elif form == "jsonl":
        rows = [json.dumps({"text": t, "score": s}) for t, s in zip(TEXTS, numbers, strict=True)]
        path.write_text("\n".join(rows))
    else:
        pq.write_table(pa.table({"text": TEXTS, "score": numbers}), path)
    kind = {"parquet": "hub"}.get(form, form)
    found = source(kind, path, "regression", label_column="score")
    assert found.checked_class_names() == ["score"]
    torch.testing.assert_close(found.labels("train"), torch.tensor(numbers)[:, None])


def write_table(path: Path, labels: list[Any]) -> Path:
    """Texts and labels in a file, as pandas writes it: floats if a label is missing."""
    frame = pd.DataFrame({"text": [f"text {i}" for i in range(len(labels))], "label": labels})
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in frame.to_dict("records")))
    return path


KINDS = {"csv": "csv", "jsonl": "jsonl", "parquet": "hub"}


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("problem_type", ["single", "multi"])
def test_floats_that_are_whole_are_classes(form: str, problem_type: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"train.{form}", [1.0, 2.0, 10.0, 2.0])
    found = source(KINDS[form], path, f"{problem_type}_label_classification")
    names = ["1", "2", "10"]
    assert found.checked_class_names() == names
    labels = found.labels("train")
    if problem_type == "multi":
        labels = labels.argmax(1)
    assert [found.class_names[i] for i in labels] == ["1", "2", "10", "2"]


@pytest.mark.parametrize("form", KINDS)
def test_missing_labels_are_counted_and_listed(form: str, tmp_path: Path) -> None:
    gaps = [1.0, None, 2.0] + [None, 1.0] * 6
    path = write_table(tmp_path / f"train.{form}", gaps)
    if form == "jsonl":  # which has no NaN
        path.write_text(path.read_text().replace("NaN", "null"))
    first = {"csv": 2, "jsonl": 1, "parquet": 0}[form]
    numbers = ", ".join(str(row + first) for row in (1, 3, 5, 7, 9))
    with pytest.raises(DataError, match=rf" {1 + first} of .*\(7 of 15 rows: {numbers}, \.\.\.\)"):
        source(KINDS[form], path, "single_label_classification").labels("train")


@pytest.mark.parametrize("form", KINDS)
def test_decimals_are_classes_if_all_are_named(form: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"train.{form}", ["1.5", "1.0", "2.0", "1.0"])
    names = ["1.0", "1.5", "2.0"]
    found = source(KINDS[form], path, "single_label_classification", class_names=names)
    assert found.checked_class_names() == names
    assert found.labels("train").tolist() == [1, 0, 2, 0]
    found = source(KINDS[form], path, "multi_label_classification", class_names=names)
    assert found.labels("train").argmax(1).tolist() == [1, 0, 2, 0]
    with pytest.raises(DataError, match=r"1\.5.*--model\.problem_type regression"):
        source(KINDS[form], path, "single_label_classification").labels("train")


@pytest.mark.parametrize(
    ("cell", "said"), [("nan", "nan"), ("high", "high"), ("", "no number"), ("1e39", "1e39")]
)
def test_bad_numbers_are_named_with_their_line(cell: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(f"text,label\na,1\nb,{cell}\nc,2\n")
    with pytest.raises(DataError, match=f"line 3 .*{said}"):
        source("csv", path, "regression").labels("train")


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([["a", None, " b"], ["", "b"]], [[1, 1], [0, 1]]),
        ([[0, 1], [1]], [[1, 1], [0, 1]]),
        ([0, 1], [[1, 0], [0, 1]]),  # a column of whole numbers
    ],
)
def test_entries_of_lists(entries: Any, expected: list[list[int]], tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["x", "y"], "labels": entries}), tmp_path / "train.parquet")
    found = source("hub", tmp_path / "train.parquet", "multi_label_classification")
    assert found.labels("train").tolist() == expected


def test_a_zero_or_one_for_each_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"text": ["x", "y"], "labels": [[0, 1, 1], [1, 0, 0]]}), path)
    with pytest.raises(DataError, match="row 0 .*twice"):
        source("hub", path, "multi_label_classification").labels("train")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"label_separator": ""}, "label_separator"),
        ({"class_names": ["a", "a"]}, "different"),
    ],
)
def test_options_of_labels(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('text,label\nx,"a,b"\ny,b\n')
    with pytest.raises((DataError, UsageError), match=said):
        source("csv", path, "multi_label_classification", **options).checked_class_names()


@pytest.mark.parametrize(
    ("rows", "classes", "warns"),
    [(60, 59, True), (60, 31, True), (60, 30, False), (49, 49, False)],
)
def test_a_class_for_almost_every_sample_is_told_once(
    rows: int, classes: int, warns: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    path = tmp_path / "train.csv"
    path.write_text(
        "\n".join(["file_name,mood", *(f"{i}.png,word{i % classes}" for i in range(rows))])
    )
    found = SOURCES["csv"](str(path), DatasetOptions(label_column="mood"))
    assert len(found.checked_class_names()) == classes
    for _ in range(2):
        found.records("train")
    assert sum("Column mood" in str(warning.message) for warning in recwarn) == warns


def test_a_column_of_images_is_not_that_of_labels(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("file_name,label\na.png,x\nb.png,y\n")
    found = SOURCES["csv"](str(path), DatasetOptions(label_column="file_name"))
    with pytest.raises(UsageError, match="image_column or label_column"):
        found.checked_class_names()


def test_folders_have_classes_only(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "1.txt").write_text("text")
    with pytest.raises(UsageError, match="one class each"):
        source("folder", tmp_path, "regression").checked_class_names()


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_images_that_a_table_names(form: str, tmp_path: Path) -> None:
    """As in Hugging Face's image folders: metadata.csv or metadata.jsonl beside the images."""
    for split, count in (("train", 6), ("test", 2)):
        rows = []
        for i in range(count):
            save_image(tmp_path / split / f"{i}.png", seed=i)
            rows.append({"file_name": f"{i}.png", "label": 0.5 * i})
        lines = ["file_name,label", *(f"{row['file_name']},{row['label']}" for row in rows)]
        if form == "jsonl":
            lines = [json.dumps(row) for row in rows]
        (tmp_path / split / f"metadata.{form}").write_text("\n".join(lines))
    found = SOURCES[form](str(tmp_path), DatasetOptions(problem_type="regression"))
    records = found.records("test")
    assert records is not None and len(records) == 2
    assert records.labels.tolist() == [[0.0], [0.5]]
    with Image.open(tmp_path / "test/1.png") as image:
        assert records.image(1, 3).permute(1, 2, 0).tolist() == np.asarray(image).tolist()
    options = DatasetOptions(problem_type="regression", val_fraction=0.34)
    data = ImageData(form, str(tmp_path), image_size=16, dataset=options)  # type: ignore[arg-type]
    metadata = data.metadata()
    numbers = data.dataset("train").labels
    assert metadata["target_mean"] == pytest.approx(float(numbers.mean()))
    assert metadata["target_std"] == pytest.approx(float(numbers.std(correction=0)))
    assert len(data.dataset("train")) + len(data.dataset("val")) == 6


def test_texts_with_several_labels_reach_the_batches(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    rows = [f'"text {i}","{"x,y" if i % 3 == 0 else "y"}"' for i in range(30)]
    path.write_text("\n".join(["text,label", *rows]))
    options = TextDatasetOptions(problem_type="multi_label_classification")
    data = ReviewData("csv", str(path), dataset=options)
    assert data.metadata()["class_names"] == ["x", "y"]
    batch = data.dataset("train")[[0, 1, 2]]
    assert batch["label"].shape == (3, 2) and batch["label"].dtype == torch.float32


# Balanced samples ---------------------------------------------------------------------------------

CLASSES = torch.tensor([5] * 900 + [0] * 90 + [2] * 10)


def test_balanced_samples_have_equally_many_of_each_class() -> None:
    sample = balanced_sample(CLASSES, seed=3, epoch=1)
    counts = CLASSES[sample].bincount(minlength=6)
    assert len(sample) == 1000 and counts[[1, 3, 4]].sum() == 0
    assert ((counts[[0, 2, 5]] - 333).abs() < 75).all()  # five standard deviations
    assert len(sample[CLASSES[sample] == 5].unique()) > 200  # not a few members again and again
    assert torch.equal(sample, balanced_sample(CLASSES, seed=3, epoch=1))
    assert not torch.equal(sample, balanced_sample(CLASSES, seed=3, epoch=2))


def test_balanced_batches_of_two_ranks_are_those_of_one() -> None:
    whole = ResumableBatchSampler(1000, 8, 3, True, balanced=CLASSES)
    ranks = [ResumableBatchSampler(1000, 4, 3, True, False, r, 2, CLASSES) for r in (0, 1)]
    for batch, *parts in zip(whole.batches(2), *(rank.batches(2) for rank in ranks), strict=True):
        assert sorted(batch) == sorted(sum(parts, []))
    lengths = torch.arange(1000) % 7
    buckets = BucketBatchSampler(lengths, 8, seed=3, shuffle=True, balanced=CLASSES)
    drawn = sorted(i for batch in buckets.batches(2) for i in batch)
    assert drawn == sorted(balanced_sample(CLASSES, 3, 2).tolist())
    assert all(len(set((lengths[batch]).tolist())) <= 2 for batch in buckets.batches(2))


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_a_balanced_data_module_draws_each_class_as_often(kind: str, tmp_path: Path) -> None:
    counts = {"ant": 180, "bee": 20}
    data: Any
    if kind == "images":
        for name, count in counts.items():
            for i in range(count):
                save_image(tmp_path / f"train/{name}/{i}.png", seed=i)
        data = ImageData("folder", str(tmp_path), batch_size=8, balanced=True)
    else:
        rows = [f"{'a ' * (i % 9)}b,{name}" for name in counts for i in range(counts[name])]
        path = tmp_path / "train.csv"
        path.write_text("\n".join(["text,label", *rows]))
        data = ReviewData("csv", str(path), batch_size=8, balanced=True)
    drawn = torch.cat([batch["label"] for batch in data.train_dataloader()]).bincount()
    assert len(drawn) == 2 and drawn.sum() > 150
    assert (drawn - drawn.sum() / 2).abs().max() < 35  # five standard deviations


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_images_to_predict_that_a_table_names(form: str, tmp_path: Path) -> None:
    for i in range(3):
        save_image(tmp_path / f"pics/{i}.png", seed=i)
    names = ["pics/2.png ", "./pics/0.png"]  # the first with a space
    path = tmp_path / f"list.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"file_name": names}), path)
    else:
        rows = {"csv": ["file_name", *names], "jsonl": [f'{{"file_name": "{n}"}}' for n in names]}
        path.write_text("\n".join(rows[form]))
    data = ImageData("digits")
    data.predict_path = str(path)
    assert data.predict_samples == names  # as the table has them
    pixels = data.dataset("predict")[[0, 1]]["image"]
    for name, found in zip(names, pixels, strict=True):
        assert torch.equal(found, decode((tmp_path / name.strip()).read_bytes(), 1))


@pytest.mark.parametrize("limit", [0, 4096])
def test_skipped_images_have_the_names_of_the_table(limit: int, tmp_path: Path) -> None:
    """In memory and as a stream."""
    save_image(tmp_path / "pics/good.png")
    (tmp_path / "pics/bad.png").write_bytes(b"no image")
    (tmp_path / "list.csv").write_text("file_name\npics/bad.png\npics/good.png\n")
    loading = LoadingOptions(memory_limit_mb=limit, num_workers=0)
    data = ImageData("digits", skip_bad=True, loading=loading)
    data.predict_path = str(tmp_path / "list.csv")
    (batch,) = data.eval_loader(data.dataset("predict"))
    data.on_before_batch_transfer(batch, 0)
    assert batch["path"] == ["pics/good.png"] and data.skipped == ["pics/bad.png"]


def test_a_test_split_without_labels_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("id,text,label\n1,a,x\n2,b,y\n")
    (tmp_path / "test.csv").write_text("id,text\n3,c\n")
    found = source("csv", tmp_path, "single_label_classification")
    assert found.labels("train").tolist() == [0, 1]
    with pytest.raises(UsageError, match="the test split of .* lacks the column label .*`predict`"):
        found.labels("test")
    (tmp_path / "test.csv").write_text("id,text,Label\n3,c,x\n")
    with pytest.raises(UsageError, match="set --data.dataset.label_column Label"):
        source("csv", tmp_path, "single_label_classification").labels("test")
