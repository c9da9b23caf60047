"""Tab completion of the script `tessera`, by bash itself."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from tasks.cli.app import TASKS
from tasks.cli.completion import choices_of
from tasks.lm.__main__ import APP as LM
from tasks.vit.__main__ import APP as VIT
from tests.helpers.command import Console, environment
from tests.helpers.packages import hide

LINE = (
    "import sys; sys.argv[0] = 'tessera'; from tasks.tessera.command import main; sys.exit(main())"
)


def tessera(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{before}\n{LINE}", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = tessera("completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path_factory.mktemp("completion") / "tessera.bash"
    path.write_text(done.stdout)
    return path


def completed(script: Path, line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line; it finds no program, and so no Python."""
    words = line.split(" ")
    code = f"""
source {shlex.quote(str(script))}
[[ $(complete -p tessera) =~ -F\\ ([^ ]+) ]]
COMP_WORDS=({shlex.join(words)})
COMP_CWORD={len(words) - 1}
${{BASH_REMATCH[1]}} tessera
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["/bin/bash", "--norc", "-c", code]
    done = subprocess.run(command, cwd=folder, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, wanted",
    [
        ("tessera ", [*TASKS, "lab", "completion"]),
        ("tessera s", ["seq2seq"]),
        ("tessera vit ", list(VIT.commands)),
        ("tessera lm ", list(LM.commands)),
        ("tessera vit fit --model.optimizer.freez", ["--model.optimizer.freeze"]),
        ("tessera vit fit --compile --run", ["--run_dir"]),
        ("tessera vit fit --model.net.stack.order p", ["pre", "post", "parallel"]),
        ("tessera vit fit --preset cifar_t", ["cifar_tiny"]),
        ("tessera bert fit --data.skip_bad ", ["true", "false"]),
        ("tessera seq2seq translate --beam", ["--beams"]),
        ("tessera lm generate --quantize ", ["int8"]),
        ("tessera lm fit --config my_", ["my_config.yaml"]),
        ("tessera lab ", ["run", "report"]),
        (
            "tessera lab run --",
            ["--help", "--output", "--jobs", "--steps", "--seeds", "--config", "--dry_run"],
        ),
        ("tessera lab run my_", ["my_config.yaml"]),
        ("tessera completion b", ["bash"]),
    ],
)
def test_completions(line: str, wanted: list[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "my_config.yaml").touch()
    (tmp_path / "other.yaml").touch()
    assert completed(script, line, tmp_path) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("line", ["vit fit", "bert predict", "lm generate"])
def test_options_are_those_of_the_help(
    line: str, script: Path, console: Console, tmp_path: Path
) -> None:
    task, command = line.split()
    text = console.printed(f"{command} --help all", task)[0].partition("options:")[2]
    shown = set(re.findall(r"^ +(?:-\w[^-]*, )?(--[\w.]+)", text, re.M))
    offered = set(completed(script, f"tessera {line} --", tmp_path))
    shown = {name for name in shown if not name.endswith(".help")}
    assert len(shown) > 10 and offered == shown


def test_a_wrong_shell_is_named_without_torch() -> None:
    for arguments in (["completion"], ["completion", "basch"], ["completion", "bash", "x"]):
        done = tessera(*arguments, before=hide({"torch", "pytorch_lightning"}))
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "bash" in done.stderr


def test_help_lists_the_shells() -> None:
    done = tessera("completion", "--help", before=hide({"torch", "pytorch_lightning"}))
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: tessera completion SHELL" in done.stdout and "bash, zsh" in done.stdout


def test_choices_of_types() -> None:
    assert choices_of(bool | None) == ["true", "false"]
    assert choices_of(float | None) == choices_of(list[bool]) == choices_of(None) == []
    assert choices_of(int | Literal["auto", 2]) == ["auto", "2"]
