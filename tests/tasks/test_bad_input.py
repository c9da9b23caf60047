"""Bad input: one line on stderr that names the culprit, the right exit code, and nothing left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tasks.command import Malicious, process, run, write_images


def nothing() -> None:
    """No file at all."""


def settings() -> None:
    """A model of a kind that is unknown here."""
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text('{"model_type": "mamba"}')
    Path("theirs/model.safetensors").touch()


def broken(folder: Path) -> None:
    write_images(folder)
    (folder / "train" / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no image")


def stranger(folder: Path) -> None:
    write_images(folder)
    (folder / "train" / "cat" / "notes.txt").write_text("buy milk")


def empty_class(folder: Path) -> None:
    write_images(folder)
    (folder / "train" / "horse").mkdir()


def one_class(folder: Path) -> None:
    write_images(folder, classes=("cat",))


def no_train(folder: Path) -> None:
    folder.mkdir()


def corrupt_table(folder: Path) -> None:
    folder.mkdir()
    (folder / "train-00000-of-00001.parquet").write_bytes(b"PAR1 not really")


USER, FAILED = 2, 1
CASES: dict[str, tuple[int, str]] = {
    "fti": (USER, "did you mean 'fit'?"),
    "fit --modle.net.stack.depth 3": (USER, "--model.net.stack.depth"),
    "fit --preset tinyy": (USER, "did you mean 'tiny'?"),
    "fit --preset": (USER, "--preset needs a value"),
    "fit --trainer.max_epochs many": (USER, "--trainer.max_epochs many"),
    "fit --model.optimizer.lr -1": (USER, "lr must be above 0"),
    "fit --model.net.image_size 9": (USER, "image_size 9 is not a multiple of patch_size 2"),
    "fit --model.net.stack.heads 7": (USER, "7 heads"),
    "fit --model.net.stack.dropout 1.5": (USER, "dropout"),
    "fit --model.augment.flip 2": (USER, "flip"),
    "fit --model.label_smoothing 1": (USER, "label_smoothing"),
    "fit --model.ema 1": (USER, "ema"),
    "fit --model.net.num_classes 3": (USER, "--model.net.num_classes 3"),
    "fit --data.batch_size 0": (USER, "batch_size is 0"),
    "fit --trainer.accelerator tpuu": (USER, "tpuu"),
    "fit --config nowhere.yaml": (USER, "nowhere.yaml"),
    "fit --config bad.yaml": (USER, "bad.yaml"),
    "fit --config list.yaml": (USER, "list.yaml"),
    "fit --resume nowhere": (USER, "nowhere"),
    "fit --model.pretrained timm/vit_tiny_patch16_225": (
        USER,
        "did you mean 'vit_tiny_patch16_224'?",
    ),
    "fit --model.pretrained timm/resnet18": (USER, "resnet18"),
    "fit --model.pretrained timm/vit_tiny_patch16_224.nope": (
        USER,
        "vit_tiny_patch16_224.augreg_in21k",
    ),
    "fit --model.pretrained nowhere.pth": (USER, "nowhere.pth"),
    "fit --model.pretrained bad.yaml": (FAILED, "bad.yaml"),
    "fit --model.pretrained list.pth": (FAILED, "list.pth holds no weights"),
    "fit --model.pretrained code.pth": (USER, "could run code"),
    "fit --data.source folder": (USER, "--data.path"),
    "fit --data.source folder --data.path nowhere": (USER, "nowhere"),
    "fit --config configs/vit/cifar10.yaml --data.path nowhere": (USER, "nowhere"),
    "fit --config configs/vit/cifar10.yaml": (FAILED, "--data.path FOLDER"),
    "fit --data.source hub": (USER, "--data.dataset.name"),
    "fit --data.path my_images": (USER, "try --data.source folder"),
    "fit --trainer.num_nodes 2": (USER, "torchrun or srun"),
    "fit --trainer.accumulate_grad_batches 0": (USER, "--trainer.accumulate_grad_batches is 0"),
    "fit --trainer.limit_train_batches 0.0": (USER, "--trainer.limit_train_batches is 0.0"),
    "fit --trainer.max_epochs 0": (USER, "--trainer.max_epochs is 0"),
    "fit --trainer.max_steps 0": (USER, "--trainer.max_steps is 0"),
    "fit --seed_everything -1": (USER, "--seed_everything"),
    "fit --run_dir bad.yaml/run": (USER, ("--run_dir", "bad.yaml is a file")),
    "fit --config flags.yaml": (USER, "resume belongs on the command line"),
    "fit --trainer.enable_checkpointing false": (USER, "--trainer.enable_checkpointing"),
    "fit --trainer.default_root_dir here": (USER, "--trainer.default_root_dir"),
    "fit --trainer.barebones true": (USER, "--trainer.barebones"),
    "export --ckpt_path nowhere --format onnx": (USER, "nowhere"),
    "export --format onnx": (USER, "--ckpt_path"),
}
FOLDERS: dict[Callable[[Path], None], tuple[str, int, str]] = {
    broken: ("folder", FAILED, "broken.jpg"),
    stranger: ("folder", FAILED, "notes.txt"),
    empty_class: ("folder", USER, "horse"),
    one_class: ("folder", USER, "cat"),
    no_train: ("folder", USER, "train/"),
    corrupt_table: ("hub", FAILED, "train-00000-of-00001.parquet"),
}


def assert_refused(
    line: str,
    code: int,
    words: str | tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    task: str = "vit",
) -> None:
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    found = run(line, task)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ") and "Traceback" not in error, (
        error
    )
    for word in (words,) if isinstance(words, str) else words:
        assert word in error
    assert found == code
    assert sorted(Path().rglob("*")) == before  # no run folder, no half-written file


@pytest.mark.parametrize("line", CASES)
def test_options(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESSERA_DATA", raising=False)
    Path("bad.yaml").write_text("trainer: {max_epochs: 1\n")
    Path("list.yaml").write_text("- 1\n")
    Path("flags.yaml").write_text("resume: runs/vit/latest\n")
    torch.save([torch.ones(2)], "list.pth")
    torch.save({"weight": Malicious()}, "code.pth")
    assert_refused(line, *CASES[line], capsys)


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_folders(make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    source, code, named = FOLDERS[make]
    make(Path("images"))
    line = (
        f"fit --preset digits --model.net.channels null --data.source {source} --data.path images"
    )
    assert_refused(line, code, named, capsys)


@pytest.mark.parametrize("switch", ("--data.skip_bad", "--data.skip_bad true"))
def test_skip_bad_counts(switch: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken(Path("images"))
    line = (
        f"fit --preset digits --data.source folder --data.path images {switch} --data.batch_size 2"
    )
    assert run(f"{line} --trainer.max_epochs 1 --run_dir r") == 0
    assert '"skipped": 1,' in Path("r/summary.json").read_text()
    assert "skipped" in capsys.readouterr().out


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="7 heads"):
        run("fit --model.net.stack.heads 7 --debug")


@pytest.mark.parametrize(
    "line, code",
    [("fit --model.net.stack.heads 7", 2), ("fit --model.net.stack.heads 7 --debug", 1)],
)
def test_exit_codes_of_a_process(line: str, code: int, tmp_path: Path) -> None:
    done = process(line, cwd=tmp_path)
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == ("--debug" in line)
    assert "--debug" in line or done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ("devices 2", "num_nodes 2", "strategy ddp", "logger true"))
def test_predict_refuses_what_it_would_overrule(
    option: str, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = option.split()[0]
    assert_refused(
        f"predict --ckpt_path {best} --data.predict_path . --trainer.{option}", USER, name, capsys
    )


@pytest.mark.parametrize("format", ("timm", "nothing"))
def test_a_refused_export_leaves_no_folders(
    format: str, best: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(
        f"export --ckpt_path {best} --format {format} --output new/deep/x.safetensors",
        USER,
        format,
        capsys,
    )
