"""Checkpoints are whole or absent, hold no code, and belong to one task and one set of classes."""

import errno
import itertools
import os
import pickle
import shutil
import stat
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tasks.checkpoints.contents import VERSION
from tasks.checkpoints.reading import KEY, read_checkpoint
from tasks.checkpoints.writing import AtomicCheckpointIO, newest_checkpoint
from tasks.errors import RunError, UsageError
from tests.tasks.command import Malicious, checkpoint, metrics, run, same, write_images


def primitives_only(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(primitives_only, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(primitives_only, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


@pytest.mark.parametrize("name", ["best", "last"])
def test_tensors_and_primitives_only(name: str, finished: Path) -> None:
    saved = checkpoint(finished, name)  # with weights_only
    assert primitives_only(saved)
    assert saved[KEY]["task"] == "vit"
    assert saved[KEY]["metadata"]["class_names"] == [str(digit) for digit in range(10)]
    assert {"mean", "std", "image_size", "channels"} <= saved[KEY]["metadata"].keys()
    assert saved[KEY]["config"]["model"]["net"]["stack"]["depth"] == 1


COMMANDS = [
    "test --ckpt_path {0}",
    "predict --ckpt_path {0} --data.predict_path .",
    "export --ckpt_path {0} --format timm",
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda line: line.split()[0])
@pytest.mark.parametrize(
    "damage",
    ["malicious", "plain pickle", "truncated", "empty", "text", "page", "other task", "tensors"],
)
def test_bad_checkpoints(
    command: str, damage: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = finished / "checkpoints" / "best.ckpt", tmp_path / "bad.ckpt"
    whole = good.read_bytes()
    content = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"trainer: {}\n",
        "page": b"<html>",
    }
    if damage == "malicious":
        torch.save(checkpoint(finished) | {"extra": Malicious()}, bad)
    elif damage == "plain pickle":
        bad.write_bytes(pickle.dumps({"state_dict": Malicious()}))
    elif damage == "other task":
        torch.save(checkpoint(finished) | {KEY: checkpoint(finished)[KEY] | {"task": "bert"}}, bad)
    elif damage == "tensors":
        torch.save({"weight": torch.ones(2)}, bad)
    else:
        bad.write_bytes(content[damage])
    code = run(command.format(bad))
    error = capsys.readouterr().err
    assert code == (1 if damage in content else 2)
    assert error.count("\n") == 1 and "bad.ckpt" in error
    assert damage != "other task" or "task 'bert', not 'vit'" in error
    assert [path.name for path in tmp_path.iterdir()] == [
        "bad.ckpt"
    ]  # the code did not run, nothing was written


def test_resume_refuses_them_too(run_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = run_copy / "checkpoints" / "last.ckpt"
    torch.save(torch.load(last) | {"extra": Malicious()}, last)
    assert run(f"fit --resume {run_copy}") == 2
    for path in last.parent.iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    assert run(f"fit --resume {run_copy}") == 1
    for path in last.parent.iterdir():
        path.unlink()
    assert run(f"fit --resume {run_copy}") == 2  # it was complete
    first, second, third = capsys.readouterr().err.splitlines()
    assert all("checkpoints/last.ckpt'" in line for line in (first, second, third))
    assert all(f"{name}.ckpt' is truncated" in second for name in ("last", "previous", "best"))
    assert not Path("pwned").exists()


def flipped(content: bytes) -> bytes:
    """One bit of it changed, in the middle: a weight."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]


DAMAGES = {
    "truncated": lambda content: content[: len(content) * 9 // 10],
    "empty": lambda content: b"",
    "garbage": lambda content: bytes(len(content)),
    "one bit": flipped,
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_a_damaged_one(
    damage: str, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_copy / "checkpoints"
    last, change = folder / "last.ckpt", DAMAGES[damage]
    (folder / "best.ckpt").unlink()
    assert [checkpoint(run_copy, name)["global_step"] for name in ("last", "previous")] == [8, 4]
    if change is None:
        last.unlink()
    else:
        last.write_bytes(change(last.read_bytes()))
    capsys.readouterr()
    assert run(f"fit --resume {run_copy}") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "resuming from" in line)
    assert "last.ckpt" in line and "resuming from previous.ckpt, step 4" in line
    assert (
        read_checkpoint(last)["global_step"] == 8
    )  # and the damaged one has not become the one before
    assert (
        not (folder / "previous.ckpt").exists()
        or read_checkpoint(folder / "previous.ckpt")["global_step"] == 4
    )


def test_a_run_that_was_killed_before_its_first_checkpoint(
    finished: Path, run_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    (run_copy / "summary.json").unlink()
    assert run(f"fit --resume {run_copy}") == 0
    assert "starting from the beginning" in capsys.readouterr().out
    assert same(checkpoint(run_copy)["state_dict"], checkpoint(finished)["state_dict"])
    assert metrics(run_copy) == metrics(finished)


class FullDisk:
    """A file that takes some bytes and then no more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)


@pytest.mark.parametrize("room", [0, 1000, 3000])
def test_a_full_disk_leaves_the_old_one_whole(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, writer = tmp_path / "last.ckpt", AtomicCheckpointIO()
    writer.save_checkpoint({"weight": torch.zeros(1000)}, path)
    with monkeypatch.context() as patch:
        patch.setattr(
            "builtins.open",
            lambda file, mode="r", open=open, **k: FullDisk(open(file, mode, **k), room),
        )
        with pytest.raises(RunError, match="last.ckpt could not be written.*"):
            writer.save_checkpoint({"weight": torch.ones(1000)}, path)
    assert torch.equal(torch.load(path)["weight"], torch.zeros(1000))
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_killed_writers_remains_are_cleared(tmp_path: Path) -> None:
    (tmp_path / ".last.ckpt.123.tmp").write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint({"weight": torch.zeros(1)}, tmp_path / "last.ckpt")
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_reading(best: Path) -> None:
    assert read_checkpoint(best, "vit").keys() == read_checkpoint(best).keys()
    with pytest.raises(UsageError, match="python -m tasks.vit"):
        read_checkpoint(best, "bert")
    with pytest.raises(UsageError, match="no checkpoint"):
        read_checkpoint(best.with_name("none.ckpt"))


@pytest.mark.parametrize("split", ["validate", "test"])
def test_class_counts_differ(
    split: str, best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "images")
    assert run(f"{split} --ckpt_path {best} --data.source folder --data.path images") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cat" in error and "10 classes" in error


def test_what_is_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fit` writes RUN_DIR/checkpoints/best.ckpt"):
        read_checkpoint(tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").touch()
    with pytest.raises(UsageError, match="there is last.ckpt"):
        read_checkpoint(tmp_path / "best.ckpt")


# Files -----------------------------------------------------------------------------------------

CHANGES = (
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.mkdir",
)  # that Python tells of beforehand


def going_on(step: int) -> dict[str, Any]:
    """What a checkpoint of a task of one's own holds beside weights and optimizers."""
    entry = {
        "task": "mine",
        "version": VERSION,
        "metadata": {},
        "net": {},
        "config": {"model": {}, "data": {}},
    }
    return {
        **{KEY: entry, "epoch": 0, "global_step": step, "callbacks": {}, "lr_schedulers": []},
        "loops": {"fit_loop": {}},
    }


def write(step: int, target: Path, damaged: Path | None = None) -> None:
    """A checkpoint as a run writes it; its weight is the step."""
    weights = {"weight": torch.full((1000,), float(step))}
    content = going_on(step) | {"state_dict": weights, "optimizer_states": []}
    AtomicCheckpointIO(damaged).save_checkpoint(content, target)


def killed(step: int, target: Path, changes: int) -> bool:
    """Whether a process that writes a checkpoint was killed before its nth change of names."""
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9)
        return code == 9
    left = changes

    def kill(event: str, _: Any) -> None:
        nonlocal left
        if event in CHANGES:
            left -= 1
            if left == 0:
                os._exit(9)

    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        sys.addaudithook(kill)
        write(step, target)
        os._exit(0)
    finally:
        os._exit(1)


def found(folder: Path) -> tuple[Path, int]:
    """Path and step of the checkpoint that a run goes on from; its weights are those of the step."""
    path, checkpoint = newest_checkpoint(folder, "mine", print)
    assert path and checkpoint
    weights = AtomicCheckpointIO().load_checkpoint(path, weights_only=True)["state_dict"]["weight"]
    assert torch.equal(weights, torch.full((1000,), float(checkpoint["global_step"])))
    return path, checkpoint["global_step"]


@pytest.mark.parametrize("name", ["last", "best"])
def test_killed_between_any_two_changes(name: str, tmp_path: Path) -> None:
    for changes in itertools.count(1):
        target = tmp_path / str(changes) / f"{name}.ckpt"
        target.parent.mkdir()
        write(4, target)
        write(8, target)
        if not killed(12, target, changes):
            assert found(target.parent) == (target, 12)
            break
        path, step = found(target.parent)
        assert step in (8, 12) and (step == 8 or path == target)
        write(12, target, None if path == target else target)
        assert found(target.parent) == (target, 12)
        assert not [left for left in target.parent.iterdir() if left.name.startswith(".")]
    assert changes > (2 if name == "last" else 1)


def test_all_is_on_the_disk_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, int] | str] = []
    sync, rename, target = os.fsync, os.replace, tmp_path / "last.ckpt"

    def what(status: os.stat_result) -> tuple[int, int]:
        return status.st_ino, 0 if stat.S_ISDIR(status.st_mode) else status.st_size

    monkeypatch.setattr(os, "fsync", lambda file: (done.append(what(os.fstat(file))), sync(file)))
    write(4, target)
    done.clear()
    monkeypatch.setattr(
        os, "replace", lambda old, new: (done.append(Path(new).name), rename(old, new))
    )
    write(8, target)
    content, folder = what(target.stat()), what(tmp_path.stat())
    assert done[-4:] == [content, "previous.ckpt", "last.ckpt", folder]


def test_the_one_before_where_a_file_has_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on file systems without hard links."""
    last = tmp_path / "last.ckpt"
    monkeypatch.setattr(
        os, "link", Mock(side_effect=OSError(errno.EPERM, "Operation not permitted"))
    )
    write(4, last)
    write(8, last)
    assert found(tmp_path) == (last, 8)
    last.unlink()
    assert found(tmp_path) == (tmp_path / "previous.ckpt", 4)


@pytest.mark.parametrize("step, name", [(4, "previous"), (8, "best")])
def test_the_newest_of_those_that_are_left(step: int, name: str, tmp_path: Path) -> None:
    write(step, tmp_path / "best.ckpt")
    write(6, tmp_path / "previous.ckpt")
    (tmp_path / "last.ckpt").write_bytes(b"half")
    assert found(tmp_path) == (tmp_path / f"{name}.ckpt", max(step, 6))


def test_after_a_damaged_one_the_one_before_is_kept_again(tmp_path: Path) -> None:
    last, previous = tmp_path / "last.ckpt", tmp_path / "previous.ckpt"
    last.write_bytes(b"half")
    writer = AtomicCheckpointIO(last)
    writer.save_checkpoint({"step": 4}, last)
    assert not previous.exists()
    writer.save_checkpoint({"step": 8}, last)
    assert torch.load(previous, weights_only=True) == {"step": 4}
