"""`predict`: several texts, the most likely classes, formats of the file."""

import csv
import gzip
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tessera
import torch

from tasks.errors import UsageError
from tasks.predictions import Number, PredictionFile
from tasks.problems import SingleLabel, external_targets
from tests.helpers.command import Console, environment, run
from tests.helpers.tiny import NET

PROBABILITIES = torch.tensor([0.25, 0.75])
FIT = (
    f"fit {NET} --data.tokenizer.vocabulary 300 --data.batch_size 8 --trainer.max_epochs 1 "
    "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0"
)


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    assert run(f"{FIT} --run_dir {folder}", "bert") == 0
    return folder / "checkpoints/best.ckpt"


def test_several_texts_and_the_most_likely_class(console: Console, best: Path) -> None:
    line = f'predict --ckpt_path {best} --text "not bad at all" --text "bad, not good" --top_k 1'
    lines = console.printed(line, "bert")[0].splitlines()
    assert len(lines) == 2
    pattern = r"label (\w+) \(probabilities: \1 [01]\.\d{4}\)"
    assert all(re.fullmatch(pattern, line) for line in lines)
    assert not Path("predictions.csv").exists()
    console.refused(line.replace("--top_k 1", "--top_k 0"), "--top_k", task="bert")
    console.refused(line.replace("--top_k 1", "--top_k 3"), "--top_k 3", "2 classes", task="bert")


def test_a_text_without_text_is_refused(console: Console, best: Path) -> None:
    line = f"predict --ckpt_path {best}"
    console.refused(f'{line} --text ""', "--text", task="bert")
    console.refused(f'{line} --text good --text " "', "--text 2 of 2 is empty", task="bert")
    model = tessera.load(best, kind=tessera.TextClassifier)
    for texts in ("", " \n", ["good", ""]):
        with pytest.raises(UsageError):
            model.predict(texts)
    assert len(model.predict(["good", "a"])) == 2


def test_skipped_texts_are_named(console: Console, best: Path) -> None:
    line = f'predict --ckpt_path {best} --data.skip_bad true --text good --text "" --text bad'
    with pytest.warns(UserWarning, match="1 bad .* skipped: --text 2 of 3"):
        out, _ = console.printed(line, "bert")
    assert len(out.splitlines()) == 2


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(best: Path, tmp_path: Path) -> None:
    """A read-only mount of the run folder, in which the commands are called."""
    run = best.parents[1]
    mounts = f"mount --bind {run} {run} && mount -o remount,bind,ro {run}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mounts], capture_output=True).returncode:
        pytest.skip("folders cannot be mounted here")

    def called(line: str) -> tuple[int, str, str]:
        command = f"{mounts} && cd {run} && exec {sys.executable} -m tasks.bert {line}"
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", command],
            capture_output=True,
            text=True,
            env=environment(),
        )
        return done.returncode, done.stdout, done.stderr

    code, out, said = called(f'predict --ckpt_path {best} --text "good"')
    assert code == 0 and out.startswith("label"), said
    (tmp_path / "a.txt").write_text("good\n")
    refused = {
        f"predict --ckpt_path {best} --input {tmp_path}/a.txt": "--output . cannot be used: you",
        f"fit --resume {run} --trainer.max_epochs 2": f"you may not write to {run}",
        f"export --ckpt_path {best} --format safetensors": "give another --output",
        f"look --ckpt_path {best} --text good": "give another --output",
    }
    for line, part in refused.items():
        code, _, said = called(line)
        assert code == 2 and part in said and said.count("error:") == 1, (line, said)
        assert "--ckpt_path:" not in said


