"""Models of numbers and of several labels in Python, in files, and in other programs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import tessera
import timm
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers.command import Console, run
from tests.helpers.images import save_image

TEXTS = ["good long bad", "short short good", "bad bad bad"]
PROBLEMS = ("regression", "multi_label_classification")
Runs = dict[str, Path]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of tasks.bert by problem type, after one epoch."""
    folder = tmp_path_factory.mktemp("texts")
    for kind in PROBLEMS:
        rows = [f"good film {i},{90 + i}" for i in range(24)]
        if kind != "regression":
            rows = [f'bad film {i},"art,{"war" if i % 3 else "love"}"' for i in range(24)]
        (folder / f"{kind}.csv").write_text("\n".join(["text,label", *rows]))
        line = (
            f"fit --data.path {folder}/{kind}.csv --model.problem_type {kind} --preset tiny "
            f"--data.tokenizer.vocabulary 200 --data.batch_size 8 --trainer.max_epochs 1 "
            f"--trainer.limit_test_batches 0 --run_dir {folder}/{kind}"
        )
        assert run(line, "bert") == 0
    return {kind: folder / kind for kind in PROBLEMS}


def test_numbers_are_predicted_in_their_unit(texts: Runs) -> None:
    model = tessera.load(texts["regression"])
    values = [one.value for one in model.predict(TEXTS)]
    assert all(80 < value < 130 for value in values)
    table = tessera.Predictor(texts["regression"])({"text": TEXTS})
    assert table["prediction"].tolist() == pytest.approx(values, rel=1e-6)
    with pytest.raises(tessera.UsageError, match="no probabilities"):
        tessera.Predictor(texts["regression"], probabilities=True)(
            {"text": [3]}
        )  # before it is read


def test_labels_are_those_with_half_the_probability(texts: Runs) -> None:
    model = tessera.load(texts["multi_label_classification"])
    for one in model.predict(TEXTS):
        assert list(one.probabilities.values()) == sorted(one.probabilities.values(), reverse=True)
        assert one.labels == [name for name, value in one.probabilities.items() if value > 0.5]
        assert set(one.probabilities) == {"art", "war", "love"}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_files_and_lines_of_predictions(
    kind: str, texts: Runs, console: Console, tmp_path: Path
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS))
    predict = f"predict --ckpt_path {texts[kind]}"
    for name in ("out.csv", "out.jsonl"):
        console.printed(f"{predict} --input {lines} --output {tmp_path / name}", "bert")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    entries = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    printed = console.printed(f'{predict} --text "{TEXTS[0]}"', "bert")[0].splitlines()
    for one, row, entry in zip(
        tessera.load(texts[kind]).predict(TEXTS), rows, entries, strict=True
    ):
        if kind == "regression":
            assert float(row["prediction"]) == pytest.approx(one.value, rel=1e-5)
            assert entry["prediction"] == pytest.approx(one.value, rel=1e-5)
        else:
            assert row["labels"] == ",".join(one.labels) and entry["labels"] == one.labels
            assert float(row["war"]) == pytest.approx(one.probabilities["war"], abs=1e-5)
    first = tessera.load(texts[kind]).predict(TEXTS[0])
    assert printed[-1] == first.line()


