"""Links and pipes in a run folder: nothing is written through a link, and nothing waits for a pipe."""

import os
import shutil
from pathlib import Path

import pytest

from tests.tasks.command import SHORT, run

pytestmark = pytest.mark.timeout(120)
READ = ("config.yaml", "metrics.csv", ".lock", "checkpoints/last.ckpt")  # by a run that goes on
WRITTEN = ("summary.json", "confusion.png", "curves.png", "checkpoints/previous.ckpt")
MORE = "--trainer.max_epochs {0} --trainer.limit_train_batches 2 --trainer.limit_val_batches 1"


@pytest.fixture(params=["vit", "lm", "seq2seq"])
def folder(request: pytest.FixtureRequest, finished: Path, tmp_path: Path) -> tuple[str, Path, str]:
    """A copy of a finished run: its task, its folder, and a command line that trains it a little more."""
    task = request.param
    if task == "vit":
        source, epochs = finished, 3
    elif task == "lm":
        source, epochs = request.getfixturevalue("lm_letters").parents[1], 2
    else:
        source, epochs = request.getfixturevalue("translator").parents[1], 18
    return (
        task,
        Path(shutil.copytree(source, tmp_path / "run")),
        f"fit --resume run {MORE.format(epochs)}",
    )


def files(folder: Path) -> list[Path]:
    """All files below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_links_are_replaced(folder: tuple[str, Path, str], tmp_path: Path) -> None:
    """All files of a run are links to files elsewhere, which stay as they are."""
    task, run_folder, line = folder
    known = {path.name for path in files(run_folder)}
    assert known >= {"config.yaml", "metrics.csv", "summary.json", "curves.png", "last.ckpt"}
    victims = tmp_path / "elsewhere"
    shutil.copytree(run_folder, victims)
    for path in files(run_folder):
        path.unlink()
        path.symlink_to(victims / path.relative_to(run_folder))
    before = {path: path.read_bytes() for path in files(victims)}
    assert run(line, task) == 0
    assert {path: path.read_bytes() for path in files(victims)} == before
    for name in (
        "config.yaml",
        "metrics.csv",
        "summary.json",
        "curves.png",
        "checkpoints/last.ckpt",
    ):
        assert not (run_folder / name).is_symlink()
        assert (run_folder / name).read_bytes() != (
            victims / name
        ).read_bytes() or name == "config.yaml"


def test_links_that_lead_nowhere_are_replaced(run_copy: Path, tmp_path: Path) -> None:
    names = ("metrics.csv", *WRITTEN)
    for name in names:
        (run_copy / name).unlink()
        (run_copy / name).symlink_to(tmp_path / f"new_{Path(name).name}")
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    assert not list(tmp_path.glob("new_*"))


def test_hard_links_are_cut(run_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for path in files(run_copy):
        os.link(path, tmp_path / "elsewhere" / path.name)
    before = {path: path.read_bytes() for path in files(tmp_path / "elsewhere")}
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    assert {path: path.read_bytes() for path in files(tmp_path / "elsewhere")} == before


@pytest.mark.parametrize(
    "left", ["checkpoints/.last.ckpt.1.tmp", "checkpoints/.last.ckpt.parts.tmp", ".lock"]
)
def test_links_that_a_run_makes_and_removes(
    left: str, run_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names that are there for a while only."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("kept")
    (run_copy / left).symlink_to(tmp_path / "elsewhere" / ("file" if left == ".lock" else ""))
    code = run(f"fit --resume {run_copy} --trainer.max_epochs 3")
    assert [path.read_text() for path in files(tmp_path / "elsewhere")] == ["kept"]
    if left == ".lock":
        said = capsys.readouterr().err
        assert code == 1 and ".lock" in said and said.count("\n") == 1
    else:
        assert code == 0 and not (run_copy / left).is_symlink()


@pytest.mark.parametrize("name", READ)
def test_pipes_that_are_read_are_refused(
    name: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy / name).unlink(missing_ok=True)
    os.mkfifo(run_copy / name)
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") in (1, 2)
    said = capsys.readouterr().err
    assert Path(name).name in said and said.count("\n") == 1 and said.startswith("error: ")


def test_pipes_that_are_written_are_replaced(run_copy: Path) -> None:
    for name in WRITTEN:
        (run_copy / name).unlink()
        os.mkfifo(run_copy / name)
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 0
    assert all(
        (run_copy / name).is_file() for name in ("summary.json", "confusion.png", "curves.png")
    )
    assert (run_copy / "checkpoints" / "previous.ckpt").is_file()


@pytest.mark.parametrize(
    "command", ["test", "predict --data.predict_path .", "export --format onnx"]
)
def test_a_checkpoint_that_is_a_pipe(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("x.ckpt")
    assert run(f"{command} --ckpt_path x.ckpt") in (1, 2)
    said = capsys.readouterr().err
    assert "x.ckpt" in said and said.count("\n") == 1 and said.startswith("error: ")


def test_exports_and_predictions_replace_links(best: Path, tmp_path: Path) -> None:
    from tests.tasks.command import picture

    picture(8, "L").save(tmp_path / "one.png")
    (tmp_path / "victim").write_text("kept")
    for name in ("predictions.csv", "model.safetensors"):
        (tmp_path / name).symlink_to("victim")
    assert run(f"predict --ckpt_path {best} --data.predict_path one.png") == 0
    assert run(f"export --ckpt_path {best} --format safetensors --output model.safetensors") == 0
    assert (tmp_path / "victim").read_text() == "kept" and not (
        tmp_path / "predictions.csv"
    ).is_symlink()


def test_folders_may_be_links(finished: Path, tmp_path: Path) -> None:
    """The run folder itself, as `latest` is, and that of its checkpoints, for which another disk has more room."""
    shutil.copytree(finished, tmp_path / "first")
    shutil.move(tmp_path / "first" / "checkpoints", tmp_path / "large_disk")
    (tmp_path / "first" / "checkpoints").symlink_to(tmp_path / "large_disk")
    (tmp_path / "latest").symlink_to("first")
    assert run("fit --resume latest --trainer.max_epochs 3") == 0
    assert (tmp_path / "first" / "checkpoints").is_symlink() and (tmp_path / "latest").is_symlink()
    import torch

    assert torch.load(tmp_path / "large_disk" / "last.ckpt", weights_only=True)["global_step"] == 12


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    assert run(f"fit {SHORT} --config configs/logger/tensorboard.yaml --run_dir r") == 0
    events, *_ = Path("r").rglob("events.out.tfevents.*")
    hparams = events.with_name("hparams.yaml")
    hparams.symlink_to(tmp_path / "new")
    assert run("fit --resume r --trainer.max_epochs 3") == 0
    assert not (tmp_path / "new").exists()
    events.unlink()
    os.mkfifo(events)
    assert run("fit --resume r --trainer.max_epochs 4") == 0  # nobody reads it


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00binary\n\n",
        b"loss\n1\n",
        b"step,train/loss\nx,1\n",
        b"step,train/loss\n1,y\n",
        b"step\n1,2,3\n",
    ],
)
def test_metrics_that_are_something_else(
    content: bytes, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_copy / "metrics.csv").write_bytes(content)
    before = {path: path.read_bytes() for path in files(run_copy)}
    assert run(f"fit --resume {run_copy} --trainer.max_epochs 3") == 1
    said = capsys.readouterr().err
    assert "metrics.csv is damaged" in said and said.count("\n") == 1
    assert {path: path.read_bytes() for path in files(run_copy)} == before
