"""One short run that many tests look at, and a folder of its own for each test."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from tasks.igpt import pictures, probe
from tasks.tracking import evaluation_figures, picture_grid, report
from tests.helpers.cases import UninterruptedRuns
from tests.helpers.command import Capture, Console, Patch, run
from tests.helpers.forked import Server
from tests.helpers.tiny import (
    PAIRS,
    SHORT,
    SMALL_LM,
    SMALL_S2S,
    TINY,
    write_corpus,
    write_data,
    write_pairs,
)

BLANK = Image.new("RGB", (4, 4))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def blank_pictures(monkeypatch: Patch) -> None:
    """Leaves the figures of runs empty: drawing takes longer than training a tiny network."""
    for module in (report, evaluation_figures, picture_grid, pictures, probe):
        monkeypatch.setattr(module, "write_png", lambda figure, path: BLANK.save(path, "png"))


@pytest.fixture
def console(capsys: Capture) -> Console:
    """Runs commands here and reads what they print."""
    return Console(capsys)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts commands in processes of their own, at once."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def uninterrupted_runs(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> UninterruptedRuns:
    """Runs that were never interrupted."""
    return UninterruptedRuns(server, tmp_path_factory.mktemp("uninterrupted_runs"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the digits, two short epochs; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(f"fit {SHORT} --run_dir {folder}") == 0
    return folder


@pytest.fixture
def run_copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of that run to continue or to damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="session")
def best(finished: Path) -> Path:
    """Its best checkpoint."""
    return finished / "checkpoints" / "best.ckpt"


def fit(line: str, task: str, folder: Path) -> Path:
    """The best checkpoint of a run."""
    assert run(f"fit {line} --run_dir {folder / 'run'}", task) == 0
    return folder / "run" / "checkpoints" / "best.ckpt"


@pytest.fixture(scope="session")
def lm_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny language model of bytes, of several documents; read only."""
    folder = tmp_path_factory.mktemp("lm_bytes")
    texts = write_corpus(folder / "texts")
    line = f"{SMALL_LM} --data.path {texts} --data.tokenizer.vocabulary 400"
    more = "--model.net.position rotary --model.optimizer.lr 3e-3"
    return fit(f"{line} {more}", "lm", folder)


@pytest.fixture(scope="session")
def lm_letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny language model of characters, of one document; read only."""
    folder = tmp_path_factory.mktemp("lm_letters")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 60)
    line = f"{SMALL_LM} --data.path {text} --model.optimizer.lr 1e-2"
    more = "--data.tokenizer.kind character --data.tokenizer.vocabulary 100"
    return fit(f"{line} {more}", "lm", folder)


@pytest.fixture(scope="session")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny encoder-decoder after a short training; read only."""
    folder = tmp_path_factory.mktemp("translator")
    pairs = PAIRS.replace("pairs", str(write_pairs(folder / "pairs")))
    line = f"{SMALL_S2S} {pairs} --model.decoding.beams 2"
    more = "--trainer.max_epochs 12 --trainer.check_val_every_n_epoch 6"
    return fit(f"{line} {more}", "seq2seq", folder)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run of each task; read only."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for task, options in TINY.items():
            few = "--trainer.max_epochs 1 --trainer.limit_val_batches 1"
            line = f"fit {options} {few} --trainer.limit_test_batches 0 --run_dir {task}"
            assert run(line, task) == 0
    return folder