@pytest.mark.parametrize("kind", PROBLEMS)
def test_transformers_predicts_the_same(
    kind: str, texts: Runs, console: Console, tmp_path: Path
) -> None:
    """And so does Tessera from the exported folder, also of a text that is truncated."""
    all_texts = [*TEXTS, " ".join(TEXTS) * 50]
    folder = tmp_path / "exported"
    console.printed(f"export --ckpt_path {texts[kind]} --format hf --output {folder}", "bert")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert theirs.config.problem_type == kind
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length < theirs.config.max_position_embeddings
    inputs = tokenizer(all_texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits
    for source in (texts[kind], folder):
        with pytest.warns(UserWarning, match="truncated to"):
            found = tessera.load(source).predict(all_texts)
        assert values(found, theirs.config.id2label) == pytest.approx(
            (logits if kind == "regression" else logits.sigmoid()).flatten().tolist(), rel=1e-4
        )


def values(found: list[Any], names: dict[int, str]) -> list[float]:
    """All numbers or probabilities, sample by sample."""
    if isinstance(found[0], tessera.Number):
        return [one.value for one in found]
    return [one.probabilities[names[i]] for one in found for i in range(len(names))]


def test_timm_predicts_the_same_numbers(console: Console, tmp_path: Path) -> None:
    rows = ["file_name,label"]
    for i in range(16):
        save_image(tmp_path / f"{i}.png", seed=i, size=(16, 16))
        rows.append(f"{i}.png,{200 + i}")
    (tmp_path / "train.csv").write_text("\n".join(rows))
    net = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2"
    line = (
        f"fit --data.path {tmp_path}/train.csv --model.problem_type regression {net} "
        f"--model.net.patch_size 8 --trainer.max_epochs 1 --run_dir {tmp_path}/r"
    )
    assert run(line) == 0
    assert (tmp_path / "r/attention.png").exists()
    console.printed(f"export --ckpt_path {tmp_path}/r --format timm --output {tmp_path}/exported")
    theirs = timm.create_model(f"local-dir:{tmp_path}/exported", pretrained=True).eval()
    model = tessera.load(tmp_path / "r")
    pixels = model._normalised([tmp_path / "3.png"])
    with torch.no_grad():
        expected = float(theirs(pixels))
    assert model.predict(tmp_path / "3.png").value == pytest.approx(expected, rel=1e-4)
    assert 150 < expected < 260
    again = tessera.load(tmp_path / "exported").predict(tmp_path / "3.png")
    assert again.value == pytest.approx(expected, rel=1e-4)


def test_images_of_several_labels(tmp_path: Path) -> None:
    rows = []
    for i in range(16):
        save_image(tmp_path / f"{i}.png", seed=i, size=(16, 16))
        labels = ["even"] * (i % 2 == 0) + ["big"] * (i > 7)
        rows.append(json.dumps({"image": f"{i}.png", "labels": labels}))
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    line = (
        f"fit --data.path {tmp_path}/train.jsonl --model.problem_type multi_label_classification "
        "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 "
        "--model.net.patch_size 8 --trainer.max_epochs 1 --model.class_weights balanced "
        f"--model.augment.mixup 0.2 --run_dir {tmp_path}/r"
    )
    assert run(line) == 0
    summary = json.loads((tmp_path / "r/summary.json").read_text())
    assert {"test/map", "test/f1", "test/exact_match"} <= summary.keys()
    assert {path.name for path in (tmp_path / "r").iterdir()} >= {"attention.png", "roc.png"}
    assert set(tessera.load(tmp_path / "r").predict(tmp_path / "3.png").probabilities) == {
        "big",
        "even",
    }


def test_images_start_from_a_run_of_ours(console: Console, tmp_path: Path) -> None:
    """With its network and normalisation; positions are resized, a head of other classes is new."""
    net = "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2"
    few = "--trainer.max_epochs 1 --trainer.limit_train_batches 1 --trainer.limit_test_batches 0"
    assert run(f"fit {net} {few} --run_dir {tmp_path}/first") == 0
    for name in ("cat", "dog"):
        for i in range(4):
            save_image(tmp_path / "train" / name / f"{i}.png", seed=i, size=(12, 12), mode="L")
    line = (
        f"fit --data.path {tmp_path} --model.pretrained {tmp_path}/first --model.net.image_size 12 "
        f"--model.optimizer.lr 1e-12 {few} --run_dir {tmp_path}/second"
    )
    out, _ = console.printed(line)
    assert "the head is initialised anew" in out
    first, second = (tessera.load(tmp_path / name) for name in ("first", "second"))
    assert second.class_names == ["cat", "dog"]
    assert second.metadata["mean"] == first.metadata["mean"]
    ours = first.net.stack.state_dict()
    for name, weight in second.net.stack.state_dict().items():
        torch.testing.assert_close(weight, ours[name])


def test_texts_of_a_table_are_read_from_their_column(
    texts: Runs, console: Console, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("id,text,label\n" + "\n".join(f"{i},{text},?" for i, text in enumerate(TEXTS)))
    output = tmp_path / "out.csv"
    line = f"predict --ckpt_path {texts['regression']} --input {table} --output {output}"
    console.printed(line, "bert")
    rows = list(csv.DictReader(output.read_text().splitlines()))
    assert [row["text"] for row in rows] == TEXTS
    console.refused(f"{line} --top_k 1", "--top_k 1", "number", task="bert")
