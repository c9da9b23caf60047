"""Config files: one sentence with the file and the entry for whatever they should not hold."""

import os
from pathlib import Path

import pytest
import yaml

from tasks.cli.config_files import read_config
from tasks.errors import UsageError
from tests.tasks.command import SHORT, checkpoint, run
from tests.tasks.test_bad_input import USER, assert_refused

BAD = {  # the content of a file, and words of the sentence beside its name
    "preset: [tiny]": "preset is a list",
    "preset: {name: tiny}": "preset is a dict",
    "preset: 5": "preset is 5",
    "preset: ''": "preset is ''",
    "model: {pretrained: [1]}": "model.pretrained is a list",
    "model: {pretrained: true}": "model.pretrained is True",
    "model: {optimizer: {lr: 2024-02-02}}": "--model.optimizer.lr 2024-02-02",
    "2024-02-02: 5": "--2024-02-02",
    f"trainer: {{max_epochs: {'9' * 5000}}}": "line 1: a number has 5000 digits",
    f"seed_everything: 0x{'9' * 5000}": "line 1: a number has",
    f"trainer:\n  max_epochs: 1{':59' * 2000}": "line 2: a number has",
    "model: {net: {stack: 5}}": "model.net.stack is 5",
    "model: {net: {stack: [1]}}": "model.net.stack is a list",
    "model: {net: {stack: null}}": "model.net.stack is null",
    "model: {net: {stack: {heads: null}}}": "--model.net.stack.heads None",
    "model: {net: small.yaml}": "model.net is 'small.yaml'",
    "model: {optimizer: }": "model.optimizer is null",
    "trainer: [1]": "trainer is a list",
    "trainer: 5": "trainer is 5",
    "trainer:": "trainer is null",
    "data: [path]": "data is a list",
    "data: {dataset: 5}": "data.dataset is 5",
    "data: {loading: {seed: 3}}": "--data.loading.seed cannot be set",
    "data: {image_size: 16}": "--data.image_size cannot be set",
    "checkpoint: 5": "checkpoint is 5",
    "modell: {net: {}}": "did you mean --model?",
    "model: {nett: {}}": "did you mean --model.net?",
    "model: {init_args: {net: {}}}": "--model.init_args",
    "trainer: {5: 6}": "--trainer.5",
    "null: 6": "--null",
    "trainer: {max_epochs: 1}\nmodel: {}\ntrainer: {max_epochs: 2}": "line 3: 'trainer' is given "
    "twice",
    "trainer:\n  max_epochs: 1\n  'max_epochs': 2": "line 3: 'max_epochs' is given twice",
    "trainer: {callbacks: [{class_path: A, class_path: B}]}": "line 1: 'class_path' is given twice",
    "a: &a {max_epochs: 1}\ntrainer: {<<: *a, <<: *a}": "line 2: '<<' is given twice",
    "trainer: {max_epochs: !!int abc}": "line 1: 'abc' is no int",
    "trainer: {max_epochs: !!binary aGVsbG8=}": "binary",
    "trainer: !!set {max_epochs}": "set",
    "trainer: *there": "there",
    'trainer: {max_time: "\\ud800"}': "line 1: ",
    "seed_everything: abc": "--seed_everything",
    "help: true": "help belongs on the command line",
    "": "must hold options by name",
    "# nothing": "must hold options by name",
    "- 1": "must hold options by name",
    "trainer: {max_epochs: 1}\n---\ntrainer: {}": "line 2: but found another document",
    "\n".join(f"{' ' * depth}a:" for depth in range(900)): "nested too deeply",
    f"trainer: {'{a: ' * 50}1{'}' * 50}": "--trainer.a",
    "# " + "x" * 2**20: "more than 1,048,576 bytes",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:60])
def test_bad_content(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text(text)
    words = BAD[text] if "heads None" in BAD[text] else (BAD[text], "c.yaml")
    assert_refused("fit --config c.yaml", USER, words, capsys)


@pytest.mark.parametrize(
    "text",
    [
        "preset: [tiny]",
        "model: {net: {stack: 5}}",
        "trainer: [1]",
        "checkpoint: 5",
        "modell: {net: {}}",
        "",
    ],
)
def test_a_damaged_run_folder(
    text: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy / "config.yaml").write_text(text)
    assert_refused(f"fit --resume {run_copy}", USER, (BAD[text], "config.yaml"), capsys)


def test_a_folder_of_checkpoints_that_is_no_name(
    run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((run_copy / "config.yaml").read_text())
    config["checkpoint"]["dirpath"] = 5
    (run_copy / "config.yaml").write_text(yaml.safe_dump(config))
    assert_refused(
        f"fit --resume {run_copy}", USER, ("--checkpoint.dirpath 5", "config.yaml"), capsys
    )


@pytest.mark.parametrize("option", ["--config", "-c", "--model.net", "--model"])
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.timeout(60)
def test_what_is_no_file_is_not_waited_for(
    option: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    assert_refused(f"fit {option} {kind}", USER, kind, capsys)


@pytest.mark.timeout(60)
def test_no_reader_waits_for_a_pipe() -> None:
    os.mkfifo("pipe")
    for name in ("pipe", "/dev/zero", ".", "missing.yaml"):
        with pytest.raises(UsageError, match=name):
            read_config(name)


SECTIONS = {
    "--model.net c.yaml": ("model.net.stack is 5", "c.yaml"),
    "--model.net '{stack: 5}'": ("model.net.stack is 5",),
    "--model '{net: null}'": ("model.net is null",),
    "--model '{nett: {}}'": ("did you mean --model.net?",),
    "--data '{image_size: 16}'": ("--data.image_size cannot be set",),
    "--model.optimizer null": ("model.optimizer is null",),
    "--trainer [1]": ("trainer is a list",),
    "--model.net '{stack: {depth: 1, depth: 2}}'": ("--model.net", "'depth' is given twice"),
}


@pytest.mark.parametrize("line", SECTIONS)
def test_sections_as_options(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("stack: 5")
    assert_refused(f"fit {line}", USER, SECTIONS[line], capsys)


def test_good_sections_as_options() -> None:
    Path("net.yaml").write_text("{stack: {width: 32, heads: 2}}")
    Path("c.yaml").write_text("\ufefftrainer: &a {max_epochs: 1}\ndata: {source: digits}\n")
    line = f"fit --config c.yaml {SHORT.replace('--trainer.max_epochs 2', '')} --preset digits --run_dir r"
    assert run(f"{line} --model.net net.yaml --model.optimizer '{{lr: 1e-4}}'") == 0
    assert checkpoint("r")["global_step"] == 4
    config = yaml.safe_load(Path("r/config.yaml").read_text())
    assert (
        config["model"]["net"]["stack"]["width"] == 32
        and config["model"]["optimizer"]["lr"] == 1e-4
    )


def test_dates_are_names() -> None:
    Path("c.yaml").write_text("data: {path: 2024-01-01}")
    assert read_config("c.yaml") == {"data": {"path": "2024-01-01"}}
