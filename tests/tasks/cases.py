"""A small run for each sampler, whole ones to compare with, and signals at chosen moments."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.tasks.command import (
    SMALL_LM,
    SMALL_S2S,
    checkpoint,
    metrics,
    same,
    write_corpus,
    write_images,
)
from tests.tasks.forked import Server

SHARED = (
    "--seed_everything 7 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 3 "
    "--trainer.limit_test_batches 1 "
    "--trainer.enable_progress_bar false --checkpoint.every_n_train_steps 2 "
    "--data.loading.eval_batch_size 16"
)
RANDOM = (
    "--model.net.stack.depth 2 --model.net.stack.dropout 0.1 --model.net.stack.drop_path 0.2 "
    "--model.ema 0.9 "
    "--model.augment.mixup 0.5 --model.augment.cutmix 0.5 --model.augment.crop_padding 1 "
    "--model.augment.flip 0.5 "
    "--model.augment.erase 0.5 --model.augment.rand_augment_ops 1 --model.optimizer.optimizer muon"
)
TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2 "
    "--model.net.stack.dropout 0.1 "
    "--data.max_length 32 --data.batch_size 8"
)
LM = (
    SMALL_LM.replace("--trainer.max_epochs 1 --trainer.log_every_n_steps 1 ", "")
    + " --model.net.stack.dropout 0.1"
)
S2S = (
    SMALL_S2S.partition(" --data.batch_size")[0]
    + " --data.max_length 32 --model.net.encoder.dropout 0.1"
)
PAIRS = "--data.source dates --data.tokenizer.vocabulary 300"
CASES = {  # by sampler: task and options
    "plain": ("vit", f"{RANDOM} --trainer.max_epochs 3 --trainer.limit_train_batches 8"),
    "workers": (
        "vit",
        f"--preset digits {RANDOM} --model.net.image_size 12 --data.source folder --data.path "
        f"images "
        "--data.batch_size 4 --data.loading.memory_limit_mb 0 --data.loading.num_workers 2 "
        "--trainer.max_epochs 3 "
        "--trainer.accumulate_grad_batches 2",
    ),
    "length buckets": (
        "bert",
        f"{TEXT} --trainer.max_epochs 2 --trainer.limit_train_batches 11 "
        f"--trainer.accumulate_grad_batches 3 "
        "--trainer.precision bf16-mixed",
    ),
    "tokens per batch": (
        "mlm",
        f"{TEXT} --data.loading.batch_tokens 256 --data.tokenizer.vocabulary 300 --model.ema 0.9 "
        "--trainer.max_steps 13 --trainer.limit_train_batches 9 --trainer.val_check_interval 4",
    ),
    "both lengths": (
        "seq2seq",
        f"{S2S} {PAIRS} --data.batch_size 16 --model.average 3 --trainer.max_epochs 2 "
        "--trainer.limit_train_batches 10 --trainer.accumulate_grad_batches 2 "
        "--trainer.val_check_interval 7 "
        "--trainer.check_val_every_n_epoch null",
    ),
    "random windows": (
        "lm",
        f"{LM} --data.source files --data.path texts --trainer.max_epochs 2 --model.ema 0.9",
    ),
    "documents": (
        "lm",
        f"{LM} --data.source files --data.path texts --data.packing documents --trainer.max_epochs "
        f"2 "
        "--trainer.accumulate_grad_batches 2 --trainer.check_val_every_n_epoch 2 "
        "--trainer.precision bf16-true",
    ),
}


PATCH = """
import os, signal, io
import torch
from tasks.base import Task
calls = [0]
def counted(owner, name, count, act):
    real = getattr(owner, name)
    def patched(*a, **k):
        sane = isinstance(a[1], io.BufferedWriter) if owner is torch else not a[0].trainer.sanity_checking
        calls[0] += sane
        if sane and calls[0] == count:
            act(*a)
        return real(*a, **k)
    setattr(owner, name, patched)
def strike(*_):
    os.kill(os.getpid(), {signal})
def half(content, file):
    buffer = io.BytesIO()
    real(content, buffer)
    file.write(buffer.getvalue()[: buffer.tell() // 2])
    file.flush()
    strike()
def full(*_):
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, ({signal}, {signal}))
real = torch.save
if rank in {ranks}:
    counted({what})
"""
MOMENTS = {  # where a process gets a signal: in a step, most often while gradients accumulate, ...
    "step": 'Task, "training_step", 8, strike',
    "half-written checkpoint": 'torch, "save", 2, half',
    "validation": 'Task, "validation_step", 1, strike',
    # with the size of files in the place of the signal
    "full disk": 'Task, "training_step", 8, full',
    "test": 'Task, "test_step", 1, strike',
}


def at(moment: str, number: int = signal.SIGKILL, ranks: tuple[int, ...] = (0,)) -> str:
    """Python code that has a process send itself a signal at some moment."""
    return PATCH.format(what=MOMENTS[moment], signal=int(number), ranks=ranks)


def fill(folder: Path) -> Path:
    """A folder to run in, with data, always the same."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    write_images(folder / "images", count=16)
    write_corpus(folder / "texts")
    return folder


def first(case: str, ranks: int = 1) -> str:
    """The command line that starts a case."""
    two = (
        "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp" if ranks == 2 else ""
    )
    return f"fit {CASES[case][1]} {SHARED} {two} --run_dir r"


class Wholes:
    """Runs that were never interrupted, as far as they were asked for."""

    def __init__(self, server: Server, place: Path) -> None:
        self.server, self.place = server, place

    def __call__(self, case: str, ranks: int = 1) -> Path:
        """The run folder of a case."""
        folder = self.place / f"{case} {ranks}".replace(" ", "_")
        if not folder.exists():
            self.server.run(first(case, ranks), fill(folder), CASES[case][0], ranks=ranks)
        return folder / "r"


def random_states(checkpoint: dict[str, Any]) -> Any:
    """Of all ranks, as they were saved."""
    return checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["random"]


def assert_same(ours: Path, theirs: Path) -> None:
    """Weights, averages, optimizer, schedule, counters and all logged rows."""
    for name in ("last", "best"):
        a, b = checkpoint(ours, name), checkpoint(theirs, name)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            assert same(a[part], b[part]), (name, part)
        assert same(random_states(a), random_states(b)), name
        for key in b["callbacks"]:
            if key == "RunRecord":
                assert a["callbacks"][key]["samples"] == b["callbacks"][key]["samples"]
            if key.startswith(("EMA", "LastWeights")):
                assert same(a["callbacks"][key], b["callbacks"][key]), (name, key)
    for row, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert row == other


def scale_gradients(put: Callable[..., None] = setattr, **options: float) -> None:
    """Have runs compute in float16 with a gradient scaler, as under 16-mixed on a GPU; Lightning
    has neither on a CPU.

    Args:
        put: like setattr; sets what replaces parts of modules.
        options: of the scaler.
    """
    from pytorch_lightning.plugins import MixedPrecision

    from tasks.cli import lightning_cli
    from tasks.training import trainer_options

    scaler: Any = torch.amp.GradScaler
    put(trainer_options, "default_precision", lambda _: None)
    put(
        lightning_cli,
        "slurm_plugins",
        lambda: [MixedPrecision("16-mixed", "cpu", scaler("cpu", **options))],
    )
