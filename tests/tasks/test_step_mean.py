"""An optimizer step is the mean over all its targets, however micro-batches and ranks share them
out.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from datamodules.base import ResumableDataModule
from datamodules.images import ImageData, LoadingOptions
from datamodules.tokens.masking import Masker
from datamodules.vision.augment import normalise
from modules.models.vit import ViT, ViTConfig
from tasks.checkpoints.reading import KEY, load_config, net_weights
from tests.tasks.command import (
    PAIRS,
    SMALL_LM,
    SMALL_S2S,
    checkpoint,
    metrics,
    run,
    write_corpus,
    write_pairs,
)
from tests.tasks.forked import Server

# Nothing random but the order, and an AdamW whose steps show how long a gradient is instead of the
# noise where it is 0.
CALM = (
    "--model.optimizer.optimizer adamw --model.optimizer.eps 1e-3 --model.optimizer.warmup 0 "
    "--model.optimizer.schedule constant --model.optimizer.gradient_clip null "
    "--trainer.log_every_n_steps 1 --trainer.max_epochs 9 --trainer.accelerator cpu"
)
STILL = "--model.net.stack.depth 1 --model.net.stack.dropout 0 --model.net.stack.drop_path 0"
NARROW = f"{STILL} --model.net.stack.width 32 --model.net.stack.heads 2"
LM = f"{SMALL_LM} {STILL} --data.source files --data.path texts"
TASKS = {
    "vit": f"{STILL} --model.augment.crop_padding 0 --trainer.limit_val_batches 2",
    "bert": f"{NARROW} --trainer.limit_val_batches 2",
    "mlm": f"{NARROW} --data.source txt --data.path texts --data.dataset.val_fraction 0.4 "
    "--data.max_length 44 --data.tokenizer.vocabulary 300",
    "lm": f"{LM} --data.packing documents",
    "lm windows": LM,
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
}


def same_draws(tokens: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
    """What decides on a token's mask (3, B, N) follows from the token and its place, whatever the
    batch.
    """
    numbers = tokens * 7 + torch.arange(tokens.shape[1]) * 31
    return torch.stack([numbers * factor % 101 / 101 for factor in (3, 5, 11)])


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Masker, "_random", staticmethod(same_draws))
    write_corpus(tmp_path / "texts", 40)
    return write_pairs(tmp_path / "pairs", 130)


def assert_equal_runs(one: str, two: str, steps: int | None = None) -> None:
    rows, others = ([row for row in metrics(r) if "train/grad_norm" in row] for r in (one, two))
    assert len(rows) == len(others) == (steps or len(others))
    ours, theirs = checkpoint(one)["state_dict"], checkpoint(two)["state_dict"]
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0, msg=name)
    for row, other in zip(rows, others, strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert float(row[name]) == pytest.approx(float(other[name]), rel=1e-5)


class Parts:
    """A loader's batches, each but the last cut into two that are unlike in size."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.sampler = loader, loader.sampler

    def __len__(self) -> int:
        return 2 * len(self.loader) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(self.loader, 1):
            most = len(next(iter(batch.values())))
            cuts = [0, most // 4, most] if number < len(self.loader) else [0, most]
            for start, stop in zip(cuts, cuts[1:], strict=False):
                yield {name: value[start:stop] for name, value in batch.items()}


@pytest.mark.parametrize("case", TASKS)
def test_micro_batches_equal_a_large_batch(
    case: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = case.split()[0]
    size, loader = {"lm": 8, "mlm": 32}.get(task, 64), ResumableDataModule.train_loader
    line = f"fit {TASKS[case]} {CALM} --trainer.max_epochs 1 --trainer.limit_test_batches 0"
    line += f" --data.batch_size {size}"
    assert run(f"{line} --trainer.limit_train_batches 20 --run_dir whole", task) == 0
    monkeypatch.setattr(ResumableDataModule, "train_loader", lambda *args: Parts(loader(*args)))
    line += " --trainer.limit_train_batches 40 --trainer.accumulate_grad_batches 2"
    assert run(f"{line} --run_dir parts", task) == 0
    assert_equal_runs("parts", "whole")


@pytest.mark.slow
@pytest.mark.parametrize("case", TASKS)
def test_two_ranks_equal_one_process(
    case: str, data: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = case.split()[0]
    line = f"fit {TASKS[case]} {CALM} --trainer.max_steps 20"
    assert run(f"{line} --data.batch_size 16 --run_dir one", task) == 0
    two = f"{line} --trainer.devices 2 --trainer.strategy ddp --data.batch_size 8 --run_dir r"
    before = "import tests.tasks.test_step_mean as m; m.Masker._random = staticmethod(m.same_draws)"
    server.run(two, data.parent, task, before=before, ranks=2)
    assert_equal_runs("r", "one", 20)
    summary = json.loads(Path("r/summary.json").read_text())
    chosen = "best" if Path("r/checkpoints/best.ckpt").exists() else "last"
    found = evaluated(Path(f"r/checkpoints/{chosen}.ckpt"), task, monkeypatch)
    # to the bit if threads are as many, too
    for name in (name for name in found if name.startswith("test/")):
        assert summary[name] == pytest.approx(found[name], rel=1e-6), name


def evaluated(path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the command `test` prints."""
    found: dict[str, float] = {}
    monkeypatch.setattr(
        "tasks.cli.lightning_cli.print_results", lambda metrics, *_: found.update(metrics)
    )
    assert run(f"test --ckpt_path {path} --trainer.accelerator cpu", task) == 0
    return found


def test_scores_of_images_equal_those_of_one_batch(
    best: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = torch.load(best, weights_only=True)
    metadata = saved[KEY]["metadata"]
    net = ViT(load_config(ViTConfig, saved[KEY]["net"])).eval()
    net.load_state_dict(net_weights(saved))
    data = ImageData(loading=LoadingOptions(eval_batch_size=1000))
    data.setup("test")
    (batch,) = data.test_dataloader()
    with torch.no_grad():
        logits = net(normalise(batch["image"], metadata["mean"], metadata["std"]))
    found = evaluated(best, "vit", monkeypatch)
    right = logits.argmax(-1) == batch["label"]
    assert len(right) == 1797 // 5
    assert found["test/acc"] == pytest.approx(float(right.float().mean()), abs=1e-6)
    loss = float(F.cross_entropy(logits, batch["label"]))
    assert found["test/loss"] == pytest.approx(loss, abs=1e-5)
