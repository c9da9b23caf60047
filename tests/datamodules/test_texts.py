"""Texts from every source, and what is said of those that cannot be used."""

import csv
import io
import json
import sys
from dataclasses import replace
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

LINE = "the {} film, number {}\nof café “{}” "
ROWS = [(LINE.format(("bad", "good")[i % 2], i % 9, i % 7) * (1 + i % 5), i % 2) for i in range(60)]
NAMES = ["neg", "pos"]
WORDS = TokenizerConfig("whitespace", min_frequency=1, lowercase=False)
FILES = ("hub", "csv", "jsonl", "txt")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """The same 60 texts for training and 10 for the test, in every format."""
    import datasets

    folders = {name: tmp_path / name for name in FILES}
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=NAMES)}
    )
    for split, rows in (("train", ROWS), ("test", ROWS[:10])):
        for path in folders.values():
            path.mkdir(exist_ok=True)
        columns = {"text": [text for text, _ in rows], "label": [label for _, label in rows]}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(
            folders["hub"] / f"{split}-0.parquet"
        )
        with open(folders["csv"] / f"{split}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [("id", "text", "label"), *((7, t, NAMES[y]) for t, y in rows)]
            )
        with open(folders["jsonl"] / f"{split}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"label": NAMES[y], "text": t}, ensure_ascii=bool(y)) + "\n"
                for t, y in rows
            )
        for i, (text, label) in enumerate(rows):
            path = folders["txt"] / split / NAMES[label] / f"{i:03}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folders


def contents(data: ReviewData, split: str) -> list[tuple[str, int]]:
    """Decoded texts and labels of a split, in its order."""
    dataset = data.dataset(split)
    batch = dataset[list(range(len(dataset)))]
    assert torch.equal(batch["padding_mask"], batch["tokens"] != 0)
    texts = [data.tokenizer.decode(row.tolist()) for row in batch["tokens"]]
    return list(zip(texts, batch["label"].tolist(), strict=True))


@pytest.mark.parametrize("source", FILES)
def test_every_source_gives_the_same_texts_and_labels(
    source: str, folders: dict[str, Path]
) -> None:
    options = TextDatasetOptions(val_fraction=0.2)
    data = ReviewData(source, str(folders[source]), dataset=options, tokenizer=WORDS)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert (
        data.metadata()["class_names"] == NAMES
        and data.metadata()["vocabulary"] == data.tokenizer.vocab_size
    )
    assert data.origin == str(folders[source])
    expected = sorted((" ".join(text.split()), label) for text, label in ROWS)
    assert sorted(contents(data, "train") + contents(data, "val")) == expected
    assert torch.cat([b["label"] for b in data.val_dataloader()]).bincount().tolist() == [6, 6]
    assert sorted(contents(data, "test")) == sorted(
        (" ".join(text.split()), label) for text, label in ROWS[:10]
    )


@pytest.mark.parametrize("source", TEXT_SOURCES)
def test_batches(source: str, folders: dict[str, Path]) -> None:
    path = str(folders[source]) if source in folders else None
    loading = TextLoading(multiple=4, eval_batch_size=5)
    data = ReviewData(source, path, batch_size=6, tokenizer=WORDS, loading=loading)  # type: ignore[arg-type]
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == data.train_batches()
    for batch in batches:
        assert batch["tokens"].dtype == batch["label"].dtype == batch["index"].dtype == torch.int64
        width = batch["tokens"].shape[1]
        assert width % 4 == 0 and batch["padding_mask"].dtype == torch.bool
        for index, row, keep, label in zip(
            *(batch[k] for k in ("index", "tokens", "padding_mask", "label")), strict=True
        ):
            text = data.source.split("train").column[int(index)].as_py()
            (ids,) = data.tokenizer.encode_batch([text])
            assert row[keep].tolist() == [2, *ids, 3] and not row[~keep].any()
            assert label == data.source.split("train").labels[index]
        assert width - batch["padding_mask"].sum(1).max() < 4
    sizes = sorted(len(batch["tokens"]) for batch in batches)
    assert sum(sizes) == len(data.dataset("train")) and set(sizes[1:]) == {6}
    kept = sum(int(batch["padding_mask"].sum()) for batch in batches)
    cells = sum(batch["tokens"].numel() for batch in batches)
    assert data.padding_share() == pytest.approx(1 - kept / cells)


