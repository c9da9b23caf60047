"""`predict` in several processes and after a kill: the file of one process that was not killed."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.distributed.predicting import PartFile, Record, fingerprint
from tests.helpers.command import Console, environment, run
from tests.helpers.forked import Server
from tests.helpers.launched import DDP, TORCHRUN
from tests.helpers.results import table
from tests.helpers.tiny import NET, picture

BATCHES = 11
COUNT = """
import pathlib
from tasks.distributed import predicting
append = predicting.PartFile.append
def counting(self, record):
    append(self, record)
    with open("batches", "a") as file:
        print(record[0], file=file)
predicting.PartFile.append = counting
"""
STOP = """
import pathlib, time
from tasks.distributed import predicting
append = predicting.PartFile.append
def appended(self, record):
    append(self, record)
    if record[0] == BATCHES - 1:
        pathlib.Path("reached").touch()
        time.sleep(60)
predicting.PartFile.append = appended
"""
every_task = pytest.mark.parametrize("task", [pytest.param("vit", marks=pytest.mark.slow), "bert"])


@pytest.fixture(scope="session")
def bert_best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Best checkpoint of a tiny classifier of texts."""
    folder = tmp_path_factory.mktemp("bert")
    line = f"fit {NET} --data.tokenizer.vocabulary 300 --trainer.max_epochs 1"
    limits = "--trainer.limit_train_batches 2 --trainer.limit_val_batches 1"
    assert run(f"{line} {limits} --trainer.limit_test_batches 0 --run_dir {folder}", "bert") == 0
    return folder / "checkpoints/best.ckpt"


@pytest.fixture
def lines(best: Path, bert_best: Path, tmp_path: Path) -> dict[str, str]:
    """A command line of each task, for 11 batches in this folder."""
    (tmp_path / "images").mkdir()
    for number in range(4 * BATCHES - 2):
        picture(8 + number % 3, "L").save(tmp_path / f"images/{number:02}.png")
    texts = [f"a {'very ' * (i % 7)}good film seen {i} times" for i in range(4 * BATCHES - 1)]
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    rows = "".join(f"{text},{i}\n" for i, text in enumerate(texts))
    (tmp_path / "asked.csv").write_text(f"text,id\n{rows}")
    size = "--data.loading.eval_batch_size 4"
    return {
        "vit": f"predict --ckpt_path {best} --input images {size}",
        "bert": f"predict --ckpt_path {bert_best} --input lines.txt {size}",
    }


@pytest.fixture
def predicted_batches(server: Server, tmp_path: Path) -> Callable[..., list[int]]:
    """A function that runs a command to its end; it returns the numbers of its batches."""

    def found(line: str, task: str = "vit", ranks: int = 1) -> list[int]:
        (tmp_path / "batches").write_text("")
        if ranks > 1:
            line += f" --trainer.devices {ranks} --trainer.strategy ddp"
        server.run(f"{line} --trainer.accelerator cpu", tmp_path, task, before=COUNT, ranks=ranks)
        assert not list(tmp_path.glob(".*part"))
        return [int(number) for number in (tmp_path / "batches").read_text().split()]

    return found


def kill_after(batches: int, line: str, task: str, server: Server, folder: Path) -> None:
    """Start a command that writes predictions.csv, and kill it after some batches."""
    line += " --trainer.accelerator cpu"
    before = f"BATCHES = {batches}\n{STOP}"
    running = server.start(line, folder, task, before=before)
    running.wait_for("reached")
    (folder / "reached").unlink()
    assert running.kill() == [-signal.SIGKILL]
    assert (folder / ".predictions.csv.part").exists()
    assert not (folder / "predictions.csv").exists()


@every_task
def test_several_processes_write_the_file_of_one(
    task: str, lines: dict[str, str], predicted_batches: Callable[..., list[int]], tmp_path: Path
) -> None:
    """Each batch once; 11 batches are a multiple of no number of processes."""
    line = lines[task].replace("lines.txt", "asked.csv")
    for ranks in (1, 2, 3):
        found = predicted_batches(f"{line} --output {ranks}.csv", task, ranks)
        assert sorted(found) == list(range(BATCHES))
    one, two, three = ((tmp_path / f"{ranks}.csv").read_bytes() for ranks in (1, 2, 3))
    assert one == two == three and one.count(b"\n") == {"vit": 43, "bert": 44}[task]
    if task == "bert":
        assert [row["id"] for row in table(tmp_path / "3.csv")] == [str(i) for i in range(43)]


