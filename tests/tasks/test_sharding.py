"""Weights in parts, here on two CPU processes, train as whole ones do; checkpoints in parts become one file."""

import errno
import json
import pickle
import shutil
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from pytorch_lightning.strategies import ModelParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch.distributed.checkpoint.api import CheckpointException

from tasks.checkpoints.reading import by_index, by_name
from tasks.checkpoints.sharded import gathered
from tasks.distributed import launch
from tasks.distributed.sharding import Sharded
from tasks.errors import RunError, UsageError
from tests.tasks.command import (
    PAIRS,
    ROOT,
    SMALL_LM,
    SMALL_S2S,
    Malicious,
    metrics,
    run,
    same,
    write_corpus,
    write_pairs,
)
from tests.tasks.forked import Server
from tests.tasks.test_launch import SHORT, TORCHRUN, finish, spied, start

LINE = f"{SHORT} --model.optimizer.gradient_clip 0.5 --trainer.limit_test_batches 2 --checkpoint.every_n_train_steps 2"
ON_CPU = "from tasks.distributed.sharding import Sharded\nclass OnCPU(Sharded):\n    pass\n"
PARTS = "--trainer.strategy parts.OnCPU --trainer.strategy.init_args.save_distributed_checkpoint"


def fit(line: str, folder: Path) -> str:
    process = start(f"tasks.vit fit {line}", folder)
    (said,) = finish(process)
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with weights in parts ("parts") and with whole ones ("whole"), two processes each."""
    folder = tmp_path_factory.mktemp("both")
    (folder / "parts.py").write_text(ON_CPU)
    drawing = "--config configs/logger/tensorboard.yaml"  # by the first process alone, which then needs all weights
    said = fit(f"{LINE} {PARTS} true {drawing} --run_dir parts", folder)
    assert [said.count(word) for word in ("Results", "next:", "epoch 1/1")] == [1, 1, 1], said
    fit(f"{LINE} --trainer.devices 2 --run_dir whole", folder)
    shutil.copytree(folder / "parts" / "checkpoints" / "last.ckpt", folder / "kept")
    shutil.copy(folder / "parts" / "metrics.csv", folder / "kept")
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
def test_parts_train_as_the_whole(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, optimizer states, norms of gradients and scores; then one process tests, and two go on."""
    parts, whole = both / "parts", both / "whole"
    folder = parts / "checkpoints" / "last.ckpt"
    assert len(list(folder.glob("*.distcp"))) == 2
    assert run(f"test --ckpt_path {folder}") == 2
    assert f"`python -m tasks.vit consolidate --ckpt_path {folder}`" in capsys.readouterr().err
    assert run(f"consolidate --ckpt_path {folder} --output one.ckpt") == 0
    ours, theirs = torch.load("one.ckpt", weights_only=True), last(whole)
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_close(ours[name], theirs[name])
    norms = [
        [float(row["train/grad_norm"]) for row in metrics(run) if "train/grad_norm" in row]
        for run in (parts, whole)
    ]
    assert (
        len(norms[0]) == 4 and min(norms[0]) > 0.5 and norms[0] == pytest.approx(norms[1], rel=1e-4)
    )
    summaries = [json.loads((run / "summary.json").read_text()) for run in (parts, whole)]
    for name in ("test/acc", "parameters", "steps"):
        assert summaries[0][name] == summaries[1][name]
    assert run("test --ckpt_path one.ckpt --data.loading.eval_batch_size 100") == 0

    assert run(f"consolidate --ckpt_path {folder}") == 0
    assert folder.is_file() and folder.with_name("last.ckpt.parts").is_dir()
    assert same(last(parts)["state_dict"], ours["state_dict"])
    more = "--trainer.max_epochs 2 --model.optimizer.schedule constant"
    fit(
        f"--resume parts {more} --trainer.strategy.init_args.save_distributed_checkpoint false",
        both,
    )
    fit(f"--resume whole {more}", both)
    for name in ("state_dict", "optimizer_states", "global_step"):
        assert_close(last(parts)[name], last(whole)[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, code, told",
    [
        ("code in .metadata", 2, "holds other things than tensors and primitives"),
        ("code in meta.pt", 2, "holds objects other than tensors and primitives"),
        ("code in a part", 2, "holds other things than tensors and primitives"),
        ("no part", 1, "lacks a part"),
        ("cut part", 1, "lacks a part, or one is damaged"),
        ("no meta.pt", 2, "is a folder without a checkpoint's parts (no meta.pt in it)"),
    ],
)
def test_damaged_parts(
    damage: str,
    code: int,
    told: str,
    both: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(both / "kept", "copy"))
    part = folder / "__0_0.distcp"
    if damage == "code in .metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Malicious()))
    elif damage == "code in meta.pt":
        torch.save({"a": Malicious()}, folder / "meta.pt")
    elif damage == "code in a part":
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        place = next(
            place for name, place in metadata.storage_data.items() if name.fqn.endswith(".lr")
        )
        torch.save(Malicious(), "evil.pt")
        evil = Path("evil.pt").read_bytes()
        place.offset, place.length, place.relative_path = 0, len(evil), "evil.distcp"
        (folder / "evil.distcp").write_bytes(evil)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    elif damage == "no part":
        part.unlink()
    elif damage == "cut part":
        part.write_bytes(part.read_bytes()[:1000])
    else:
        (folder / "meta.pt").unlink()
    assert run("consolidate --ckpt_path copy --output one.ckpt") == code
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1, error
    assert not Path("pwned").exists() and not Path("one.ckpt").exists()


@pytest.mark.slow
def test_whole_weights_go_on_from_parts(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many processes, each with all weights; another number is refused, as for a checkpoint in one file."""
    folder = both / "again"
    shutil.copytree(both / "parts", folder, ignore=shutil.ignore_patterns("*.ckpt*"))
    shutil.copytree(both / "kept", folder / "checkpoints" / "last.ckpt")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["trainer"] |= {
        "callbacks": None,
        "strategy": {"class_path": "tasks.distributed.sharding.Sharded"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    more = f"--resume {folder} --trainer.max_epochs 2 --trainer.limit_test_batches 0"
    assert run(f"fit {more} --trainer.strategy auto --trainer.devices 1") == 2
    assert "written with number of devices 2, this run has 1" in capsys.readouterr().err
    fit(f"{more} --trainer.strategy ddp", both)
    assert [int(row["step"]) for row in metrics(folder) if "train/loss" in row] == list(range(8))
    state = last(folder)["optimizer_states"][0]["state"]
    assert (
        state[0]["step"] == 8
        and gathered(both / "kept")["optimizer_states"][0]["state"].keys() == state.keys()
    )


@pytest.mark.slow
def test_torchrun_starts_again_from_parts(both: Path) -> None:
    """Bit by bit as if nothing had happened."""
    line = f"{LINE} {PARTS} true --run_dir killed"
    process = start(f"{TORCHRUN} --max-restarts 1 -m tasks.vit fit {line}", both, END="1 3 SIGKILL")
    (said,) = finish(process)
    assert process.returncode == 0 and said.count("started again: continuing") == 1, said
    assert [rank["first"] for rank in spied(both)] == [2, 2]
    ours, theirs = gathered(both / "killed" / "checkpoints" / "last.ckpt"), gathered(both / "kept")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert same(ours[part], theirs[part]), part
    assert metrics(both / "killed") == metrics(both / "kept")


TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 1 --model.net.stack.heads 2 --model.net.stack.dropout 0 "
    "--data.max_length 32 --data.batch_size 4 --data.tokenizer.vocabulary 300"
)
TASKS = {
    "bert": TEXT,
    "mlm": f"{TEXT} --data.next_sentence true --model.net.segments 2",
    "lm": f"{SMALL_LM} --data.source files --data.path texts --model.net.stack.dropout 0 --model.samples.every 2",
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}
THREE_STEPS = (
    "--trainer.accelerator cpu --trainer.devices 2 --trainer.limit_train_batches 3 --trainer.limit_val_batches 1 "
    "--trainer.limit_test_batches 1 --trainer.max_epochs 1 --trainer.log_every_n_steps 1 "
    "--run_dir r"
)


GPUS = "import tasks.distributed.launch; tasks.distributed.launch.SHARDED = set()"  # as if there were some


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


def test_what_is_not_in_parts(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = finished / "checkpoints" / "best.ckpt"
    Path("a/last.ckpt").mkdir(parents=True)
    Path("text").write_text("no checkpoint")
    for path, code, told in (
        ("none", 2, "none: no such folder; with parts, `fit` writes RUN_DIR/checkpoints/last.ckpt"),
        (file, 2, f"is one file already: `python -m tasks.vit test --ckpt_path {file}`"),
        ("text", 1, "'text' is truncated or not a checkpoint"),
        (
            "a",
            2,
            "a is a folder without a checkpoint's parts (no meta.pt in it): `fit` writes RUN_DIR",
        ),
    ):
        assert run(f"consolidate --ckpt_path {path} --output one.ckpt") == code
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1, error
    Path("a/last.ckpt/meta.pt").touch()
    assert run("consolidate --ckpt_path a --output one.ckpt") == 2
    assert "there is a/last.ckpt" in capsys.readouterr().err
    assert not Path("one.ckpt").exists()


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch tells of it; the parts before stay."""
    (tmp_path / "last.ckpt").mkdir()
    strategy = Sharded(save_distributed_checkpoint=True)

    def save(self: Sharded, checkpoint: object, path: Path, options: object) -> None:
        path.mkdir()
        raise CheckpointException(
            "failed", {1: (OSError(errno.ENOSPC, "No space left on device"), StackSummary())}
        )

    monkeypatch.setattr(ModelParallelStrategy, "save_checkpoint", save)
    with pytest.raises(RunError, match="last.ckpt could not be written: .*No space left on device"):
        strategy.save_checkpoint({}, tmp_path / "last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_what_needs_whole_weights() -> None:
    """The line names the options that let it go on."""

    def refuse(
        ema: float | None = None, average: int | None = None, compile_net: bool = False
    ) -> None:
        trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
        Sharded().refuse(
            trainer, SimpleNamespace(ema=ema, average=average, compile_net=compile_net)
        )

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
        trainer: Any = self.lightning_module.trainer
        self.refuse(trainer, self.lightning_module)
        raise UsageError("accepted")

    monkeypatch.setattr(launch, "SHARDED", set())  # as if there were GPUs
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