def test_batches_by_tokens_and_without_buckets(folders: dict[str, Path]) -> None:
    loading = TextLoading(batch_tokens=128)
    data = ReviewData("csv", str(folders["csv"]), tokenizer=WORDS, loading=loading)
    data.setup("fit")
    sizes = [batch["tokens"].numel() for batch in data.train_dataloader()]
    assert max(sizes) <= 128 and len(sizes) == data.train_batches()
    plain = ReviewData(
        "csv",
        str(folders["csv"]),
        batch_size=6,
        tokenizer=WORDS,
        loading=TextLoading(buckets=False),
    )
    plain.setup("fit")
    assert plain.padding_share() > 1.5 * data.padding_share()
    batches = [batch["index"].tolist() for batch in plain.train_dataloader()]
    assert sorted(sum(batches, [])) == list(range(54)) and plain.train_batches() == len(batches)
    plain = ReviewData(
        "csv",
        str(folders["csv"]),
        batch_size=8,
        tokenizer=WORDS,
        loading=TextLoading(buckets=False),
    )
    batches = [batch["index"].tolist() for batch in plain.train_dataloader()]
    assert sorted(sum(batches, [])) == list(range(54)) and sorted(map(len, batches)) == [
        6,
        *[8] * 6,
    ]
    for bad in (
        TextLoading(batch_tokens=100),
        TextLoading(batch_tokens=500, buckets=False),
        TextLoading(multiple=0),
    ):
        with pytest.raises(UsageError, match="batch_tokens|multiple"):
            ReviewData(loading=bad)


@pytest.mark.parametrize("kind", [ReviewData, MaskedTextData])
def test_only_training_texts_teach_the_tokenizer(kind: Any, tmp_path: Path) -> None:
    """Only the splits val, test and unlabelled have the words `val`, `test` and `unlabelled`."""
    for split, count in (("train", 20), ("val", 4), ("test", 4), ("unlabelled", 4)):
        rows = "".join(f"a {('bad', 'good')[i % 2]} {split} film,{i % 2}\n" for i in range(count))
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{rows}")
    data = kind("csv", str(tmp_path), tokenizer=WORDS)
    words = {"a", "bad", "good", "film", "train"} | (
        {"unlabelled"} if kind is MaskedTextData else set()
    )
    assert set(data.tokenizer.vocab) - set(SPECIAL_TOKENS.values()) == words
    for split, stage in (("val", "fit"), ("test", "test")):
        data.setup(stage)
        assert data.tokenizer.convert_ids_to_tokens(data.dataset(split)[[1]]["tokens"][0]) == [
            *("[CLS]", "a", "good", "[UNK]", "film", "[SEP]", "[PAD]", "[PAD]")
        ]


def test_a_run_counted_in_other_batches_is_not_resumed(folders: dict[str, Path]) -> None:
    for changed in (
        TextLoading(),
        TextLoading(batch_tokens=256),
        TextLoading(batch_tokens=128, multiple=2),
    ):
        data = ReviewData("csv", str(folders["csv"]), tokenizer=WORDS, loading=changed)
        data.setup("fit")
        state = {"epoch": 1, "batch": 1, "batch_size": 32, "world_size": 1, "samples": 54}
        data.load_state_dict({**state, "batch_tokens": 128, "buckets": 1, "multiple": 8})
        name = "batch_tokens 128" if changed.batch_tokens != 128 else "multiple 8"
        with pytest.raises(UsageError, match=f"written with {name}, this run has"):
            data.train_dataloader()


