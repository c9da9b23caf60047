"""The averaged weights: against torch's own average and the mean of the latest validations, and
through every way in which a run can stop and resume.
"""

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tasks.errors import UsageError
from tasks.training.averaging import EMA, LastWeights

DECAY = 0.5
COUNT = 3
BATCHES = 10
ACCUMULATE = 2
Weights = dict[str, Tensor]
KINDS = {"EMA": lambda: EMA(DECAY), "LastWeights": lambda: LastWeights(COUNT)}


class Stop(BaseException):
    """Stands for SIGTERM or Ctrl-C."""


class TiedNet(nn.Module):
    """Two layers that share one weight, and a buffer that must stay out of the average."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Toy(LightningModule):
    """Trains on noise that depends on the position in training alone, so that any resume is exact
    but for the average.
    """

    def __init__(self, stop_at: int | None = None, stop_in_validation: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.stop_in_validation = stop_in_validation
        self.seen: list[Weights] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = TiedNet()

    def loss(self, position: int) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(position))
        return (self.net(x) - x).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        position = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if position == self.stop_at:
            raise Stop
        self.net.count += 1
        return self.loss(position)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append(weights_of(self))
        if len(self.seen) == self.stop_in_validation:
            raise Stop

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader() -> DataLoader:
    return DataLoader(torch.zeros(BATCHES, 1), batch_size=1)


def weights_of(module: nn.Module) -> Weights:
    return {name: value.clone() for name, value in module.state_dict().items()}


def fit(task: Toy, steps: int, *callbacks: Any, resume: Path | None = None) -> Trainer:
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=ACCUMULATE,
        val_check_interval=4, limit_val_batches=1, num_sanity_val_steps=1,
        callbacks=list(callbacks), logger=False, enable_progress_bar=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks),
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, loader(), loader(), ckpt_path=resume)
    return trainer


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def tied(weights: Weights) -> Weights:
    """With the second name of the weight that has two."""
    return {**weights, "net.b.weight": weights["net.a.weight"]}


def trained(checkpoint: dict[str, Any], callback: str = "EMA") -> Weights:
    return tied(checkpoint["callbacks"][callback]["trained"])


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys() if name != "net.count")


def close(a: Weights, b: Weights) -> bool:
    return all(torch.allclose(a[name], b[name], atol=1e-7) for name in a if name != "net.count")


@cache
def torch_reference(steps: int, decay: float = DECAY) -> tuple[Weights, Weights]:
    """Weights and averages of a plain loop with `torch.optim.swa_utils.AveragedModel`."""
    task = Toy()
    task.configure_model()

    def update(averages: list[Tensor], weights: list[Tensor], count: Tensor) -> None:
        current = min(decay, (1 + int(count)) / (10 + int(count)))
        get_ema_multi_avg_fn(current)(averages, weights, count)

    average = AveragedModel(task, multi_avg_fn=update)
    average.update_parameters(task)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.05)
    for position in range(steps * ACCUMULATE):
        (task.loss(position) / ACCUMULATE).backward()
        if position % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(task)
    return weights_of(task), weights_of(average.module)


def plain(steps: int) -> list[Weights]:
    """The weights at each validation of a run without averages, and those at its end."""
    task = Toy()
    fit(task, steps)
    return [*task.seen[1:], weights_of(task)]  # the first are seen by the sanity check


def mean(weights: list[Weights]) -> Weights:
    return {name: sum(one[name] / len(weights) for one in weights) for name in weights[0]}


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.9])
def test_ema_equals_torch_average(decay: float, tmp_path: Path) -> None:
    ema = EMA(decay)
    task = Toy()
    trainer = fit(task, 12, ema, ModelCheckpoint(tmp_path, "x", every_n_train_steps=12))
    weights, average = torch_reference(12, decay)
    assert same(weights_of(task), average) and not same(weights, average)
    assert same(weights, tied(ema.state_dict()["trained"]))
    assert task.net.count == 12 * ACCUMULATE  # buffers are not averaged
    for seen, steps in zip(task.seen, (0, 2, 4, 7, 9, 12), strict=True):  # epochs of 10 batches
        assert same(seen, torch_reference(steps, decay)[1])
    saved = load(tmp_path / "x.ckpt")["state_dict"]
    assert saved.keys() == average.keys() and same(saved, average)
    trainer.test(task, loader(), verbose=False)
    assert same(task.seen[-1], average)


def test_validation_and_what_follows_see_the_mean_of_the_latest(tmp_path: Path) -> None:
    expected = plain(14)
    task = Toy()
    saver = ModelCheckpoint(tmp_path, "x", every_n_epochs=1, save_on_train_epoch_end=False)
    fit(task, 14, LastWeights(COUNT), saver)
    seen = task.seen[1:]
    assert len(seen) == len(expected) - 1 > COUNT
    for number, found in enumerate(seen, 1):
        assert close(found, mean(expected[max(0, number - COUNT) : number])), number
    latest = mean(expected[-1 - COUNT : -1])
    assert close(weights_of(task), latest) and not close(latest, expected[-1])
    saved = load(tmp_path / "x.ckpt")
    assert close(saved["state_dict"], latest)
    assert close(trained(saved, "LastWeights"), expected[-2])
    assert len(saved["callbacks"]["LastWeights"]["last"]) == COUNT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_at", [2, 7, 13])
def test_resume_is_exact(tmp_path: Path, stop_at: int, kind: str) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(Stop):
        fit(Toy(stop_at=stop_at), 14, KINDS[kind](), saver)
    saved = tmp_path / f"step={stop_at // ACCUMULATE}.ckpt"
    if stop_at == 2 and kind == "LastWeights":  # before the first validation there is no average
        assert same(load(saved)["state_dict"], trained(load(saved), kind))
    average = KINDS[kind]()
    task = Toy()
    fit(task, 14, average, resume=saved)
    straight_average = KINDS[kind]()
    straight = Toy()
    fit(straight, 14, straight_average)
    assert same(weights_of(task), weights_of(straight))
    assert same(average.state_dict()["trained"], straight_average.state_dict()["trained"])


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_keep_every_bit(kind: str) -> None:
    task = Toy()
    task.configure_model()
    task.net.a.bias.requires_grad_(False)
    before = weights_of(task)
    fit(task, 14, KINDS[kind]())
    after = weights_of(task)
    assert torch.equal(after["net.a.bias"], before["net.a.bias"])
    assert not torch.equal(after["net.a.weight"], before["net.a.weight"])


def test_stop_in_validation(tmp_path: Path) -> None:
    task = Toy(stop_in_validation=3)
    saver = ModelCheckpoint(tmp_path, "x", save_on_exception=True)
    with pytest.raises(Stop):
        fit(task, 12, EMA(DECAY), saver)
    weights, average = torch_reference(4)
    assert same(weights_of(task), average)
    checkpoint = load(tmp_path / "x.ckpt")
    assert same(checkpoint["state_dict"], average) and same(trained(checkpoint), weights)
    resumed = Toy()
    fit(resumed, 12, EMA(DECAY), resume=tmp_path / "x.ckpt")
    assert same(weights_of(resumed), torch_reference(12)[1])


def test_starts_from_a_checkpoint_without_average(tmp_path: Path) -> None:
    fit(Toy(), 3, ModelCheckpoint(tmp_path, "x", every_n_train_steps=3))
    ema = EMA(DECAY)
    fit(Toy(), 12, ema, resume=tmp_path / "x.ckpt")
    assert same(tied(ema.state_dict()["trained"]), torch_reference(12)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stops", [{}, {"stop_at": 9}, {"stop_in_validation": 2}])
def test_task_saves_its_own_weights_after_fit(stops: dict[str, int], kind: str) -> None:
    task = Toy(**stops)
    with contextlib.suppress(Stop):
        fit(task, 6, KINDS[kind]())
    with torch.no_grad():
        task.net.a.weight.zero_()
    assert not task.state_dict()["net.a.weight"].any()


def test_the_mean_of_equal_weights_is_exact_in_16_bits() -> None:
    """The sum is in 32 bits; in 16 it would round at each of the five."""
    toy = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    mean = LastWeights(5)
    mean.names = {parameter: name for name, parameter in toy.named_parameters()}
    mean.swapped_out = {parameter: torch.zeros_like(parameter) for parameter in mean.names}
    state = {name: parameter.detach() for parameter, name in mean.names.items()}
    mean.restore({"last": [state] * 5})
    for parameter, average in mean.swapped_out.items():
        assert torch.equal(average, parameter)


def test_mean_of_validations_needs_validations(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", max_steps=2, callbacks=[LastWeights(COUNT)], limit_val_batches=0,
        logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(UsageError, match="--model.average"):
        trainer.fit(Toy(), loader(), loader())
