"""Sharded weights, on two CPU processes, train as unsharded ones do, with the same checkpoints."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tasks.base import Task
from tasks.distributed import launch
from tasks.distributed.sharding import Sharded, by_index, by_name, check_sharding_options, shard
from tasks.errors import UsageError
from tests.helpers.command import ROOT, Console, Patch, run
from tests.helpers.forked import Server
from tests.helpers.launched import FOUR_STEPS, assert_once, finish, start
from tests.helpers.results import checkpoint, logged, summary
from tests.helpers.tiny import FEW_STEPS, TINY, write_data

SHARDED = "'--trainer.strategy={class_path: tests.helpers.callbacks.OnCPU}'"


def fit(line: str, folder: Path) -> str:
    process = start(f"tasks.vit fit {line}", folder)
    (said,) = finish(process)
    assert process.returncode == 0, said
    return said


def assert_close(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_close(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
    elif isinstance(theirs, torch.Tensor | float):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    else:
        assert ours == theirs


@pytest.mark.slow
def test_sharded_weights_train_as_whole_ones(tmp_path: Path) -> None:
    """Weights, optimizer states, norms of gradients and scores; one process tests, and two resume,
    sharded or not.
    """
    line = f"{FOUR_STEPS} --model.optimizer.gradient_clip 0.5 --trainer.limit_test_batches 2"
    line += " --checkpoint.every_n_train_steps 2"
    # pictures of the first process, which then needs all weights
    pictures = "--config configs/logger/tensorboard.yaml"
    assert_once(fit(f"{line} {SHARDED} {pictures} --run_dir sharded", tmp_path))
    fit(f"{line} --trainer.devices 2 --run_dir unsharded", tmp_path)
    sharded, unsharded = tmp_path / "sharded", tmp_path / "unsharded"
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_close(checkpoint(sharded)[name], checkpoint(unsharded)[name])
    norms, others = (logged(run, "train/grad_norm") for run in (sharded, unsharded))
    assert len(norms) == 4 and min(norms) > 0.5 and norms == pytest.approx(others, rel=1e-4)
    ours, theirs = summary(sharded), summary(unsharded)
    for name in ("test/acc", "parameters", "steps"):
        assert ours[name] == theirs[name]
    assert run(f"test --ckpt_path {sharded}/checkpoints/last.ckpt") == 0

    moved = shutil.copytree(unsharded, tmp_path / "moved")
    more = "--trainer.max_epochs 2 --model.optimizer.schedule constant"
    fit(f"--resume unsharded {more}", tmp_path)
    fit(f"--resume sharded {more}", tmp_path)
    fit(f"--resume moved {more} {SHARDED}", tmp_path)
    for name in ("state_dict", "optimizer_states", "global_step"):
        assert_close(checkpoint(sharded)[name], checkpoint(unsharded)[name])
        assert_close(checkpoint(moved)[name], checkpoint(unsharded)[name])


DRY = "--model.net.stack.dropout 0"
TASKS = {
    "bert": f"{TINY['bert']} {DRY}",
    "mlm": f"{TINY['mlm']} {DRY} --data.next_sentence true --model.net.segments 2",
    "lm": f"{TINY['lm']} {DRY} --model.samples.every 2 --model.optimizer.optimizer muon",
    "seq2seq": TINY["seq2seq"],
}
TWO_RANKS = f"{FEW_STEPS} --trainer.accelerator cpu --trainer.devices 2 --run_dir r"
GPUS = "import tasks.distributed.launch as l; l.GPU_STRATEGIES = set()"  # as if there were some


@pytest.mark.slow
@pytest.mark.exhaustive_except("lm", "seq2seq")
@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_sharded(task: str, server: Server, tmp_path: Path) -> None:
    """By its default options, as with unsharded weights."""
    for strategy in ("fsdp", "ddp"):
        folder = tmp_path / strategy
        folder.mkdir()
        write_data(folder, texts=40)
        line = f"fit {TASKS[task]} {TWO_RANKS} --trainer.strategy {strategy}"
        server.run(line, folder, task, before=GPUS, ranks=2)
        if task == "lm":
            assert (folder / "r" / "samples" / "step_0000002.txt").exists()
    # Muon rounds in another order if sharded
    for name, rounded in (("train/loss", 1e-3), ("train/grad_norm", 2e-2)):
        ours, theirs = (logged(tmp_path / strategy / "r", name) for strategy in ("fsdp", "ddp"))
        assert len(ours) == 3 and ours[0] == pytest.approx(theirs[0], rel=1e-5)
        assert ours == pytest.approx(theirs, rel=rounded)


def reduce_gradients(rank: int, sharded: bool) -> None:
    """Compare the gradient of bfloat16 weights over four processes with the exact mean."""
    dist.init_process_group("gloo", rank=rank, world_size=4)
    model: Any = torch.nn.Linear(4096, 1, bias=False).bfloat16()
    net = model
    if sharded:
        shard(net, init_device_mesh("cpu", (4,)))
    else:
        model = DistributedDataParallel(net)
        strategy = SimpleNamespace(model=model)
        trainer = SimpleNamespace(strategy=strategy, gradient_clip_val=None)
        task: Any = SimpleNamespace(trainer=trainer)
        Task.on_train_start(task)
    inputs = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    model(inputs[rank : rank + 1]).sum().backward()
    gradient = (net.weight.grad.full_tensor() if sharded else net.weight.grad)[0]
    assert torch.equal(gradient, inputs.float().mean(0).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [True, False], ids=["fsdp", "ddp"])
def test_gradients_are_summed_in_float32(sharded: bool, server: Server, tmp_path: Path) -> None:
    before = (
        f"from tests.tasks.distributed.test_sharding import *; reduce_gradients(rank, {sharded})"
    )
    server.run("--version", tmp_path, before=before, ranks=4)


@pytest.mark.parametrize("options, named", [
    ({"ema": 0.9}, "--model.ema null"), ({"average": 5}, "--model.average null"),
    ({"ema": 0.9, "compile_net": True}, "--model.ema null --model.compile false"),
])  # fmt: skip
def test_what_needs_whole_weights(options: dict[str, Any], named: str) -> None:
    """The message names the options that resolve it."""
    task = SimpleNamespace(**{"ema": None, "average": None, "compile_net": False} | options)
    with pytest.raises(UsageError, match=f"{named}$"):
        check_sharding_options(task)


@pytest.mark.parametrize("task", ["vit", *TASKS])
def test_defaults_train_sharded(task: str, monkeypatch: Patch, console: Console) -> None:
    """`configs/trainer/fsdp.yaml` needs no further option."""

    def stop(self: Sharded) -> None:
        check_sharding_options(self.lightning_module)
        raise UsageError("accepted")

    monkeypatch.setattr(launch, "GPU_STRATEGIES", set())  # as if there were GPUs
    monkeypatch.setattr(Sharded, "setup_environment", stop)
    line = f"fit --config {ROOT}/configs/trainer/fsdp.yaml --trainer.accelerator cpu"
    console.refused(f"{line} --trainer.devices 1 --run_dir r", "accepted", task=task)


def test_names_and_numbers_of_an_optimizers_state() -> None:
    groups = [{"params": ["b"], "lr": 1.0}, {"params": ["c", "a"], "lr": 2.0}]
    state = {"state": {"a": {"step": 1}, "b": {"step": 2}}, "param_groups": groups}
    plain = by_index(state)
    assert plain["state"] == {2: {"step": 1}, 0: {"step": 2}}
    assert [group["params"] for group in plain["param_groups"]] == [[0], [1, 2]]
    assert by_name(plain, ["b", "c", "a"]) == state