def test_a_single_file_is_split(folders: dict[str, Path]) -> None:
    data = ReviewData("csv", str(folders["csv"] / "train.csv"), tokenizer=WORDS)
    data.setup("fit")
    assert (len(data.dataset("train")), len(data.dataset("val"))) == (54, 6)
    assert not set(data.source.split("train").rows.tolist()) & set(
        data.source.split("val").rows.tolist()
    )
    with pytest.warns(UserWarning, match="no test split"):
        data.setup("test")


def test_columns_and_classes_can_be_chosen(tmp_path: Path) -> None:
    rows = [{"body": f"text {i}", "stars": 1 + i % 5, "text": 3} for i in range(50)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    options = {"text_column": "body", "label_column": "stars"}
    data = ReviewData(
        "jsonl", str(tmp_path), dataset=TextDatasetOptions(**options), tokenizer=WORDS
    )  # type: ignore[arg-type]
    assert data.metadata()["class_names"] == ["1", "2", "3", "4", "5"]
    assert {label - int(text.split()[1]) % 5 for text, label in contents(data, "train")} == {0}
    names = TextDatasetOptions(**options, class_names=["awful", "bad", "fair", "good", "great"])  # type: ignore[arg-type]
    data = ReviewData("jsonl", str(tmp_path), dataset=names, tokenizer=WORDS)
    assert data.metadata()["class_names"][4] == "great"
    assert {label - int(text.split()[1]) % 5 for text, label in contents(data, "train")} == {0}


def test_named_classes_fix_their_order(folders: dict[str, Path]) -> None:
    for source in ("csv", "jsonl", "txt"):
        options = TextDatasetOptions(class_names=["pos", "neg"])
        data = ReviewData(source, str(folders[source]), dataset=options, tokenizer=WORDS)  # type: ignore[arg-type]
        data.setup("fit")
        assert all(("good" in text) == (label == 0) for text, label in contents(data, "train"))


def refused(kind: type[Exception], *words: str, stage: str = "fit", **options: Any) -> None:
    with pytest.raises(kind) as caught:
        ReviewData(**options).setup(stage)
    message = str(caught.value)
    assert "\n" not in message and message.endswith("."), message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "review"}, ["review", "reviews, hub, csv, jsonl, txt"]),
        ({"batch_size": 0}, ["batch_size is 0"]),
        ({"max_length": 3}, ["max_length is 3"]),
        ({"source": "csv"}, ["--data.path", "train.csv"]),
        ({"source": "csv", "path": "{hub}"}, ["CSV", "try --data.source hub"]),
        ({"source": "hub", "path": "{csv}"}, ["parquet", "try --data.source csv"]),
        ({"source": "txt", "path": "{txt}/train/pos/001.txt"}, ["is a file", "train/CLASS/*.txt."]),
        ({"source": "txt", "path": "{jsonl}"}, ["train/CLASS/", "try --data.source jsonl"]),
        (
            {"source": "hub", "path": "{hub}", "dataset": TextDatasetOptions(label_column="id")},
            ["text, label"],
        ),
        (
            {"source": "hub", "path": "{hub}", "dataset": TextDatasetOptions(text_column="label")},
            ["int64", "text."],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    options: dict[str, Any], words: list[str], folders: dict[str, Path]
) -> None:
    if "path" in options:
        options = options | {"path": options["path"].format(**folders)}
    refused(UsageError, *words, **options)


def test_a_path_for_generated_texts_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="try --data.source csv"):
        ReviewData(path=str(folders["csv"])).prepare_data()


BAD = {
    "csv": [
        (b"7,  ,pos\n", "holds no text"),
        (b"7,caf\xe9,pos\n", "UTF-8"),
        (b'7,"four lines,\r\nof which\n\ncaf\xe9, the last,\n\xe9",pos\n', "UTF-8"),
        (b"7,good, but long,pos\n", "4 cells"),
    ],
    "jsonl": [
        (b'{"text": "", "label": "pos"}\n', "holds no text"),
        (b'{"text": "caf\xe9", "label": "pos"}\n', "UTF-8"),
        (b'{"text": "ok", "label"}\n', "not JSON"),
        (b"[1]\n", "JSON object"),
        (b'{"label": "neg"}\n', "holds no text"),
    ],
}


