"""The command line: which option wins, help, and what each command imports."""

import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks import __version__
from tasks.cli.app import App
from tasks.cli.config_files import read_config
from tasks.cli.help_screens import format_columns
from tasks.cli.lightning_cli import TaskCLI
from tasks.cli.main import help_screen, main
from tasks.cli.parsing import arguments_name_data
from tasks.errors import UsageError
from tasks.options import flat
from tasks.vit.__main__ import APP
from tests.helpers.command import ROOT, Console, Patch, environment, process, run
from tests.helpers.packages import hide
from tests.helpers.tiny import SHORT, picture

UNUSED = {"timm", "wandb", "transformers", "datasets", "onnx", "onnxruntime", "tensorboard"}
UNUSED |= {"torchvision", "sklearn"}
DEPTH = "model.net.stack.depth"
Options = Callable[[str], dict[str, Any]]


@pytest.fixture
def options(monkeypatch: Patch) -> Options:
    """A function from a command line to the options that `fit` would have, flat."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(TaskCLI, "fit", lambda self: seen.append(flat(self.options_to_save())))

    def parse(line: str) -> dict[str, Any]:
        assert run(f"fit {line}") == 0
        return seen[-1]

    return parse


def write(name: str, **content: Any) -> None:
    Path(name).write_text(yaml.safe_dump(content))


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("line, depth", [
    ("--config a.yaml --config b.yaml", 3),
    ("--config b.yaml --config=a.yaml", 2),
    (f"--{DEPTH} 4 --config a.yaml", 4),
    (f"--config a.yaml --{DEPTH} 4 --{DEPTH} 5", 5),
    ("--config a.yaml --preset digits", 4),  # the preset's
    ("--config c.yaml", 5),
    (f"--config c.yaml --{DEPTH} 7", 7),
])  # fmt: skip
def test_command_line_wins_then_the_later(line: str, depth: int, options: Options) -> None:
    for name, value in (("a.yaml", 2), ("b.yaml", 3)):
        write(name, model={"net": {"stack": {"depth": value}}})
    net = {"stack": {"depth": 5, "drop_path": 0.25}}
    write("c.yaml", preset="cifar_tiny", model={"net": net}, data={})
    found = options(line)
    assert found[DEPTH] == depth
    if "c.yaml" in line:
        assert found["model.net.stack.drop_path"] == 0.25
        width = "model.net.stack.width"
        assert found[width] == options("--preset cifar_tiny")[width] != options("")[width]


def test_default_config_is_for_runs_that_name_no_data(options: Options) -> None:
    default = flat(read_config("configs/vit/digits.yaml"))  # of the package, not of this folder
    plain = options("")
    assert all(plain[name] == value for name, value in default.items() if name != "preset")
    write("c.yaml", data={"source": "digits"})
    assert options("--config c.yaml")["model.optimizer.lr"] == 1e-3
    assert arguments_name_data(["--config=configs/vit/digits.yaml"])
    assert not arguments_name_data(["--config=configs/logger/wandb.yaml", "--trainer.max_epochs=3"])


@pytest.mark.parametrize("given, meant", [
    ("--num_epochs 3", "did you mean --trainer.max_epochs?"),
    ("--device cpu", "did you mean --trainer.accelerator?"),
    ("--gpus 1", "did you mean --trainer.devices?"),
    ("--output x", "did you mean --run_dir?"),
    ("--model tiny", "did you mean --preset?"),
    ("--data my_images", "did you mean --data.path my_images?"),
    ("--model.net.tied true", "tasks.lm and tasks.igpt have it"),  # nothing is near
])  # fmt: skip
def test_options_by_their_usual_names(given: str, meant: str, console: Console) -> None:
    console.refused(f"fit {given}", meant)


def test_compile_is_short_for_model_compile(options: Options) -> None:
    assert options("--compile")["model.compile"] is True
    assert options("")["model.compile"] is False


# Help ---------------------------------------------------------------------------------------------


def test_an_own_task_lists_only_what_it_has() -> None:
    app = App("own", "An own task", task="tasks.base:Task", data="datamodules.images:ImageData")
    screen = help_screen(app)
    assert list(app.commands) == ["fit", "validate", "test"]
    assert not [word for word in ("predict", "examples:", "configs") if word in screen], screen
    assert main(app, ["predict"]) == 2
    assert "configs/vit/*.yaml" in help_screen(APP) and "predict" in APP.commands


def test_help_is_one_screen() -> None:
    lines = help_screen(APP).splitlines()
    assert len(lines) <= 26 and max(map(len, lines)) <= 120
    examples = [line for line in lines if line.startswith("  python -m tasks.vit ")]
    assert len(examples) >= 6
    for command in ("fit", "validate", "test", "predict", "export"):
        assert any(line.split()[:1] == [command] for line in lines)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_of_every_option(command: str, console: Console) -> None:
    text = " ".join(console.printed(f"{command} --help all")[0].split())
    written = "--run_dir" if command == "fit" else "--output"
    for option in ("--trainer.max_epochs", f"--{DEPTH}", "--data.path", written):
        assert option in text
    assert ("--checkpoint.every_n_train_steps" in text) == (command == "fit")
    assert "Peak learning rate" in text and re.search(r"type: float, value: 0\.00[13]\)", text)
    assert ("configs/vit/digits.yaml" in text) == (command == "fit")
    assert not re.findall(r"--[\w.]+ \S+ \((?:type|required)", text)  # options without a sentence
    assert "onnx" in console.printed("export --help")[0]


@pytest.mark.parametrize("task", ["vit", "mae", "bert", "mlm", "lm", "igpt", "seq2seq"])
def test_help_of_fit_is_two_screens(task: str, console: Console, monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = console.printed("fit --help", task)[0]
    lines = text.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["data:", "model:", "optimizer:", "training:", "run:", "more:"]
    options = re.findall(r"^  (--[\w.*]+)", text.partition("\nmore:")[0], re.M)
    assert len(options) == len(set(options)) > 30
    assert {"--data.path", "--model.optimizer.lr", "--run_dir", "--config"} <= set(options)
    blocks = ("encoder", "decoder") if task == "seq2seq" else ("stack",)
    sizes = [f"{block}.{size}" for block in blocks for size in ("width", "depth", "heads")]
    assert {f"--model.net.{name}" for name in ("position", *sizes)} <= set(options)


@pytest.mark.parametrize("task, command, first, later", [
    ("bert", "predict", "ckpt_path input text output top_k", "data.skip_bad trainer.devices"),
    ("vit", "predict", "ckpt_path input output top_k", "data.loading.* trainer.precision"),
    ("vit", "test", "ckpt_path output", "data.path trainer.limit_test_batches"),
    ("mlm", "validate", "ckpt_path output", "model.mask.* trainer.limit_val_batches"),
    ("lm", "test", "ckpt_path output", "data.dataset.* data.loading.*"),
    ("seq2seq", "test", "ckpt_path output", "data.languages model.decoding.*"),
])  # fmt: skip
def test_help_of_using_a_checkpoint_begins_with_its_own_options(
    task: str, command: str, first: str, later: str, console: Console
) -> None:
    text = console.printed(f"{command} --help", task)[0]
    options = re.findall(r"^  --([\w.*]+)", text.partition("\nmore:")[0], re.M)
    own = first.split()
    assert options[: len(own)] == own and set(later.split()) <= set(options)
    without_effect = ("model.optimizer", "model.net", "model.ema", "trainer.max", "data.batch")
    assert not [name for name in options if name.startswith(without_effect)]
    assert "--model.optimizer.lr" in console.printed(f"{command} --help all", task)[0]


@pytest.mark.parametrize("task, command, first", [
    ("seq2seq", "translate", "ckpt_path text input output beams max_new_tokens temperature"),
    ("lm", "generate", "ckpt_path prompt input output samples"),
    ("igpt", "generate", "ckpt_path input output samples"),
    ("lm", "score", "ckpt_path text input output stride"),
    ("mlm", "fill_mask", "ckpt_path text input output top_k"),
])  # fmt: skip
def test_help_begins_with_what_a_command_reads_and_writes(
    task: str, command: str, first: str, console: Console
) -> None:
    text = console.printed(f"{command} --help", task)[0]
    options = re.findall(r"^  --(\w+)", text, re.M)
    assert options[: len(first.split())] == first.split()
    assert "ITEM" not in text  # jsonargparse's word for a list


def test_help_shows_the_values_that_hold(console: Console) -> None:
    def shown(line: str) -> str:
        return " ".join(console.printed(line, "bert")[0].split())

    text = shown("fit --help")
    assert "--trainer.max_epochs 6 " in text and "--model.net.stack.width 64 " in text
    text = shown("fit --preset tiny --data.source csv --model.optimizer.lr 0.25 --help")
    assert "--trainer.max_epochs 5 " in text and "--model.net.stack.width 128 " in text
    assert "--model.optimizer.lr 0.25 " in text and "--data.source csv " in text


def test_help_without_a_checkpoint_says_where_options_come_from(
    console: Console, best: Path
) -> None:
    for line in ("predict --help model.net", "test --help"):
        assert "--ckpt_path RUN" in console.printed(line)[0].splitlines()[-1]
        assert "--ckpt_path RUN" not in console.printed(f"{line} --ckpt_path {best}")[0]


def test_help_of_a_topic(console: Console) -> None:
    for topic in ("optimizer", "model.optimizer", "model"):
        text = console.printed(f"fit --help {topic}")[0]
        assert "--model.optimizer.betas" in text and "{adamw,muon}" in text
        assert "--data" not in text.partition("\n\n")[2].partition("\n\n")[2]
        assert ("--model.net.stack.depth" in text) == (topic == "model")
        assert "Literal[" not in text.replace("Literal['balanced']", "") and "False" not in text
    text = console.printed("fit --help run")[0]
    options = re.findall(r"^  (?:-\w.*, )?--([\w.]+)", text, re.M)
    assert {"help", "config", "run_dir", "resume", "preset", "debug"} <= set(options)
    assert not {"trainer", "model", "data", "checkpoint"} & set(options)
    assert re.findall(r"^\S.*:$", text, re.M) == ["options:"]
    console.refused("fit --help dta", "'data'?", "optimizer, preset, run")
    console.refused("fit --help stack", "did you mean model.net.stack?")
    console.refused("fit --help lr", "did you mean model.optimizer.lr?")


def test_help_of_a_section_in_a_section(console: Console) -> None:
    for line in ("fit --help data.tokenizer", "tokenize --help tokenizer"):
        text = console.printed(line, "bert")[0]
        assert "tokenizer.vocabulary" in text and "max_length" not in text
    assert "--top_p" in console.printed("generate --help top_p", "lm")[0]
    console.refused("fit --help data.tokenizr", "did you mean data.tokenizer?", task="bert")
    console.refused("tokenize --help kind", "did you mean tokenizer.kind?", task="bert")
    console.refused("--help data.tokenizer", "fit --help data.tokenizer`", task="bert")
    console.refused("help export", "export --help`")


def test_help_of_a_topic_shows_the_values_that_hold(console: Console) -> None:
    def shown(line: str) -> str:
        return " ".join(console.printed(line)[0].split())

    text = shown("fit --help model")
    assert "value: 0.003)" in text and "--model.net.image_size IMAGE_SIZE Height" in text
    assert "in pixels. (type: int, value: 8)" in text
    assert "value: 0.25)" in shown("fit --model.optimizer.lr 0.25 --help optimizer")
    assert "value: digits)" in shown("fit --help run")
    assert "--preset tiny " in shown("fit --preset tiny --help")
    assert "--compile true " in shown("fit --model.compile true --help")


def test_help_has_two_columns() -> None:
    for count in range(5, 60):
        lines = format_columns(f"  --{'a' * 9}", "word " * count).splitlines()
        assert all(len(line) <= 100 for line in lines)
        assert " ".join(line[44:] for line in lines).split() == ["word"] * count
    long = format_columns(f"  --{'a' * 50}", "word").splitlines()
    assert len(long) == 2 and long[1] == f"{'':<44}word"


@pytest.mark.parametrize("task, command", [("vit", "test"), ("bert", "export")])
def test_messages_name_the_command_that_was_started(
    task: str, command: str, lm_letters: Path, console: Console, monkeypatch: Patch
) -> None:
    line = f"{command} --ckpt_path {lm_letters}"
    console.refused(line, "python -m tasks.lm", task=task)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tessera"])
    console.refused(line, "use tessera lm", task=task)


# Imports ------------------------------------------------------------------------------------------


def imported(output: str) -> set[str]:
    """Packages that `process` says were imported."""
    return set(output.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("line, code", [("--help", 0), ("", 0), ("--version", 0), ("fti", 2)])
def test_screens_do_not_import_torch(line: str, code: int) -> None:
    done = process(line)
    assert done.returncode == code
    heavy = {"torch", "numpy", "pytorch_lightning", "jsonargparse", "yaml"}
    assert not imported(done.stdout) & (UNUSED | heavy)
    assert len(done.stderr.splitlines()) == (code != 0)
    assert line != "--version" or done.stdout.startswith(f"tessera {__version__}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, unused",
    [
        ("predict --input a.png", {"matplotlib"}),
        (
            "export --format safetensors --output a.safetensors",
            {"matplotlib", "pytorch_lightning", "torchmetrics"},
        ),
    ],
)
def test_commands_import_what_they_use(
    line: str, unused: set[str], best: Path, tmp_path: Path
) -> None:
    picture(8, "L").save(tmp_path / "a.png")
    done = process(f"{line} --ckpt_path {best}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not imported(done.stdout) & (UNUSED | unused)


@pytest.mark.slow
def test_fit_in_a_process_without_a_terminal(tmp_path: Path) -> None:
    done = process(f"fit {SHORT} --run_dir r", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert not imported(done.stdout) & UNUSED
    assert "epoch 2/2" in done.stdout and "\x1b" not in done.stdout
    for word in ("test/acc", "test/loss", "best.ckpt", "predict --ckpt_path", "run folder"):
        assert word in done.stdout


@pytest.mark.slow
def test_a_command_after_a_model_was_loaded_prints_no_hints(best: Path, tmp_path: Path) -> None:
    before = f"import tessera; tessera.load({str(best)!r})"
    done = process(f"test --ckpt_path {best}", before, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stderr


# Progress -----------------------------------------------------------------------------------------


def test_no_progress_if_it_is_switched_off(console: Console) -> None:
    out, _ = console.printed(f"fit {SHORT} --trainer.enable_progress_bar false --run_dir r")
    assert "epoch 2/2" not in out


def run_on_terminal(line: str, folder: Path) -> tuple[int, str]:
    """Exit code of `python -m tasks.vit LINE`, and what a terminal shows, without control codes."""
    terminal, stream = pty.openpty()
    command = [sys.executable, "-m", "tasks.vit", *shlex.split(line)]
    settings = {"TERM": "xterm-256color", "COLUMNS": "200", "LINES": "50"}
    streams: Any = {"stdin": stream, "stdout": stream, "stderr": stream}
    child = subprocess.Popen(command, cwd=folder, env=environment(**settings), **streams)
    os.close(stream)
    sent = b""
    try:
        while part := os.read(terminal, 65536):
            sent += part
    except OSError:  # Linux, once the process has closed its side
        pass
    os.close(terminal)
    return child.wait(), re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", sent.decode())


@pytest.mark.slow
def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    code, screen = run_on_terminal(f"fit {SHORT} --run_dir r", tmp_path)
    assert code == 0, screen
    for epoch in (1, 2):
        assert re.search(rf"epoch {epoch}/2 ━+ [1-4]/4 .*loss \d+\.\d+", screen), screen
        assert re.search(rf"[\r\n]epoch {epoch}/2  step \d+ .*val/acc \d\.\d+", screen), screen
    bars = re.findall(r"(?:epoch|validation|test) [^\r\n]*?━+ \d+/\d+ \S+(?: loss \S+)?", screen)
    assert len(bars) > 4 and max(map(len, bars)) <= 80
    assert re.search(r"Results.*test/acc.*run folder.*best checkpoint", screen, re.DOTALL)


@pytest.mark.slow
def test_garbage_is_collected_once_a_command_runs() -> None:
    """Not before, and what was imported is left out."""
    code = (
        "import gc, sys; from tasks.cli.main import main; import tasks.vit.__main__ as vit\n"
        "from tasks.cli import lightning_cli as cli\n"
        "cli.TaskCLI.fit = lambda self: print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
        "sys.argv = ['vit', 'fit']; main(vit.APP)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[-2:] == ["True", "True"], done.stderr


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(UsageError, match="heads 7"):
        run("fit --model.net.stack.heads 7 --debug")
    with pytest.raises(UsageError, match="heads 7"):
        run("fit --debug true --model.net.stack.heads 7")
    assert run("fit --model.net.stack.heads 7 --debug false") == 2
    assert list(Path().iterdir()) == []


def test_the_first_line_comes_before_torch(tmp_path: Path) -> None:
    """A process without torch still says what it is about to do, but not for an answer."""
    for line, shown in (
        ("fit", "with a Vision Transformer or a relative: fit with configs/vit/"),
        ("fit --data.path photos", ": fit with --data.path photos ...\n"),
        ("test --ckpt_path=old", ": test with --ckpt_path old ...\n"),
        ("fit --print_config", ""),
        ("predict --ckpt_path old", ""),
    ):
        code = f"{hide({'torch'})}\nimport sys\nsys.argv[1:] = {line.split()}\n"
        code += "from tasks.cli.main import main\nfrom tasks.vit.__main__ import APP\n"
        command = [sys.executable, "-c", f"{code}sys.exit(main(APP))"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2 and done.stderr.startswith("error: torch is not installed")
        assert done.stdout.count("\n") == (1 if shown else 0) and shown in done.stdout
