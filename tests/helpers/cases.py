"""A small run for each sampler, uninterrupted runs to compare with, and signals at kill points."""

import signal
from pathlib import Path
from typing import Any

import torch

from tests.helpers.forked import Server
from tests.helpers.results import checkpoint, metrics, same
from tests.helpers.tiny import SMALL_LM, SMALL_S2S, write_corpus, write_images

SHARED = (
    "--seed_everything 7 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 3 "
    "--trainer.limit_test_batches 1 --trainer.enable_progress_bar false "
    "--checkpoint.every_n_train_steps 2 --data.loading.eval_batch_size 16"
)
TWO = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp"
RANDOM = (  # all that is random in a ViT's training
    "--model.net.stack.depth 2 --model.net.stack.dropout 0.1 --model.net.stack.drop_path 0.2 "
    "--model.augment.mixup 0.5 --model.augment.cutmix 0.5 --model.augment.crop_padding 1 "
    "--model.augment.flip 0.5 --model.augment.erase 0.5 --model.augment.rand_augment_ops 1 "
    "--model.ema 0.9 --model.optimizer.optimizer muon"
)
TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2 "
    "--model.net.stack.dropout 0.1 --data.max_length 32 --data.batch_size 8"
)
LM = SMALL_LM.replace("--trainer.max_epochs 1 --trainer.log_every_n_steps 1 ", "")
LM += " --model.net.stack.dropout 0.1 --data.path texts --trainer.max_epochs 2"
S2S = SMALL_S2S.partition(" --data.batch_size")[0]
CASES = {  # by sampler: task and options
    "plain": ("vit", f"{RANDOM} --trainer.max_epochs 3 --trainer.limit_train_batches 8"),
    "workers": (
        "vit",
        f"--preset digits {RANDOM} --model.net.image_size 12 --data.source folder "
        "--data.path images --data.batch_size 4 --data.loading.memory_limit_mb 0 "
        "--data.loading.num_workers 2 --data.balanced true --trainer.max_epochs 3 "
        "--trainer.accumulate_grad_batches 2",
    ),
    "patches": (
        "mae",
        "--model.augment.crop_padding 1 --model.augment.flip 0.5 --model.net.stack.dropout 0.1 "
        "--model.net.stack.drop_path 0.2 --model.net.decoder.dropout 0.1 --model.ema 0.9 "
        "--trainer.max_epochs 2 --trainer.limit_train_batches 9 "
        "--trainer.accumulate_grad_batches 2 --trainer.precision bf16-mixed",
    ),
    "length buckets": (
        "bert",
        f"{TEXT} --data.balanced true --trainer.max_epochs 2 --trainer.limit_train_batches 11 "
        "--trainer.accumulate_grad_batches 3 --trainer.precision bf16-mixed",
    ),
    "tokens per batch": (
        "mlm",
        f"{TEXT} --data.loading.batch_tokens 256 --data.tokenizer.vocabulary 300 --model.ema 0.9 "
        "--trainer.max_steps 13 --trainer.limit_train_batches 9 --trainer.val_check_interval 4",
    ),
    "both lengths": (
        "seq2seq",
        f"{S2S} --model.net.encoder.dropout 0.1 --data.source dates --data.max_length 32 "
        "--data.tokenizer.vocabulary 300 --data.batch_size 16 --model.average 3 "
        "--trainer.max_epochs 2 --trainer.limit_train_batches 10 --trainer.val_check_interval 7 "
        "--trainer.accumulate_grad_batches 2 --trainer.check_val_every_n_epoch null",
    ),
    "random windows": ("lm", f"{LM} --model.ema 0.9 --model.samples.every 4"),
    "pixels": (
        "igpt",
        "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2 "
        "--model.net.stack.dropout 0.1 --model.augment.flip 0.5 --trainer.max_epochs 3 "
        "--trainer.limit_train_batches 6 --data.batch_size 16 --trainer.precision bf16-mixed",
    ),
    "documents": (
        "lm",
        f"{LM} --data.packing documents --trainer.accumulate_grad_batches 2 "
        "--trainer.check_val_every_n_epoch 2 --trainer.precision bf16-true",
    ),
}


def signal_at(point: str, number: int = signal.SIGKILL, ranks: tuple[int, ...] = (0,)) -> str:
    """Python code that has some ranks send themselves a signal at a kill point."""
    return f"if rank in {ranks}: send_signal({point!r}, {int(number)})"


def fill(folder: Path) -> Path:
    """A folder to run in, with data, always the same."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    write_images(folder / "images", count=16)
    write_corpus(folder / "texts")
    return folder


def first(case: str, ranks: int = 1) -> str:
    """The command line that starts a case."""
    return f"fit {CASES[case][1]} {SHARED} {TWO if ranks == 2 else ''} --run_dir r"


class UninterruptedRuns:
    """Runs that were never interrupted, as far as they were asked for."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder

    def __call__(self, case: str, ranks: int = 1) -> Path:
        """The run folder of a case."""
        folder = self.folder / f"{case} {ranks}".replace(" ", "_")
        if not folder.exists():
            self.server.run(first(case, ranks), fill(folder), CASES[case][0], ranks=ranks)
        return folder / "r"


def random_states(checkpoint: dict[str, Any]) -> Any:
    """Of all ranks, as they were saved."""
    return checkpoint["loops"]["fit_loop"]["epoch_loop.state_dict"]["random"]


def assert_same(ours: Path, theirs: Path) -> None:
    """Weights, averages, optimizer, schedule, counters, all logged rows, and samples of texts."""
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
    assert metrics(ours) == metrics(theirs)
    texts = [{file.name: file.read_text() for file in r.glob("samples/*")} for r in (ours, theirs)]
    assert texts[0] == texts[1]
