"""Runs of several processes: who starts them, on how many machines, and what happens when one of them ends."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tasks import launch
from tasks.errors import RunError, UsageError
from tests.tasks.cases import Wholes, assert_same, fill, first
from tests.tasks.command import ROOT, checkpoint, metrics, run, same

SHORT = (
    "--trainer.limit_train_batches 4 --trainer.limit_val_batches 1 --trainer.max_epochs 1 "
    "--trainer.log_every_n_steps 1 --model.net.stack.depth 1 --model.augment.crop_padding 0"
)
TORCHRUN = "torch.distributed.run --standalone --nproc_per_node 2"
DDP = "--config configs/trainer/ddp.yaml"
SPY = """
import atexit, json, os, pathlib, signal, socket, time
import pytorch_lightning as pl
import torch
from tasks.signals import SIGNALS
class Spy(pl.Callback):
    def on_train_start(self, trainer, task):
        seen = {"host": socket.gethostname(), "threads": torch.get_num_threads(), "first": trainer.global_step}
        seen["pid"] = os.getpid()
        path = pathlib.Path(f"rank{trainer.global_rank}.json")
        path.write_text(json.dumps(seen))
        connected = torch.distributed.is_initialized
        atexit.register(lambda: path.write_text(json.dumps(seen | {"connected_at_exit": connected()})))
    def on_train_batch_start(self, trainer, task, batch, number):
        rank, step, how, *to = os.environ.get("END", "-1 0 no").split()
        if (trainer.global_rank, trainer.global_step) != (int(rank), int(step)) or pathlib.Path("ended").exists():
            return
        pathlib.Path("ended").touch()
        if how == "ValueError":
            raise ValueError("a bad sample")
        if how == "exit":
            os._exit(1)
        self.slow = to == ["slow"]
        own, launcher = os.getpid(), os.getppid()
        pid = {"launcher": launcher, "terminal": -os.getpgid(launcher)}.get("".join(to), own)
        os.kill(pid, getattr(signal, how))
        while not SIGNALS.noted:
            time.sleep(0.01)
        time.sleep(2.5 * self.slow)
    def on_exception(self, trainer, task, error):
        if getattr(self, "slow", False):
            time.sleep(4)
            pathlib.Path("whole").touch()
"""


def start(line: str, folder: Path, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """`python -m LINE` in `folder`, with a callback that says what it saw; one thread unless told otherwise."""
    folder.mkdir(exist_ok=True)
    (folder / "spy.py").write_text(SPY)
    command = [*shlex.split(before), sys.executable, "-m", *shlex.split(line), "--trainer.callbacks+=spy.Spy"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("TESSERA_RUN")}
    environment = (
        own | {"PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1", "TESSERA_TRUST": "spy,parts"} | environment
    )
    environment = {name: value for name, value in environment.items() if value}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    """What the processes said, once all have ended."""
    return [process.communicate(timeout=200)[0] for process in processes]


def spied(folder: Path) -> list[dict[str, object]]:
    """What each rank saw."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def assert_once(text: str) -> None:
    assert [text.count(word) for word in ("Results", "run folder", "next:", "epoch 1/1")] == [1, 1, 1, 1], text


# ------------------------------------------------------------------------------------------------ what is settled


def options(**given: object) -> SimpleNamespace:
    class Options(SimpleNamespace):
        __getitem__, __setitem__ = SimpleNamespace.__getattribute__, SimpleNamespace.__setattr__

    return Options(**{"accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": "auto"} | given)


TORCHRUN_SETS = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
SRUN_SETS = {"SLURM_NTASKS": "6", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "fit"}