@every_task
def test_a_killed_command_goes_on(
    task: str,
    lines: dict[str, str],
    predicted_batches: Callable[..., list[int]],
    server: Server,
    tmp_path: Path,
) -> None:
    """Also in another number of processes, and if half a batch was written."""
    line = lines[task].replace("lines.txt", "asked.csv")
    predicted_batches(f"{line} --output whole.csv", task)
    part = tmp_path / ".predictions.csv.part"
    for ranks in (1, 2):
        kill_after(3, line, task, server, tmp_path)
        os.truncate(part, part.stat().st_size - 9)
        found = predicted_batches(line, task, ranks)
        assert sorted(found) == list(range(2, BATCHES))  # the third batch was cut off
        assert "8 of 4" in (tmp_path / "out0").read_text()  # says where it goes on
        assert (tmp_path / "predictions.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
        (tmp_path / "predictions.csv").unlink()


@pytest.mark.slow
def test_what_was_predicted_from_something_else_is_replaced(
    lines: dict[str, str],
    run_copy: Path,
    predicted_batches: Callable[..., list[int]],
    server: Server,
    tmp_path: Path,
) -> None:
    def changed_weights() -> str:
        path = run_copy / "checkpoints/best.ckpt"
        content = torch.load(path, weights_only=True)
        name = next(name for name in content["state_dict"] if name.startswith("net.head"))
        content["state_dict"][name] *= 1.5
        torch.save(content, path)
        return line.replace(line.split()[2], str(path))

    def changed_image() -> str:
        picture(9, "L").save(tmp_path / "images/01.png")
        return line

    line = lines["vit"]
    for change in (
        changed_weights,
        changed_image,
        lambda: f"{line} --data.skip_bad true",
        lambda: line.replace("images", f"{tmp_path}/images"),
    ):
        kill_after(2, line, "vit", server, tmp_path)
        other = change()
        assert len(predicted_batches(other)) == BATCHES
        predicted_batches(f"{other} --output whole.csv")
        assert (tmp_path / "predictions.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
        (tmp_path / "predictions.csv").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["vit", "bert"])
def test_launched_processes(task: str, lines: dict[str, str], tmp_path: Path) -> None:
    """Those of `configs/trainer/ddp.yaml`, and of torchrun; standard input is read once."""
    line = lines[task]
    texts = (tmp_path / "lines.txt").read_bytes()
    if task == "bert":
        line = line.replace("lines.txt", "-")
    launched = {
        "one": f"tasks.{task} {line}",
        "ddp": f"tasks.{task} {line} {DDP}",
        "torchrun": f"{TORCHRUN} -m tasks.{task} {line} --trainer.strategy ddp",
    }
    for name, command in launched.items():
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command), "--output", f"{name}/p.csv"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            input=texts,
            timeout=300,
        )
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == 0 and said.count("p.csv") == 1, said
    files = {(tmp_path / name / "p.csv").read_bytes() for name in launched}
    assert len(files) == 1 and all(len(list((tmp_path / name).iterdir())) == 1 for name in launched)


def test_bad_files_are_counted_after_a_kill_and_in_several_processes(
    lines: dict[str, str],
    predicted_batches: Callable[..., list[int]],
    server: Server,
    tmp_path: Path,
) -> None:
    for number in (2, 21, 40):
        (tmp_path / f"images/{number:02}.png").write_text("no image")
    line = f"{lines['vit']} --data.skip_bad true --data.loading.memory_limit_mb 0"
    line += " --data.loading.num_workers 0"
    kill_after(2, line, "vit", server, tmp_path)
    two = f"{line} --trainer.devices 2 --trainer.strategy ddp --trainer.accelerator cpu"
    out = server.run(two, tmp_path, ranks=2)
    assert "predictions for 39 images" in out and "3 bad files skipped" in out


def test_a_checkpoint_with_the_former_option(run_copy: Path, tmp_path: Path) -> None:
    path = run_copy / "checkpoints/best.ckpt"
    content = torch.load(path, weights_only=True)
    content["tessera"]["config"]["data"]["predict_path"] = None
    torch.save(content, path)
    picture(8, "L").save(tmp_path / "a.png")
    assert run(f"predict --ckpt_path {path} --input a.png") == 0


def test_texts_on_the_command_line_leave_no_file(
    lines: dict[str, str], server: Server, console: Console, tmp_path: Path
) -> None:
    ckpt = lines["bert"].split()[2]
    line = f"predict --ckpt_path {ckpt} --text good --text 'a bad film' --trainer.accelerator cpu"
    before = {path.name for path in tmp_path.iterdir()}
    options = "--data.loading.eval_batch_size 1 --trainer.devices 2 --trainer.strategy ddp"
    out = server.run(f"{line} {options}", tmp_path, "bert", ranks=2)
    assert out.splitlines()[-2:] == console.printed(line, "bert")[0].splitlines()
    assert {path.name for path in tmp_path.iterdir()} - before == {"out0", "out1"}


