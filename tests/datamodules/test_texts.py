"""Texts from every source, and what is said of those that cannot be used."""

import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.masked_text import MaskedTextData
from datamodules.reviews import ReviewData
from datamodules.sources import CORPORA, TEXT_SOURCES, TextDatasetOptions
from datamodules.text import TextLoading
from datamodules.tokenizers import SPECIAL_TOKENS, TokenizerConfig
from datamodules.utils.errors import DataError, UsageError
from tests.helpers.refusals import refused
from tests.helpers.tables import write

LINE = "the {} film, number {}\nof café “{}” "
ROWS = [(LINE.format(("bad", "good")[i % 2], i % 9, i % 7) * (1 + i % 5), i % 2) for i in range(60)]
NAMES = ["neg", "pos"]
WORDS = TokenizerConfig("whitespace", min_frequency=1, lowercase=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 texts for training and 10 for the test."""
    for split, samples in (("train", ROWS), ("test", ROWS[:10])):
        rows = [{"id": 7, "text": text, "label": NAMES[label]} for text, label in samples]
        write(tmp_path / f"csv/{split}.csv", rows)
    return tmp_path / "csv"


def review_data(source: Any = "csv", path: object = None, **options: Any) -> ReviewData:
    return ReviewData(source, None if path is None else str(path), tokenizer=WORDS, **options)


def test_batches(folder: Path) -> None:
    loading = TextLoading(multiple=4, eval_batch_size=5)
    data = review_data("csv", folder, batch_size=6, loading=loading)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == data.train_batches()
    samples = data.source.split("train")
    for batch in batches:
        assert batch["tokens"].dtype == batch["label"].dtype == batch["index"].dtype == torch.int64
        width = batch["tokens"].shape[1]
        assert width % 4 == 0 and width - batch["padding_mask"].sum(1).max() < 4
        for index, row, mask, label in zip(
            *(batch[k] for k in ("index", "tokens", "padding_mask", "label")), strict=True
        ):
            (ids,) = data.tokenizer.encode_batch([samples.column[int(index)].as_py()])
            assert row[mask].tolist() == [2, *ids, 3] and not row[~mask].any()
            assert label == samples.labels[index]
    sizes = sorted(len(batch["tokens"]) for batch in batches)
    assert sum(sizes) == len(data.dataset("train")) and set(sizes[1:]) == {6}
    tokens = sum(int(batch["padding_mask"].sum()) for batch in batches)
    padded = sum(batch["tokens"].numel() for batch in batches)
    assert data.padding_fraction() == pytest.approx(1 - tokens / padded)


def test_batches_by_tokens_and_without_buckets(folder: Path) -> None:
    by_tokens = review_data("csv", folder, loading=TextLoading(batch_tokens=128))
    by_tokens.setup("fit")
    sizes = [batch["tokens"].numel() for batch in by_tokens.train_dataloader()]
    assert max(sizes) <= 128 and len(sizes) == by_tokens.train_batches()
    for size, expected in ((6, [6] * 9), (8, [6, *[8] * 6])):
        loading = TextLoading(buckets=False)
        plain = review_data("csv", folder, batch_size=size, loading=loading)
        batches = [batch["index"].tolist() for batch in plain.train_dataloader()]
        assert sorted(sum(batches, [])) == list(range(54))
        assert sorted(map(len, batches)) == expected and plain.train_batches() == len(batches)
        assert plain.padding_fraction() > 1.5 * by_tokens.padding_fraction()


@pytest.mark.parametrize("kind", [ReviewData, MaskedTextData])
def test_only_training_texts_teach_the_tokenizer(kind: Any, tmp_path: Path) -> None:
    """Only the splits val, test and unlabelled have the words `val`, `test` and `unlabelled`."""
    for split, count in (("train", 20), ("val", 4), ("test", 4), ("unlabelled", 4)):
        rows = "".join(f"a {('bad', 'good')[i % 2]} {split} film,{i % 2}\n" for i in range(count))
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{rows}")
    data = kind("csv", str(tmp_path), tokenizer=WORDS)
    words = {"a", "bad", "good", "film", "train"}
    if kind is MaskedTextData:
        words.add("unlabelled")
    assert set(data.tokenizer.vocab) - set(SPECIAL_TOKENS.values()) == words
    for split in ("val", "test"):
        tokens = data.dataset(split)[[1]]["tokens"][0]
        expected = ["[CLS]", "a", "good", "[UNK]", "film", "[SEP]", "[PAD]", "[PAD]"]
        assert data.tokenizer.convert_ids_to_tokens(tokens) == expected


def found(data: ReviewData, split: str) -> dict[int, int]:
    """The labels of texts by the number in them."""
    samples = data.source.split(split)
    numbers = [int(text.split()[1]) for text in samples.column.to_pylist()]
    return dict(zip(numbers, samples.labels.tolist(), strict=True))


@pytest.mark.parametrize(
    ("source", "labels", "given", "names", "indices"),
    [
        ("jsonl", [1, 2, 3], None, ["1", "2", "3"], [0, 1, 2]),
        ("jsonl", [0, 1, 2], ["bad", "fair", "good"], None, [0, 1, 2]),
        ("jsonl", [1, 2, 3], ["3", "2", "1"], None, [2, 1, 0]),
        ("csv", ["pos", "neg", "odd"], ["odd", "neg", "pos"], None, [2, 1, 0]),
        ("csv", [" pos", "neg ", "\tneg"], None, ["neg", "pos"], [1, 0, 0]),
        ("csv", [10, 9, 0], None, ["0", "9", "10"], [2, 1, 0]),
        ("hub", [0, 1, 0], None, ["0", "1"], [0, 1, 0]),
        ("hub", [-1, 10**12, -1], ["a", "b"], None, [0, 1, 0]),
    ],
)
def test_columns_and_classes(
    source: str,
    labels: list[Any],
    given: list[str] | None,
    names: list[str] | None,
    indices: list[int],
    tmp_path: Path,
) -> None:
    """Of any name; with a checkpoint they mean the same without a training split."""
    ending = {"jsonl": "jsonl", "csv": "csv", "hub": "parquet"}[source]
    columns = {"text_column": "body", "label_column": "stars"}
    expected = {i: indices[i % 3] for i in range(60)}
    rows = [{"body": f"text {i}", "stars": labels[i % 3], "text": "same"} for i in range(60)]
    path = write(tmp_path / f"train.{ending}", rows)
    options = TextDatasetOptions(**columns, class_names=given)
    data = review_data(source, tmp_path, dataset=options)
    metadata = data.metadata()
    assert metadata["class_names"] == (names or given)
    assert found(data, "train") | found(data, "val") == expected
    if -1 not in labels:
        path.rename(tmp_path / f"test.{ending}")
        data = review_data(source, tmp_path, dataset=TextDatasetOptions(**columns))
        data.set_metadata(metadata)
        assert found(data, "test") == expected


def test_long_texts_are_truncated_and_said_once(folder: Path) -> None:
    data = review_data("csv", folder, max_length=10)
    with pytest.warns(UserWarning, match="48 of 60 .* 10 tokens"):
        data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    full = batch["tokens"][batch["padding_mask"].all(1)]
    assert batch["tokens"].shape[1] == 10 and (full[:, -1] == 3).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("fit")


# Prediction, and other stages with a checkpoint.


@pytest.fixture
def metadata(folder: Path) -> dict[str, Any]:
    data = review_data("csv", folder)
    data.setup("fit")
    return data.metadata()


def asking(
    metadata: dict[str, Any], text: str | None = None, path: str | None = None, **options: Any
) -> ReviewData:
    """Data with a checkpoint's metadata, to predict."""
    data = ReviewData(tokenizer=WORDS, **options)
    data.set_metadata(metadata)
    data.predict_text = [] if text is None else [text]
    data.predict_path = path
    return data


def test_prediction_needs_a_checkpoint_and_no_data_set(
    metadata: dict[str, Any], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "asked.txt"
    path.write_bytes("good\r\na good film of café\nbad, bad film\n".encode())
    loading = TextLoading(eval_batch_size=2)
    data = asking(metadata, source="hub", path=str(path), loading=loading)
    cached = set(cache.rglob("*"))
    data.setup("predict")
    assert set(cache.rglob("*")) == cached  # what is asked is not written down
    assert data.predict_samples == ["good", "a good film of café", "bad, bad film"]
    assert data.metadata() == metadata
    batches = list(data.predict_dataloader())
    order = torch.cat([batch["index"] for batch in batches])
    rows = [data.tokenizer.decode(row.tolist()) for batch in batches for row in batch["tokens"]]
    assert len(batches) == 2 and "label" not in batches[0]
    assert rows[order.tolist().index(0)] == "good"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("good\ncafé".encode())))
    assert asking(metadata, path="-").predict_samples == ["good", "café"]
    data = asking(metadata, "a bad film")
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert batch["tokens"].shape == (1, 8)
    for line, word in ((b" ", "no text"), (b"\xff\xfe", "UTF-8")):
        path.write_bytes(b"good\n" + line + b"\nbad\n")
        with refused(DataError, f"line 2 of {path}", word):
            asking(metadata, path=str(path)).setup("predict")
        data = asking(metadata, path=str(path), skip_bad=True)
        assert data.predict_samples == ["good", "bad"] and data.skipped == [f"line 2 of {path}"]
    for kind, name, options in (
        (UsageError, "--input", {}),
        (UsageError, "--text", {"text": " "}),
        (UsageError, "/no/such", {"path": "/no/such"}),
        (UsageError, str(tmp_path), {"path": str(tmp_path)}),
    ):
        with refused(kind, name):
            asking(metadata, **options).setup("predict")


