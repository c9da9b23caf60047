"""Exponential moving average of the weights."""

from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tasks.checkpoints.contents import read_count
from tasks.errors import UsageError
from tasks.training.averaging import Averaging


class EMA(Averaging):
    """Shows the EMA of the weights (Polyak & Juditsky 1992).

    After optimizer step t, `average = d * average + (1 - d) * weights` with `d = min(decay, (1 + t)
    / (10 + t))`, so that short runs are not dominated by the first weights.

    Args:
        decay: Decay of the average in each step, above 0 and below 1; 0.999 averages some 1,000
            steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = decay
        super().__init__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts every `fit` afresh.

        Raises:
            UsageError: The weights have 16 bits, too few for the small steps of an average.
        """
        super().setup(trainer, pl_module, stage)
        if stage == TrainerFn.FITTING and str(trainer.precision).endswith("16-true"):
            raise UsageError(
                f"--model.ema needs more digits than --trainer.precision {trainer.precision} has: "
                "use bf16-mixed"
            )

    def reset(self) -> None:
        """As in the base class."""
        super().reset()
        self.step = 0  # optimizer step of the latest update

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the number of steps."""
        self.step = read_count(state, f"callbacks.{self.state_key}", "step")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Updates the average if the batch completed an optimizer step."""
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            averages = list(self.swapped_out.values())
            get_ema_multi_avg_fn(decay)(averages, list(self.swapped_out), None)

    def state_dict(self) -> dict[str, Any]:
        """As in the base class, and the step of the latest update."""
        state = super().state_dict()
        return state | {"step": self.step} if state else {}
