"""Runs of several processes: who starts them, on how many machines, and what happens when one of
them ends.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tasks.distributed import launch
from tasks.distributed.environment import with_launcher
from tasks.errors import RunError, UsageError
from tests.helpers.cases import TWO, Wholes, assert_same, fill, first
from tests.helpers.command import ROOT, Patch, run
from tests.helpers.command import environment as variables
from tests.helpers.forked import Server
from tests.helpers.results import checkpoint, metrics, same, summary

SHORT = (
    "--trainer.limit_train_batches 4 --trainer.limit_val_batches 1 --trainer.max_epochs 1 "
    "--trainer.log_every_n_steps 1 --model.net.stack.depth 1 --model.augment.crop_padding 0"
)
TORCHRUN = "torch.distributed.run --standalone --nproc_per_node 2"
DDP = "--config configs/trainer/ddp.yaml"


def start(line: str, folder: Path, before: str = "", **more: str) -> subprocess.Popen[str]:
    """`python -m LINE` in `folder`, with a callback that says what it saw; one thread unless told
    otherwise.
    """
    folder.mkdir(exist_ok=True)
    line += " --trainer.callbacks+=tests.helpers.callbacks.Spy"
    command = [*shlex.split(before), sys.executable, "-m", *shlex.split(line)]
    own = {name: value for name, value in variables(TESSERA_TRUST="tests", **more).items() if value}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=own, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """What the processes said, once all have ended."""
    return [process.communicate(timeout=200)[0] for process in processes]


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def spied(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def assert_once(text: str) -> None:
    for word in ("Results", "run folder", "next:", "epoch 1/1"):
        assert text.count(word) == 1, text


def assert_logged(folder: Path, steps: int) -> None:
    """Each step once, and validation and test once."""
    rows = metrics(folder)
    assert [int(row["step"]) for row in rows if "train/loss" in row] == list(range(steps))
    assert [sum(name in row for row in rows) for name in ("val/loss", "test/loss")] == [1, 1]


def run_folder_of(folder: Path) -> Path:
    """The only one below a folder."""
    (found,) = {path.parent for path in folder.rglob("metrics.csv")}
    assert len([path for path in found.parent.iterdir() if (path / "config.yaml").exists()]) <= 2
    return found


# Options ------------------------------------------------------------------------------------------

TORCHRUN_SETS = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
SRUN_SETS = {"SLURM_NTASKS": "6", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "fit"}
DEFAULTS = {"accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": "auto"}


class Options(SimpleNamespace):
    """The Trainer's, as jsonargparse has them."""

    __getitem__, __setitem__ = SimpleNamespace.__getattribute__, SimpleNamespace.__setattr__


@pytest.fixture
def environment(monkeypatch: Patch, request: pytest.FixtureRequest) -> None:
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "fresh_store", lambda: None)


