"""Exponential moving average of the weights: what is validated, saved and used is calmer than what is trained."""

from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA(Callback):
    """Keeps a running mean of the weights (Polyak & Juditsky 1992) and shows it to everyone but the optimizer.

    After optimizer step t, `average = d * average + (1 - d) * weights` with `d = min(decay, (1 + t) / (10 + t))`, so
    that short runs are not dominated by the first weights. Validation sees the averaged weights, and so does whoever
    uses the task after `fit`, however that ended. A checkpoint's `state_dict` holds them under the usual names; the
    weights in training are in this callback's own state there, and a resumed run continues from those, bit by bit.
    Only parameters are averaged; buffers stay as they are.

    Lightning 2.6's `WeightAveraging` is not exact: it mixes up the two sets of weights in a checkpoint that is written
    when training ends or when validation is interrupted, saves the wrong one with `save_weights_only`, and copies the
    whole task before it reaches its device.

    Args:
        decay: Share of the average that each step keeps, from 0 to below 1; 0.999 remembers some 1,000 steps.

    Raises:
        ValueError: `decay` is out of range.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"The decay of the averaged weights must be from 0 to below 1, but is {decay}.")
        self.decay = decay
        self._forget()

    def _forget(self) -> None:
        self.names: dict[nn.Parameter, str] = {}
        self.other: dict[nn.Parameter, Tensor] = {}  # the averages, or while they are swapped in, the trained weights
        self.swapped = False
        self.step = 0  # optimizer step of the latest update
        self.loaded: dict[str, Any] = {}

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, other in self.other.items():
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)
        self.swapped = not self.swapped

    def _averaged_state(self, task: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if not self.swapped:
            shared = task.named_parameters(remove_duplicate=False)  # a tied weight has two names
            state.update({prefix + name: self.other[parameter] for name, parameter in shared})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Starts every `fit` afresh, from the weights the task has then."""
        if stage == TrainerFn.FITTING:
            self._forget()

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the average at the present weights, which after a resume are the saved average."""
        self.names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self.other = {parameter: parameter.detach().clone() for parameter in self.names}
        if self.loaded:
            for parameter, name in self.names.items():
                parameter.copy_(self.loaded["trained"][name])
            self.step = self.loaded["step"]
            self.loaded = {}
        # torch marks the hook with an attribute, which a bound method cannot take but a partial can
        self.hook = pl_module.register_state_dict_post_hook(partial(self._averaged_state))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Updates the average if the batch completed an optimizer step."""
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            get_ema_multi_avg_fn(decay)(list(self.other.values()), list(self.other), None)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the averaged weights in."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the trained weights back."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the averaged weights in the task, which saves its own weights from now on."""
        if self.other:
            self.hook.remove()
            if not self.swapped:
                self._swap()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends an interrupted run like a complete one, also in the middle of a validation."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Weights in training by name, and the step of the latest update."""
        trained = {name: self.other[p] if self.swapped else p.detach() for p, name in self.names.items()}
        return {"step": self.step, "trained": trained} if trained else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the saved state until `fit` starts."""
        self.loaded = state_dict
