"""Training that was stopped anywhere and continued from its checkpoint ends with the bits of training that was not."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from datamodules.base import ResumableDataModule
from datamodules.corpus import CorpusData
from datamodules.images import ImageData
from datamodules.reviews import ReviewData
from datamodules.utils.batching import BucketBatchSampler, ResumableBatchSampler, StreamBatchSampler
from datamodules.utils.errors import UsageError

BATCHES, EPOCHS = 5, 3  # 42 samples in batches of 8, the rest dropped


class Numbers:
    """Sample i is the vector i, 1 / (i + 1)."""

    def __init__(self, in_memory: bool) -> None:
        self.in_memory = in_memory

    def __len__(self) -> int:
        return 42

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        index = torch.tensor(indices)
        return {"x": torch.stack([index / 42, 1 / (index + 1)], dim=1), "index": index}


class NumberData(ResumableDataModule):
    def __init__(self, workers: int = 0, batch_size: int = 8) -> None:
        super().__init__(batch_size, eval_batch_size=16, num_workers=workers, seed=3)
        self.numbers = Numbers(in_memory=workers == 0)

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.numbers)

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(self.numbers)


class Line(pl.LightningModule):
    def __init__(self, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.net, self.ask, self.seen, self.validated = nn.Linear(2, 1), ask_for_steps, [], []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["index"].tolist())
        return F.mse_loss(self.net(batch["x"]).squeeze(1), batch["index"] / 42)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(batch["index"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        steps = (
            self.trainer.estimated_stepping_batches if self.ask else 1
        )  # sets the loader up early
        return torch.optim.AdamW(self.parameters(), lr=0.01 * steps / steps)


class Killed(BaseException):
    pass


class StopAfter(Callback):
    """Ends training as a kill does: nothing is saved on the way out."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.steps:
            raise Killed


