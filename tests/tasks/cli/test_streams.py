"""Closed standard streams, encodings that lack a character, and names that are not UTF-8."""

import errno
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.cli.text_io import printing_to, read_input_lines
from tasks.errors import UsageError, exit_status
from tests.helpers.command import Capture, Console, environment, run
from tests.helpers.results import checkpoint
from tests.helpers.tiny import SHORT, picture


def shell(
    line: str, task: str, before: str = "", **more: str
) -> subprocess.CompletedProcess[bytes]:
    """`python -m tasks.TASK LINE` in a shell, whose redirections the line may hold."""
    command = f"{before} {shlex.quote(sys.executable)} -m tasks.{task} {line}"
    return subprocess.run(["bash", "-c", command], capture_output=True, env=environment(**more))


GENERATE = "generate --ckpt_path {0} --max_new_tokens 2"


@pytest.mark.parametrize(
    ("line", "code"),
    [("--help", 0), ("fti", 2), pytest.param(GENERATE, 0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed(closed: str, line: str, code: int, lm_letters: Path) -> None:
    done = shell(f"{line.format(lm_letters)} {closed}", "lm")
    assert done.returncode == code
    assert done.stderr.count(b"\n") == (("2>" not in closed) and line != "--help"), done.stderr
    assert (b"error" in done.stderr) == (code == 2 and "2>" not in closed)
    assert (done.stdout == b"") == (" >" in f" {closed}" or code == 2)


@pytest.mark.parametrize("line, task", [
    (f"{GENERATE} --prompt The --samples 2 --seed 1", "lm"),
    (f"{GENERATE} --prompt The --json", "lm"),
    ("score --ckpt_path {0} --input text.txt", "lm"),
    ("translate --ckpt_path {1} --text two --text three --nbest 2", "seq2seq"),
])  # fmt: skip
def test_output_is_what_would_be_printed(
    line: str, task: str, lm_letters: Path, translator: Path, console: Console
) -> None:
    Path("text.txt").write_text("The lazy dog and the quick one.")
    line = line.format(lm_letters, translator)
    printed, _ = console.printed(line, task)
    out, _ = console.printed(f"{line} --output new/out.txt", task)
    assert out == "" and Path("new/out.txt").read_text() == printed != ""
    console.refused(f"{line} --output new", "new is a folder", task=task)
    Path("file").touch()
    console.refused(f"{line} --output file/out.txt", "--output", "file", task=task)


def test_output_is_written_whole_or_not_at_all() -> None:
    Path("out.txt").write_text("before")
    for name in ("out.txt", "new/out.txt"):
        with pytest.raises(KeyboardInterrupt), printing_to(name):
            print("half")
            raise KeyboardInterrupt
    assert Path("out.txt").read_text() == "before"
    assert [path.name for path in Path().iterdir()] == ["out.txt"]


@pytest.mark.slow
def test_closed_in_training_and_prediction(tmp_path: Path) -> None:
    """No file that is opened takes the place of a stream."""
    done = shell(f"fit {SHORT} --run_dir r <&- >&- 2>&-", "vit")
    assert done.returncode == 0 and checkpoint("r")["global_step"] == 8
    picture(8, "L").save("a.png")
    line = "predict --ckpt_path r/checkpoints/best.ckpt --input a.png --output predictions.csv"
    assert shell(f"{line} <&- >&- 2>&-", "vit").returncode == 0
    assert Path("predictions.csv").read_text().splitlines()[1].startswith("a.png,")


def test_a_full_device() -> None:
    done = shell("--help >/dev/full", "lm")
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"error: ")


def test_a_full_disk_names_the_file() -> None:
    done = shell("profile --preset gpt3 --output out", "lm", before="ulimit -f 1;")
    assert done.returncode == 1
    *_, error = done.stderr.decode().splitlines()  # after the progress
    assert error.startswith("error: --output: 'out/profile.json'") and "make room" in error
    assert "fit" not in error and not list(Path("out").iterdir())


@pytest.mark.parametrize(
    ("task", "format", "output", "file"),
    [
        ("lm", "safetensors", "x.safetensors", "x.safetensors"),
        ("lm", "hf", "x", "x/model.safetensors"),
        ("vit", "onnx", "x.onnx", "x.onnx"),
    ],
)
def test_an_export_on_a_full_disk(
    task: str, format: str, output: str, file: str, lm_letters: Path, best: Path
) -> None:
    path = {"lm": lm_letters, "vit": best}[task]
    line = f"export --ckpt_path {path} --format {format} --output {output}"
    done = shell(line, task, before="ulimit -f 4;")
    error = done.stderr.decode()
    assert done.returncode == 1 and error.startswith(f"error: --output: '{file}'"), error
    assert error.count("\n") == 1 and "make room" in error
    assert not list(Path().iterdir())


@pytest.mark.parametrize("command", ["fit", "look"])
def test_only_a_fit_can_be_resumed_on_a_full_disk(command: str, capsys: Capture) -> None:
    with exit_status(False, [], command) as status:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert status.code == 1
    error = capsys.readouterr().err
    assert "make room" in error and ("--resume" in error) == (command == "fit")


def test_errors_in_ascii() -> None:
    done = shell("wörk", "lm", PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and b"'w\\xf6rk'" in done.stderr


@pytest.mark.slow
def test_texts_in_ascii(lm_bytes: Path) -> None:
    line = f"generate --ckpt_path {lm_bytes} --prompt 'Zwölf 🙂' --max_new_tokens 4"
    done = shell(f"{line} --json", "lm", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr.count(b"\n") == 1, done.stderr
    assert done.stdout.isascii() and json.loads(done.stdout)["prompt"] == "Zwölf 🙂"
    done = shell(line, "lm", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.startswith(b"Zw\\xf6lf \\U0001f642"), done.stderr


NOT_UTF8 = os.fsdecode(b"caf\xe9")
NAMED = {
    f"generate --ckpt_path {NOT_UTF8}": "lm",
    f"generate --ckpt_path x --prompt {NOT_UTF8}": "lm",
    f"generate --ckpt_path x --input {NOT_UTF8}": "lm",
    NOT_UTF8: "lm",
    f"fit --resume {NOT_UTF8}": "vit",
    f"fit --config {NOT_UTF8}": "vit",
    f"fit --preset {NOT_UTF8}": "vit",
    f"fit --data.source folder --data.path {NOT_UTF8}": "vit",
}


@pytest.mark.parametrize("line", NAMED, ids=ascii)
def test_what_is_not_utf8_is_named(line: str, console: Console) -> None:
    console.refused(line, "caf\\", task=NAMED[line])  # the byte as \xe9 or \udce9


def test_predictions_of_files_that_are_not_utf8(best: Path) -> None:
    picture(8, "L").save(f"{NOT_UTF8}.png")
    line = f"predict --ckpt_path {best} --input {NOT_UTF8}.png --output predictions.csv"
    assert run(line) == 0
    assert Path("predictions.csv").read_bytes().splitlines()[1].startswith(rb"caf\xe9.png,")


@pytest.mark.slow
def test_a_run_folder_that_is_not_utf8() -> None:
    name = shlex.quote(NOT_UTF8)
    assert shell(f"fit {SHORT} --run_dir {name}", "vit").returncode == 0
    done = shell(f"fit --resume {name} --trainer.max_epochs 3", "vit")
    assert done.returncode == 0 and checkpoint(NOT_UTF8)["global_step"] == 12, done.stderr


def test_a_file_in_latin_1_is_refused_with_the_command_that_converts_it() -> None:
    Path("in.txt").write_bytes("a\ncafé\n".encode("latin-1"))
    with pytest.raises(UsageError, match="in.txt, line 2: .*`iconv .* in.txt > new.txt`"):
        read_input_lines("in.txt", "--input", "prompts")
