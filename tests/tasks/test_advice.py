"""Messages and warnings advise what can be done."""

import warnings
from pathlib import Path

import pytest

from tests.helpers.command import Console, Patch, run
from tests.helpers.model_folders import encoder_folder
from tests.helpers.tiny import NET, write_images

ONE_EPOCH = "--trainer.max_epochs 1 --data.batch_size 8"


def write_csv(path: str, column: str = "text") -> None:
    """20 texts of 9 tokens or more, with the class neg or pos."""
    rows = [f"a film that was seen on day {i},{('neg', 'pos')[i % 2]}\n" for i in range(20)]
    Path(path).write_text("".join([f"{column},label\n", *rows]))


def test_data_of_a_run_that_are_not_here(console: Console, monkeypatch: Patch) -> None:
    write_csv("a.csv")
    line = f"fit --data.path a.csv {NET} --data.tokenizer.vocabulary 300 {ONE_EPOCH}"
    assert run(f"{line} --run_dir r", "bert") == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for line in ("test --ckpt_path ../r", "fit --resume ../r --trainer.max_epochs 2"):
        names = (
            "a.csv does not exist: ../r was trained with",
            "relative",
            "add --data.path",
        )
        console.refused(line, *names, task="bert")
        given = console.refused(f"{line} --data.path b.csv", "b.csv does not exist", task="bert")
        assert "records" not in given
        console.printed(f"{line} --data.path ../a.csv", "bert")
    Path("../a.csv").unlink()
    console.refused("test --ckpt_path ../r", "../a.csv does not exist: ../r", task="bert")


def test_a_run_without_its_best_checkpoint(console: Console) -> None:
    write_csv("a.csv")
    assert run(f"fit --data.path a.csv {NET} {ONE_EPOCH} --run_dir r", "bert") == 0
    line = "predict --ckpt_path r --text good"
    best, _ = console.printed(line, "bert")
    Path("r/checkpoints/best.ckpt").rename("best.ckpt")
    with pytest.warns(UserWarning) as warned:
        last, _ = console.printed(line, "bert")
    (message,) = [str(one.message) for one in warned if "best.ckpt" in str(one.message)]
    assert message.endswith("/r has no best.ckpt, as no validation has ended: last.ckpt is used")
    assert last == best  # after one epoch
    Path("r/checkpoints/last.ckpt").unlink()
    console.refused(line, "no checkpoint 'r'", task="bert")


def test_a_recipe_for_any_text_asks_for_one(console: Console) -> None:
    line = "fit --config configs/lm/shakespeare_char_cpu.yaml"
    console.refused(line, "HUB_ID stands for your data: --data.path takes", task="lm")


@pytest.mark.parametrize("task", ["vit", "igpt"])
def test_images_of_a_probed_model_that_are_not_here(
    task: str, console: Console, monkeypatch: Patch
) -> None:
    write_images(Path("images"), side=8)
    net = "--model.net.stack.depth 1 --model.net.stack.width 16 --model.net.stack.heads 2"
    size = "--model.net.patch_size 4" if task == "vit" else "--data.image_size 8"
    line = f"fit --data.path images {net} {size} --data.batch_size 4 --trainer.max_epochs 1"
    assert run(f"{line} --run_dir r", task) == 0
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    names = ("images does not exist:", "../r was trained with this path", "add --data.path with")
    console.refused("probe --ckpt_path ../r", *names, task=task)


def test_classes_with_almost_the_same_name_are_told_once() -> None:
    write_csv("a.csv")
    with Path("a.csv").open("a") as file:
        file.writelines(f"a film of year {i},Pos \n" for i in range(10))
    line = f"fit --data.path a.csv {NET} --data.tokenizer.vocabulary 300 {ONE_EPOCH}"
    for command, times in ((f"{line} --run_dir r", 1), ("test --ckpt_path r", 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert run(command, "bert") == 0
        told = [str(warning.message) for warning in caught]
        assert sum("'Pos' and 'pos' are different classes" in text for text in told) == times


@pytest.mark.parametrize(
    ("task", "option", "said"),
    [
        ("bert", "--data.num_workers", "`--help all` lists them all"),
        ("vit", "--model.hidden_size", "`--help all` lists them all"),
        ("vit", "--data.num_workrs", "did you mean --data.loading.num_workers?"),
        ("vit", "--num_heads", "did you mean --model.net.stack.heads?"),
        ("vit", "--max_epoch", "did you mean --trainer.max_epochs?"),
    ],
)
def test_only_near_options_are_suggested(
    task: str, option: str, said: str, console: Console
) -> None:
    console.refused(f"fit {option} 2", f"unknown option {option}: {said}", task=task)


@pytest.mark.parametrize("task", ["vit", "bert"])
def test_classes_are_balanced_in_one_way(task: str, console: Console) -> None:
    line = "fit --data.balanced true --model.class_weights balanced"
    console.refused(line, "--data.balanced", "--model.class_weights", "leave one out", task=task)


def test_another_column_than_that_of_the_training_is_told(console: Console) -> None:
    write_csv("a.csv")
    write_csv("two.csv", "review")
    line = f"fit --data.path a.csv {NET} --data.tokenizer.vocabulary 300 {ONE_EPOCH}"
    assert run(f"{line} --run_dir r", "bert") == 0
    line = "predict --ckpt_path r --input"
    told = "two.csv: reading the column review, the model was trained on the column text;"
    assert told in console.printed(f"{line} two.csv", "bert")[1]
    for same in ("a.csv", "two.csv --data.dataset.text_column review"):
        assert "column" not in console.printed(f"{line} {same}", "bert")[1]


@pytest.mark.parametrize(
    ("length", "advice"),
    [(6, "raise --data.max_length, to 8 at most"), (8, "the model reads no more")],
)
def test_no_longer_texts_than_the_pretrained_positions(
    length: int, advice: str, console: Console
) -> None:
    encoder_folder(Path("theirs"), "BertForMaskedLM", max_position_embeddings=8)
    write_csv("a.csv")
    line = f"fit --data.path a.csv --model.pretrained theirs --data.max_length {length} {ONE_EPOCH}"
    with pytest.warns(UserWarning, match=f"20 of 20 texts: truncated.*{advice}"):
        assert run(line, "bert") == 0
    console.refused(f"{line} --data.max_length 9", "--data.max_length 9 exceeds", task="bert")
