"""Config files: what is wrong in them is named in one sentence."""

import re
from pathlib import Path

import pytest
import yaml

from tasks.checkpoints.reading import KEY
from tests.helpers.command import Console, run
from tests.helpers.results import checkpoint
from tests.helpers.tiny import FEW_STEPS, SHORT

CONFIGS = {  # the content of a file, and what the sentence names beside the file
    "preset: [tiny]": "preset is a list",
    "preset: ''": "preset is ''",
    "model: {pretrained: true}": "model.pretrained is True",
    "model: {optimizer: {lr: 2024-02-02}}": "--model.optimizer.lr 2024-02-02",
    f"trainer: {{max_epochs: {'9' * 5000}}}": "line 1",
    "model: {net: {stack: [1]}}": "model.net.stack is a list",
    "model: {net: {stack: null}}": "model.net.stack is null",
    "model: {net: small.yaml}": "model.net is 'small.yaml'",
    "model: {optimizer: }": "model.optimizer is null",
    "trainer: 5": "trainer is 5",
    "trainer:": "trainer is null",
    "data: {dataset: 5}": "data.dataset is 5",
    "data: {loading: {seed: 3}}": "--data.loading.seed",
    "checkpoint: 5": "checkpoint is 5",
    "modell: {net: {}}": "did you mean --model?",
    "model: {init_args: {net: {}}}": "--model.init_args",
    "trainer: {5: 6}": "--trainer.5",
    "null: 6": "--null",
    "trainer: {max_epochs: 1}\nmodel: {}\ntrainer: {max_epochs: 2}": "line 3: 'trainer'",
    "trainer:\n  max_epochs: 1\n  'max_epochs': 2": "line 3: 'max_epochs'",
    "model: {optimizer: {lr: 1}}\nmodel.optimizer.lr: 2": "model.optimizer.lr is given twice",
    "trainer: {callbacks: [{class_path: A, class_path: B}]}": "line 1: 'class_path'",
    "trainer: {max_epochs: !!int abc}": "line 1: 'abc'",
    "trainer: {max_epochs: !!int [1]}": "line 1",
    "trainer: {max_epochs: !!int ''}": "line 1: ''",
    "trainer: *there": "there",
    "seed_everything: abc": "--seed_everything",
    "help: true": "help",
    "data: {dataset: {class_names: [010, b]}}": "line 1: 010 would be the number 8: quote it",
    "data: {dataset: {class_names: [a, 1:30]}}": "line 1: 1:30 would be the number 90",
    "# nothing": "",
    "trainer: {max_epochs: 1}\n---\ntrainer: {}": "line 2",
}


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("text", CONFIGS, ids=lambda text: text[:60])
def test_config_files(text: str, console: Console) -> None:
    Path("c.yaml").write_text(text)
    console.refused("fit --config c.yaml", CONFIGS[text], "c.yaml")


@pytest.mark.parametrize("text", ["preset: [tiny]", "trainer: 5", "modell: {net: {}}", "# nothing"])
def test_config_of_a_run_folder(text: str, run_copy: Path, console: Console) -> None:
    (run_copy / "config.yaml").write_text(text)
    console.refused(f"fit --resume {run_copy}", CONFIGS[text], "config.yaml")


def test_good_config_files() -> None:
    """With a byte order mark and an anchor, and sections as options."""
    Path("net.yaml").write_text("{stack: {width: 32, heads: 2}}")
    Path("c.yaml").write_text("\ufefftrainer: &a {max_epochs: 1}\ndata: {source: digits}\n")
    line = f"fit --config c.yaml {SHORT.replace('--trainer.max_epochs 2', '')} --preset digits"
    assert run(f"{line} --model.net net.yaml --model.optimizer '{{lr: 1e-4}}' --run_dir r") == 0
    assert checkpoint("r")["global_step"] == 4
    config = yaml.safe_load(Path("r/config.yaml").read_text())
    assert config["model"]["net"]["stack"]["width"] == 32
    assert config["model"]["optimizer"]["lr"] == 1e-4


def test_texts_that_look_like_numbers_stay_texts(console: Console) -> None:
    """YAML has several rules for what is a number; a run keeps what it was given."""
    names = ["a", "1e3", "7e05"]
    rows = [f"word {name},{name}" for name in names] * 20
    Path("7e3").mkdir()
    Path("7e3/train.csv").write_text("\n".join(["text,1e5", *rows]))
    given = "--data.dataset.class_names=\"['a','1e3','7e05']\" --data.dataset.label_column 1e5"
    line = f"fit --preset tiny {FEW_STEPS} --data.path 7e3 --run_dir"
    assert run(f"{line} r {given}", "bert") == 0
    assert run("test --ckpt_path r", "bert") == 0
    assert run("fit --resume r --trainer.max_epochs 2", "bert") == 0
    out, _ = console.printed("predict --ckpt_path r --text word", "bert")
    assert set(re.findall(r"(\w+) 0\.\d+", out)) == {*names}
    assert run(f"{line} again --config r/config.yaml --trainer.max_epochs 1", "bert") == 0
    assert checkpoint("again")[KEY]["metadata"]["class_names"] == names


NO_TEXTS = {"[a,null]": "None", "[a,b: c]": "{'b': 'c'}", "[a,[b]]": "['b']", "[a,010]": "number 8"}


@pytest.mark.parametrize(("names", "named"), NO_TEXTS.items())
def test_names_that_yaml_does_not_read_as_texts(names: str, named: str, console: Console) -> None:
    Path("two.csv").write_text("\n".join(["text,label", *["word,0", "text,1"] * 20]))
    line = f"fit --preset tiny --data.path two.csv --data.dataset.class_names '{names}'"
    console.refused(line, "--data.dataset.class_names", named, task="bert")


def test_names_with_dots_are_those_of_sections() -> None:
    """Also for what reads configs before the parser: the data, and the weights to start from."""
    assert run(f"fit {SHORT} --data.source digits --run_dir a") == 0
    lines = ["data.source: digits", "model.pretrained: a", "model: {label_smoothing: 0.2}"]
    Path("c.yaml").write_text("\n".join(lines))
    assert run(f"fit {FEW_STEPS} --config c.yaml --run_dir b") == 0
    nets = [yaml.safe_load(Path(name, "config.yaml").read_text())["model"] for name in "ab"]
    assert nets[1]["net"] == nets[0]["net"] and nets[1]["label_smoothing"] == 0.2


def test_deep_nesting_is_one_sentence(console: Console) -> None:
    Path("deep.yaml").write_text("trainer: " + "[" * 3000 + "]" * 3000)
    console.refused("fit --config deep.yaml", "deep.yaml")


def test_what_print_config_prints_is_a_config(console: Console) -> None:
    printed, _ = console.printed("fit --print_config")
    Path("printed.yaml").write_text(printed)
    assert console.printed("fit --config printed.yaml --print_config")[0] == printed
    shorter, _ = console.printed("fit --print_config=skip_null")
    assert yaml.safe_load(shorter)["model"]
    Path("debug.yaml").write_text("compile: true\n")
    console.refused("fit --config debug.yaml", "compile belongs on the command line")
    Path("list.yaml").write_text("data: [1]\n")
    console.refused("fit --config list.yaml", "data")


def test_a_config_that_names_no_data_is_added_to_the_default(console: Console) -> None:
    Path("small.yaml").write_text("data: {batch_size: 16}\n")
    by_option, _ = console.printed("fit --data.batch_size 16 --print_config")
    assert console.printed("fit --config small.yaml --print_config")[0] == by_option