def test_classes_of_data_and_checkpoint_must_agree(metadata: dict[str, Any], folder: Path) -> None:
    rows = "".join(f"x {i},{'abc'[i % 3]}\n" for i in range(30))
    (folder / "train.csv").write_text("text,label\n" + rows)
    for stage in ("fit", "validate", "test"):
        data = review_data("csv", folder)
        data.set_metadata(metadata)
        with refused(UsageError, "3 classes (a, b, c)", "2 (neg, pos)"):
            data.setup(stage)


def test_imdb_is_whole(real_data: Path) -> None:
    source = TEXT_SOURCES["hub"](str(real_data / "imdb"), TextDatasetOptions())
    sizes = [len(source.split(split)) for split in ("train", "val", "test")]
    assert sizes == [22_500, 2_500, 25_000] and source.checked_class_names() == ["neg", "pos"]
    assert source.split("val").labels.bincount().tolist() == [1250, 1250]
    corpus = CORPORA["hub"](str(real_data / "imdb"), TextDatasetOptions())
    corpus.labelled = False
    train, val = corpus.corpus("train"), corpus.corpus("val")
    assert len(train) == 72_500 and val.equals(source.split("val").column)


class SameLengths(list[int]):
    """A dataset of 400 texts."""

    padded_lengths = torch.full((400,), 8)


def test_without_buckets_each_epoch_has_other_batches() -> None:
    data = ReviewData(loading=TextLoading(buckets=False))
    sampler = data.train_sampler(SameLengths(range(400)))
    first, second = ({frozenset(batch) for batch in sampler.batches(epoch)} for epoch in (0, 1))
    assert len(first & second) < 3
