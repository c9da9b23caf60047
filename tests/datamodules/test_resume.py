"""Training that was stopped anywhere and resumed from its checkpoint ends with the bits of
training that was not stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from datamodules.base import ResumableDataModule
from datamodules.utils.errors import UsageError
from tests.helpers.corpora import corpus, letters, poem
from tests.helpers.data_modules import MODULES, translations
from tests.helpers.marks import slow_except
from tests.helpers.recorder import Recorder, fit, tiny_trainer

BATCHES = 5  # 42 samples in batches of 8, the rest dropped
EPOCHS = 3


class Numbers:
    """Sample i is the number i / 42."""

    def __init__(self, in_memory: bool) -> None:
        self.in_memory = in_memory
        self.read: list[int] = []

    def __len__(self) -> int:
        return 42

    def __getitem__(self, indices: list[int]) -> dict[str, Any]:
        self.read += indices
        index = torch.tensor(indices)
        return {"x": index / 42, "index": index}


class NumberData(ResumableDataModule):
    def __init__(self, workers: int = 0, batch_size: int = 8) -> None:
        super().__init__(batch_size, eval_batch_size=16, num_workers=workers, seed=3)
        self.numbers = Numbers(in_memory=workers == 0)

    def load(self, split: str) -> Numbers:
        return self.numbers

    def measure_metadata(self) -> dict[str, int]:
        return {"numbers": len(self.numbers)}

    def train_dataloader(self) -> DataLoader:
        return self.train_loader(self.numbers)

    def val_dataloader(self) -> DataLoader:
        return self.eval_loader(self.numbers)


DATA: dict[str, Callable[[Path], pl.LightningDataModule]] = {
    "numbers": lambda folder: NumberData(),
    "numbers, workers": lambda folder: NumberData(workers=2),
    **MODULES,
}


@pytest.mark.plain_every(2)
@pytest.mark.parametrize("kind", slow_except([*DATA][::3], DATA))
def test_continues_after_any_step_with_the_same_batches_and_bits(kind: str, tmp_path: Path) -> None:
    whole = fit(DATA[kind](tmp_path), tmp_path, limit_val_batches=0)
    steps = len(whole.seen) // EPOCHS
    assert len(whole.seen) == steps * EPOCHS > 3 * EPOCHS
    assert len({str(batch) for batch in whole.seen}) == len(whole.seen)  # no batch comes twice
    for step in (1, steps - 1, steps, steps + 2, EPOCHS * steps - 1):
        ckpt = tmp_path / f"step={step}.ckpt"
        options = {"limit_val_batches": 0, "asks_for_steps": step == 1}
        resumed = fit(DATA[kind](tmp_path), tmp_path / "again", ckpt, **options)
        assert resumed.seen == whole.seen[step:], step
        assert torch.equal(resumed.weight, whole.weight)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, Path]:
    """An uninterrupted run on numbers, which left a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return fit(NumberData(), folder), folder


@pytest.mark.parametrize("at_epoch_end", [False, True])
@pytest.mark.parametrize("interval", [1.0, 2])
def test_saved_at_validation(
    whole: tuple[Recorder, Path], tmp_path: Path, at_epoch_end: bool, interval: float
) -> None:
    save = {"every_n_train_steps": None, "every_n_epochs": 1}
    save["save_on_train_epoch_end"] = at_epoch_end or None
    options: dict[str, Any] = {"save": save, "val_check_interval": interval}
    fit(NumberData(), tmp_path, **options)
    paths = list(tmp_path.glob("step=*.ckpt"))
    assert len(paths) >= EPOCHS
    for path in paths:
        step = int(path.stem.removeprefix("step=").split("-")[0])
        resumed = fit(NumberData(), tmp_path / path.stem, path, **options)
        assert resumed.seen == whole[0].seen[step:], path.name
        assert torch.equal(resumed.weight, whole[0].weight)


