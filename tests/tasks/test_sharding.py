"""Sharded weights, here on two CPU processes, train as whole ones do, and their checkpoints are the
same.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.distributed import launch
from tasks.distributed.sharding import Sharded, by_index, by_name, check_options
from tasks.errors import UsageError
from tests.tasks.command import (
    PAIRS,
    ROOT,
    SMALL_LM,
    SMALL_S2S,
    metrics,
    run,
    write_corpus,
    write_pairs,
)
from tests.tasks.forked import Server
from tests.tasks.test_launch import SHORT, finish, start

LINE = f"{SHORT} --model.optimizer.gradient_clip 0.5 --trainer.limit_test_batches 2 --checkpoint.every_n_train_steps 2"
ON_CPU = "from tasks.distributed.sharding import Sharded\nclass OnCPU(Sharded):\n    pass\n"
SHARDED = "'--trainer.strategy={class_path: parts.OnCPU}'"


def fit(line: str, folder: Path) -> str:
    process = start(f"tasks.vit fit {line}", folder)
    (said,) = finish(process)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with sharded weights ("sharded") and with whole ones ("whole"), two processes
    each.
    """
    folder = tmp_path_factory.mktemp("both")
    (folder / "parts.py").write_text(ON_CPU)
    # of the first process, which then needs all weights
    pictures = "--config configs/logger/tensorboard.yaml"
    said = fit(f"{LINE} {SHARDED} {pictures} --run_dir sharded", folder)
    assert [said.count(word) for word in ("Results", "next:", "epoch 1/1")] == [1, 1, 1], said
    fit(f"{LINE} --trainer.devices 2 --run_dir whole", folder)
    return folder


def last(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


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
def test_sharded_weights_train_as_whole_ones(both: Path) -> None:
    """Weights, optimizer states, norms of gradients and scores; one process tests, and two go on,
    sharded or not.
    """
    sharded, whole = both / "sharded", both / "whole"
    ours, theirs = last(sharded), last(whole)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_close(ours[name], theirs[name])
    norms = [
        [float(row["train/grad_norm"]) for row in metrics(run) if "train/grad_norm" in row]
        for run in (sharded, whole)
    ]
    assert len(norms[0]) == 4 and min(norms[0]) > 0.5
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (sharded, whole)]
    for name in ("test/acc", "parameters", "steps"):
        assert summaries[0][name] == summaries[1][name]
    checkpoint = sharded / "checkpoints" / "last.ckpt"
    assert run(f"test --ckpt_path {checkpoint} --data.loading.eval_batch_size 100") == 0

    shutil.copytree(whole, both / "whole to sharded")
    more = "--trainer.max_epochs 2 --model.optimizer.schedule constant"
    fit(f"--resume whole {more}", both)
    fit(f"--resume sharded {more}", both)
    fit(f"--resume 'whole to sharded' {more} {SHARDED}", both)
    for name in ("state_dict", "optimizer_states", "global_step"):
        assert_close(last(sharded)[name], last(whole)[name])
        assert_close(last(both / "whole to sharded")[name], last(whole)[name])


TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 "
    "--model.net.stack.dropout 0 "
    "--data.max_length 32 --data.batch_size 4 --data.tokenizer.vocabulary 300"
)
TASKS = {
    "bert": TEXT,
    "mlm": f"{TEXT} --data.next_sentence true --model.net.segments 2",
    "lm": f"{SMALL_LM} --data.source files --data.path texts --model.net.stack.dropout 0 "
    f"--model.samples.every 2",
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}
THREE_STEPS = (
    "--trainer.accelerator cpu --trainer.devices 2 --trainer.limit_train_batches 3 "
    "--trainer.limit_val_batches 1 "
    "--trainer.limit_test_batches 1 --trainer.max_epochs 1 --trainer.log_every_n_steps 1 "
    "--run_dir r"
)


