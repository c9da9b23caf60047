"""The scripts of configs/examples/ run as a reader would run them."""

import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tessera

from modules.feedforward import FEEDFORWARDS, FeedForward
from tests.helpers.command import ROOT, environment, python, run
from tests.helpers.tiny import TINY, write_reviews

EXAMPLES = sorted(path.stem for path in (ROOT / "configs/examples").glob("*.py"))


def example(name: str, folder: Path, *arguments: str) -> str:
    """What an example prints."""
    done = python(f"configs.examples.{name} {' '.join(arguments)}", folder)
    assert (done.returncode, done.stderr.replace(NO_TEST, "")) == (0, ""), done.stderr
    return done.stdout


NO_TEST = "warning: The data have no test split: the validation split is tested instead.\n"


def test_all_are_named_where_readers_look() -> None:
    assert EXAMPLES == ["attention", "own_images", "self_training", "vary_a_block"]
    for page in ("README.md", "configs/README.md"):
        text = (ROOT / page).read_text()
        assert all(f"{name}.py" in text for name in EXAMPLES), page
    for name in EXAMPLES:
        code = (ROOT / f"configs/examples/{name}.py").read_text()
        assert 60 <= len(code.splitlines()) <= 110
        assert f"python -m configs.examples.{name}" in code


def test_attention(tmp_path: Path) -> None:
    shown = example("attention", tmp_path)
    differences = re.findall(r"(?:all|causal): (\S+)\n", shown)
    assert len(differences) == 2 and all(float(number) < 1e-5 for number in differences)
    rows = [line.split() for line in shown.splitlines() if re.fullmatch(r" +(\d\.\d\d *){5}", line)]
    weights = [[float(cell) for cell in row] for row in rows]
    assert all(sum(row) == pytest.approx(1, abs=0.03) for row in weights)
    assert all(weights[n][m] == 0 for n in range(5) for m in range(n + 1, 5))


@pytest.mark.slow
def test_vary_a_block(tmp_path: Path) -> None:
    shown = example("vary_a_block", tmp_path)
    rows = re.findall(r"^(\w+) +\d +([\d,]+) +(\d\.\d+) +(\d\.\d+) +\d+\.\d$", shown, re.M)
    assert [row[0] for row in rows] == ["gelu"] * 2 + ["bilinear"] * 2
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert sizes[0] == pytest.approx(sizes[2], rel=0.01)
    accuracies = [float(accuracy) for _, _, accuracy, _ in rows]
    assert min(accuracies) > 0.85
    said = re.search(r"^(?:Yes|No), .* differ by ([+-]\d\.\d+)", shown, re.M)
    difference = (sum(accuracies[2:]) - sum(accuracies[:2])) / 2
    assert said and float(said[1]) == pytest.approx(difference, abs=2e-4)
    assert list(tmp_path.iterdir()) == []


def test_the_answer_follows_from_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FEEDFORWARDS, "bilinear", FeedForward)  # the example's ends with the test
    from configs.examples.vary_a_block import answer

    assert answer(gelu=0.92, bilinear=0.93).startswith("Yes, as well")
    assert answer(gelu=0.90, bilinear=0.96).startswith("Yes, better")
    assert answer(gelu=0.96, bilinear=0.90).startswith("No")


@pytest.mark.slow
def test_own_images(tmp_path: Path) -> None:
    shown = example("own_images", tmp_path, "'my shapes'")
    answers = re.findall(r"^a (\w+) +is taken for a (\w+) ", shown, re.M)
    assert len(answers) == 3 and all(drawn == found for drawn, found in answers)
    assert "(4, 4, 64, 64)" in shown
    picture = re.findall(r"^  (.{16}) \| (.{16})$", shown, re.M)
    assert len(picture) == 8 and all("".join(half).strip() for half in zip(*picture, strict=True))
    assert len(list((tmp_path / "my shapes/images/train").glob("*/*.png"))) == 120


@pytest.mark.parametrize("given, images", [(".", "images"), ("", "runs/own_images/images")])
def test_own_images_needs_a_new_folder(given: str, images: str, tmp_path: Path) -> None:
    """By default it is in runs/, where it stays."""
    (tmp_path / images / "train/cross").mkdir(parents=True)
    done = python(f"configs.examples.own_images {given}", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {images} exists: give another FOLDER\n"


@pytest.mark.slow
def test_self_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from configs.examples import self_training

    monkeypatch.chdir(tmp_path)
    write_reviews(tmp_path / "imdb", copies=50)
    (file,) = Path("imdb").glob("unsupervised-*")
    texts = [f"{i} {word} films" for i in range(10) for word in ("bad", "good", "odd")]
    pq.write_table(pa.table({"text": texts, "label": [-1] * len(texts)}), file)
    options = "--data.dataset.name null --model.optimizer.lr 3e-3 --trainer.max_epochs 2"
    line = f"fit {TINY['bert']} --data.path imdb {options} --run_dir teacher"
    assert run(line, "bert") == 0
    predictions = tessera.load("teacher").predict(texts)
    probabilities = sorted(prediction.probability for prediction in predictions)
    monkeypatch.setattr(self_training, "SURE", probabilities[10])
    added = [
        (text, prediction.label)
        for text, prediction in zip(texts, predictions, strict=True)
        if prediction.probability >= probabilities[10]
    ]
    self_training.main("teacher", Path("imdb"), Path("more"))
    splits = {path.stem: pq.read_table(path).to_pylist() for path in Path("more").iterdir()}
    (file,) = Path("imdb").glob("train-*")
    given = [(row["text"], ("neg", "pos")[row["label"]]) for row in pq.read_table(file).to_pylist()]
    rows = [(row["text"], row["label"]) for name in ("train", "validation") for row in splits[name]]
    assert sorted(rows) == sorted(given + added) and len(added) < len(texts)
    (file,) = Path("imdb").glob("test-*")
    tested = [
        (row["text"], ("neg", "pos")[row["label"]]) for row in pq.read_table(file).to_pylist()
    ]
    assert [(row["text"], row["label"]) for row in splits["test"]] == tested
    assert 1 <= len(splits["validation"]) <= 20 and len(tested) == 8
    assert not {row["text"] for row in splits["validation"]} & {*texts}
    assert run(line.replace("imdb", "more").replace("teacher", "student"), "bert") == 0
    with pytest.raises(SystemExit, match="^error: more exists: give another OUTPUT$"):
        self_training.main("teacher", Path("imdb"), Path("more"))


def test_self_training_needs_a_run(tmp_path: Path) -> None:
    done = python("configs.examples.self_training nowhere imdb more", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "nowhere" in done.stderr and not (tmp_path / "more").exists()


@pytest.mark.slow
def test_a_file_runs_like_its_module(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "configs/examples/attention.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "They are the same."), done.stderr
