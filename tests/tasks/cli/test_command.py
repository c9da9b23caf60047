"""The script `tessera TASK COMMAND`, in folders whose packages have the names of ours."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import __version__
from tests.helpers.command import environment
from tests.helpers.tiny import NET

SCRIPT = str(Path(sys.executable).with_name("tessera"))
FIT = f"vit fit {NET} --trainer.max_epochs 1 --trainer.limit_train_batches 2 --run_dir out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with packages of other programs."""
    for name in ("tasks", "modules", "datamodules", "configs", "tessera"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not ours')")
    return tmp_path


def tessera(line: str, folder: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    """`tessera LINE` in a folder."""
    own = environment()
    del own["PYTHONPATH"]
    command = [*launcher, SCRIPT, *line.split()]
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=300)


def test_help_and_mistakes(folder: Path) -> None:
    shown = tessera("", folder).stdout
    assert shown == tessera("--help", folder).stdout
    tasks = ("vit", "mae", "bert", "mlm", "lm", "igpt", "seq2seq")
    assert all(f"\n  {task} " in shown for task in tasks)
    assert tessera("--version", folder).stdout == f"tessera {__version__}\n"
    assert "usage: tessera vit COMMAND" in tessera("vit --help", folder).stdout
    wrong = tessera("vti fit", folder)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "'vit'" in wrong.stderr
    assert tessera("vit fti", folder).returncode == 2


@pytest.mark.slow
def test_a_run_and_the_commands_that_it_prints(folder: Path) -> None:
    done = tessera(FIT, folder)
    assert done.returncode == 0, done.stderr
    (next_line,) = [line for line in done.stdout.splitlines() if "tessera vit export" in line]
    line = next_line.strip().removeprefix("tessera ").replace("onnx", "safetensors")
    assert tessera(line, folder).returncode == 0
    assert list((folder / "out/checkpoints").glob("*.safetensors"))


@pytest.mark.parametrize("content", ["", "raise ImportError('not ours')"])
def test_python_names_the_package_that_hides_ours(content: str, folder: Path) -> None:
    shutil.rmtree(folder / "tessera")
    (folder / "tasks/__init__.py").write_text(content)
    code = "import tessera; tessera.load('runs')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {folder / 'tasks'} hides Tessera's package tasks")


@pytest.mark.slow
def test_two_processes(folder: Path) -> None:
    done = tessera(f"{FIT} --trainer.devices 2 --trainer.accelerator cpu", folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "out/summary.json").read_text())


@pytest.mark.slow
def test_torchrun_starts_it(folder: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    options = (torchrun, "--standalone", "--nproc_per_node", "2", "--no-python")
    done = tessera(f"{FIT} --trainer.devices 2 --trainer.accelerator cpu", folder, *options)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if "--resume" in line]
    assert lines and lines[0].startswith(" ".join(("torchrun", *options[1:], "tessera vit fit")))


def test_the_module_is_the_script(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tasks.tessera.command", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.stdout == f"tessera {__version__}\n"
