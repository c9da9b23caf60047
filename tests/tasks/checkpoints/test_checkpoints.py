"""Checkpoints are whole or absent, hold no code, and are refused if they cannot be used."""

import errno
import itertools
import math
import os
import resource
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.checkpoints.reading import KEY, VERSION, read_checkpoint
from tasks.checkpoints.writing import AtomicCheckpointIO, newest_checkpoint
from tasks.errors import RunError
from tests.helpers.command import Console, Patch, run
from tests.helpers.results import checkpoint, metrics, same
from tests.helpers.tiny import SHORT, Malicious

Keys = tuple[str | int, ...]  # of an entry
GONE = ...


def is_primitive(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(is_primitive, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(is_primitive, value))
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def test_tensors_and_primitives_only(finished: Path) -> None:
    assert is_primitive(checkpoint(finished))
    saved = checkpoint(finished, "best")
    assert is_primitive(saved)
    assert saved[KEY]["task"] == "vit"
    assert saved[KEY]["metadata"]["class_names"] == [str(digit) for digit in range(10)]
    assert {"mean", "std", "image_size", "channels"} <= saved[KEY]["metadata"].keys()
    assert saved[KEY]["config"]["model"]["net"]["stack"]["depth"] == 1


# Resuming from a damaged one ----------------------------------------------------------------------


def flip_one_bit(content: bytes) -> bytes:
    """In the middle, which is a weight."""
    offset = len(content) // 2
    return content[:offset] + bytes([content[offset] ^ 16]) + content[offset + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[: len(content) * 9 // 10],
    "empty": lambda content: b"",
    "one bit": flip_one_bit,
    "missing": lambda content: None,
}


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_resumes_from_the_one_before(damage: str, run_copy: Path, console: Console) -> None:
    folder = run_copy / "checkpoints"
    last = folder / "last.ckpt"
    previous = folder / "previous.ckpt"
    (folder / "best.ckpt").unlink()
    assert [checkpoint(run_copy, name)["global_step"] for name in ("last", "previous")] == [8, 4]
    damaged = DAMAGES[damage](last.read_bytes())
    last.unlink()
    if damaged is not None:
        last.write_bytes(damaged)
    out, _ = console.printed(f"fit --resume {run_copy}")
    (line,) = (line for line in out.splitlines() if "resuming from" in line)
    assert "last.ckpt" in line and "previous.ckpt, step 4" in line
    assert read_checkpoint(last)["global_step"] == 8
    # The damaged one has not become the one before.
    assert not previous.exists() or read_checkpoint(previous)["global_step"] == 4


def test_refuses_to_resume_without_a_good_one(run_copy: Path, console: Console) -> None:
    last = run_copy / "checkpoints" / "last.ckpt"
    torch.save(torch.load(last) | {"extra": Malicious()}, last)
    console.refused(f"fit --resume {run_copy}", "last.ckpt")
    for path in last.parent.iterdir():
        path.write_bytes(path.read_bytes()[:1000])
    names = [f"{name}.ckpt'" for name in ("last", "previous", "best")]
    console.refused(f"fit --resume {run_copy}", *names, code=1)
    for path in last.parent.iterdir():
        path.unlink()
    console.refused(f"fit --resume {run_copy}", "last.ckpt")  # it was complete


def test_run_that_was_killed_before_its_first_checkpoint(finished: Path, run_copy: Path) -> None:
    shutil.rmtree(run_copy / "checkpoints")
    (run_copy / "summary.json").unlink()
    assert run(f"fit --resume {run_copy}") == 0
    assert same(checkpoint(run_copy)["state_dict"], checkpoint(finished)["state_dict"])
    assert metrics(run_copy) == metrics(finished)


# Entries that are missing or wrong ----------------------------------------------------------------


def changed(tree: Any, keys: Keys, value: Any) -> Any:
    """The same tree with another value of one entry."""
    tree = type(tree)(tree)
    name, *rest = keys
    if rest:
        tree[name] = changed(tree[name], tuple(rest), value)
    elif value is GONE:
        del tree[name]
    else:
        tree[name] = value
    return tree


def replace_checkpoints(folder: Path, content: dict[str, Any]) -> Path:
    """The only checkpoint of a run folder, with this content."""
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    torch.save(content, folder / "checkpoints" / "last.ckpt")
    return folder / "checkpoints" / "last.ckpt"


HEAD = "net.head.linear.bias"
ENTRIES: dict[Keys, tuple[Any, int, str]] = {  # value, exit code, named
    (KEY,): (5, 1, "tessera"),
    (KEY, "version"): (1, 2, "version 1"),
    (KEY, "task"): (["vit"], 1, "tessera.task"),
    (KEY, "config", "model"): (None, 1, "tessera.config.model"),
    (KEY, "metadata"): ("x", 1, "tessera.metadata"),
    (KEY, "net"): (GONE, 1, "tessera.net"),
    ("state_dict",): ([], 1, "state_dict"),
    ("state_dict", HEAD): (torch.full((10,), math.nan), 1, HEAD),
}


READERS = ["test --ckpt_path {0}", "export --ckpt_path {0} --format timm", "fit --resume {1}"]


@pytest.mark.parametrize("keys", ENTRIES, ids=str)
def test_entry_is_named(keys: Keys, run_copy: Path, console: Console) -> None:
    value, code, named = ENTRIES[keys]
    file = replace_checkpoints(run_copy, changed(checkpoint(run_copy), keys, value))
    for command in READERS:
        console.refused(command.format(file, run_copy), "last.ckpt", named, code=code)


OPTIMIZER = ("optimizer_states", 0, "state", 0)
TRAINING: list[tuple[str, Keys, Any, str]] = [  # of a run to continue
    ("adamw", ("global_step",), GONE, "global_step"),
    ("adamw", ("optimizer_states",), GONE, "optimizer_states"),
    ("adamw", ("callbacks", "EMA", "step"), GONE, "callbacks.EMA.step"),
    ("adamw", ("callbacks", "EMA", "trained", HEAD), torch.zeros(3), HEAD),
    ("adamw", (*OPTIMIZER, "exp_avg_sq"), torch.zeros(3), "exp_avg_sq"),
    ("adamw", (*OPTIMIZER, "exp_avg_sq"), GONE, "exp_avg_sq"),
    ("muon", (*OPTIMIZER, "momentum_buffer"), torch.zeros(3), "momentum_buffer"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run with averaged weights for each optimizer."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("adamw", "muon"):
        line = f"fit {SHORT} --model.ema 0.9 --model.optimizer.optimizer {name}"
        assert run(f"{line} --trainer.limit_test_batches 0 --run_dir {folder / name}") == 0
    return {name: folder / name for name in ("adamw", "muon")}


@pytest.mark.plain_every(3)
@pytest.mark.parametrize("optimizer, keys, value, named", TRAINING, ids=str)
def test_state_of_training_is_named(
    optimizer: str, keys: Keys, value: Any, named: str, trained: dict[str, Path], console: Console
) -> None:
    shutil.copytree(trained[optimizer], "r")
    replace_checkpoints(Path("r"), changed(checkpoint("r"), keys, value))
    console.refused("fit --resume r --trainer.max_epochs 3", "last.ckpt", named, code=1)


def test_average_starts_if_the_checkpoint_has_none(
    trained: dict[str, Path], console: Console
) -> None:
    shutil.copytree(trained["adamw"], "r")
    replace_checkpoints(Path("r"), changed(checkpoint("r"), ("callbacks", "EMA"), GONE))
    out, _ = console.printed("fit --resume r --trainer.max_epochs 3")
    assert "no average of the weights" in out


@pytest.mark.parametrize("path, folder", [
    ("{0}/thesis.txt", ""), ("{1}/checkpoints/../../thesis.txt", ""),
    ("local:///{0}/thesis.txt", "local:/{0}"), ("{1}/checkpoints-thesis.txt", ""),
])  # fmt: skip
def test_no_file_elsewhere_is_removed(
    path: str, folder: str, run_copy: Path, console: Console
) -> None:
    """As one that is no longer among the best."""
    thesis = Path("thesis.txt").absolute()
    thesis.write_text("three years")
    content = checkpoint(run_copy)
    name = path.format(thesis.parent, run_copy.absolute())
    for state in content["callbacks"].values():
        if state.get("monitor") == "val/acc":
            state["dirpath"] = folder.format(thesis.parent) or state["dirpath"]
            state["best_k_models"] = {name: torch.tensor(0.0)}
            for kind in ("best", "kth_best", "last"):
                state[f"{kind}_model_path"] = name
            state["kth_value"] = torch.tensor(0.0)
    replace_checkpoints(run_copy, content)
    console.refused(f"fit --resume {run_copy} --trainer.max_epochs 3", "thesis.txt", code=1)
    assert thesis.read_text() == "three years"


# Writing ------------------------------------------------------------------------------------------

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.link", "os.mkdir")  # audit events


def write(step: int, target: Path, damaged: Path | None = None) -> None:
    """A checkpoint of a user's own task as a run writes it; its weight is the step."""
    config: dict[str, Any] = {"model": {}, "data": {}}
    entry = {"task": "mine", "version": VERSION, "metadata": {}, "net": {}, "config": config}
    content = {
        KEY: entry,
        "state_dict": {"weight": torch.full((1000,), float(step))},
        "epoch": 0,
        "global_step": step,
        "callbacks": {},
        "lr_schedulers": [],
        "loops": {"fit_loop": {}},
        "optimizer_states": [],
    }
    AtomicCheckpointIO(damaged).save_checkpoint(content, target)


def newest(folder: Path) -> tuple[Path, int]:
    """Path and step of the checkpoint that a run continues from; its weights are of that step."""
    path, content = newest_checkpoint(folder, "mine", print)
    assert path and content
    step = content["global_step"]
    assert torch.equal(content["state_dict"]["weight"], torch.full((1000,), float(step)))
    return path, step


def in_child(action: Callable[[], Any]) -> int:
    """The exit code of a process that does something; 1 after an error."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        action()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("room", [0, 3000])
def test_full_disk_leaves_the_old_one_whole(room: int, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(4, path)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with pytest.raises(RunError, match=f"last.ckpt.*{os.strerror(errno.EFBIG)}"):
            write(8, path)

    assert in_child(fill) == 0
    assert newest(tmp_path) == (path, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_large_checkpoint_that_does_not_fit_names_the_reason(tmp_path: Path) -> None:
    """torch writes large tensors itself, and then fails with an error of its own."""
    content = {"w": torch.zeros(50_000)}  # before the fork: filling it starts threads

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(RunError, match=os.strerror(errno.EFBIG)):
            AtomicCheckpointIO().save_checkpoint(content, tmp_path / "w.ckpt")

    assert in_child(fill) == 0 and not list(tmp_path.iterdir())


def write_until(changes: int, step: int, target: Path) -> None:
    """Write a checkpoint, and end this process before its nth change of names."""
    left = changes

    def end(event: str, _: Any) -> None:
        nonlocal left
        left -= event in CHANGES
        if event in CHANGES and left == 0:
            os._exit(9)

    sys.addaudithook(end)
    write(step, target)


@pytest.mark.parametrize("name", ["last", "best"])
def test_killed_between_any_two_changes(name: str, tmp_path: Path) -> None:
    for changes in itertools.count(1):
        target = tmp_path / str(changes) / f"{name}.ckpt"
        target.parent.mkdir()
        write(4, target)
        write(8, target)
        if in_child(partial(write_until, changes, 12, target)) == 0:
            assert newest(target.parent) == (target, 12)
            break
        path, step = newest(target.parent)
        assert step in (8, 12) and (step == 8 or path == target)
        write(12, target, None if path == target else target)
        assert newest(target.parent) == (target, 12)
        assert not [left for left in target.parent.iterdir() if left.name.startswith(".")]
    assert changes > (2 if name == "last" else 1)


def test_all_is_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    done: list[tuple[int, int] | str] = []
    target = tmp_path / "last.ckpt"
    sync = os.fsync
    rename = os.replace

    def what(status: os.stat_result) -> tuple[int, int]:
        return status.st_ino, 0 if stat.S_ISDIR(status.st_mode) else status.st_size

    monkeypatch.setattr(os, "fsync", lambda file: (done.append(what(os.fstat(file))), sync(file)))
    write(4, target)
    done.clear()
    monkeypatch.setattr(
        os, "replace", lambda old, new: (done.append(Path(new).name), rename(old, new))
    )
    write(8, target)
    content = what(target.stat())
    folder = what(tmp_path.stat())
    assert done[-4:] == [content, "previous.ckpt", "last.ckpt", folder]


def test_the_one_before_without_hard_links(tmp_path: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    last = tmp_path / "last.ckpt"
    write(4, last)
    write(8, last)
    assert newest(tmp_path) == (last, 8)
    last.unlink()
    assert newest(tmp_path) == (tmp_path / "previous.ckpt", 4)


@pytest.mark.parametrize("step, name", [(4, "previous"), (8, "best")])
def test_newest_of_those_that_are_left(step: int, name: str, tmp_path: Path) -> None:
    write(step, tmp_path / "best.ckpt")
    write(6, tmp_path / "previous.ckpt")
    (tmp_path / "last.ckpt").write_bytes(b"half")
    assert newest(tmp_path) == (tmp_path / f"{name}.ckpt", max(step, 6))