def fit(
    folder: Path,
    data: NumberData,
    ckpt: Path | None = None,
    stop: int | None = None,
    **options: Any,
) -> Line:
    torch.manual_seed(0)
    line = Line(options.pop("ask_for_steps", False))
    save = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, **options.pop("save", {"every_n_train_steps": 1})
    )
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[save, *([StopAfter(stop)] if stop else [])],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )
    try:
        trainer.fit(line, data, ckpt_path=ckpt)
    except Killed:
        assert stop is not None
    return line


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Line, Path]:
    """An uninterrupted run, which left a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return fit(folder, NumberData()), folder


def test_every_epoch_takes_each_sample_once_in_its_own_order(whole: tuple[Line, Path]) -> None:
    seen = whole[0].seen
    assert len(seen) == BATCHES * EPOCHS
    epochs = [sum(seen[e * BATCHES : (e + 1) * BATCHES], []) for e in range(EPOCHS)]
    assert all(len(set(epoch)) == 40 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS


@pytest.mark.parametrize("step", range(1, BATCHES * EPOCHS))
def test_continues_after_any_step_with_the_same_bits(
    whole: tuple[Line, Path], tmp_path: Path, step: int
) -> None:
    line, folder = whole
    resumed = fit(tmp_path, NumberData(), folder / f"step={step}.ckpt")
    assert resumed.seen == line.seen[step:]
    assert same(resumed, line)


@pytest.mark.parametrize("step", [3, BATCHES, BATCHES + 1])
def test_workers_have_prefetched_nothing_of_another_epoch(
    whole: tuple[Line, Path], tmp_path: Path, step: int
) -> None:
    resumed = fit(tmp_path, NumberData(workers=2), whole[1] / f"step={step}.ckpt")
    assert resumed.seen == whole[0].seen[step:]
    assert same(resumed, whole[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_in_mid_epoch(whole: tuple[Line, Path], tmp_path: Path, workers: int) -> None:
    assert fit(tmp_path, NumberData(workers), stop=8).seen == whole[0].seen[:8]
    resumed = fit(tmp_path / "again", NumberData(workers), tmp_path / "step=8.ckpt")
    assert resumed.seen == whole[0].seen[8:]
    assert same(resumed, whole[0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "save",
    [{"every_n_epochs": 1}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}],
    ids=["validation end", "epoch end"],
)
@pytest.mark.parametrize("interval", [1.0, 2], ids=["once an epoch", "every two steps"])
def test_saved_at_validation(
    whole: tuple[Line, Path], tmp_path: Path, save: dict[str, Any], workers: int, interval: float
) -> None:
    fit(tmp_path, NumberData(workers), save=save, val_check_interval=interval)
    for path in tmp_path.glob("step=*.ckpt"):
        step = int(path.stem.removeprefix("step=").split("-")[0])
        resumed = fit(
            tmp_path / path.stem, NumberData(workers), path, save=save, val_check_interval=interval
        )
        assert resumed.seen == whole[0].seen[step:], path.name
        assert same(resumed, whole[0])


def test_loader_asked_for_before_the_fit_starts(whole: tuple[Line, Path], tmp_path: Path) -> None:
    resumed = fit(tmp_path, NumberData(), whole[1] / "step=7.ckpt", ask_for_steps=True)
    assert resumed.seen == whole[0].seen[7:]
    assert same(resumed, whole[0])


def test_state_is_numbers_only(whole: tuple[Line, Path]) -> None:
    checkpoint = torch.load(whole[1] / "step=7.ckpt", weights_only=True)
    assert checkpoint["NumberData"] == {
        "epoch": 1,
        "batch": 2,
        "batch_size": 8,
        "world_size": 1,
        "samples": 42,
    }


def test_another_batch_size_is_refused_by_name(whole: tuple[Line, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="batch size 8, this run has 7"):
        fit(tmp_path, NumberData(batch_size=7), whole[1] / "step=7.ckpt")


class Two:
    """Two samples."""

    lengths = torch.ones(2, dtype=torch.int64)

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("kind", [ImageData, ReviewData, CorpusData])
def test_fewer_samples_than_processes_are_refused(kind: Any) -> None:
    """Some would have no batch, and the others would wait for them."""
    data = kind()
    data.trainer = SimpleNamespace(world_size=2, global_rank=1)
    assert len(data.train_sampler(Two())) == 1
    data.trainer.world_size = 3
    with pytest.raises(
        UsageError, match="has 2 samples, too few for 3 processes: .* --trainer.devices 2"
    ):
        data.train_sampler(Two())


def test_evaluation_takes_any_batch_size(whole: tuple[Line, Path]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    line = Line()
    trainer.validate(
        line, NumberData(batch_size=7), ckpt_path=whole[1] / "step=7.ckpt", verbose=False
    )
    assert line.validated == [list(range(16)), list(range(16, 32)), list(range(32, 42))]


def test_iterators_leave_the_global_generator_alone() -> None:
    data = NumberData(workers=1)
    state = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    assert torch.equal(state, torch.get_rng_state())


SAMPLERS: dict[str, Callable[[int], ResumableBatchSampler]] = {
    "plain": lambda size: ResumableBatchSampler(size, 8, 3, shuffle=True),
    "stream": lambda size: StreamBatchSampler(size, 8, 3, shuffle=True),
    "buckets": lambda size: BucketBatchSampler(
        torch.arange(size) % 50 + 1, 8, seed=3, training=True
    ),
    "tokens": lambda size: BucketBatchSampler(
        torch.arange(size) % 50 + 1, 8, 400, seed=3, training=True
    ),
    "both lengths": lambda size: BucketBatchSampler(
        torch.stack([torch.arange(size) % 50 + 1, torch.arange(size) % 30 + 1], 1),
        8,
        seed=3,
        training=True,
    ),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_the_place_is_found_without_what_is_before_it(kind: str) -> None:
    """The same batches, and as quickly at the end of an epoch of many samples as at its beginning."""
    small = SAMPLERS[kind](1000)
    everything = list(small.batches(5))
    for batch in (1, len(small) // 2, len(small) - 1):
        small.start(5, batch)
        assert list(small) == everything[batch:]

    large = SAMPLERS[kind](1_000_000)

    def seconds(batch: int) -> float:
        start = time.perf_counter()
        large.start(5, batch)
        next(iter(large))
        return time.perf_counter() - start

    early, late = (min(seconds(batch) for _ in range(3)) for batch in (0, len(large) - 2))
    assert late < 1.5 * early + 0.01


def test_nothing_before_the_place_is_read() -> None:
    data = NumberData()
    data.numbers = Counting(in_memory=True)
    data.load_state_dict({"epoch": 1, "batch": 4})
    batch = next(iter(data.train_dataloader()))
    assert data.numbers.read == batch["index"].tolist()


class Counting(Numbers):
    """Writes down what is read."""

    def __init__(self, in_memory: bool) -> None:
        super().__init__(in_memory)
        self.read: list[int] = []

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        self.read += indices
        return super().__getitem__(indices)


class Diary(Callback):
    """Writes down, on each rank, which samples each step saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        torch.save(module.seen, self.folder / f"rank{trainer.global_rank}.pt")


@pytest.mark.slow
def test_two_processes_share_each_batch_and_continue_with_the_same_bits(tmp_path: Path) -> None:
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp_spawn",
        "logger": False,
        "max_epochs": EPOCHS,
    }
    options |= {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }

    def run(
        folder: Path, ckpt: Path | None = None
    ) -> tuple[list[list[list[int]]], dict[str, Tensor]]:
        torch.manual_seed(0)
        save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = pl.Trainer(callbacks=[save, Diary(folder)], **options)  # type: ignore[arg-type]
        folder.mkdir()
        trainer.fit(Line(), NumberData(batch_size=4), ckpt_path=ckpt)
        last = torch.load(folder / f"step={BATCHES * EPOCHS}.ckpt", weights_only=True)
        return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)], last["state_dict"]

    seen, weights = run(tmp_path / "whole")
    assert len(seen[0]) == len(seen[1]) == BATCHES * EPOCHS
    for epoch in range(EPOCHS):
        steps = slice(epoch * BATCHES, (epoch + 1) * BATCHES)
        assert len(set(sum(seen[0][steps] + seen[1][steps], []))) == 40
    resumed, again = run(tmp_path / "resumed", tmp_path / "whole" / "step=7.ckpt")
    assert resumed == [rank[7:] for rank in seen]
    assert all(torch.equal(weights[key], again[key]) for key in weights)