@pytest.mark.parametrize("given", ["--text", "--input"])
def test_a_long_text_is_cut_and_said(given: str, console: Console, best: Path) -> None:
    """The model reads the first 62 words, between [CLS] and [SEP]."""

    def answer(text: str) -> dict[str, str]:
        Path("in.txt").write_text(text)
        value = f"'{text}'" if given == "--text" else "in.txt"
        console.printed(f"predict --ckpt_path {best} {given} {value} --output out.csv", "bert")
        (row,) = csv.DictReader(Path("out.csv").read_text().splitlines())
        return {name: row[name] for name in row.keys() - {"text"}}

    said = "1 of 1 texts: truncated to 64 tokens, keeping the head"
    with pytest.warns(UserWarning, match=said):
        cut = answer("good " * 200)
    assert cut == answer("good " * 62) != answer("good " * 61)


def test_the_output_is_named_not_its_hidden_files(console: Console, best: Path) -> None:
    Path("lines.txt").write_text("good\n")
    name = f"{246 * 'a'}.csv"  # 255 characters are allowed, and hidden files have more
    error = console.refused(
        f"predict --ckpt_path {best} --input lines.txt --output {name}", f"'{name}'", task="bert"
    )
    assert ".part" not in error


def test_what_may_be_an_input_is_told(console: Console, best: Path) -> None:
    line = f"predict --ckpt_path {best} --input"
    console.refused(f'{line} "the film was dull"', "--text", "TSV", "Parquet", task="bert")
    Path("lines.tsv").write_text("text\tstars\ngood, not bad\t3\n")
    console.printed(f"{line} lines.tsv", "bert")
    (row,) = csv.DictReader(Path("predictions.csv").read_text().splitlines())
    assert row["text"] == "good, not bad"


def test_an_answer_is_printed_and_written(console: Console, best: Path) -> None:
    line = f"predict --ckpt_path {best} --text good"
    printed = console.printed(line, "bert")[0].splitlines()
    assert console.printed(f"{line} --output out.csv", "bert")[0].splitlines()[:1] == printed
    (row,) = csv.DictReader(Path("out.csv").read_text().splitlines())
    assert row["text"] == "good" and printed[0].startswith(f"label {row['label']} (")


@pytest.mark.parametrize("other", ["link.csv", "./here/../lines.csv", "twin.csv"])
def test_the_input_is_not_overwritten(other: str, console: Console, best: Path) -> None:
    Path("here").mkdir()
    Path("lines.csv").write_text("text\ngood\nbad\n")
    Path("link.csv").symlink_to("lines.csv")
    Path("twin.csv").hardlink_to("lines.csv")
    line = f"predict --ckpt_path {best} --input lines.csv --output {other}"
    console.refused(line, f"--output {other}", "--input lines.csv", task="bert")
    Path("predictions.csv").symlink_to("lines.csv")
    line = f"predict --ckpt_path {best} --input lines.csv"
    console.refused(line, "--output predictions.csv", task="bert")
    assert Path("lines.csv").read_text() == "text\ngood\nbad\n"


@pytest.mark.parametrize("top_k", [None, 1, 2])
def test_formats_of_predictions(top_k: int | None, console: Console, best: Path) -> None:
    Path("lines.txt").write_text("not bad\nbad, “quoted”\n")
    line = f"predict --ckpt_path {best} --input lines.txt"
    line += "" if top_k is None else f" --top_k {top_k}"
    for name in ("csv", "json", "jsonl", "parquet"):
        console.printed(f"{line} --output out/predictions.{name}", "bert")
    with open("out/predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    read = [
        {name: cell if isinstance(cell, str) else f"{cell:.6f}" for name, cell in row.items()}
        for row in pq.read_table("out/predictions.parquet").to_pylist()
    ]
    assert read == rows and [row["text"] for row in rows] == ["not bad", "bad, “quoted”"]
    assert all(len(row) == {None: 4, 1: 3, 2: 5}[top_k] for row in rows)
    objects = [*map(json.loads, Path("out/predictions.jsonl").read_text().splitlines())]
    assert json.loads(Path("out/predictions.json").read_text()) == objects
    for entry, row in zip(objects, rows, strict=True):
        assert (entry["text"], entry["label"]) == (row["text"], row["label"])
        assert len(entry["probabilities"]) == (top_k or 2)
        first = next(iter(entry["probabilities"].items()))
        assert first[0] == row["label"] and first[1] >= 0.5


