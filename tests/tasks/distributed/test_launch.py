"""Runs of several processes: devices and machines, and what happens when one of them ends."""

import os
import shutil
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from tasks.cli.app import program
from tasks.distributed import launch
from tasks.distributed.environment import with_launcher
from tasks.errors import RunError, UsageError
from tests.helpers.cases import TWO, fill, first
from tests.helpers.command import Patch
from tests.helpers.forked import Server
from tests.helpers.launched import (
    DDP,
    FOUR_STEPS,
    TORCHRUN,
    assert_logged,
    assert_once,
    errors,
    finish,
    gone,
    run_folder_of,
    spied,
    start,
)
from tests.helpers.results import checkpoint, same

# Options ------------------------------------------------------------------------------------------

TORCHRUN_SETS = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
SRUN_SETS = {"SLURM_NTASKS": "6", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "fit"}
DEFAULTS = {"accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": "auto"}


class Options(SimpleNamespace):
    """The Trainer's, as jsonargparse has them."""

    __getitem__ = SimpleNamespace.__getattribute__
    __setitem__ = SimpleNamespace.__setattr__


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
    if isinstance(expected, str):
        with pytest.raises(UsageError, match=expected):
            launch.resolve_devices(options)
        return
    launch.resolve_devices(options)
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
def test_how_to_resume(environment: None, started: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_launcher("python -m tasks.vit fit --resume r") == started
    assert with_launcher("python -m tasks.vit test") == "python -m tasks.vit test"
    monkeypatch.setenv("TESSERA_TRUST", "my_blocks")
    assert with_launcher(f"{program('vit')} fit --resume r") == f"TESSERA_TRUST=my_blocks {started}"


# Two processes ------------------------------------------------------------------------------------

TEXT = FOUR_STEPS.replace("--model.augment.crop_padding 0", "--data.batch_size 4")
FILES = (
    ".lock config.yaml metrics.csv summary.json checkpoints report.csv predictions.csv curves.png "
    "confusion.png roc.png calibration.png embeddings.png attention.png misclassified.png"
)


@pytest.mark.slow
@pytest.mark.parametrize("line, expected", [
    (f"tasks.vit fit {FOUR_STEPS} {DDP}", "runs/vit/latest"),
    (f"{TORCHRUN} -m tasks.vit fit {FOUR_STEPS}", "runs/vit/latest"),
    (f"{TORCHRUN} -m tasks.vit fit {FOUR_STEPS} {TWO} --run_dir chosen", "chosen"),
    # with no more than the configuration of the processes: the data are the default ones
    (f"tasks.mlm fit {TEXT} {DDP}", "runs/mlm/latest"),
])  # fmt: skip
def test_two_processes_are_one_run(line: str, expected: str, tmp_path: Path) -> None:
    process = start(f"{line} --trainer.limit_test_batches 2", tmp_path)
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert_once(said)
    folder = run_folder_of(tmp_path)
    assert folder == (tmp_path / expected).resolve()
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


@pytest.mark.slow
@pytest.mark.parametrize("end, told", [
    ("1 2 ValueError", ["error: ValueError: a bad sample",
                        "error: process 1 of this run ended with exit code 1"]),
    ("1 2 SIGKILL", ["error: process 1 of this run was ended by SIGKILL"]),
    ("0 2 SIGKILL", []),
])  # fmt: skip
def test_one_that_ends_takes_all_down(end: str, told: list[str], tmp_path: Path) -> None:
    line = f"tasks.vit fit {FOUR_STEPS} {DDP} --run_dir r"
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


@pytest.mark.plain_every(2)
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

    def raised(error: Exception) -> BaseException:
        with pytest.raises(BaseException) as found, launch.fail_together(trainer):
            raise error
        return found.value

    kinds = [type(raised(ValueError(message))) for message in "aab"]
    assert kinds == [ValueError, SystemExit, ValueError]
    monkeypatch.setenv("LOCAL_RANK", "1")  # of which the command line prints no error of usage
    monkeypatch.setattr(launch, "watch_parent", lambda: None)  # nobody launched this process
    for kind in (UsageError, MisconfigurationException):
        assert isinstance(raised(kind(kind.__name__)), RunError)
        second: Any = raised(kind(kind.__name__))
        assert isinstance(second, SystemExit) and second.code == 2


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
        process = start(f"tasks.vit fit {FOUR_STEPS} {DDP} --run_dir r", tmp_path, **variables)
        (said,) = finish(process)
    (_, *others) = said.splitlines()  # what is to be done comes first
    assert process.returncode == 1 and len(errors(said)) == len(others) > 0, said
    assert (f":{port} (" if wrong == "port" else "address for: nope") in said


# Two machines -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_machines_need_a_common_disk(server: Server, tmp_path: Path) -> None:
    """Else a resumed run of several would be one network each."""
    line = f"fit {FOUR_STEPS} {TWO} --trainer.max_epochs 2 --run_dir r"
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