def test_the_state_is_plain_values_and_names_what_differs(
    whole: tuple[Recorder, Path], tmp_path: Path
) -> None:
    path = whole[1] / "step=7.ckpt"
    state = torch.load(path, weights_only=True)["NumberData"]
    assert state == {
        "epoch": 1,
        "batch": 2,
        "accumulate_grad_batches": 1,
        "limit_train_batches": "1.0",
        "batch_size": 8,
        "world_size": 1,
        "samples": 42,
        "content": 0,
        "seed": 3,
        "balanced": False,
    }
    with pytest.raises(UsageError, match="batch size 8, this run has 7"):
        fit(NumberData(batch_size=7), tmp_path, path)
    other_order = NumberData()
    other_order.seed = 4
    with pytest.raises(UsageError, match="seed 3, this run has 4"):
        fit(other_order, tmp_path, path)
    evaluation = Recorder()
    tiny_trainer().validate(evaluation, NumberData(batch_size=7), ckpt_path=path, verbose=False)
    validated = [batch["index"] for batch in evaluation.validated]
    assert validated == [list(range(16)), list(range(16, 32)), list(range(32, 42))]


@pytest.mark.parametrize(
    ("name", "value"), [("batch_tokens", 400), ("buckets", 1), ("multiple", 8), ("batch_size", 64)]
)
def test_batches_of_texts_that_would_differ_are_refused_by_name(
    name: str, value: int, tmp_path: Path
) -> None:
    data = translations(tmp_path)
    data.train_dataloader()
    state = data.batch_layout(1) | {"epoch": 0, "batch": 1}
    data.load_state_dict(state)
    data.train_dataloader()
    data.load_state_dict(state | {name: value + 1})
    with pytest.raises(UsageError, match=name.replace("batch_size", "batch size")):
        data.train_dataloader()


@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_another_text_of_the_same_length_is_refused(packing: str, tmp_path: Path) -> None:
    path = poem(tmp_path) if packing == "windows" else letters(tmp_path)
    fit(corpus(path, packing, max_length=256), tmp_path, max_epochs=1, limit_val_batches=0)
    ckpt = tmp_path / "step=2.ckpt"
    with pytest.raises(UsageError, match="number of training samples|batch size"):
        fit(corpus(path, packing, max_length=256, batch_size=5), tmp_path / "again", ckpt)
    path.write_text(path.read_text().replace("1", "2"))
    with pytest.raises(UsageError, match="are not those that the checkpoint was written with"):
        fit(corpus(path, packing, max_length=256), tmp_path / "again", ckpt)


def test_nothing_before_the_place_is_read_and_the_global_generator_is_left_alone() -> None:
    data = NumberData()
    data.load_state_dict({"epoch": 1, "batch": 4})
    batch = next(iter(data.train_dataloader()))
    assert data.numbers.read == batch["index"].tolist()
    state = torch.get_rng_state()
    next(iter(NumberData(workers=1).train_dataloader()))
    assert torch.equal(state, torch.get_rng_state())


class SaveSeen(Callback):
    """Writes down, on each rank, what each step saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        seen = [batch["index"] for batch in module.seen]
        torch.save(seen, self.folder / f"rank{trainer.global_rank}.pt")


@pytest.mark.slow
def test_two_processes_share_each_batch_and_continue_with_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, ckpt: Path | None = None) -> tuple[list[list[list[int]]], Tensor]:
        folder.mkdir()
        options = {"devices": 2, "strategy": "ddp_spawn", "callbacks": [SaveSeen(folder)]}
        fit(NumberData(batch_size=4), folder, ckpt, **options)
        last = torch.load(folder / f"step={BATCHES * EPOCHS}.ckpt", weights_only=True)
        seen = [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]
        return seen, last["state_dict"]["weight"]

    seen, weight = run(tmp_path / "whole")
    assert len(seen[0]) == len(seen[1]) == BATCHES * EPOCHS
    for epoch in range(EPOCHS):
        steps = slice(epoch * BATCHES, (epoch + 1) * BATCHES)
        assert len(set(sum(seen[0][steps] + seen[1][steps], []))) == 40
    resumed, weight_again = run(tmp_path / "resumed", tmp_path / "whole" / "step=7.ckpt")
    assert resumed == [rank[7:] for rank in seen]
    assert torch.equal(weight, weight_again)
