"""`test` and `validate` on data that the model was not trained on evaluate all samples of them."""

import csv
import json
import warnings
from pathlib import Path

import pytest

from tests.helpers.command import Console, run
from tests.helpers.images import save_image
from tests.helpers.tables import write
from tests.helpers.tiny import NET

FITS = {  # task, and the options of a tiny model on the data at `old`
    "vit": f"fit {NET} --model.net.image_size 8 --model.net.patch_size 4 --data.batch_size 8",
    "bert": f"fit {NET} --data.tokenizer.vocabulary 200 --data.batch_size 8",
    "mlm": f"fit {NET} --data.tokenizer.vocabulary 200 --data.batch_size 8",
}
NOUNS = {"vit": "images", "bert": "texts"}
FILES = {"test": "predictions.csv", "validate": "val_predictions.csv"}


def write_samples(path: Path, count: int, task: str) -> None:
    """`count` samples of each of two classes: class folders, or a table if the path is one."""
    rows = []
    for i in range(count):
        for name in ("ant", "bee"):
            if task != "vit":
                rows.append({"text": f"{name} number {i}", "label": name})
                continue
            file = Path("pictures" if path.suffix else path, name, f"{i}.png")
            save_image(file, i)
            rows.append({"file_name": str(file), "label": name})
    if path.suffix:
        write(path, rows)


def which_split(path: str) -> str:
    split: str = json.loads(Path(path).read_text())["test_split"]
    return split


def evaluated(console: Console, line: str, task: str, command: str = "test") -> tuple[str, int]:
    """The first line that a command prints, and how many samples it evaluates."""
    out, _ = console.printed(f"{command} --ckpt_path r --output out {line}", task)
    with open(Path("out", FILES[command]), newline="") as file:
        return out.splitlines()[0], len(list(csv.DictReader(file)))


CASES = [("vit", "old", "new"), ("vit", "old", "new.csv"), ("bert", "old.csv", "new.jsonl")]


@pytest.mark.plain_every(2)
@pytest.mark.parametrize(("task", "old", "new"), CASES)
def test_other_data_are_evaluated_whole(
    task: str, old: str, new: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_samples(Path(old), 20, task)
    write_samples(Path(new), 9, task)
    assert run(f"{FITS[task]} --trainer.max_epochs 1 --data.path {old} --run_dir r", task) == 0
    for command in ("test", "validate"):
        first, count = evaluated(console, f"--data.path {new}", task, command)
        assert first.startswith(f"data    {new}: all 18 {NOUNS[task]} to {command}") and count == 18
    assert [which_split("r/summary.json"), which_split("out/test.json")] == ["val", "all"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*no test split")
        console.printed(f"test --ckpt_path r --data.path {new}", task)
    for path in ("", f"--data.path {old}", f"--data.path {Path(old).resolve()}"):
        first, count = evaluated(console, path, task)
        assert f": 4 {NOUNS[task]} to test, held out of the training split" in first and count == 4
    Path("elsewhere").mkdir()  # where the checkpoint's relative path means nothing
    monkeypatch.chdir("elsewhere")
    first, _ = console.printed(f"test --ckpt_path ../r --data.path ../{old}", task)
    assert f": 4 {NOUNS[task]} to test, held out" in first


@pytest.mark.parametrize(
    ("task", "old", "new"), [("vit", "old", "new"), ("bert", "old.csv", "new.csv")]
)
def test_samples_of_the_training_in_another_place(
    task: str, old: str, new: str, console: Console
) -> None:
    """As the message about the missing path advises; only what was held out is evaluated."""
    write_samples(Path(old), 20, task)
    path = Path(old).resolve()
    assert run(f"{FITS[task]} --trainer.max_epochs 1 --data.path {path} --run_dir r", task) == 0
    path.rename(new)
    console.refused("test --ckpt_path r", "if the data were moved, add --data.path", task=task)
    for command in ("test", "validate"):
        with pytest.warns(UserWarning, match=f"{new} has the samples of the training"):
            first, count = evaluated(console, f"--data.path {new}", task, command)
        assert f": 4 {NOUNS[task]} to {command}, held out of the training" in first and count == 4


@pytest.mark.parametrize("models", ["r other", "other r"])
def test_models_are_compared_on_the_same_images(models: str, console: Console) -> None:
    """Those that were held out of the training of one, wherever they are now."""
    for folder, count, name in (("old", 20, "r"), ("others", 9, "other")):
        write_samples(Path(folder), count, "vit")
        options = f"--trainer.max_epochs 1 --data.path {folder} --run_dir {name}"
        assert run(f"{FITS['vit']} {options}") == 0
    Path("old").rename("new")
    with pytest.warns(UserWarning, match="new has the samples of the training"):
        out, _ = console.printed(f"compare {models} --data.path new --repetitions 1 --output out")
    assert "tested with 4 images of new" in out
    for row in csv.DictReader(Path("out/compare.csv").read_text().splitlines()):
        assert float(row["test/acc"]) in (0, 0.25, 0.5, 0.75, 1)


@pytest.mark.parametrize(
    ("task", "path"), [("vit", "data"), ("bert", "data.csv"), ("mlm", "data.csv")]
)
def test_data_that_have_changed_since_the_training(task: str, path: str, console: Console) -> None:
    """One more sample, or another of the same number, changes which ones are held out."""
    write_samples(Path(path), 20, task)
    assert run(f"{FITS[task]} --trainer.max_epochs 1 --data.path {path} --run_dir r", task) == 0
    changed = "training split of .* has changed since the training"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{changed}")
        console.printed("test --ckpt_path r", task)
    if task == "vit":
        Path("data/ant/00.png").write_bytes(Path("data/ant/0.png").read_bytes())
        Path("data/ant/19.png").unlink()
    else:
        lines = Path(path).read_text().splitlines(keepends=True)
        first = lines[1].replace("number", "letter")
        Path(path).write_text("".join([lines[0], first, *lines[1:-2], lines[-1]]))
    for command in ("test", "validate"):
        with pytest.warns(UserWarning, match=changed):
            assert "held out" in console.printed(f"{command} --ckpt_path r", task)[0]
    console.refused("fit --resume r --trainer.max_epochs 2", "are not those that the", task=task)
