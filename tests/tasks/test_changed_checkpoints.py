"""Checkpoints with an entry that is missing, of another type or size: read as they are, or refused by name."""

import math
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.checkpoints.contents import SCHEMAS, VERSION
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.checkpoints.writing import read_to_continue
from tasks.errors import DataError, RunError, UsageError
from tests.tasks.command import SHORT, checkpoint, run

Place = tuple[str | int, ...]  # where an entry is
TASKS = ("vit", "bert", "mlm", "lm", "seq2seq")
TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --data.max_length 32 "
    "--data.batch_size 8 --trainer.limit_train_batches 2 --trainer.limit_val_batches 1 --trainer.limit_test_batches 0 "
    "--trainer.max_epochs 1 --model.ema 0.9"
)


def nested(levels: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


GONE = ...
ODD = [
    GONE,
    None,
    True,
    -1,
    0,
    10**7,
    10**30,
    1.5,
    math.nan,
    "",
    "x",
    [],
    {},
    nested(100),
    torch.full((2,), math.nan),
]


@pytest.fixture(scope="module")
def last(
    finished: Path, lm_letters: Path, translator: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The last checkpoint of a tiny run of each task."""
    found = {"vit": finished, "lm": lm_letters.parents[1], "seq2seq": translator.parents[1]}
    for task, more in (
        ("bert", "--model.optimizer.optimizer muon"),
        ("mlm", "--data.tokenizer.vocabulary 300"),
    ):
        found[task] = tmp_path_factory.mktemp(task) / "run"
        assert run(f"fit {TEXT} {more} --run_dir {found[task]}", task) == 0
    return {task: folder / "checkpoints" / "last.ckpt" for task, folder in found.items()}


def entries(tree: Any, place: Place = ()) -> Iterator[Place]:
    """Where the entries of nested dicts and lists are; of long lists the first."""
    items = (
        list(tree.items())
        if isinstance(tree, dict)
        else list(enumerate(tree))[:3]
        if list is type(tree)
        else []
    )
    for name, value in items:
        yield (*place, name)
        yield from entries(value, (*place, name))


def changed(tree: Any, place: Place, value: Any) -> Any:
    """The same tree with another value in one place."""
    tree, (name, *rest) = type(tree)(tree), place
    if rest:
        tree[name] = changed(tree[name], tuple(rest), value)
    elif value is GONE:
        del tree[name]
    else:
        tree[name] = value
    return tree


@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", TASKS)
def test_any_entry(task: str, last: dict[str, Path], tmp_path: Path) -> None:
    """Many, drawn with a seed, of all there are."""
    whole, draw, file, refused = (
        torch.load(last[task], weights_only=True),
        random.Random(0),
        tmp_path / "x.ckpt",
        0,
    )
    places = list(entries(whole))
    assert len(places) > 300
    for place in draw.sample(places, 120):
        torch.save(changed(whole, place, draw.choice(ODD)), file)
        try:
            read_to_continue(file, task)
        except (UsageError, RunError) as error:
            refused += 1
            assert "x.ckpt" in str(error) and "\n" not in str(error) and len(str(error)) < 600
    assert refused > 30


def test_an_entry_for_each_task(last: dict[str, Path]) -> None:
    assert SCHEMAS.keys() == last.keys()
    for task, file in last.items():
        assert read_to_continue(file, task)[KEY]["task"] == task


NET, METADATA = (KEY, "net"), (KEY, "metadata")
MODEL = {  # wrong whatever a checkpoint is read for
    (KEY,): (5, "tessera is 5"),
    (KEY, "task"): (["vit"], "tessera.task"),
    (KEY, "config", "model"): (None, "tessera.config.model"),
    (KEY, "config", "data", "path"): (nested(100), "nested too deeply"),
    (KEY, "config", "data", "batch_size"): (10**30, "tessera.config.data.batch_size"),
    (KEY, "config", "model", "net"): (GONE, "tessera.config.model.net"),
    METADATA: ("x", "tessera.metadata"),
    (*METADATA, "class_names", 1): ("0", "class_names"),
    (*METADATA, "class_names"): ({}, "tessera.metadata.class_names"),
    (*METADATA, "num_classes"): (3, "class_names"),
    (*METADATA, "mean"): ([math.nan], "tessera.metadata.mean"),
    (*METADATA, "std"): ([0.0], "metadata.std"),
    NET: ([], "tessera.net"),
    (*NET, "stack"): (5, "tessera.net"),
    ("state_dict",): ([], "state_dict"),
    ("state_dict", "net.head.linear.weight"): (GONE, "state_dict.net.head.linear.weight"),
    ("state_dict", "net.head.linear.bias"): (torch.zeros(3), "state_dict.net.head.linear.bias"),
    ("state_dict", "net.norm.bias"): (torch.zeros(64), "state_dict.net.norm.bias"),
}


def with_net(whole: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The same checkpoint with another option of the stack, in both places that have it."""
    stack = whole[KEY]["net"]["stack"] | {name: value}
    for place in ((*NET, "stack"), (KEY, "config", "model", "net", "stack")):
        whole = changed(whole, place, stack)
    return whole


COMMANDS = [
    "test --ckpt_path {0}",
    "predict --ckpt_path {0} --data.predict_path .",
    "export --ckpt_path {0} --format safetensors",
    "fit --resume {1}",
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split()[0])
@pytest.mark.parametrize("version", ["0.1.0", 1, GONE])
def test_older_checkpoints_are_refused(
    version: Any, command: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_copy / "checkpoints" / "last.ckpt"
    torch.save(changed(checkpoint(run_copy), (KEY, "version"), version), file)
    capsys.readouterr()
    assert run(command.format(file, run_copy)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "last.ckpt" in said and "version" in said, said


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split()[0])
@pytest.mark.parametrize("place", MODEL, ids=str)
def test_the_entry_is_named(
    place: Place, command: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value, named = MODEL[place]
    refuse(changed(checkpoint(run_copy), place, value), command, named, run_copy, capsys)


def refuse(
    content: dict[str, Any],
    command: str,
    named: str,
    run_copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run a command on the only checkpoint of a run, which it must refuse in one sentence, and write nothing."""
    file = run_copy / "checkpoints" / "last.ckpt"
    torch.save(content, file)
    for other in ("best", "previous"):
        (file.parent / f"{other}.ckpt").unlink()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(command.format(file, run_copy)) == 1
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1 and "last.ckpt" in said and named in said and "--debug" not in said
    ), said
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split()[0])
@pytest.mark.parametrize(
    "name, value",
    [
        ("depth", 10**7),
        ("depth", 999),
        ("width", 10**12),
        ("width", -64),
        ("heads", "4"),
        ("dropout", []),
    ],
)
def test_networks_that_the_weights_are_not_of(
    name: str, value: Any, command: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before memory for them is taken."""
    refuse(with_net(checkpoint(run_copy), name, value), command, "", run_copy, capsys)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split()[0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(
    value: float, command: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = checkpoint(run_copy)
    content["state_dict"]["net.head.linear.weight"][0, 0] = value
    refuse(content, command, "net.head.linear.weight holds NaN or infinity", run_copy, capsys)


TRAINING: list[tuple[Place, Any, str]] = [  # wrong for a run that is to be continued
    (("global_step",), GONE, "global_step is missing"),
    (("epoch",), "1", "epoch is"),
    (("loops",), [], "loops is"),
    (("callbacks",), GONE, "callbacks is missing"),
    (("lr_schedulers",), None, "lr_schedulers is"),
    (("callbacks", "RunRecord", "samples"), "x", "callbacks.RunRecord.samples"),
    (("optimizer_states",), GONE, "optimizer_states is missing"),
    (("optimizer_states", 0, "state", 0, "exp_avg"), "x", "optimizer_states[0].state.0.exp_avg"),
]


@pytest.mark.parametrize("place, value, named", TRAINING, ids=str)
def test_what_a_run_goes_on_with(
    place: Place, value: Any, named: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "fit --resume {1} --trainer.max_epochs 3"
    refuse(changed(checkpoint(run_copy), place, value), line, named, run_copy, capsys)


AVERAGES: list[tuple[Place, Any, str]] = [
    (("step",), "x", "callbacks.EMA.step is 'x'"),
    (("step",), GONE, "callbacks.EMA.step is missing"),
    (("trained", "net.head.linear.bias"), GONE, "callbacks.EMA has no net.head.linear.bias"),
    (("trained", "net.head.linear.bias"), torch.zeros(3), "net.head.linear.bias has shape [3]"),
    (
        ("trained", "net.head.linear.bias"),
        torch.full((10,), math.nan),
        "net.head.linear.bias holds NaN",
    ),
]


def test_averages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"fit {SHORT} --model.ema 0.9 --run_dir whole") == 0
    for number, (place, value, named) in enumerate(AVERAGES):
        folder = Path(shutil.copytree("whole", str(number)))
        content = changed(checkpoint(folder), ("callbacks", "EMA", *place), value)
        refuse(content, "fit --resume {1} --trainer.max_epochs 3", named, folder, capsys)
    content = changed(checkpoint("whole"), ("callbacks", "EMA"), GONE)
    torch.save(content, "whole/checkpoints/last.ckpt")
    assert run("fit --resume whole --trainer.max_epochs 3") == 0
    assert "the checkpoint has no average of the weights" in capsys.readouterr().out


def test_the_one_before_goes_on(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where an entry of the last one is wrong."""
    file = run_copy / "checkpoints" / "last.ckpt"
    torch.save(changed(torch.load(file, weights_only=True), ("global_step",), None), file)
    assert run(f"fit --resume {run_copy}") == 0
    assert (
        "global_step is None, but must be a whole number: resuming from" in capsys.readouterr().out
    )
    assert checkpoint(run_copy)["global_step"] == 8


@pytest.mark.parametrize("path", ["{0}/thesis.txt", "{1}/checkpoints/../../thesis.txt"])
def test_no_file_elsewhere_is_removed(
    path: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that is no longer among the best."""
    thesis = Path("thesis.txt").absolute()
    thesis.write_text("three years")
    content = checkpoint(run_copy)
    for state in content["callbacks"].values():
        if state.get("monitor") == "val/acc":
            name = path.format(thesis.parent, run_copy.absolute())
            state["best_k_models"], state["kth_best_model_path"] = {name: torch.tensor(0.0)}, name
            state["kth_value"] = torch.tensor(0.0)
    refuse(content, "fit --resume {1} --trainer.max_epochs 3", "thesis.txt", run_copy, capsys)
    assert thesis.read_text() == "three years"


# Optimizers ---------------------------------------------------------------------------------------------------------

STATES = {  # by name: what the state of the first parameter becomes
    "another shape": lambda value: torch.zeros(3),
    "not a number": lambda value: value * math.nan,
    "one number": lambda value: torch.zeros(()),
    "fewer dimensions": lambda value: value.flatten(),
    "whole numbers": lambda value: value.long(),
    "complex numbers": lambda value: value.to(torch.complex64),
    "one number for all": lambda value: torch.zeros(()).expand(value.shape),
    "missing": None,
}


@pytest.mark.parametrize("change", STATES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_states_of_optimizers(
    optimizer: str, change: str, finished: Path, tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    source = finished if optimizer == "adamw" else tmp_path_factory.getbasetemp() / "muon"
    if not source.exists():
        assert run(f"fit {SHORT} --model.optimizer.optimizer muon --run_dir {source}") == 0
    shutil.copytree(source, "r")
    content, make = checkpoint("r"), STATES[change]
    (state,) = content["optimizer_states"]
    first = state["state"][0]
    name = "exp_avg_sq" if optimizer == "adamw" else "momentum_buffer"
    if make is None:
        del first[name]
        first["other"] = torch.zeros(3)
    else:
        first[name] = make(first[name])
    refuse(content, "fit --resume {1} --trainer.max_epochs 3", name, Path("r"), capsys)


# Other commands -----------------------------------------------------------------------------------------------------

READERS = {
    "bert": ["tokenize --text a", "export --output o", 'predict --text "a"', "validate"],
    "mlm": ["export --output o", "validate"],
    "lm": [
        "generate --prompt a --max_new_tokens 2",
        "score --data.path t.txt",
        "export --output o",
        "validate",
    ],
    "seq2seq": [
        "translate --text a --beams 1",
        "attend --text a --beams 1",
        "export --output o",
        "validate",
    ],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", READERS)
def test_every_command(
    task: str, last: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the whole of it: odd metadata, options and weights, drawn with a seed; also those of an odd size."""
    whole, draw = torch.load(last[task], weights_only=True), random.Random(1)
    Path("t.txt").write_text("The quick brown fox.\n" * 20)
    places = [
        place for place in entries(whole) if place[:2] in ((KEY, "metadata"), (KEY, "config"))
    ]
    for number, place in enumerate(draw.sample(places, 12)):
        torch.save(changed(whole, place, draw.choice(ODD)), "x.ckpt")
        line = READERS[task][number % len(READERS[task])]
        capsys.readouterr()
        more = " --trainer.limit_val_batches 1" if line == "validate" else ""
        code, said = run(f"{line} --ckpt_path x.ckpt{more}", task), capsys.readouterr().err
        assert code in (0, 1, 2) and "--debug" not in said, (place, said)
        assert not code or said.count("\n") == 1, (place, said)
        shutil.rmtree("o", ignore_errors=True)


@pytest.mark.parametrize(
    "task, source", [("bert", "mlm"), ("mlm", "bert"), ("lm", "lm"), ("seq2seq", "seq2seq")]
)
def test_pretrained(
    task: str, source: str, last: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = torch.load(last[source], weights_only=True)
    for place, value, named in (
        ((*METADATA, "tokenizer_options"), GONE, "tessera.metadata.tokenizer_options is missing"),
        (NET, [], "tessera.net"),
        (
            ("state_dict", next(iter(whole["state_dict"]))),
            torch.full((2, 2), math.nan),
            "state_dict.",
        ),
    ):
        torch.save(changed(whole, place, value), "x.ckpt")
        capsys.readouterr()
        assert run("fit --model.pretrained x.ckpt", task) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "x.ckpt" in said and named in said, said


def deep_file(levels: int) -> bytes:
    """A checkpoint with lists in lists among its metadata, as many as Python itself would not write."""
    entry = {
        "task": "vit",
        "version": VERSION,
        "metadata": {"class_names": "HERE"},
        "net": {},
        "config": {},
    }
    plain = pickle.dumps({KEY: entry, "state_dict": {}}, protocol=2)
    word = b"X\x04\x00\x00\x00HERE"
    place = plain.index(word)
    return plain[:place] + b"]" * levels + b"a" * (levels - 1) + plain[place + len(word) :]


@pytest.mark.parametrize("levels", [1000, 1_000_000])
def test_nested_without_end(levels: int, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({}, "x.ckpt")
    with zipfile.ZipFile("x.ckpt") as old, zipfile.ZipFile("deep.ckpt", "w") as new:
        for name in old.namelist():
            new.writestr(name, deep_file(levels) if name.endswith("data.pkl") else old.read(name))
    assert run("test --ckpt_path deep.ckpt") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "deep.ckpt" in said, said


def test_reading_says_which_kind_of_error(last: dict[str, Path], tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "theirs.ckpt")
    with pytest.raises(UsageError, match="not a Tessera checkpoint"):
        read_checkpoint(tmp_path / "theirs.ckpt")
    with pytest.raises((RunError, DataError)):
        torch.save(changed(torch.load(last["vit"], weights_only=True), NET, 5), tmp_path / "x.ckpt")
        read_checkpoint(tmp_path / "x.ckpt")