@pytest.mark.parametrize("environment, gpus, given, expected", [
    ({}, False, {}, ("auto", 1)),
    ({}, False, {"strategy": "ddp"}, (2, 1)),
    ({}, False, {"strategy": "ddp", "devices": 3}, (3, 1)),
    ({}, True, {"strategy": "fsdp"}, ("auto", 1)),
    (TORCHRUN_SETS, False, {}, (4, 2)),
    (TORCHRUN_SETS, False, {"devices": 4, "num_nodes": 2}, (4, 2)),
    (TORCHRUN_SETS | SRUN_SETS, False, {"strategy": "ddp"}, (4, 2)),
    (SRUN_SETS, False, {"strategy": "ddp"}, (3, 2)),
    (SRUN_SETS | {"SLURM_JOB_NAME": "bash"}, False, {}, ("auto", 1)),
    (TORCHRUN_SETS, False, {"devices": 3}, "--trainer.devices 3 .*torchrun .*4"),
    (SRUN_SETS, False, {"num_nodes": 3}, "--trainer.num_nodes 3 .*srun .*on 2"),
    (SRUN_SETS, False, {"command": "predict"}, "srun"),
    ({}, False, {"num_nodes": 2}, "--trainer.num_nodes 2"),
    ({}, False, {"strategy": "ddp_spawn"}, "--trainer.strategy ddp_spawn .*give auto or"),
    ({}, False, {"strategy": SimpleNamespace(class_path="x.FSDPStrategy")}, "FSDP.*give fsdp"),
    ({}, False, {"strategy": "fsdp"}, "--trainer.strategy fsdp"),
], indirect=["environment"])  # fmt: skip
def test_devices_and_machines(
    environment: None, gpus: bool, given: Any, expected: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    options = Options(**DEFAULTS | given)
    command = given.get("command", "fit")
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            launch.resolve_devices(options, command)
        return
    launch.resolve_devices(options, command)
    assert (options.devices, options.num_nodes) == expected


@pytest.mark.parametrize("environment, started", [
    ({}, "python -m tasks.vit fit --resume r"),
    (
        TORCHRUN_SETS | {"LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_MAX_RESTARTS": "3"},
        "torchrun --standalone --nproc_per_node 8 --max-restarts 3 -m tasks.vit fit --resume r",
    ),
    (
        TORCHRUN_SETS | {"MASTER_ADDR": "one", "TORCHELASTIC_MAX_RESTARTS": "0"},
        "torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint one:29500 "
        "-m tasks.vit fit --resume r # on each machine",
    ),
    (
        SRUN_SETS,
        "srun --nodes 2 --ntasks-per-node 3 --kill-on-bad-exit python -m tasks.vit fit --resume r",
    ),
], indirect=["environment"])  # fmt: skip
def test_how_to_resume(environment: None, started: str) -> None:
    assert with_launcher("python -m tasks.vit fit --resume r") == started
    assert with_launcher("python -m tasks.vit test") == "python -m tasks.vit test"


# Two processes ------------------------------------------------------------------------------------

TEXT = SHORT.replace("--model.augment.crop_padding 0", "--data.batch_size 4")
FILES = ".lock config.yaml metrics.csv summary.json confusion.png curves.png checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize("line, place", [
    (f"tasks.vit fit {SHORT} {DDP}", "runs/vit/latest"),
    (f"{TORCHRUN} -m tasks.vit fit {SHORT}", "runs/vit/latest"),
    (f"{TORCHRUN} -m tasks.vit fit {SHORT} {TWO} --run_dir chosen", "chosen"),
    # with no more than the configuration of the processes: the data are the default ones
    (f"tasks.mlm fit {TEXT} {DDP}", "runs/mlm/latest"),
])  # fmt: skip
def test_two_processes_are_one_run(line: str, place: str, tmp_path: Path) -> None:
    process = start(f"{line} --trainer.limit_test_batches 2", tmp_path)
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert_once(said)
    folder = run_folder_of(tmp_path)
    assert folder == (tmp_path / place).resolve()
    if "vit" in line:
        assert {path.name for path in folder.iterdir()} == set(FILES.split())
    assert_logged(folder, 4)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert str(config["trainer"]["devices"]) == "2"  # as it was given, or resolved
    assert "mlm" not in line or config["data"]["source"] == "reference"
    seen = spied(tmp_path)
    samples = [index for rank in seen for batch in rank["samples"] for index in batch]
    count = 2 * 4 * (64 if "vit" in line else 4)  # ranks, steps, batch size
    assert len(seen) == 2 and len(set(samples)) == len(samples) == count


