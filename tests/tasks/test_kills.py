"""Runs that are killed, anywhere and any number of times, and resumed end with the bits of one that was not."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tasks.command import SMALL_LM, SMALL_S2S, checkpoint, metrics, same, write_corpus, write_images
from tests.tasks.forked import Server

SHARED = (
    "--seed_everything 7 --trainer.log_every_n_steps 1 --trainer.limit_val_batches 3 --trainer.limit_test_batches 1 "
    "--trainer.enable_progress_bar false --checkpoint.every_n_train_steps 2"
)
RANDOM = (
    "--model.net.stack.depth 2 --model.net.stack.dropout 0.1 --model.net.stack.drop_path 0.2 --model.ema 0.9 "
    "--model.augment.mixup 0.5 --model.augment.cutmix 0.5 --model.augment.crop_padding 1 --model.augment.flip 0.5 "
    "--model.augment.erase 0.5 --model.augment.rand_augment_ops 1 --model.optimizer.optimizer muon"
)
TEXT = (
    "--model.net.stack.width 32 --model.net.stack.depth 2 --model.net.stack.heads 2 --model.net.stack.dropout 0.1 "
    "--data.max_length 32 --data.batch_size 8"
)
LM = SMALL_LM.replace("--trainer.max_epochs 1 --trainer.log_every_n_steps 1 ", "") + " --model.net.stack.dropout 0.1"
S2S = SMALL_S2S.partition(" --data.batch_size")[0] + " --data.max_length 32 --model.net.encoder.dropout 0.1"
PAIRS = "--data.source dates --data.tokenizer.vocabulary 200"
CASES = {  # by sampler: task and options
    "plain": ("vit", f"{RANDOM} --trainer.max_epochs 3 --trainer.limit_train_batches 8"),
    "workers": (
        "vit",
        f"--preset digits {RANDOM} --model.net.image_size 12 --data.source folder --data.path images "
        "--data.batch_size 4 --data.loading.memory_limit_mb 0 --data.loading.num_workers 2 --trainer.max_epochs 3 "
        "--trainer.accumulate_grad_batches 2",
    ),
    "length buckets": (
        "bert",
        f"{TEXT} --trainer.max_epochs 2 --trainer.limit_train_batches 11 --trainer.accumulate_grad_batches 3",
    ),
    "tokens per batch": (
        "mlm",
        f"{TEXT} --data.loading.batch_tokens 256 --data.tokenizer.vocabulary 300 --model.ema 0.9 "
        "--trainer.max_steps 13 --trainer.limit_train_batches 9 --trainer.val_check_interval 4",
    ),
    "both lengths": (
        "seq2seq",
        f"{S2S} {PAIRS} --data.batch_size 16 --model.average_last 2 --trainer.max_epochs 2 "
        "--trainer.limit_train_batches 10 --trainer.val_check_interval 5 --trainer.accumulate_grad_batches 2",
    ),
    "random windows": ("lm", f"{LM} --data.source files --data.path texts --trainer.max_epochs 2 --model.ema 0.9"),
    "documents": (
        "lm",
        f"{LM} --data.source files --data.path texts --data.packing documents --trainer.max_epochs 2 "
        "--trainer.accumulate_grad_batches 2 --trainer.check_val_every_n_epoch 2",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Starts commands at once."""
    server = Server()
    yield server
    server.close()


def fill(folder: Path) -> Path:
    """A folder with data to run in."""
    folder.mkdir(parents=True)
    write_images(folder / "images", count=16)
    write_corpus(folder / "texts")
    return folder


@pytest.fixture(scope="module")
def wholes(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Path]]:
    """Runs that were never interrupted, as far as they were asked for."""
    yield {}


def whole(case: str, ranks: int, server: Server, wholes: dict, place: pytest.TempPathFactory) -> Path:
    """The folder of a case's uninterrupted run."""
    if (case, ranks) not in wholes:
        folder = fill(place.mktemp("whole") / "here")
        wholes[case, ranks] = folder / "r"
        server.run(first(case, ranks), folder, CASES[case][0], ranks=ranks)
    return wholes[case, ranks]


def first(case: str, ranks: int) -> str:
    """The command line that starts a case."""
    two = "--trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp" if ranks == 2 else ""
    return f"fit {CASES[case][1]} {SHARED} {two} " + ("--run_dir r" if ranks == 1 else f"--run_dir r")


def assert_same(ours: Path, theirs: Path) -> None:
    """Weights, averages, optimizer, schedule, counters and all logged rows."""
    for name in ("last", "best"):
        a, b = checkpoint(ours, name), checkpoint(theirs, name)
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step"):
            assert same(a[part], b[part]), (name, part)
        for key in b["callbacks"]:
            if key.startswith(("EMA", "LastWeights")):
                assert same(a["callbacks"][key], b["callbacks"][key]), (name, key)
    assert metrics(ours) == metrics(theirs)


def goes_on(folder: Path, line: str) -> str:
    """What to type after a kill."""
    return "fit --resume r" if (folder / "r" / "config.yaml").exists() else line


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_again_and_again(
    ranks: int, server: Server, wholes: dict, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One run, killed at 20 random moments."""
    theirs = whole("plain", ranks, server, wholes, tmp_path_factory)
    folder, moments, kills = fill(tmp_path / "here"), random.Random(ranks), 0
    line = first("plain", ranks)
    while True:
        running = server.start(line, folder, ranks=ranks)
        codes = running.kill(moments.uniform(0.5, 2.5)) if kills < 20 else running.wait()
        if 0 in codes:
            break
        assert set(codes) <= {-signal.SIGKILL}, running.output()
        kills, line = kills + 1, goes_on(folder, line)
    print(kills)
    assert_same(folder / "r", theirs)
