"""The averaged weights: against torch's own averaging, and through every way in which a run can
stop and go on.
"""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tasks.training.ema import EMA

DECAY, BATCHES, ACCUMULATE = 0.5, 10, 2
Weights = dict[str, Tensor]


class Stop(BaseException):
    """Stands for SIGTERM or Ctrl-C."""


class TiedNet(nn.Module):
    """Two layers that share one weight, and a buffer that must stay out of the average."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Toy(LightningModule):
    """Trains on noise that depends on the position in training alone, so that any resume is exact
    but for the EMA.
    """

    def __init__(self, stop_at: int | None = None, stop_in_validation: int | None = None) -> None:
        super().__init__()
        self.stop_at, self.stop_in_validation = stop_at, stop_in_validation
        self.seen: list[Weights] = []

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = TiedNet()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        position = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if position == self.stop_at:
            raise Stop
        self.net.count += 1
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(position))
        return (self.net(x) - x).square().mean()

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
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=4,
        limit_val_batches=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(task, loader(), loader(), ckpt_path=resume)
    return trainer


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def trained(checkpoint: dict[str, Any], callback: str = "EMA") -> Weights:
    return checkpoint["callbacks"][callback]["trained"]


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys() if name != "net.count")


def torch_reference(steps: int, decay: float) -> tuple[Weights, Weights]:
    """Weights and averages of a plain loop with `torch.optim.swa_utils.AveragedModel`."""
    task = Toy()
    task.configure_model()

    def update(averages: list[Tensor], weights: list[Tensor], count: Tensor) -> None:
        get_ema_multi_avg_fn(min(decay, (1 + int(count)) / (10 + int(count))))(
            averages, weights, count
        )

    average = AveragedModel(task, multi_avg_fn=update)
    average.update_parameters(task)
    optimizer = torch.optim.AdamW(task.parameters(), lr=0.05)
    for position in range(steps * ACCUMULATE):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(position))
        ((task.net(x) - x).square().mean() / ACCUMULATE).backward()
        if position % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(task)
    return weights_of(task), weights_of(average.module)


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.9])
def test_equals_torch_average(decay: float) -> None:
    ema, task = EMA(decay), Toy()
    trainer = fit(task, 12, ema)
    weights, average = torch_reference(12, decay)
    assert same(weights_of(task), average)
    assert not same(weights, average)
    assert same(weights, {**ema.state_dict()["trained"], "net.b.weight": weights["net.a.weight"]})
    trainer.test(task, loader(), verbose=False)
    assert same(task.seen[-1], average)


def test_validation_sees_the_average() -> None:
    task = Toy()
    fit(task, 10, EMA(DECAY))
    sanity_check, *validations = task.seen
    assert same(sanity_check, torch_reference(0, DECAY)[1])
    for weights, steps in zip(
        validations, (2, 4, 7, 9), strict=True
    ):  # every 4 batches of an epoch of 10
        assert same(weights, torch_reference(steps, DECAY)[1])


def test_buffers_are_not_averaged() -> None:
    task = Toy()
    fit(task, 5, EMA(DECAY))
    assert task.net.count == 5 * ACCUMULATE


@pytest.mark.parametrize("stop_at", [7, 9, 13])
def test_resume_in_mid_epoch_is_exact(tmp_path: Path, stop_at: int) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(Stop):
        fit(Toy(stop_at=stop_at), 12, EMA(DECAY), saver)
    saved = tmp_path / f"step={stop_at // ACCUMULATE}.ckpt"
    ema, task = EMA(DECAY), Toy()
    fit(task, 12, ema, resume=saved)
    straight_ema, straight = EMA(DECAY), Toy()
    fit(straight, 12, straight_ema)
    assert same(weights_of(task), weights_of(straight))
    assert same(ema.state_dict()["trained"], straight_ema.state_dict()["trained"])


def test_stop_in_validation(tmp_path: Path) -> None:
    task = Toy(stop_in_validation=3)
    with pytest.raises(Stop):
        fit(
            task,
            12,
            EMA(DECAY),
            ModelCheckpoint(tmp_path, filename="stopped", save_on_exception=True),
        )
    weights, average = torch_reference(4, DECAY)
    assert same(weights_of(task), average)
    checkpoint = load(tmp_path / "stopped.ckpt")
    assert same(checkpoint["state_dict"], average)
    assert same({**trained(checkpoint), "net.b.weight": weights["net.a.weight"]}, weights)
    resumed = Toy()
    fit(resumed, 12, EMA(DECAY), resume=tmp_path / "stopped.ckpt")
    assert same(weights_of(resumed), torch_reference(12, DECAY)[1])


def test_checkpoint_at_the_end_continues_exactly(tmp_path: Path) -> None:
    fit(Toy(), 6, EMA(DECAY), ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=100))
    resumed = Toy()
    fit(resumed, 12, EMA(DECAY), resume=tmp_path / "last.ckpt")
    assert same(weights_of(resumed), torch_reference(12, DECAY)[1])


@pytest.mark.parametrize("weights_only", [False, True])
def test_saved_state_is_the_average_under_the_usual_names(
    tmp_path: Path, weights_only: bool
) -> None:
    saver = ModelCheckpoint(
        tmp_path, filename="x", every_n_train_steps=3, save_weights_only=weights_only
    )
    fit(Toy(), 3, EMA(DECAY), saver)
    plain = Toy()
    plain.configure_model()
    state = load(tmp_path / "x.ckpt")["state_dict"]
    assert state.keys() == plain.state_dict().keys()
    assert same(state, torch_reference(3, DECAY)[1])
    assert torch.equal(state["net.a.weight"], state["net.b.weight"])


def test_starts_from_a_checkpoint_without_average(tmp_path: Path) -> None:
    fit(Toy(), 3, ModelCheckpoint(tmp_path, filename="x", every_n_train_steps=3))
    ema, task = EMA(DECAY), Toy()
    fit(task, 12, ema, resume=tmp_path / "x.ckpt")
    weights = torch_reference(12, DECAY)[0]
    assert same({**ema.state_dict()["trained"], "net.b.weight": weights["net.a.weight"]}, weights)


@pytest.mark.parametrize("stops", [{}, {"stop_at": 5}, {"stop_in_validation": 2}])
def test_task_saves_its_own_weights_after_fit(stops: dict[str, int]) -> None:
    task = Toy(**stops)
    with contextlib.suppress(Stop):
        fit(task, 3, EMA(DECAY))
    assert not task._state_dict_hooks
    with torch.no_grad():
        task.net.a.weight.zero_()
    assert not task.state_dict()["net.a.weight"].any()


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_decay_out_of_range(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        EMA(decay)