@pytest.mark.parametrize(
    "variables, given, settled",
    [
        ({}, {}, ("auto", 1)),
        ({}, {"strategy": "ddp"}, (2, 1)),
        ({}, {"strategy": "ddp", "devices": 3}, (3, 1)),
        (TORCHRUN_SETS, {}, (4, 2)),
        (TORCHRUN_SETS, {"devices": 4, "num_nodes": 2}, (4, 2)),
        (TORCHRUN_SETS | SRUN_SETS, {"strategy": "ddp"}, (4, 2)),
        (SRUN_SETS, {"strategy": "ddp"}, (3, 2)),
        (SRUN_SETS | {"SLURM_JOB_NAME": "bash"}, {}, ("auto", 1)),
        (TORCHRUN_SETS, {"devices": 3}, "--trainer.devices 3 contradicts .*torchrun started 4 on this machine"),
        (SRUN_SETS, {"num_nodes": 3}, "--trainer.num_nodes 3 contradicts .*srun started some on 2"),
        ({}, {"strategy": "ddp_spawn"}, "--trainer.strategy ddp_spawn has not been made to work here: give auto or"),
        ({}, {"strategy": SimpleNamespace(class_path="x.FSDPStrategy")}, "FSDPStrategy .*give fsdp"),
    ],
)
def test_devices_and_machines(
    variables: dict[str, str], given: dict[str, object], settled: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(launch, "fresh_store", lambda: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    chosen = options(**given)
    if isinstance(settled, str):
        with pytest.raises(UsageError, match=settled):
            launch.settle(chosen, "fit")
        return
    launch.settle(chosen, "fit")
    assert (chosen.devices, chosen.num_nodes) == settled


def test_gpus_are_all_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = options(strategy="fsdp")
    launch.settle(chosen, "fit")
    assert chosen.devices == "auto"


@pytest.mark.parametrize("chosen", ["--trainer.strategy fsdp", "--config configs/trainer/fsdp.yaml"])
def test_sharded_weights_need_gpus(chosen: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"fit {chosen} --run_dir r") == 2
    error = capsys.readouterr().err
    assert re.search(r"--trainer.strategy (fsdp|Sharded) shards weights over GPUs, and there are none", error), error
    assert error.count("\n") == 1 and not Path("r").exists()


@pytest.mark.parametrize(
    "variables, started",
    [
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
        (SRUN_SETS, "srun --nodes 2 --ntasks-per-node 3 --kill-on-bad-exit python -m tasks.vit fit --resume r"),
    ],
)
def test_how_to_go_on(variables: dict[str, str], started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launch.as_started("python -m tasks.vit fit --resume r") == started
    assert launch.as_started("python -m tasks.vit test --ckpt_path c") == "python -m tasks.vit test --ckpt_path c"


def test_predictions_are_made_by_one(best: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN_SETS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="predict runs in one process: start it without srun"):
        launch.settle(options(), "predict")


@pytest.mark.slow
def test_masked_lm_in_two_processes(tmp_path: Path) -> None:
    """With no more than the configuration of the processes: the data are the default ones."""
    few = SHORT.replace("--model.augment.crop_padding 0", "--data.batch_size 4 --trainer.limit_test_batches 1")
    process = start(f"tasks.mlm fit {DDP} {few}", tmp_path)
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert_once(said)
    folder = tmp_path / "runs/mlm/latest"
    assert [int(row["step"]) for row in metrics(folder) if "train/loss" in row] == [0, 1, 2, 3]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["data"]["source"], config["trainer"]["devices"]) == ("reference", 2)
    assert len(spied(tmp_path)) == 2 and len(list(tmp_path.rglob("summary.json"))) == 1


# --------------------------------------------------------------------------------------------- where one of them ends


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def forked(work: Callable[[], object]) -> int:
    """The process id of a copy of this process that does something for ten seconds at most."""
    if pid := os.fork():
        return pid
    try:
        work()
        time.sleep(10)
    finally:
        os._exit(0)


@pytest.mark.parametrize("end, told", [("exit 3", "ended with exit code 3"), ("kill -9 $$", "was ended by SIGKILL")])
def test_one_that_hangs_is_ended(end: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a collective of GPUs, which does not notice that another process has ended."""
    monkeypatch.setattr(launch, "PATIENCE", 0.2)

    def work() -> None:
        sys.stderr = open("said", "w")  # noqa: SIM115
        children = [subprocess.Popen(["sleep", "100"]), subprocess.Popen(["sh", "-c", end])]
        Path("pid").write_text(str(children[0].pid))
        launch.watch(children)

    _, status = os.waitpid(forked(work), 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert Path("said").read_text() == f"error: process 2 of this run {told}, so this one ends, too\n"
    assert gone(int(Path("pid").read_text()))


def test_one_that_stops_by_itself_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all stop at a signal, and the first has yet to write a checkpoint."""
    monkeypatch.setattr(launch, "PATIENCE", 0.5)

    def work() -> None:
        children = [subprocess.Popen(["sh", "-c", "exit 143"])]
        children[0].wait()
        launch.watch(children)
        children.clear()
        time.sleep(1.5)
        Path("lived").touch()
        os._exit(0)

    _, status = os.waitpid(forked(work), 0)
    assert os.waitstatus_to_exitcode(status) == 0 and Path("lived").exists()


def test_one_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 0.2)

    def main() -> None:
        parent = os.getpid()
        Path("pid").write_text(str(forked(lambda: launch.end_with(parent))))
        os._exit(0)

    os.waitpid(forked(main), 0)
    start = time.monotonic()
    while not gone(int(Path("pid").read_text())):
        assert time.monotonic() - start < 5
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, told",
    [
        (
            "1 2 ValueError",
            ["error: ValueError: a bad sample", "error: process 1 of this run ended with exit code 1, so"],
        ),
        ("1 2 SIGKILL", ["error: process 1 of this run was ended by SIGKILL, so this one ends, too"]),
        ("0 2 SIGKILL", []),
    ],
)
def test_one_that_ends_takes_all_down(end: str, told: list[str], tmp_path: Path) -> None:
    process = start(f"tasks.vit fit {SHORT} {DDP} --run_dir r", tmp_path, END=end, OMP_NUM_THREADS="")
    (said,) = finish(process)
    ended = (tmp_path / "ended").stat().st_mtime
    assert time.time() - ended < 60
    assert process.returncode == (-signal.SIGKILL if end.startswith("0") else 1)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(told) and "Traceback" not in said, said
    assert all(line.startswith(text) for line, text in zip(errors, told, strict=True)), said
    seen = spied(tmp_path)
    assert len(seen) == 2
    while not all(gone(int(rank["pid"])) for rank in seen):
        assert time.time() - ended < 60
        time.sleep(0.5)
    cores = len(os.sched_getaffinity(0))
    assert [rank["threads"] for rank in seen] == [max(1, cores // 2)] * 2  # shared out fairly


NCCL = "NCCL error in: c10d.cpp:1, invalid usage\nncclInvalidUsage: This is wrong.\nLast error:\nDuplicate GPU detected"


@pytest.mark.parametrize(
    "connected, error, said",
    [
        (False, RuntimeError("no address for: nope"), r"connected at here:1 \(no address for: nope\): MASTER_ADDR"),
        (False, torch.distributed.DistStoreError("timed out\nframe 0"), r"at here:1 \(timed out\): MASTER_ADDR"),
        (False, ValueError("of the data"), "^of the data$"),
        (True, RuntimeError("Connection reset by peer"), r"another process .*, too \(Connection reset by peer\)$"),
        (True, torch.distributed.DistBackendError(NCCL), r"another process .*, too \(Duplicate GPU detected\)$"),
        (True, RuntimeError("nccl and gloo are words of ours"), "^nccl and gloo are words of ours$"),
    ],
)
def test_why_processes_are_not_connected(
    connected: bool, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.subprocess_script, "_launch_process_observer", None)
    monkeypatch.setattr(launch, "PATIENCE", 0.0)
    monkeypatch.setattr(launch, "first_to_say", lambda _: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: connected)
    monkeypatch.setenv("MASTER_ADDR", "here")
    monkeypatch.setenv("MASTER_PORT", "1")
    trainer: Any = SimpleNamespace(world_size=2, strategy=SimpleNamespace(launcher=None))
    with pytest.raises((RunError, type(error)), match=said), launch.as_one(trainer):
        raise error


def test_what_all_have_to_say_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before they are connected, by those that torchrun started."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(launch, "fresh_store", lambda: store)
    assert launch.first_to_say("a") and launch.first_to_say("a")  # nobody else is there
    monkeypatch.setattr(launch, "by_torchrun", lambda: True)
    assert [launch.first_to_say(text) for text in "aab"] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["port", "network"])
def test_processes_that_cannot_be_connected_say_why(wrong: str, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"MASTER_PORT": port} if wrong == "port" else {"GLOO_SOCKET_IFNAME": "nope"}
        process = start(f"tasks.vit fit {SHORT} {DDP} --run_dir r", tmp_path, **variables)
        (said,) = finish(process)
    assert process.returncode == 1 and said.startswith("error: the processes of this run cannot be connected at"), said
    assert ("EADDRINUSE" in said and f":{port} (" in said) if wrong == "port" else "address for: nope" in said
    assert said.count("\n") == len(re.findall("^error: the processes of", said, re.MULTILINE)), said


@pytest.mark.slow
def test_torchrun_shows_its_own_error_first(tmp_path: Path) -> None:
    process = start(f"{TORCHRUN} -m tasks.vit fit {SHORT} --run_dir r", tmp_path, END="1 2 ValueError")
    (said,) = finish(process)
    assert time.time() - (tmp_path / "ended").stat().st_mtime < 60
    assert process.returncode == 1
    first, *others = (line for line in said.splitlines() if line.startswith("error: "))
    assert said.startswith(first) and first.startswith("error: ValueError: a bad sample"), said
    assert all(line.startswith("error: another process of this run ended, so this one ends, too (") for line in others)


@pytest.mark.slow
def test_torchrun_starts_again_where_it_was(tmp_path: Path) -> None:
    line = f"{SHORT} --checkpoint.every_n_train_steps 2 --model.net.stack.dropout 0.1 --trainer.max_epochs 2"
    again = f"{TORCHRUN} --max-restarts 1"
    processes = [
        start(f"{again} -m tasks.vit fit {line}", tmp_path / "killed", END="1 7 SIGKILL"),
        start(f"tasks.vit fit {line} --trainer.devices 2", tmp_path / "whole"),
    ]
    said, _ = finish(*processes)
    assert [process.returncode for process in processes] == [0, 0], said
    assert said.count("started again: continuing") == 1 and said.count("epoch 2/2") == 1, said
    assert [rank["first"] for rank in spied(tmp_path / "killed")] == [6, 6]
    ours, theirs = (tmp_path / name / "runs" / "vit" / "latest" for name in ("killed", "whole"))
    assert len([path for path in ours.parent.iterdir() if not path.is_symlink()]) == 1
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(checkpoint(ours)[part], checkpoint(theirs)[part]), part
    assert metrics(ours) == metrics(theirs)


@pytest.mark.slow
def test_torchrun_stops_at_a_signal_and_goes_on(wholes: Wholes, tmp_path: Path) -> None:
    """One for torchrun, one from a terminal, and one for a process that is slow to end: torchrun ends it meanwhile."""
    folder = fill(tmp_path / "here")
    command = f"{TORCHRUN} -m tasks.vit {first('workers', 2)}"
    for end, name in (
        ("1 1 SIGTERM launcher", "SIGTERM"),
        ("0 2 SIGINT terminal", "SIGINT"),
        ("0 4 SIGTERM slow", "SIGTERM"),
    ):
        (folder / "ended").unlink(missing_ok=True)
        process = start(command, folder, "setsid", END=end)
        (said,) = finish(process)
        stopped, step = time.time() - (folder / "ended").stat().st_mtime, int(end.split()[1]) + 1
        assert process.returncode == 1 and stopped < 30, said  # torchrun's own
        assert checkpoint(folder / "r")["global_step"] == step, said
        (told,) = (line for line in said.splitlines() if line.startswith("stopped by "))
        how, _, command = told.partition("; to go on: torchrun ")
        assert how == f"stopped by {name} after step {step}", said
        assert command == f"--standalone --nproc_per_node 2 -m tasks.vit fit --resume {folder}/r"
        assert f"{ROOT}/tasks/" not in said and "error: " not in said, said  # no traceback but torchrun's
        assert not re.findall(r"exitcode +: (?!143 )", said), said
        assert all(gone(int(rank["pid"])) for rank in spied(folder))
        command = f"torch.distributed.run {command}"
    (said,) = finish(process := start(command, folder))
    assert process.returncode == 0 and [rank["first"] for rank in spied(folder)] == [step, step], said
    assert (folder / "whole").exists()  # what the slow one had to do at its end
    assert_same(folder / "r", wholes("workers", 2))


@pytest.mark.slow
def test_torchrun_does_not_continue_the_run_of_another(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("{}")
    process = start(f"{TORCHRUN} --max-restarts 1 -m tasks.vit fit {SHORT} --run_dir r", tmp_path)
    (said,) = finish(process)
    assert process.returncode == 1 and said.count("holds a run already") == 2  # one for each start


# ---------------------------------------------------------------------------------------------- SLURM, two machines


def test_several_runs_of_one_job_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each continues its own after the job was queued again, and none that of another."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "fit"}.items():
        monkeypatch.setenv(name, value)
    lines = [["--model.optimizer.lr", lr] for lr in ("0.1", "0.2")]

    def asked(line: list[str]) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["vit", "fit", *line])
        return launch.continued("vit", "fit", line)

    folders = []
    for line in lines:
        assert asked(line) == line
        folders.append(launch.run_folder("vit", None))
        folders[-1].mkdir(parents=True)
        (folders[-1] / "config.yaml").write_text("{}")
    with pytest.raises(UsageError, match="holds a run already"):
        asked(lines[0])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [asked(line) for line in lines] == [["--resume", str(folder)] for folder in folders]
    assert asked(["--trainer.max_steps", "1"]) == ["--trainer.max_steps", "1"]


@pytest.mark.slow
def test_one_process_of_slurm(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    process = start(
        f"tasks.vit fit {SHORT}", tmp_path, **job, SLURM_NODEID="0", SLURM_CPUS_PER_TASK="3", OMP_NUM_THREADS=""
    )
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert_once(said)
    assert len(list(tmp_path.glob("runs/vit/slurm_1_0_*/summary.json"))) == 1
    assert [rank["threads"] for rank in spied(tmp_path)] == [3]


@contextmanager
def two_machines() -> Iterator[list[str]]:
    """Two network namespaces that are linked, each with a name of its own; how to start a command on each.

    The test is skipped where they cannot be made, which needs Linux, iproute2 and root.
    """
    mark = f"{os.getpid() % 0xFFFF:x}"
    names = [f"tessera-{mark}-{side}" for side in "ab"]
    net = f"10.{177 + os.getpid() % 50}.{os.getpid() % 250}"

    def ip(line: str) -> None:
        subprocess.run(["ip", *line.split()], check=True, capture_output=True)

    with ExitStack() as stack:
        try:
            for name in names:
                ip(f"netns add {name}")
                stack.callback(ip, f"netns del {name}")
                hosts = Path("/etc/netns", name, "hosts")  # which `ip netns exec` shows as /etc/hosts
                hosts.parent.mkdir(parents=True)
                stack.callback(lambda hosts=hosts: (hosts.unlink(missing_ok=True), hosts.parent.rmdir()))
                hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{net}.{i} {n}\n" for i, n in enumerate(names, 1)))
            ip(f"link add te{mark}a netns {names[0]} type veth peer name te{mark}b netns {names[1]}")
            for i, name in enumerate(names, 1):
                ip(f"-n {name} addr add {net}.{i}/24 dev te{mark}{'ab'[i - 1]}")
                ip(f"-n {name} link set te{mark}{'ab'[i - 1]} up")
                ip(f"-n {name} link set lo up")
            starts = [f"ip netns exec {name} unshare --uts sh -c 'hostname {name}; exec \"$@\"' -" for name in names]
            subprocess.run([*shlex.split(starts[0]), "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here ({getattr(error, 'stderr', error)!r})")
        yield starts


def on_each(folder: Path, starts: list[str], line: str, *, restarts: int = 3, **environment: str) -> list[str]:
    """What two machines say that run `fit LINE` by the README's torchrun together, each in a folder of its own."""
    name = re.findall(r"exec (\S+)", starts[0])[0]
    (said,) = re.findall(r"^    torchrun (--nnodes 2 .*)$", (ROOT / "README.md").read_text(), re.M)
    for there, here in (
        ("HOST", name),
        ("nproc_per_node 4", "nproc_per_node 1"),
        ("restarts 3", f"restarts {restarts}"),
    ):
        assert there in said
        said = said.replace(there, here)
    many = f"torch.distributed.run {said} {line}"
    processes = [
        start(many, folder / side, before, **environment) for side, before in zip(("a", "b"), starts, strict=True)
    ]
    return [*finish(*processes), str([process.returncode for process in processes])]


@pytest.mark.slow
def test_machines_without_a_common_disk_do_not_start_again(tmp_path: Path) -> None:
    """The second would begin anew."""
    line = f"{SHORT} --checkpoint.every_n_train_steps 1 --run_dir r"
    with two_machines() as starts:
        starts[1] += f" unshare --mount sh -c 'mount -t tmpfs none {tmp_path}/a && exec \"$@\"' -"  # hidden
        first, second, codes = on_each(tmp_path, starts, line, restarts=1, END="1 2 SIGKILL")
    assert codes == "[1, 1]", first + second
    (error,) = (line for line in second.splitlines() if line.startswith("error: "))
    last = tmp_path / "a" / "r" / "checkpoints" / "last.ckpt"
    assert f"the first process of this run goes on from {last}, step 2, which tessera-" in error, error
    assert "does not see (it has no checkpoint)" in error and "on a disk that all machines share" in error
    assert checkpoint(tmp_path / "a" / "r")["global_step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_slurms_processes_are_one_run_and_continue_it(machines: int, tmp_path: Path) -> None:
    """Two processes with the variables that srun sets; one dies, SLURM queues the job again, and it is continued."""
    line, each = f"tasks.vit fit {SHORT} {DDP} --checkpoint.every_n_train_steps 1", 2 // machines
    job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": "2"}
    job |= {"SLURM_NNODES": str(machines), "SLURM_NTASKS_PER_NODE": str(each), "END": "1 2 SIGKILL"}

    def attempt(number: int, befores: list[str]) -> tuple[list[int], str]:
        names = re.findall(r"netns exec (\S+)", " ".join(befores)) or ["127.0.0.1"]
        more = job | {"SLURM_RESTART_COUNT": str(number), "SLURM_NODELIST": ",".join(names)}
        processes = []
        for rank, before in enumerate(befores):
            own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank % each, "SLURM_NODEID": rank // each}
            processes.append(start(line, tmp_path, before, **more, **{name: str(n) for name, n in own.items()}))
        said = "".join(finish(*processes))
        return [process.returncode for process in processes], said

    with two_machines() if machines == 2 else nullcontext(["", ""]) as befores:
        codes, said = attempt(0, befores)
        (error,) = (line for line in said.splitlines() if line.startswith("error: "))
        assert codes == [1, -signal.SIGKILL] and "another process of this run ended, so this one ends, too (" in error
        assert "([/" not in error, error  # a place in torch's code
        codes, said = attempt(1, befores)
    assert codes == [0, 0] and said.count("started again: continuing") == 1, said
    assert_once(said)
    (folder,) = {path.parent for path in tmp_path.rglob("metrics.csv")}
    assert re.fullmatch(r"slurm_4711_0_[0-9a-f]{8}", folder.name) and folder.parent == tmp_path / "runs" / "vit"
    assert [int(row["step"]) for row in metrics(folder) if "train/loss" in row] == [0, 1, 2, 3]
    seen = spied(tmp_path)
    assert [rank["first"] for rank in seen] == [2, 2] and len({rank["host"] for rank in seen}) == machines
    assert not any(rank["connected_at_exit"] for rank in seen)  # threads of the connection may abort an exit
    assert not list(tmp_path.rglob("hpc_ckpt*"))


@pytest.mark.slow
def test_two_machines_are_one_run(tmp_path: Path) -> None:
    line = f"{SHORT} --trainer.max_epochs 2"
    with two_machines() as starts:
        name = re.findall(r"exec (\S+)", starts[0])[0]
        first, second, codes = on_each(tmp_path, starts, f"{line} --data.batch_size 32")
    assert codes == "[0, 0]", first + second
    assert [first.count(word) for word in ("Results", "run folder", "next:", "epoch 2/2")] == [1, 1, 1, 1], first
    assert "epoch" not in second and "error" not in first + second, second
    assert [(rank["host"] == name) for rank in spied(tmp_path / "a") + spied(tmp_path / "b")] == [True, False]
    (folder,) = {path.parent for path in tmp_path.rglob("metrics.csv")}
    assert folder == (tmp_path / "a/runs/vit/latest").resolve() and not (tmp_path / "b/runs").exists()

    assert run(f"fit {line} --data.batch_size 64 --run_dir alone") == 0
    ours, theirs = (json.loads(Path(path, "summary.json").read_text()) for path in (folder, "alone"))
    assert ours["steps"] == theirs["steps"] == 8
    assert ours["test/acc"] == theirs["test/acc"]
    assert ours["test/loss"] == pytest.approx(theirs["test/loss"], abs=1e-5)