# If one of them ends ------------------------------------------------------------------------------


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.parametrize("end, told", [
    ("1 2 ValueError", ["error: ValueError: a bad sample",
                        "error: process 1 of this run ended with exit code 1"]),
    ("1 2 SIGKILL", ["error: process 1 of this run was ended by SIGKILL"]),
    ("0 2 SIGKILL", []),
])  # fmt: skip
def test_one_that_ends_takes_all_down(end: str, told: list[str], tmp_path: Path) -> None:
    line = f"tasks.vit fit {SHORT} {DDP} --run_dir r"
    process = start(line, tmp_path, END=end, OMP_NUM_THREADS="")
    (said,) = finish(process)
    ended = (tmp_path / "ended").stat().st_mtime
    assert time.time() - ended < 60
    assert process.returncode == (-signal.SIGKILL if end.startswith("0") else 1)
    assert "Traceback" not in said, said
    for line, text in zip(errors(said), told, strict=True):
        assert line.startswith(text), said
    seen = spied(tmp_path)
    assert len(seen) == 2
    while not all(gone(rank["pid"]) for rank in seen):
        assert time.time() - ended < 60
        time.sleep(0.5)
    cores = len(os.sched_getaffinity(0))
    assert [rank["threads"] for rank in seen] == [max(1, cores // 2)] * 2  # shared out fairly


NCCL = "NCCL error in: c10d.cpp:1, invalid usage\nLast error:\nDuplicate GPU detected"
DIST = torch.distributed


@pytest.mark.parametrize("connected, error, kind, said", [
    (False, DIST.DistStoreError("timed out\nframe 0"), RunError, r"here:1 \(timed out\)"),
    (False, ValueError("of the data"), ValueError, "^of the data$"),
    (True, RuntimeError("Connection reset by peer"), RunError, r"\(Connection reset by peer\)$"),
    (True, DIST.DistBackendError(NCCL), RunError, r"another .*\(Duplicate GPU detected\)$"),
    (True, RuntimeError("nccl and gloo are words"), RuntimeError, "^nccl and gloo are words$"),
])  # fmt: skip
def test_why_processes_are_not_connected(
    connected: bool, error: Exception, kind: type, said: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(DIST, "is_initialized", lambda: connected)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1")
    trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(launcher=None))
    with pytest.raises(kind, match=said), launch.fail_together(trainer):
        raise error


def test_what_all_have_to_say_is_said_once(monkeypatch: Patch) -> None:
    store = DIST.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    trainer: Any = SimpleNamespace(world_size=2)

    def kind_of(message: str) -> type:
        with pytest.raises(BaseException) as found, launch.fail_together(trainer):
            raise ValueError(message)
        return found.type

    assert [kind_of(message) for message in "aab"] == [ValueError, SystemExit, ValueError]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["0 3 SIGTERM", "1 3 SIGINT terminal"])
def test_processes_of_lightning_stop_at_a_signal(end: str, tmp_path: Path) -> None:
    folder = fill(tmp_path / "here")
    process = start(f"tasks.vit {first('workers', 2)}", folder, "setsid", END=end)
    (said,) = finish(process)
    assert process.returncode == 128 + getattr(signal, end.split()[2]), said
    assert said.count(f"python -m tasks.vit fit --resume {folder}/r") == 1
    assert "Traceback" not in said and checkpoint(folder / "r")["global_step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["port", "network"])
def test_processes_that_cannot_be_connected_say_why(wrong: str, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"MASTER_PORT": port} if wrong == "port" else {"GLOO_SOCKET_IFNAME": "nope"}
        process = start(f"tasks.vit fit {SHORT} {DDP} --run_dir r", tmp_path, **variables)
        (said,) = finish(process)
    assert process.returncode == 1 and len(errors(said)) == said.count("\n") > 0, said
    assert (f":{port} (" if wrong == "port" else "address for: nope") in said


@pytest.mark.slow
def test_torchrun_shows_its_own_error_first(tmp_path: Path) -> None:
    line = f"{TORCHRUN} -m tasks.vit fit {SHORT} --run_dir r"
    process = start(line, tmp_path, END="1 2 ValueError")
    (said,) = finish(process)
    assert time.time() - (tmp_path / "ended").stat().st_mtime < 60
    assert process.returncode == 1
    assert said.startswith("error: ValueError: a bad sample"), said
    assert all("another process of this run ended" in line for line in errors(said)[1:])


# torchrun starts them again -----------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_starts_again_where_it_was(tmp_path: Path) -> None:
    line = f"fit {SHORT} --checkpoint.every_n_train_steps 2 --model.net.stack.dropout 0.1"
    line += " --trainer.max_epochs 2"
    again = f"{TORCHRUN} --max-restarts 1 -m tasks.vit {line}"
    processes = [
        start(again, tmp_path / "killed", END="1 7 SIGKILL"),
        start(f"tasks.vit {line} --trainer.devices 2", tmp_path / "whole"),
    ]
    said, _ = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert said.count("started again: continuing") == 1 and said.count("epoch 2/2") == 1, said
    assert [rank["first"] for rank in spied(tmp_path / "killed")] == [6, 6]
    ours, theirs = (run_folder_of(tmp_path / name) for name in ("killed", "whole"))
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(checkpoint(ours)[part], checkpoint(theirs)[part]), part
    assert metrics(ours) == metrics(theirs)


@pytest.mark.slow
def test_torchrun_stops_at_a_signal_and_resumes(wholes: Wholes, tmp_path: Path) -> None:
    """One for torchrun, one from a terminal, and one for a process that is slow to end: torchrun
    ends it meanwhile.
    """
    folder = fill(tmp_path / "here")
    command = f"{TORCHRUN} -m tasks.vit {first('workers', 2)}"
    for end in ("1 1 SIGTERM launcher", "0 2 SIGINT terminal", "0 4 SIGTERM slow"):
        (folder / "ended").unlink(missing_ok=True)
        process = start(command, folder, "setsid", END=end)
        (said,) = finish(process)
        stopped = time.time() - (folder / "ended").stat().st_mtime
        assert process.returncode == 1 and stopped < 30, said  # torchrun's own
        step = int(end.split()[1]) + 1
        assert checkpoint(folder / "r")["global_step"] == step, said
        (told,) = (line for line in said.splitlines() if line.startswith("stopped by "))
        how, _, command = told.partition(": torchrun ")
        assert how.startswith(f"stopped by {end.split()[2]} after step {step};"), said
        assert command == f"--standalone --nproc_per_node 2 -m tasks.vit fit --resume {folder}/r"
        assert f"{ROOT}/tasks/" not in said and not errors(said), said  # torchrun's traceback only
        assert not re.findall(r"exitcode +: (?!143 )", said), said
        assert all(gone(rank["pid"]) for rank in spied(folder))
        command = f"torch.distributed.run {command}"
    process = start(command, folder)
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert [rank["first"] for rank in spied(folder)] == [step, step]
    assert (folder / "whole").exists()  # what the slow one had to do at its end
    assert_same(folder / "r", wholes("workers", 2))


@pytest.mark.slow
def test_torchrun_does_not_continue_the_run_of_another(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("{}")
    process = start(f"{TORCHRUN} --max-restarts 1 -m tasks.vit fit {SHORT} --run_dir r", tmp_path)
    (said,) = finish(process)
    assert process.returncode == 1 and len(errors(said)) == 2  # one for each start
    assert all(f"--run_dir {tmp_path}/r" in error for error in errors(said))


# SLURM, two machines ------------------------------------------------------------------------------


def test_several_runs_of_one_job_of_slurm(monkeypatch: Patch) -> None:
    """Each continues its own after the job was queued again, and none that of another."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "fit"}.items():
        monkeypatch.setenv(name, value)

    def asked(line: list[str]) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["vit", "fit", *line])
        return launch.resume_if_restarted("vit", line)

    lines = [[f"--model.optimizer.lr={lr}"] for lr in ("0.1", "0.2")]
    folders = []
    for line in lines:
        assert asked(line) == line
        number = zlib.crc32(f"fit\0{line[0]}".encode())
        folders.append(Path("runs", "vit", f"slurm_7_0_{number:08x}").resolve())
        folders[-1].mkdir(parents=True)
        (folders[-1] / "config.yaml").write_text("{}")
    with pytest.raises(UsageError):
        asked(lines[0])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [asked(line) for line in lines] == [[f"--resume={folder}"] for folder in folders]


@pytest.mark.slow
def test_one_process_of_slurm(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_CPUS_PER_TASK": "3"}
    process = start(f"tasks.vit fit {SHORT}", tmp_path, **job, OMP_NUM_THREADS="")
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert_once(said)
    assert len(list(tmp_path.glob("runs/vit/slurm_1_0_*/summary.json"))) == 1
    assert [rank["threads"] for rank in spied(tmp_path)] == [3]


@pytest.mark.slow
def test_machines_need_a_common_disk(server: Server, tmp_path: Path) -> None:
    """Else a resumed run of several would be one network each."""
    line = f"fit {SHORT} {TWO} --trainer.max_epochs 2 --run_dir r"
    server.run(line, tmp_path, ranks=2)
    shutil.copytree("r", "other/r")
    shutil.copy("r/checkpoints/previous.ckpt", "other/r/checkpoints/last.ckpt")
    other = """if rank:
        os.chdir("other")
        os.environ["TESSERA_RUN_DIR"] = os.path.abspath("r")"""
    before = checkpoint("r")
    line = "fit --resume r --trainer.max_epochs 3"
    running = server.start(line, tmp_path, before=other, ranks=2)
    assert all(running.wait())
    (error,) = (error for error in running.errors() if "a disk that all machines share" in error)
    assert "last.ckpt, step 8" in error and "last.ckpt, step 4" in error
    assert same(checkpoint("r"), before)


@pytest.mark.slow
def test_two_machines_are_one_run(tmp_path: Path) -> None:
    """By the README's torchrun, here both on one machine, each in a folder of its own."""
    readme = (ROOT / "README.md").read_text()
    (line,) = re.findall(r"^    torchrun (--nnodes 2 .*)$", readme, re.MULTILINE)
    endpoint = f"127.0.0.1:{20000 + os.getpid() % 20000}"
    for there, here in (("HOST:29500", endpoint), ("nproc_per_node 4", "nproc_per_node 1")):
        assert there in line
        line = line.replace(there, here)
    line = f"torch.distributed.run {line} {SHORT} --data.batch_size 32"
    processes = [start(line, tmp_path / side) for side in "ab"]
    said = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert_once("".join(said))
    assert [len(spied(tmp_path / side)) for side in "ab"] == [1, 1]
    folder = run_folder_of(tmp_path)
    assert run(f"fit {SHORT} --data.batch_size 64 --run_dir alone") == 0
    ours, theirs = summary(folder), summary("alone")
    assert ours["steps"] == theirs["steps"] == 4
    assert ours["test/acc"] == theirs["test/acc"]
    assert ours["test/loss"] == pytest.approx(theirs["test/loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_slurms_processes_are_one_run_and_continue_it(machines: int, tmp_path: Path) -> None:
    """Two processes with the variables that srun sets; one dies, SLURM queues the job again, and it
    is continued.
    """
    line = f"tasks.vit fit {SHORT} {DDP} --checkpoint.every_n_train_steps 1"
    each = 2 // machines
    job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "fit"}
    job |= {"SLURM_NNODES": str(machines), "SLURM_NTASKS_PER_NODE": str(each)}
    job |= {"SLURM_NTASKS": "2", "SLURM_NODELIST": "127.0.0.1", "END": "1 2 SIGKILL"}

    def attempt(number: int) -> tuple[list[int], str]:
        processes = []
        for rank in range(2):
            own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % each)}
            own |= {"SLURM_NODEID": str(rank // each), "SLURM_RESTART_COUNT": str(number)}
            processes.append(start(line, tmp_path, **job | own))
        said = "".join(finish(*processes))
        return [process.returncode for process in processes], said

    codes, said = attempt(0)
    (error,) = errors(said)
    assert codes == [1, -signal.SIGKILL] and "another process of this run ended" in error
    assert "([/" not in error, error  # a place in torch's code
    codes, said = attempt(1)
    assert codes == [0, 0] and said.count("started again: continuing") == 1, said
    assert_once(said)
    folder = run_folder_of(tmp_path)
    assert re.fullmatch(r"slurm_4711_0_[0-9a-f]{8}", folder.name)
    assert folder.parent == tmp_path / "runs" / "vit"
    assert_logged(folder, 4)
    seen = spied(tmp_path)
    # threads of the connection may abort an exit
    assert not any(rank["connected_at_exit"] for rank in seen)
    assert [rank["first"] for rank in seen] == [2, 2]
    assert not list(tmp_path.rglob("hpc_ckpt*"))
