"""A loss that is no longer a number stops the run and leaves the last good checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.vit.task import ViTTask
from tests.tasks.command import SHORT, checkpoint, run


@pytest.mark.parametrize("ema", ["", "--model.ema 0.9"])
def test_nan(ema: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step = ViTTask.step

    def poisoned(
        self: ViTTask, batch: dict[str, Tensor], training: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        loss, *rest = step(self, batch, training)
        return (loss * float("nan") if training and self.global_step == 6 else loss), *rest

    monkeypatch.setattr(ViTTask, "step", poisoned)
    assert run(f"fit {SHORT} {ema} --checkpoint.every_n_train_steps 2 --run_dir r") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "step 6" in error and "NaN" in error
    assert checkpoint("r")["global_step"] == 6
    for name in ("best", "last"):
        saved = checkpoint("r", name)["state_dict"]
        assert all(torch.isfinite(value).all() for value in saved.values())
        assert (
            run(f"test --ckpt_path r/checkpoints/{name}.ckpt --trainer.limit_test_batches 1") == 0
        )
    assert not list(Path("r").rglob("*.tmp"))
    monkeypatch.setattr(ViTTask, "step", step)
    assert run("fit --resume r") == 0
    assert checkpoint("r")["global_step"] == 8


def test_a_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"fit {SHORT} --model.optimizer.lr 1e30 --model.optimizer.warmup 0 --run_dir r"
    assert run(f"{line} --checkpoint.every_n_train_steps 1") == 1
    assert " step " in capsys.readouterr().err
    for path in Path("r").rglob("*.ckpt"):
        saved = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.isfinite(value).all() for value in saved.values())


def test_weights_that_are_no_numbers_are_not_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finite loss whose update spoils the weights: the checkpoint before it stays."""
    clip = ViTTask.configure_gradient_clipping

    def poisoned(self: ViTTask, *arguments: Any, **options: Any) -> None:
        clip(self, *arguments, **options)
        if self.global_step == 5:
            next(self.net.parameters()).grad.fill_(float("nan"))

    monkeypatch.setattr(ViTTask, "configure_gradient_clipping", poisoned)
    assert run(f"fit {SHORT} --checkpoint.every_n_train_steps 1 --run_dir r") == 1
    assert "weights became NaN" in capsys.readouterr().err
    assert checkpoint("r")["global_step"] == 5
    assert all(torch.isfinite(value).all() for value in checkpoint("r")["state_dict"].values())