@pytest.mark.parametrize(
    ("source", "line", "words"), [(source, *case) for source in BAD for case in BAD[source]]
)
def test_bad_lines_are_named_or_skipped_and_counted(
    source: str, line: bytes, words: str, folders: dict[str, Path]
) -> None:
    path = folders[source] / f"train.{source}"
    lines = path.read_bytes().splitlines(keepends=True)
    place = (
        1 if line.count(b"\n") == 1 and source == "csv" else len(lines)
    )  # not inside of a text with lines
    lines.insert(place, line)
    path.write_bytes(b"".join(lines))
    inside = line.partition(b"caf\xe9")[0].count(b"\n") if b"caf\xe9" in line else 0
    name = f"line {place + inside + 1} of {path}"
    refused(DataError, name, words, "--data.skip_bad true", source=source, path=str(path.parent))
    data = ReviewData(source, str(path.parent), skip_bad=True, tokenizer=WORDS)  # type: ignore[arg-type]
    data.setup("fit")
    assert data.skipped == [name] and len(data.dataset("train")) + len(data.dataset("val")) == 60


def test_tables_with_bytes_that_are_not_utf8(folders: dict[str, Path]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = pa.array([b"caf\xe9" if i == 5 else f"text {i}".encode() for i in range(40)]).view(
        pa.string()
    )
    parquet.write_table(
        pa.table({"text": texts, "label": [i % 2 for i in range(40)]}),
        folders["hub"] / "train-0.parquet",
    )
    refused(DataError, "row 5 of the train split", "UTF-8", source="hub", path=str(folders["hub"]))
    data = ReviewData("hub", str(folders["hub"]), skip_bad=True, tokenizer=WORDS)
    data.setup("fit")
    assert len(data.skipped) == 1 and len(data.dataset("train")) + len(data.dataset("val")) == 39


def test_nothing_usable(folders: dict[str, Path]) -> None:
    path = folders["jsonl"] / "train.jsonl"
    path.write_text('{"text": " ", "label": "pos"}\n{"text": "", "label": "neg"}\n')
    refused(
        DataError,
        f"none of the 2 texts can be used, such as line 1 of {path}",
        source="jsonl",
        path=str(folders["jsonl"]),
        skip_bad=True,
    )
    path.write_text("\n")
    refused(DataError, f"{path} is empty", source="jsonl", path=str(folders["jsonl"]))


@pytest.mark.parametrize(
    ("content", "words"), [(b" \n\t", "holds no text"), (b"one\ntwo\n\xff three", "line 3")]
)
def test_bad_files_are_named_or_skipped_and_counted(
    content: bytes, words: str, folders: dict[str, Path]
) -> None:
    bad = folders["txt"] / "train" / "pos" / "007.txt"
    bad.write_bytes(content)
    refused(DataError, str(bad), words, source="txt", path=str(folders["txt"]))
    data = ReviewData("txt", str(folders["txt"]), skip_bad=True, tokenizer=WORDS)
    data.setup("fit")
    assert (
        data.skipped == [str(bad)] and len(data.dataset("train")) + len(data.dataset("val")) == 59
    )


def test_labels_that_are_no_classes_are_named(folders: dict[str, Path]) -> None:
    (folders["txt"] / "test" / "positive").mkdir()
    refused(
        UsageError, "positive", "2 classes", stage="test", source="txt", path=str(folders["txt"])
    )
    (folders["jsonl"] / "test.jsonl").write_text(
        '{"text": "fine", "label": "pos"}\n{"text": "hm", "label": null}\n'
    )
    refused(
        DataError, "line 2 of", "no label", stage="test", source="jsonl", path=str(folders["jsonl"])
    )


def test_spaces_around_labels_make_no_classes(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text, label\n" + "fine, good\nfine,good \ndull,bad\ndull,\tbad\n" * 5)
    data = ReviewData("csv", str(path), tokenizer=WORDS)
    assert data.metadata()["class_names"] == ["bad", "good"]
    assert {*contents(data, "train"), *contents(data, "val")} == {("dull", 0), ("fine", 1)}


def test_unbalanced_quotes_are_named(folders: dict[str, Path]) -> None:
    (folders["csv"] / "train.csv").write_text('text,label\nfine,pos\n"never closed,neg\nx,pos\n')
    refused(DataError, "train.csv", "not valid CSV", source="csv", path=str(folders["csv"]))


def test_long_texts_are_cut_counted_and_said_once(folders: dict[str, Path]) -> None:
    data = ReviewData("csv", str(folders["csv"]), max_length=10, tokenizer=WORDS)
    with pytest.warns(
        UserWarning,
        match=r"^48 of 60 texts are longer than 10 tokens and were cut \(keeping the head\)",
    ):
        data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert (
        batch["tokens"].shape[1] == 10
        and (batch["tokens"][batch["padding_mask"].all(1)][:, -1] == 3).all()
    )
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.setup("fit")


@pytest.fixture
def metadata(folders: dict[str, Path]) -> dict[str, Any]:
    data = ReviewData("csv", str(folders["csv"]), tokenizer=WORDS)
    data.setup("fit")
    return data.metadata()


def test_prediction_needs_the_facts_and_no_data_set(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "asked.txt"
    path.write_bytes("good\r\na good film of café\nbad, bad film\n".encode())
    data = ReviewData(
        "hub", predict_path=str(path), tokenizer=WORDS, loading=TextLoading(eval_batch_size=2)
    )
    data.set_metadata(metadata)
    kept = set((tmp_path / "cache").rglob("*"))
    data.setup("predict")
    assert set((tmp_path / "cache").rglob("*")) == kept  # what is asked is not written down
    assert (
        data.predict_texts == ["good", "a good film of café", "bad, bad film"]
        and data.metadata() == metadata
    )
    batches = list(data.predict_dataloader())
    order = torch.cat([batch["index"] for batch in batches])
    rows = [data.tokenizer.decode(row.tolist()) for batch in batches for row in batch["tokens"]]
    assert len(batches) == 2 and "label" not in batches[0]
    assert [rows[i] for i in order.argsort().tolist()][0] == "good"


@pytest.mark.parametrize(("line", "words"), [(b" ", "holds no text"), (b"\xff\xfe", "UTF-8")])
def test_bad_lines_to_predict(
    metadata: dict[str, Any], tmp_path: Path, line: bytes, words: str
) -> None:
    path = tmp_path / "asked.txt"
    path.write_bytes(b"good\n" + line + b"\nbad\n")
    for skip in (False, True):
        data = ReviewData(predict_path=str(path), skip_bad=skip, tokenizer=WORDS)
        data.set_metadata(metadata)
        if skip:
            data.setup("predict")
            assert data.predict_texts == ["good", "bad"] and data.skipped == [f"line 2 of {path}"]
        else:
            with pytest.raises(DataError, match=f"line 2 of .*{words}"):
                data.setup("predict")


def test_texts_from_standard_input_and_the_command_line(
    metadata: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("good\ncafé".encode())))
    data = ReviewData(predict_path="-", tokenizer=WORDS)
    data.set_metadata(metadata)
    assert data.predict_texts == ["good", "café"]
    data = ReviewData(tokenizer=WORDS)
    data.set_metadata(metadata)
    data.predict_text = "a bad film"
    data.setup("predict")
    (batch,) = data.predict_dataloader()
    assert batch["tokens"].shape == (1, 8)
    for text, words in ((None, "--data.predict_path"), (" ", "--text holds no text")):
        data = ReviewData(tokenizer=WORDS)
        data.set_metadata(metadata)
        data.predict_text = text
        with pytest.raises((UsageError, DataError), match=words):
            data.setup("predict")
    for path, words in (("/no/such", "does not exist"), (str(tmp_path), "is a folder")):
        data = ReviewData(predict_path=path, tokenizer=WORDS)
        data.set_metadata(metadata)
        with pytest.raises(UsageError, match=words):
            data.setup("predict")


def test_data_and_checkpoint_must_agree(
    metadata: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    other = ReviewData("csv", str(folders["csv"]), tokenizer=TokenizerConfig("character"))
    file = tmp_path / "tokenizer.json"
    file.write_text(other.tokenizer.to_json())
    size = metadata["vocabulary"]
    for options, words in (
        ({"max_length": 64}, "max_length is 64, the checkpoint was trained with 128"),
        (
            {"tokenizer": TokenizerConfig(vocabulary=40)},
            rf"kind wordpiece \(vocabulary 40\) .* tokenizer of {size} tokens .* kind whitespace",
        ),
        ({"tokenizer": replace(WORDS, file="nosuch.json")}, "nosuch.json does not exist"),
        (
            {"tokenizer": TokenizerConfig("whitespace", 16_000, 1, False, str(file))},
            rf"{other.tokenizer.vocab_size} tokens\) is not the checkpoint's \({size} tokens",
        ),
        ({"dataset": TextDatasetOptions(class_names=["a", "b"])}, "class_names"),
    ):
        with pytest.raises(UsageError, match=words):
            ReviewData(**{"tokenizer": WORDS, **options}).set_metadata(metadata)  # type: ignore[arg-type]
    (folders["csv"] / "train.csv").write_text(
        "text,label\n" + "".join(f"x {i},{'abc'[i % 3]}\n" for i in range(30))
    )
    for stage in ("fit", "validate", "test"):
        data = ReviewData("csv", str(folders["csv"]), tokenizer=WORDS)
        data.set_metadata(metadata)
        with pytest.raises(
            UsageError, match=r"3 classes \(a, b, c\), the checkpoint 2 \(neg, pos\)"
        ):
            data.setup(stage)


@pytest.mark.parametrize("source", FILES)
def test_a_checkpoint_tests_data_that_hold_no_training_split(
    source: str, metadata: dict[str, Any], folders: dict[str, Path]
) -> None:
    for path in folders[source].glob("train*"):
        path.rename(folders[source] / f"unread_{path.name}")
    data = ReviewData(source, str(folders[source]), tokenizer=WORDS)  # type: ignore[arg-type]
    data.set_metadata(metadata)
    data.setup("test")
    assert sorted(contents(data, "test")) == sorted(
        (" ".join(text.split()), label) for text, label in ROWS[:10]
    )


def test_all_arguments_are_options_of_the_command_line() -> None:
    from jsonargparse import ArgumentParser

    shared = {
        "batch_size",
        "max_length",
        "skip_bad",
        "dataset.val_fraction",
        "tokenizer.kind",
        "loading.multiple",
    }
    for kind, own in ((ReviewData, "predict_path"), (MaskedTextData, "next_sentence")):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(kind, "data")
        assert {f"data.{name}" for name in shared | {"source", "path", own}} <= set(
            parser.get_defaults().keys()
        )
        assert "Tokens of a sample at most" in (text := parser.format_help()) and "parquet" in text


def test_imdb_is_whole(real_data: Path) -> None:
    source = TEXT_SOURCES["hub"](str(real_data / "imdb"), TextDatasetOptions())
    sizes = [len(source.split(split)) for split in ("train", "val", "test")]
    assert sizes == [22_500, 2_500, 25_000] and source.checked_class_names() == ["neg", "pos"]
    assert source.split("val").labels.bincount().tolist() == [1250, 1250]
    corpus = CORPORA["hub"](str(real_data / "imdb"), TextDatasetOptions())
    corpus.labelled = False
    train, val = corpus.corpus("train"), corpus.corpus("val")
    assert len(train) == 72_500 and val.equals(source.split("val").column)
