"""The help of commands that are functions, as short as that of `fit`."""

import re
from dataclasses import fields

import pytest

from tasks.cli.app import TASKS, app, load
from tasks.cli.help_screens import first_sentence
from tasks.lab.__main__ import main as lab
from tasks.lm.generate import GenerateOptions
from tests.helpers.command import Capture, Console, Patch

COMMANDS = [(task, command) for task in TASKS for command in app(task).extra_commands]


@pytest.mark.parametrize("task, command", COMMANDS)
def test_help_is_one_screen(task: str, command: str, console: Console, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = console.printed(f"{command} --help", task)[0]
    lines = text.splitlines()
    models = " MODEL ..." * (command == "compare")
    assert lines[0] == f"usage: python -m tasks.{task} {command}{models} [options]"
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    assert "(type" not in text and "required" not in text and "[-" not in text
    every = console.printed(f"{command} --help all", task)[0]
    names = set(re.findall(r"^  --([\w.]+)", every, re.M))
    shown = re.findall(r"^  --([\w.]+) ", text.partition("\nmore:")[0], re.M)
    assert names >= set(shown) and len(shown) == len(set(shown)) > 1
    function = load(app(task).extra_commands[command][1])
    assert lines[2].startswith(function.__doc__.splitlines()[0][:40])


def test_help_shows_defaults_and_choices(console: Console) -> None:
    text = " ".join(console.printed("generate --help", "lm")[0].split())
    for field in fields(GenerateOptions):
        assert f" --{field.name} " in text
    assert "--max_new_tokens 100 Number" in text and "(never, likely, first)" in text
    assert "--ckpt_path CKPT_PATH Required: checkpoint that `fit` wrote" in text


@pytest.mark.parametrize("line", ["run FILE", "report FOLDER"])
def test_help_of_a_lab(line: str, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command, argument = line.split()
    with pytest.raises(SystemExit, match="0"):
        lab([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f" {command} {argument} [options]") and "[-" not in lines[0]
    assert any(line.split()[:1] == [argument] for line in lines[1:])
    assert any("--jobs 1 " in line for line in lines) == (command == "run")


@pytest.mark.parametrize(
    "text, first",
    [
        ("Ranks by length (as in f(x), g (Wu 2016)); above 0: longer.", "Ranks by length"),
        ("Names of the columns 1, 2, ...", "Names of the columns 1, 2, ..."),
        ("Beams (Graves\n 2012). More are slower.", "Beams"),
    ],
)
def test_the_first_sentence_is_whole_without_parentheses(text: str, first: str) -> None:
    assert first_sentence(text) == first
