"""All changes to Lightning (2.6) that need its private names, each with its reason.

`tests/tasks/test_lightning_patches.py` fails where Lightning no longer needs one of them. A
continued run is exact, bit for bit, only with these loops and this checkpoint callback.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.utilities import rank_zero_only
from torch.optim import AdamW

from datamodules.base import training_position
from tasks.errors import UsageError
from tasks.training.seeds import States, check_random_states, random_states, set_random_states


def use_exact_loops(trainer: Trainer) -> Trainer:
    """The same trainer with the loops below, and without Lightning's signal handlers, which would
    replace ours.
    """
    trainer.fit_loop = FitLoop(trainer)
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def logged_step(trainer: Trainer) -> int:
    """The step that Lightning logs metrics at now; it has no public name, and `global_step` is one
    ahead.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_accumulating(trainer: Trainer) -> bool:
    """Whether more micro-batches follow before the optimizer steps; public names say so only before
    a batch.
    """
    return trainer.fit_loop.epoch_loop._should_accumulate()


def clippable(optimizer: AdamW) -> AdamW:
    """The same optimizer, for which Lightning clips gradients under mixed precision.

    It refuses where an optimizer says that it unscales gradients itself, as torch's fused AdamW
    does; without this mark a gradient scaler unscales them before the step, as for any other
    optimizer.
    """
    optimizer._step_supports_amp_scaling = False
    return optimizer


def without_anonymous(logger: WandbLogger) -> None:
    """Take out an option that W&B has no more, and warns about."""
    logger._wandb_init.pop("anonymous", None)


def call_hook(trainer: Trainer, name: str) -> None:
    """Call a hook of ours, `after_step` or `after_epoch`, of the callbacks that have it."""
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if hasattr(callback, name):
            getattr(callback, name)(trainer, trainer.lightning_module)


class EpochLoop(_TrainingEpochLoop):
    """Calls `after_step` of the callbacks that have it once a step is complete and logged, before
    any validation.

    A run that resumes does what was still to be done, such as a validation that had not ended.
    Lightning guesses that from its counters, and leaves out a validation that was due or shifts the
    loggers' steps; it also asks all ranks before each batch whether there was a SIGTERM, which
    callbacks do here.
    """

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.validates = False  # whether the validation after the latest batch has yet to be done
        self.states: States | None = None  # of the generators after the latest optimizer step

    def reset(self) -> None:
        """Begin an epoch, or go on in it."""
        super().reset()
        self.restarting = False  # the counters are those of complete steps: nothing to put right

    def on_run_start(self, data_fetcher: Any) -> None:
        """Do a validation that had not ended."""
        super().on_run_start(data_fetcher)
        if self.validates:
            super().on_advance_end(data_fetcher)
            self.validates = False

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Tell the callbacks that an optimizer step is complete; then validate, if it is time."""
        self.validates = self._should_check_val_fx(data_fetcher)
        if not self._should_accumulate():
            self.states = random_states(self.trainer.strategy.root_device)
            call_hook(self.trainer, "after_step")
        super().on_advance_end(data_fetcher)
        self.validates = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        """The loggers' next step, whether to validate first, and the states of all ranks'
        generators.
        """
        validates = self.validates and not self._should_accumulate()
        own = self.states  # what came after the step will be done again
        if not self.validates and not self._should_accumulate():
            own = random_states(self.trainer.strategy.root_device)
        states: list[Any] = [own]
        if self.trainer.world_size > 1:
            states = [None] * self.trainer.world_size
            dist.all_gather_object(states, own)
        return {
            "_batches_that_stepped": self.global_step - validates,
            "validates": validates,
            "random": states,
        }

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take over the same; random states only of as many ranks, since none of our random numbers
        depends on them.
        """
        super().on_load_checkpoint(state_dict)
        self.validates = state_dict.get("validates", False)
        states = state_dict.get("random", ())
        if len(states) == self.trainer.world_size:
            self.states = states[self.trainer.global_rank]
            check_random_states(self.states, self.trainer.strategy.root_device)

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: see the class."""


class FitLoop(_FitLoop):
    """Saves as progress what is complete, whenever it is asked: whole optimizer steps, and epochs
    whose end is over.

    Args:
        trainer: whose own loop it replaces.
    """

    epoch_loop: EpochLoop

    def __init__(self, trainer: Trainer) -> None:
        old = trainer.fit_loop
        super().__init__(trainer, old.min_epochs, old.max_epochs)
        self.epoch_loop = EpochLoop(trainer, old.epoch_loop.min_steps, old.epoch_loop.max_steps)
        self.ends_epoch = False  # whether a loaded epoch has yet to be ended
        callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
        stopping = [one for one in callbacks if isinstance(one, EarlyStopping)]
        self.patience = {one: one.patience for one in stopping}  # a checkpoint's would win

    @property
    def completed(self) -> int:
        """Number of epochs whose end is over."""
        epochs: Any = self.epoch_progress.current
        if not epochs.ready:
            return 0
        epoch, batch = training_position(self.trainer)
        full = batch >= self.trainer.num_training_batches
        return epoch + (full and epochs.processed == epochs.ready)

    @property
    def done(self) -> bool:
        """Whether training is over."""
        return super().done and not self.ends_epoch

    def on_run_start(self) -> None:
        """Begin training, a run that goes on with the random states that it had."""
        super().on_run_start()
        if self.epoch_loop.states is not None:
            set_random_states(self.epoch_loop.states, self.trainer.strategy.root_device)

    def on_advance_start(self) -> None:
        """Begin an epoch, or the rest of one."""
        super().on_advance_start()
        self.ends_epoch = False

    def on_advance_end(self) -> None:
        """End an epoch; then tell the callbacks that have `after_epoch`, as long as it still is
        `current_epoch`.
        """
        super().on_advance_end()
        self.epoch_progress.current.completed -= 1
        call_hook(self.trainer, "after_epoch")
        self.epoch_progress.current.completed += 1

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take over the progress of a checkpoint."""
        super().load_state_dict(state_dict, prefix)
        epochs: Any = self.epoch_progress.current
        done = epochs.processed
        if self.max_epochs is not None and -1 != self.max_epochs < done:
            raise UsageError(
                f"the run has done {done} epochs, and --trainer.max_epochs {self.max_epochs} is "
                "less: give more"
            )
        self.ends_epoch = epochs.completed < epochs.ready
        for stopping, patience in self.patience.items():
            stopping.patience = patience
            if had_stopped(stopping):
                self.trainer.should_stop = True
                more = "to train on, give it more patience or leave it out"
                rank_zero_only(print)(
                    f"stopped early by EarlyStopping on {stopping.monitor}: {more}"
                )

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = ""
    ) -> dict[str, Any]:
        """The progress of this loop and of those in it."""
        state = super().state_dict(destination, prefix)
        epochs: Any = self.epoch_progress.current
        batches: Any = self.epoch_loop.batch_progress
        if not epochs.ready:
            return state
        epoch, batch = training_position(self.trainer)
        full = batch >= self.trainer.num_training_batches
        done = self.completed
        over = done > epoch  # else the end of the epoch has yet to be done
        total = counters(batches.total.processed - batches.current.processed + batch)
        current = counters(0 if over else batch)
        epochs = {"ready": epoch + 1, "started": epoch + 1, "processed": done, "completed": done}
        state["epoch_progress"] = {"total": epochs, "current": epochs}
        state["epoch_loop.batch_progress"] = {
            "total": total,
            "current": current,
            "is_last_batch": full and not over,
        }
        return state


