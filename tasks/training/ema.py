"""Exponential moving average of the weights."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tasks.checkpoints.contents import read_count
from tasks.errors import UsageError
from tasks.training.averaging import Averaging


class EMA(Averaging):
    """Shows a running mean of the weights (Polyak & Juditsky 1992).

    After optimizer step t, `average = d * average + (1 - d) * weights` with `d = min(decay, (1 + t)
    / (10 + t))`, so that short runs are not dominated by the first weights.

    Args:
        decay: Decay of the average in each step, from 0 to below 1; 0.999 averages some 1,000
            steps.

    Raises:
        ValueError: `decay` is out of range.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(
                f"The decay of the averaged weights must be from 0 to below 1, but is {decay}."
            )
        self.decay = decay
        super().__init__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts every `fit` afresh.

        Raises:
            UsageError: the weights have 16 bits: an average of such stays where it is, its steps
                being too small.
        """
        super().setup(trainer, pl_module, stage)
        if stage == TrainerFn.FITTING and str(trainer.precision).endswith("16-true"):
            raise UsageError(
                f"--model.ema needs more digits than --trainer.precision {trainer.precision} has: "
                "use bf16-mixed"
            )

    def _forget(self) -> None:
        super()._forget()
        self.step = 0  # optimizer step of the latest update

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on counting."""
        self.step = read_count(state, f"callbacks.{self.state_key}", "step")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Updates the average if the batch completed an optimizer step."""
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            get_ema_multi_avg_fn(decay)(list(self.other.values()), list(self.other), None)

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, and the step of the latest update."""
        state = super().state_dict()
        return state | {"step": self.step} if state else {}
