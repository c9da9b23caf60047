"""The screens that need no torch, the help of every option, and what each command imports."""

from argparse import Namespace
from pathlib import Path

import jsonargparse
import pytest

from tasks import __version__
from tasks.cli.lightning_cli import TaskCLI
from tasks.cli.main import help_screen
from tasks.cli.parsing import OneLineErrorParser
from tasks.training.trainer_options import set_defaults
from tasks.vit.__main__ import APP
from tests.tasks.command import SHORT, picture, process, run

UNUSED = {
    "timm",
    "wandb",
    "transformers",
    "datasets",
    "onnx",
    "onnxruntime",
    "tensorboard",
    "torchvision",
}


def imported(output: str) -> set[str]:
    return set(output.splitlines()[-1].split()[1:])


def test_help_is_one_screen() -> None:
    lines = help_screen(APP).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert (
        sum(line.startswith("  python -m tasks.vit ") and "--help" not in line for line in lines)
        >= 5
    )
    for command in ("fit", "validate", "test", "predict", "export"):
        assert any(line.split()[:1] == [command] for line in lines)


@pytest.mark.parametrize("line, code", [("--help", 0), ("", 0), ("--version", 0), ("fti", 2)])
def test_screens_do_not_import_torch(line: str, code: int) -> None:
    done = process(line)
    assert done.returncode == code
    assert not imported(done.stdout) & (
        UNUSED | {"torch", "numpy", "pytorch_lightning", "jsonargparse", "yaml"}
    )
    assert len(done.stderr.splitlines()) == (code != 0)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tessera {__version__}\n"


class Parsed(Exception):
    """Stops a command once its parser is complete."""


def actions(parser: jsonargparse.ArgumentParser) -> list[jsonargparse.Namespace]:
    found = []
    for action in parser._actions:
        if isinstance(action.choices, dict):
            found += [inner for sub in action.choices.values() for inner in actions(sub)]
        elif action.option_strings:
            found.append(action)
    return found


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_every_option_says_what_it_does(
    command: str, best: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[jsonargparse.ArgumentParser] = []

    def stop(self: TaskCLI, parser: jsonargparse.ArgumentParser, args: object) -> None:
        seen.append(parser)
        raise Parsed

    monkeypatch.setattr(TaskCLI, "parse_arguments", stop)
    with pytest.raises(Parsed):
        TaskCLI(APP, command, [] if command == "fit" else ["--ckpt_path", str(best)])
    options = {action.option_strings[-1]: action.help for action in actions(seen[0])}
    assert {
        "--trainer.max_epochs",
        "--model.net.stack.depth",
        "--data.path",
        "--run_dir",
    } <= options.keys()
    assert ("--checkpoint.every_n_train_steps" in options) == (command == "fit")
    assert [name for name, text in options.items() if not text or len(text.split()) < 2] == []


def test_help_groups_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit --help") == 0
    text = capsys.readouterr().out
    for part in ("trainer", "model", "data", "checkpoint"):
        assert f"--{part}." in text
    assert "Peak learning rate" in text and "(type: float, default: 0.001)" in " ".join(
        text.split()
    )
    assert "configs/vit/digits.yaml" in " ".join(text.split())


def test_export_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("export --help") == 0
    assert "onnx" in capsys.readouterr().out


def test_predict_imports_what_it_uses(best: Path, tmp_path: Path) -> None:
    picture(8, "L").save(tmp_path / "a.png")
    done = process(f"predict --ckpt_path {best} --data.predict_path a.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not imported(done.stdout) & (UNUSED | {"matplotlib", "sklearn"})


def test_export_imports_what_it_uses(best: Path, tmp_path: Path) -> None:
    done = process(
        f"export --ckpt_path {best} --format safetensors --output a.safetensors", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert not imported(done.stdout) & (
        UNUSED | {"matplotlib", "sklearn", "pytorch_lightning", "torchmetrics"}
    )


def test_fit_in_a_process_without_a_terminal(tmp_path: Path) -> None:
    done = process(f"fit {SHORT} --run_dir r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not imported(done.stdout) & UNUSED
    assert done.stderr == ""
    assert "epoch 2/2" in done.stdout and "\x1b" not in done.stdout
    for word in (
        "test/acc",
        "test/loss",
        "best.ckpt",
        "python -m tasks.vit predict --ckpt_path",
        "run folder",
    ):
        assert word in done.stdout


def test_only_one_place_makes_parsers_plain() -> None:
    with pytest.raises(ValueError, match="unknown option --dpeth: did you mean --depth"):
        parser = OneLineErrorParser()
        parser.add_argument("--depth", type=int)
        parser.parse_args(["--dpeth=3"])


def test_a_run_without_an_end_gets_one() -> None:
    options = Namespace(
        precision="32-true",
        plugins=None,
        accelerator="cpu",
        max_epochs=None,
        max_steps=-1,
        max_time=None,
        logger=None,
    )
    set_defaults(options, 7)
    assert options.max_epochs == 7
    for name, value in (("max_epochs", 3), ("max_steps", 9), ("max_time", "00:00:01:00")):
        given = Namespace(**{**vars(options), "max_epochs": None, name: value})
        set_defaults(given, 7)
        assert given.max_epochs == (3 if name == "max_epochs" else None)
