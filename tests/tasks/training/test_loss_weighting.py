"""An optimizer step is the mean over all its targets, whatever the micro-batches and ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.base import ResumableDataModule
from datamodules.tokens.masking import Masker
from modules.models.mae import MaskedAutoencoder
from tests.helpers.command import Patch, run
from tests.helpers.forked import Server
from tests.helpers.results import checkpoint, logged
from tests.helpers.tiny import PAIRS, SMALL_LM, SMALL_S2S, write_corpus, write_pairs

# A large eps: a step shows the size of a gradient, and hardly rounding where it is nearly 0.
OPTIMIZER = (
    "--model.optimizer.optimizer adamw --model.optimizer.eps 1e-3 --model.optimizer.warmup 0 "
    "--model.optimizer.schedule constant --model.optimizer.gradient_clip null "
    "--trainer.log_every_n_steps 1 --trainer.max_epochs 9 --trainer.accelerator cpu"
)
# Nothing is random but the order.
NO_DROPOUT = "--model.net.stack.depth 1 --model.net.stack.dropout 0 --model.net.stack.drop_path 0"
NARROW = f"{NO_DROPOUT} --model.net.stack.width 32 --model.net.stack.heads 2"
LM = f"{SMALL_LM} {NO_DROPOUT} --data.path texts"
TASKS = {
    "vit": f"{NO_DROPOUT} --model.augment.crop_padding 0 --trainer.limit_val_batches 2",
    "bert": f"{NARROW} --trainer.limit_val_batches 2",
    "mlm": f"{NARROW} --data.path texts --data.dataset.val_fraction 0.4 "
    "--data.max_length 44 --data.tokenizer.vocabulary 300",
    "lm": f"{LM} --data.packing documents",
    "lm windows": LM,
    "seq2seq": f"{SMALL_S2S} {PAIRS}",
    "mae": f"{NARROW} --model.net.decoder.depth 1 --model.augment.crop_padding 0",
    "igpt": f"{NARROW} --model.augment.crop_padding 0 --model.pictures.samples 1 "
    "--model.pictures.completions 1 --trainer.limit_val_batches 1",
}


def fixed_numbers(tokens: torch.Tensor, seeds: list[int] | None) -> torch.Tensor:
    """What decides on a token's mask (3, B, N) follows from the token and its position alone."""
    numbers = tokens * 7 + torch.arange(tokens.shape[1]) * 31
    return torch.stack([numbers * factor % 101 / 101 for factor in (3, 5, 11)])


def fixed_patches(self: MaskedAutoencoder, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same patches of each image are visible, (B, K), and masked, (B, M)."""
    order = torch.arange(noise.shape[1]).expand(len(noise), -1)  # (B, N)
    visible = self.config.visible_patches
    return order[:, :visible], order[:, visible:]


@pytest.fixture(autouse=True)
def data(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Masker, "_random", staticmethod(fixed_numbers))
    monkeypatch.setattr(MaskedAutoencoder, "split", fixed_patches)
    write_corpus(Path("texts"), 40)
    write_pairs(Path("pairs"), 130)


def assert_equal_runs(one: str, two: str, steps: int) -> None:
    ours, theirs = checkpoint(one)["state_dict"], checkpoint(two)["state_dict"]
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0, msg=name)
    for name in ("train/loss", "train/grad_norm"):
        assert len(logged(one, name)) >= steps
        assert logged(one, name) == pytest.approx(logged(two, name), rel=1e-5)


class Parts:
    """A loader's batches, each but the last cut into two that are unlike in size."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.sampler = loader.sampler

    def __len__(self) -> int:
        return 2 * len(self.loader) - 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(self.loader, 1):
            most = len(next(iter(batch.values())))
            cuts = [0, most // 4, most] if number < len(self.loader) else [0, most]
            for start, stop in zip(cuts, cuts[1:], strict=False):
                yield {name: value[start:stop] for name, value in batch.items()}


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("case", [
    "vit", "lm",
    *(pytest.param(case, marks=pytest.mark.slow) for case in TASKS if case not in ("vit", "lm")),
])  # fmt: skip
def test_micro_batches_equal_a_large_batch(case: str, monkeypatch: Patch) -> None:
    task = case.split()[0]
    size = {"lm": 8, "mlm": 32}.get(task, 64)
    loader = ResumableDataModule.train_loader
    line = f"fit {TASKS[case]} {OPTIMIZER} --trainer.max_epochs 1 --trainer.limit_test_batches 0"
    line += f" --data.batch_size {size}"
    assert run(f"{line} --trainer.limit_train_batches 10 --run_dir whole", task) == 0
    monkeypatch.setattr(ResumableDataModule, "train_loader", lambda *args: Parts(loader(*args)))
    line += " --trainer.limit_train_batches 20 --trainer.accumulate_grad_batches 2"
    assert run(f"{line} --run_dir parts", task) == 0
    assert_equal_runs("parts", "whole", 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", TASKS)
def test_two_ranks_equal_one_process(case: str, server: Server, tmp_path: Path) -> None:
    task = case.split()[0]
    line = f"fit {TASKS[case]} {OPTIMIZER} --trainer.max_steps 20 --trainer.limit_test_batches 0"
    assert run(f"{line} --data.batch_size 16 --run_dir one", task) == 0
    two = f"{line} --trainer.devices 2 --trainer.strategy ddp --data.batch_size 8 --run_dir r"
    before = (
        "from tests.tasks.training.test_loss_weighting import *; "
        "Masker._random = staticmethod(fixed_numbers); MaskedAutoencoder.split = fixed_patches"
    )
    server.run(two, tmp_path, task, before=before, ranks=2)
    assert_equal_runs("r", "one", 20)