@every_task
def test_a_second_command_with_the_same_output_is_refused(
    task: str, lines: dict[str, str], server: Server, tmp_path: Path
) -> None:
    """Also if its options differ; the first goes on after it was killed."""
    part = tmp_path / ".predictions.csv.part"
    line = f"{lines[task]} --trainer.accelerator cpu"
    first = server.start(line, tmp_path, task, before=f"BATCHES = 3\n{STOP}")
    first.wait_for("reached")
    content = part.read_bytes()
    for other in (line, f"{line} --data.skip_bad true"):
        second = server.start(other, tmp_path, task)
        assert second.wait() == [2]
        (error,) = second.errors()
        assert "another process" in error and str(part.name) in error and "--output" in error
    assert part.read_bytes() == content
    assert first.kill() == [-signal.SIGKILL]
    server.run(line, tmp_path, task, before=COUNT)
    assert sorted(map(int, Path(tmp_path, "batches").read_text().split())) == [*range(3, BATCHES)]


@every_task
def test_of_two_commands_that_start_together_one_is_refused(
    task: str, lines: dict[str, str], server: Server, tmp_path: Path
) -> None:
    """Each waits with its first batch until the other has one, too."""
    wait = """
import pathlib, time
from tasks.distributed import predicting
append = predicting.PartFile.append
def together(self, record):
    pathlib.Path(NAME).touch()
    while not (pathlib.Path("a").exists() and pathlib.Path("b").exists()):
        time.sleep(0.01)
    append(self, record)
    if record[0] == 0:
        time.sleep(1)
predicting.PartFile.append = together
"""
    line = f"{lines[task]} --trainer.accelerator cpu"
    both = [server.start(line, tmp_path, task, f"NAME = '{name}'\n{wait}") for name in "ab"]
    assert sorted(running.wait()[0] for running in both) == [0, 2]
    found = (tmp_path / "predictions.csv").read_bytes()
    server.run(f"{line} --output whole.csv", tmp_path, task)
    assert found == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob(".*part"))


def test_a_limited_command_leaves_the_part_file(
    lines: dict[str, str], server: Server, tmp_path: Path
) -> None:
    part = tmp_path / ".predictions.csv.part"
    kill_after(3, lines["bert"], "bert", server, tmp_path)
    content = part.read_bytes()
    limited = f"{lines['bert']} --trainer.limit_predict_batches 1 --trainer.accelerator cpu"
    server.run(limited, tmp_path, "bert")
    assert (tmp_path / "predictions.csv").read_text().count("\n") == 5
    assert part.read_bytes() == content


# The part file ------------------------------------------------------------------------------------


def records(count: int) -> list[Record]:
    generator = np.random.default_rng(0)
    return [(number, np.arange(3), generator.random((3, 2), np.float32)) for number in range(count)]


def test_a_part_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    """All whole batches are read, and others can be appended."""
    path = tmp_path / "new/.x.csv.part"
    written = records(3)
    sizes = [0]
    part = PartFile(path, "key")
    for record in written:
        part.append(record)
        sizes.append(path.stat().st_size)
    content = path.read_bytes()
    for size in {*range(0, len(content), 17), *sizes, len(content) - 1}:
        path.write_bytes(content[:size])
        whole = sum(size >= end for end in sizes[1:])
        part = PartFile(path, "key")
        assert [record[0] for record in part.read()] == list(range(whole))
        part.append(written[2])
        *_, (number, index, outputs) = part.read()
        assert number == 2 and (index == written[2][1]).all() and (outputs == written[2][2]).all()
    assert PartFile(path, "another").read() == [] and not path.exists()


def test_a_fingerprint_is_of_options_weights_and_metadata() -> None:
    """Not of the number of processes."""

    def made(**changes: object) -> str:
        values = {"batch_size": 1, "devices": 1, "precision": "32", "weight": 0.0, "names": "ab"}
        values |= changes
        options = {
            "data": {"batch_size": values["batch_size"]},
            "trainer": {name: values[name] for name in ("devices", "precision")}
            | {"num_nodes": 1, "strategy": "auto"},
        }
        weights = {"net.w": torch.tensor(values["weight"], dtype=torch.bfloat16)}
        checkpoint = {"state_dict": weights, "tessera": {"metadata": {"names": values["names"]}}}
        return fingerprint(options, checkpoint)

    assert made() == made(devices=2)
    changes = [{"batch_size": 2}, {"precision": "16"}, {"weight": 1.0}, {"names": "ac"}, {}]
    assert len({made(**change) for change in changes}) == len(changes)
