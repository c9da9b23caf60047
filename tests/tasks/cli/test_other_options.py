"""Options and commands that another task has, or another network of the same task."""

from dataclasses import replace
from pathlib import Path

import pytest

from tasks.cli.main import main
from tasks.options import Options
from tasks.vit.__main__ import APP
from tests.helpers.command import Console

CASES = {
    "lm": {
        "fit --model.label_smoothing 0.1": "tasks.vit, tasks.bert and tasks.seq2seq have it",
        "fit --data.image_size 8": "tasks.igpt has it, tasks.lm does not",
        "fit --model.net.patch_size 2": "tasks.vit and tasks.mae have it, tasks.lm does not",
        "fit --model.net.window_size 2": "tasks.vit has it, tasks.lm does not",
        "fit --config other.yaml": "tasks.vit and tasks.mae have it, tasks.lm does not",
    },
    "vit": {
        "fit --model.mask.probability 0.3": "tasks.mlm has it, tasks.vit does not",
        "probe --ckpt_path r --model.net.window_size 2": "`fit` has it, `probe` does not",
        "probe --ckpt_path r --model.mask.probability 0.3": "`--help all` lists them all",
        "profile --data.source digits": "`fit` has it, `profile` does not",
        "fit --model.net.window_size 2": "add --model.net.architecture swin or --preset swin_cifar",
        "fit --preset swin_cifar --model.net.pool cls": "a ViT has it, a Swin does not",
        "probe --ckpt_path r --label_fraction 0.1": "did you mean --data.label_fraction?",
    },
    "seq2seq": {"fit --model.net.stack.depth 2": "did you mean --model.net.decoder.depth or"},
    "mae": {"probe --ckpt_path r": "unknown command 'probe': tasks.vit and tasks.igpt have it;"},
}


@pytest.mark.parametrize(
    ("task", "line"), [(task, line) for task, lines in CASES.items() for line in lines]
)
def test_who_has_it_is_said(
    task: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: Console
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("model: {net: {patch_size: 2}}")
    console.refused(line, CASES[task][line], task=task)


def test_other_trainer_commands_have_the_options_of_the_network(
    best: Path, console: Console
) -> None:
    line = f"test --ckpt_path {best} --model.net.window_size 2"
    console.refused(line, "unknown option --model.net.window_size: `--help all` lists them all")


def count(data: Options, number: int = 1) -> None:
    """A command of the user, which takes `--data`."""


def test_a_command_of_your_own_takes_data(capsys: pytest.CaptureFixture[str]) -> None:
    app = replace(APP, name="mine", extra_commands={"count": ("counts", f"{__name__}:count")})
    assert main(app, ["count", "--nubmer", "2"]) == 2
    error = "error: unknown option --nubmer: did you mean --number?\n"
    assert capsys.readouterr().err == error