# as if there were some
GPUS = "import tasks.distributed.launch; tasks.distributed.launch.GPU_STRATEGIES = set()"


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_in_parts(task: str, server: Server, tmp_path: Path) -> None:
    """By its default recipe, as with whole weights."""
    found = []
    for name, strategy in (("parts", "fsdp"), ("whole", "ddp")):
        folder = tmp_path / name
        folder.mkdir()
        write_corpus(folder / "texts", 40)
        write_pairs(folder / "pairs")
        line = f"fit {TASKS[task]} {THREE_STEPS} --trainer.strategy {strategy}"
        server.run(line, folder, task, before=GPUS, ranks=2)
        found.append(metrics(folder / "r"))
    parts, whole = ([row for row in rows if "train/grad_norm" in row] for rows in found)
    assert len(parts) == len(whole) == 3
    for number, (ours, theirs) in enumerate(zip(parts, whole, strict=True)):
        assert ours.keys() == theirs.keys()
        assert float(ours["train/loss"]) == pytest.approx(
            float(theirs["train/loss"]), rel=1e-3 if number else 1e-5
        )
        rounded = 2e-2 if number else 1e-5  # Muon computes in bfloat16, in another order in parts
        assert float(ours["train/grad_norm"]) == pytest.approx(
            float(theirs["train/grad_norm"]), rel=rounded
        )
    if task == "lm":
        assert all(
            (tmp_path / name / "r" / "samples" / "step_0000002.txt").exists()
            for name in ("parts", "whole")
        )


REDUCED = """
import torch
import torch.distributed as dist
from types import SimpleNamespace
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from tasks.base import Task
from tasks.distributed.sharding import shard
dist.init_process_group("gloo", rank=rank, world_size=4)
model = net = torch.nn.Linear(4096, 1, bias=False).bfloat16()
if {parts}:
    shard(net, init_device_mesh("cpu", (4,)))
else:
    model = DistributedDataParallel(net)
    Task.on_train_start(SimpleNamespace(trainer=SimpleNamespace(strategy=SimpleNamespace(model=model))))
inputs = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()
model(inputs[rank : rank + 1]).sum().backward()
gradient = (net.weight.grad.full_tensor() if {parts} else net.weight.grad)[0]
assert gradient.dtype == torch.bfloat16
different = int((gradient != inputs.float().mean(0).bfloat16()).sum())
assert not different, f"{{different}} differ"
"""


@pytest.mark.parametrize("parts", [True, False], ids=["fsdp", "ddp"])
def test_gradients_are_summed_in_float32(parts: bool, server: Server, tmp_path: Path) -> None:
    """Those of weights in bfloat16, over four processes."""
    server.run("--version", tmp_path, before=REDUCED.format(parts=parts), ranks=4)


def test_what_needs_whole_weights() -> None:
    """The line names the options that let it go on."""

    def refuse(
        ema: float | None = None, average: int | None = None, compile_net: bool = False
    ) -> None:
        check_options(SimpleNamespace(ema=ema, average=average, compile_net=compile_net))

    refuse()
    for arguments, told in (
        ({"ema": 0.9}, "give --model.ema null"),
        ({"average": 5}, "give --model.average null"),
        ({"ema": 0.9, "compile_net": True}, "give --model.ema null --model.compile false"),
    ):
        with pytest.raises(UsageError, match=f"{told}$"):
            refuse(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["vit", "bert", "mlm", "lm", "seq2seq"])
def test_defaults_go_with_parts(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`configs/trainer/fsdp.yaml` needs no further option."""

    def stop(self: Sharded) -> None:
        check_options(self.lightning_module)
        raise UsageError("accepted")

    monkeypatch.setattr(launch, "GPU_STRATEGIES", set())  # as if there were GPUs
    monkeypatch.setattr(Sharded, "setup_environment", stop)
    config = ROOT / "configs" / "trainer" / "fsdp.yaml"
    assert (
        run(
            f"fit --config {config} --trainer.accelerator cpu --trainer.devices 1 --run_dir r", task
        )
        == 2
    )
    assert "error: accepted" in capsys.readouterr().err


def test_names_and_numbers_of_an_optimizers_state() -> None:
    groups = [{"params": ["b"], "lr": 1.0}, {"params": ["c", "a"], "lr": 2.0}]
    state = {"state": {"a": {"step": 1}, "b": {"step": 2}}, "param_groups": groups}
    plain = by_index(state)
    assert plain["state"] == {2: {"step": 1}, 0: {"step": 2}}
    assert [group["params"] for group in plain["param_groups"]] == [[0], [1, 2]]
    assert by_name(plain, ["b", "c", "a"]) == state