def had_stopped(stopping: EarlyStopping) -> bool:
    """Whether it has ended the run that its state is of, by the patience that it has now."""
    if stopping.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
        return stopping.wait_count >= stopping.patience
    return stopping.stopping_reason != EarlyStoppingReason.NOT_STOPPED


def counters(count: int) -> dict[str, int]:
    """Lightning's counters of something that is begun and completed as often."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose `last` is always exact to go on from, and which finds its files in a
    moved run folder.

    Lightning saves before a step's metrics are logged and an epoch's end is over, writes `last`
    only beside another checkpoint, and keeps absolute paths.
    """

    epochs = 0  # that were completed when it saved

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether to save: of equally good checkpoints the latest, since small validation sets
        often see ties.
        """
        best = self.best_model_score
        tied = current is not None and best is not None and bool(current == best)
        return tied or super().check_monitor_top_k(trainer, current)

    def on_train_batch_end(self, trainer: Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Nothing: see `after_step`."""

    def after_step(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time, now that the optimizer step is complete and logged."""
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        if trainer.fit_loop.epoch_loop.validates:  # type: ignore[attr-defined]
            self._last_global_step_saved = -1  # what comes after the validation is not saved yet

    def on_train_epoch_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: see `after_epoch`."""

    def after_epoch(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time, now that the end of the epoch is complete and logged."""
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time."""
        trainer.fit_loop.epoch_loop.validates = False  # type: ignore[attr-defined]
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end, which `every_n_train_steps` need not meet; Lightning does so only where
        nothing was saved.
        """
        if self.save_last:
            self.save_now(trainer)

    def last_saved(self, trainer: Trainer) -> bool:
        """Whether `last` is of where training is; a signal may have it saved also where `save_last`
        is off.
        """
        is_last = Path(self._last_checkpoint_saved).stem == self.CHECKPOINT_NAME_LAST
        now = (trainer.global_step, trainer.fit_loop.completed)  # type: ignore[attr-defined]
        saved = (self._last_global_step_saved, self.epochs)
        return (bool(self.save_last) or is_last) and saved == now

    def save_now(self, trainer: Trainer) -> None:
        """Save `last`, unless it was just saved."""
        if not self.last_saved(trainer):
            self._last_global_step_saved = -1  # if it was of this step, it was of another file
        if not self._should_skip_saving_checkpoint(trainer):
            path = Path(self.dirpath or "", f"{self.CHECKPOINT_NAME_LAST}.ckpt")
            self._save_checkpoint(trainer, str(path))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.epochs = trainer.fit_loop.completed  # type: ignore[attr-defined]

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, torch.Tensor]
    ) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if self.save_last and self.save_top_k == 0:
            self._last_global_step_saved = trainer.global_step  # else `last` is not written

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scores; paths in the old folder become paths in this one."""
        old = str(state_dict["dirpath"])

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {moved(key): moved(item) for key, item in value.items()}
            if isinstance(value, str) and value.startswith(old):
                return value.replace(old, str(self.dirpath), 1)
            return value

        super().load_state_dict(moved(state_dict))
