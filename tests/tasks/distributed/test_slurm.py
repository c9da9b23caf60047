"""Runs that SLURM starts, and starts again."""

import re
import signal
import sys
import zlib
from pathlib import Path

import pytest

from tasks.distributed import launch
from tasks.distributed.variables import MINIMUM
from tasks.errors import UsageError
from tests.helpers.command import Patch
from tests.helpers.launched import (
    DDP,
    FOUR_STEPS,
    assert_logged,
    assert_once,
    errors,
    finish,
    run_folder_of,
    spied,
    start,
)


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
@pytest.mark.parametrize(
    "job, ignored",
    [
        ({"SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "0"}, ["SLURM_CPUS_PER_TASK"]),
        ({"SLURM_NTASKS": "x", "SLURM_NNODES": "0"}, ["SLURM_NTASKS", "SLURM_NNODES"]),
        ({"RANK": "x", "LOCAL_RANK": "-1", "WORLD_SIZE": ""}, ["RANK", "LOCAL_RANK"]),
        ({"TORCHELASTIC_RUN_ID": "1", "OMP_NUM_THREADS": "many"}, []),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_variables_of_launchers_with_nonsense(
    job: dict[str, str], ignored: list[str], tmp_path: Path
) -> None:
    devices = "--trainer.devices 2 " * ("TORCHELASTIC_RUN_ID" in job)
    process = start(f"tasks.vit fit {devices}{FOUR_STEPS} --run_dir r", tmp_path, **job)
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert re.findall(r"^warning: (\w+) is .* it is ignored$", said, re.M) == sorted(
        ignored, key=list(MINIMUM).index
    )
    assert_once(said)


@pytest.mark.slow
def test_one_process_of_slurm(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "fit", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}
    job |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_CPUS_PER_TASK": "3"}
    process = start(f"tasks.vit fit {FOUR_STEPS}", tmp_path, **job, OMP_NUM_THREADS="")
    (said,) = finish(process)
    assert process.returncode == 0, said
    assert_once(said)
    assert len(list(tmp_path.glob("runs/vit/slurm_1_0_*/summary.json"))) == 1
    assert [rank["threads"] for rank in spied(tmp_path)] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_slurms_processes_are_one_run_and_continue_it(machines: int, tmp_path: Path) -> None:
    """Two processes with the variables that srun sets; one dies, SLURM queues the job again, and it
    is continued.
    """
    line = f"tasks.vit fit {FOUR_STEPS} {DDP} --checkpoint.every_n_train_steps 1"
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
    assert "([/" not in error, error  # a line of torch's code
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
