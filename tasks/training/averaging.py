"""Averages of the weights: smoother than the trained weights, used in validation and saved."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from modules.config import require
from modules.schema import check_value
from tasks.checkpoints.reading import check_tensor
from tasks.errors import UsageError

State = dict[str, Tensor]


class Averaging(Callback):
    """Keeps an average of the weights and shows it to everyone but the optimizer.

    Validation sees the averaged weights, and so does whoever uses the task after `fit`, however
    that ended. A checkpoint's `state_dict` holds them under the usual names; the trained weights
    are in this callback's own state there, and a resumed run continues from those, bit for bit.
    Only parameters are averaged, not buffers. Subclasses say of which weights.

    Lightning 2.6's `WeightAveraging` is not exact: it mixes up the two sets of weights in a
    checkpoint that is written when training ends or when validation is interrupted, saves the wrong
    one with `save_weights_only`, and copies the whole task before it reaches its device.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.names: dict[nn.Parameter, str] = {}
        # the averages; or the trained weights, while the parameters are the averages
        self.swapped_out: dict[nn.Parameter, Tensor] = {}
        self.is_swapped = False
        self.loaded: dict[str, Any] = {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what a subclass has saved, after the trained weights."""

    @property
    def ready(self) -> bool:
        """Whether there is an average yet; until then everyone sees the trained weights."""
        return bool(self.swapped_out)

    @torch.no_grad()
    def _swap(self) -> None:
        if not self.ready:
            return
        for parameter, other in self.swapped_out.items():
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)
        self.is_swapped = not self.is_swapped

    def _averaged_state(self, task: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if self.ready and not self.is_swapped:
            shared = task.named_parameters(remove_duplicate=False)  # a tied weight has two names
            state.update({prefix + name: self.swapped_out[parameter] for name, parameter in shared})

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            self.reset()

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the average at the present weights, which after a resume are the saved average."""
        self.names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self.swapped_out = {parameter: parameter.detach().clone() for parameter in self.names}
        # torch marks the hook with an attribute, which a bound method cannot take but a partial can
        self.hook = pl_module.register_state_dict_post_hook(partial(self._averaged_state))
        if self.loaded:
            for weights in (self.loaded["trained"], *self.loaded.get("last", ())):
                self._check(weights)
            for parameter, name in self.names.items():
                parameter.copy_(self.loaded["trained"][name])
            self.restore(self.loaded)
            self.loaded = {}
        elif trainer.ckpt_path is not None:
            rank_zero_only(print)("the checkpoint has no average of the weights: it starts now")

    def _check(self, weights: State) -> None:
        own = f"callbacks.{self.state_key}"
        for parameter, name in self.names.items():
            require(name in weights, f"{own} has no {name}.")
            check_tensor(weights[name], parameter, f"{own}: {name}")
            finite = bool(weights[name].isfinite().all())
            require(finite, f"{own}: {name} holds NaN or infinity.")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves the averaged weights in the task, which saves its own weights from now on."""
        if self.swapped_out:
            self.hook.remove()
            if not self.is_swapped:
                self._swap()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends an interrupted run like a complete one, also in the middle of a validation."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Weights in training by name, and what a subclass adds."""
        trained = {
            name: self.swapped_out[parameter] if self.is_swapped else parameter.detach()
            for parameter, name in self.names.items()
        }
        return {"trained": trained} if trained else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def refuse_lost_average(saved: Iterable[str], callbacks: Iterable[Callback]) -> None:
    """Refuses to resume a run without its average: a checkpoint's weights are the average.

    Args:
        saved: Names of the callbacks whose states are in the checkpoint.
        callbacks: Of the run that resumes.

    Raises:
        UsageError: One of them is an average that the run does not have.
    """
    options = {"EMA": "--model.ema", "LastWeights": "--model.average"}
    kept = {callback.state_key for callback in callbacks if isinstance(callback, Averaging)}
    lost = [options[name] for name in saved if name in options and name not in kept]
    if lost:
        raise UsageError(
            f"the run averages its weights: resume it with {lost[0]}, or start a new run from its "
            "average with --model.pretrained"
        )


class EMA(Averaging):
    """The EMA of the weights, an exponential form of the mean of Polyak & Juditsky (1992).

    After optimizer step t, `average = d * average + (1 - d) * weights` with `d = min(decay, (1 + t)
    / (10 + t))`, so that short runs are not dominated by the first weights.

    Args:
        decay: Decay per step, above 0 and below 1; 0.999 averages some 1,000 steps.
    """

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = decay
        super().__init__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses weights of 16 bits, too few for the small steps of an average."""
        super().setup(trainer, pl_module, stage)
        if stage == TrainerFn.FITTING and str(trainer.precision).endswith("16-true"):
            raise UsageError(f"--model.ema needs more than {trainer.precision}: give bf16-mixed")

    def reset(self) -> None:
        super().reset()
        self.step = 0  # optimizer step of the latest update

    def restore(self, state: dict[str, Any]) -> None:
        name = f"callbacks.{self.state_key}.step"
        require("step" in state, f"{name} is missing.")
        self.step = check_value(int, state["step"], name)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Updates the average if the batch completed an optimizer step."""
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            decay = min(self.decay, (1 + self.step) / (10 + self.step))
            averages = list(self.swapped_out.values())
            get_ema_multi_avg_fn(decay)(averages, list(self.swapped_out), None)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"step": self.step} if state else {}


class LastWeights(Averaging):
    """The mean of the weights at the latest validations (Vaswani 2017, 6.1: 5 or 20 checkpoints).

    Each validation first adds its own weights to the mean. Memory and checkpoints hold the network
    once for each.

    Args:
        count: Number of validations, at least 2; the mean of all while there are fewer.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == TrainerFn.FITTING and not trainer.enable_validation:
            raise UsageError(
                f"--model.average {self.count} averages the weights at validations, but the run "
                "has none: leave it out, or give validation data"
            )

    def reset(self) -> None:
        super().reset()
        self.last: list[State] = []  # the oldest first
        self.in_validation = False  # the newest is of a validation that has not ended

    @property
    def ready(self) -> bool:
        return bool(self.last)

    def restore(self, state: dict[str, Any]) -> None:
        self.last = [
            {name: saved[name].to(parameter.device) for parameter, name in self.names.items()}
            for saved in state["last"][-self.count :]
        ]
        if self.last:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        last = self.last[-self.count :]
        for parameter, name in self.names.items():
            if parameter.requires_grad:  # frozen ones keep every bit
                kind = torch.promote_types(parameter.dtype, torch.float32)  # of the sum
                mean = sum(weights[name].to(kind) / len(last) for weights in last)
                self.swapped_out[parameter].copy_(mean)  # type: ignore[arg-type]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            now = {name: parameter.detach().clone() for parameter, name in self.names.items()}
            self.last = [*self.last, now]
            self.in_validation = True
            self._average()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last = self.last[-self.count :]
        self.in_validation = False
        super().on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Leaves out the weights of a validation that has not ended: it will be done again."""
        state = super().state_dict()
        if state:
            state["last"] = self.last[:-1] if self.in_validation else self.last
        return state