def test_other_columns_of_a_table_are_kept(console: Console, best: Path) -> None:
    """In the order of the rows, without those that are skipped; labels are the predicted ones."""
    ids = {"a": 1, "b b b b b b": 2, "": 3, "c c": 4}
    rows = [
        {"id": i, "text": text, "label": "asked", "weight": i / 3, "seen": i == 1}
        for text, i in ids.items()
    ]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), "asked.parquet")
    with open("asked.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for kind in ("csv", "jsonl", "parquet"):
        line = f"predict --ckpt_path {best} --input asked.{kind} --data.skip_bad true"
        console.printed(f"{line} --output out.csv", "bert")
        with open("out.csv", newline="") as file:
            found = [*csv.DictReader(file)]
        assert list(found[0])[:2] == ["text", "label"] and list(found[0])[-1] == "seen"
        assert [(row["text"], int(row["id"])) for row in found] == [
            (text, i) for text, i in ids.items() if text
        ]
        assert [float(row["weight"]) for row in found] == [1 / 3, 2 / 3, 4 / 3]
        assert [row["seen"].lower() for row in found] == ["true", "false", "false"]
        assert "asked" not in {row["label"] for row in found}
        console.printed(f"{line} --output out.jsonl", "bert")
        entries = [json.loads(text) for text in Path("out.jsonl").read_text().splitlines()]
        assert [int(entry["id"]) for entry in entries] == [1, 2, 4]
    console.printed(f"{line} --output out.parquet", "bert")
    assert pq.read_table("out.parquet").column("seen").to_pylist() == [True, False, False]


def test_cells_of_json_stay_what_they_are(console: Console, best: Path) -> None:
    """In CSV files they are JSON. A column of Parquet with several types is text."""
    others: dict[str, list[Any]] = {
        "count": [3, None, 2**53 + 1],
        "weight": [1 / 3, 1e-9, 2.0],
        "seen": [True, None, False],
        "tags": [["é", "b"], [], None],
        "code": ["007", "true", "[1]"],
        "mixed": [1, "1", [True]],
        "various": ["a", [1], None],
        "large": [2**70, 1, None],
        "empty": [[{}], [], None],
        "nested": [{"a": [1], "b": "x.y"}, {}, {"c.d": 1}],
        "score": [1, 2, 3],
        "score.std": [0.5, None, 0.25],
    }
    rows = [dict(zip(others, cells, strict=True)) for cells in zip(*others.values(), strict=True)]
    for number, row in enumerate(rows):
        row["text"] = f"{number} good"
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("out.jsonl", "out.parquet", "out.csv"):
        console.printed(f"predict --ckpt_path {best} --input in.jsonl --output {name}", "bert")
    entries = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    table = pq.read_table("out.parquet").to_pydict()
    with open("out.csv", newline="") as file:
        cells = [*csv.DictReader(file)]
    assert not [name for name in cells[0] if name.startswith("nested.")]
    for name, column in others.items():
        found = [entry[name] for entry in entries]
        assert found == column and [*map(type, found)] == [*map(type, column)]
        texts = ["" if c is None else c if type(c) is str else json.dumps(c) for c in column]
        assert [row[name] for row in cells] == texts
        if name in ("mixed", "various", "large", "empty", "nested"):
            assert [cell or "" for cell in table[name]] == texts
        else:
            assert table[name] == column and [*map(type, table[name])] == [*map(type, column)]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_classes_that_are_named_like_columns(name: str, tmp_path: Path) -> None:
    file = PredictionFile(tmp_path / name)
    names = ["text", "label"]
    file.write("text", ["hello"], names, [SingleLabel(targets(names)).prediction(PROBABILITIES)])
    if name.endswith("csv"):
        (row,) = csv.DictReader((tmp_path / name).read_text().splitlines())
    else:
        (row,) = pq.read_table(tmp_path / name).to_pylist()
    assert list(row) == ["text", "label", "probability_text", "probability_label"]
    assert row["text"] == "hello" and row["label"] == "label"
    assert float(row["probability_text"]) == pytest.approx(0.25)


def targets(names: list[str]) -> dict[str, Any]:
    """Metadata of classes."""
    return {"class_names": names, **external_targets("single_label_classification")}


def test_texts_with_carriage_returns_stay_whole_in_csv(console: Console, best: Path) -> None:
    texts = ["10%\r50%\r100%", 'a "word"', "two\nlines", "last\r"]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    Path("in.jsonl").write_text(rows)
    predict = f"predict --ckpt_path {best} --input"
    console.printed(f"{predict} in.jsonl --output out.csv", "bert")
    with open("out.csv", newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == texts
    console.printed(f"{predict} out.csv --output again.csv", "bert")
    assert Path("again.csv").read_bytes().count(b"\r") == 3


def test_structs_of_a_parquet_file_are_kept(console: Console, best: Path) -> None:
    rows = [{"text": "good", "about": {"id": 1}, "image": {"bytes": b"x", "path": "x.png"}}]
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    console.printed(f"predict --ckpt_path {best} --input in.parquet --output out.jsonl", "bert")
    entry = json.loads(Path("out.jsonl").read_text())
    assert entry["about"] == {"id": 1} and "image" not in entry


def test_compressed_lines_and_lists_of_json(console: Console, best: Path) -> None:
    predict = f"predict --ckpt_path {best} --input"
    Path("in.txt").write_text("good\nbad\n")
    Path("in.txt.gz").write_bytes(gzip.compress(b"good\nbad\n"))
    console.printed(f"{predict} in.txt --output a.csv", "bert")
    console.printed(f"{predict} in.txt.gz --output b.csv", "bert")
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()
    Path("in.txt.gz").write_bytes(gzip.compress(b"good\nbad\n")[:-4])
    console.refused(f"{predict} in.txt.gz", "in.txt.gz cannot be read", task="bert", code=None)
    console.printed(f"{predict} in.txt --output a.json", "bert")
    console.refused(f"{predict} a.json", "each line must be a JSON object", task="bert", code=None)


@pytest.mark.parametrize("value", [1.2345678e-8, -7.5, 5.5375433e14])
@pytest.mark.parametrize("name", ["out.csv", "out.json", "out.parquet"])
def test_numbers_keep_their_digits(name: str, value: float, tmp_path: Path) -> None:
    PredictionFile(tmp_path / name).write("text", ["hello"], [], [Number(value)])
    if name.endswith("csv"):
        (row,) = csv.DictReader((tmp_path / name).read_text().splitlines())
    elif name.endswith("json"):
        (row,) = json.loads((tmp_path / name).read_text())
    else:
        (row,) = pq.read_table(tmp_path / name).to_pylist()
    assert float(row["prediction"]) == pytest.approx(value, rel=1e-6)


def test_json_has_null_for_infinity_and_nan(console: Console, best: Path) -> None:
    rows = {
        "text": ["good"],
        "score": [math.nan],
        "more": [[1.5, math.inf]],
        "a": [{"b": math.nan}],
    }
    pq.write_table(pa.table(rows), "in.parquet")
    for name in ("out.json", "out.jsonl"):
        console.printed(f"predict --ckpt_path {best} --input in.parquet --output {name}", "bert")
        text = Path(name).read_text()
        assert "NaN" not in text and "Infinity" not in text
        found = json.loads(text)
        entry = found[0] if name == "out.json" else found
        assert (entry["score"], entry["more"], entry["a"]) == (None, [1.5, None], {"b": None})
