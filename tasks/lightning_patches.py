"""Changes to Lightning (2.6), and uses of private names of its and of torch, with their reasons.

A resumed run is exact, bit for bit, only with these loops and this checkpoint callback.
`tests/tasks/test_lightning_patches.py` fails once Lightning does by itself what most of them do.
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
from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher
from torch.optim import AdamW

from datamodules.base import training_position
from tasks.cli.signals import SIGNALS, blocked
from tasks.errors import UsageError
from tasks.training.seeds import States, random_states, set_random_states


def use_exact_loops(trainer: Trainer) -> Trainer:
    """The same trainer with the loops below, and without Lightning's signal handlers.

    Batches stay as they are: with bf16-true, Lightning would round labels that are numbers, as
    FSDP still does.

    Processes that it launches have SIGTERM and SIGINT blocked until they handle them: a signal to
    all would end one that is still starting, and Lightning then kills the others. `SIGNALS` ends
    them.
    """
    trainer.fit_loop = FitLoop(trainer)
    trainer.precision_plugin.convert_input = lambda data: data  # type: ignore[method-assign]
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        call_scripts = launcher._call_children_scripts

        @blocked()
        def launch() -> None:
            call_scripts()
            SIGNALS.launched = launcher.procs  # the same list as that of Lightning's observer

        launcher._call_children_scripts = launch  # type: ignore[method-assign]
    return trainer


def logged_step(trainer: Trainer) -> int:
    """The step that Lightning logs metrics at now; `global_step` is one ahead."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_accumulating(trainer: Trainer) -> bool:
    """Whether more micro-batches follow before the optimizer steps."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def clippable(optimizer: AdamW) -> AdamW:
    """The same optimizer, whose gradients a gradient scaler unscales before they are clipped.

    torch's fused AdamW says that it unscales them itself, in its step; Lightning then refuses to
    clip, in bfloat16 too: https://github.com/Lightning-AI/pytorch-lightning/issues/21435
    """
    optimizer._step_supports_amp_scaling = False
    return optimizer


def without_anonymous(logger: WandbLogger) -> None:
    """Remove an option that W&B no longer has, and warns about.

    https://github.com/wandb/wandb/pull/10909
    """
    logger._wandb_init.pop("anonymous", None)


def call_hook(trainer: Trainer, name: str) -> None:
    """Call a hook of ours, `after_step` or `after_epoch`, of the callbacks that have it."""
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if hasattr(callback, name):
            getattr(callback, name)(trainer, trainer.lightning_module)


class EpochLoop(_TrainingEpochLoop):
    """Calls `after_step` of callbacks once a step is complete and logged, before any validation.

    A resumed run does what was still to be done, such as a validation that had not ended. Lightning
    guesses that from its counters, and leaves out a validation that was due or shifts the loggers'
    steps. Nor does it keep the states of the random generators.

    https://github.com/Lightning-AI/pytorch-lightning/issues/14579
    """

    def __init__(self, trainer: Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.validation_due = False  # that after the latest batch has not ended
        self.states: States | None = None  # of the generators after the latest optimizer step

    def reset(self) -> None:
        super().reset()
        self.restarting = False  # the counters are those of complete steps: nothing to correct

    def on_run_start(self, data_fetcher: Any) -> None:
        """Do a validation that had not ended."""
        super().on_run_start(data_fetcher)
        if self.validation_due:
            super().on_advance_end(data_fetcher)
            self.validation_due = False

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Tell the callbacks that an optimizer step is complete; then validate, if it is time."""
        self.validation_due = self._is_validation_due(data_fetcher)
        if not self._should_accumulate():
            self.states = random_states(self.trainer.strategy.root_device)
            call_hook(self.trainer, "after_step")
        super().on_advance_end(data_fetcher)
        self.validation_due = False

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """As decided before: a second look at the clock could differ."""
        return self.validation_due

    def _is_validation_due(self, data_fetcher: Any) -> bool:
        """Also after the last step: else its weights could not become the best.

        With `val_check_interval` as a time, the clock of the first process decides for all.
        """
        is_last = 0 <= self.max_steps <= self.global_step and not self._should_accumulate()
        in_last_epoch = self.trainer.current_epoch + 1 == self.trainer.max_epochs
        is_last |= in_last_epoch and self.batch_progress.is_last_batch
        is_last |= self.trainer.should_stop and self.trainer.fit_loop._can_stop_early
        is_due = is_last and self.trainer.enable_validation
        is_due = is_due or super()._should_check_val_fx(data_fetcher)
        if getattr(self.trainer, "_val_check_time_interval", None) is None:
            return is_due
        return self.trainer.strategy.broadcast(is_due)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """The loggers' next step, whether a validation is due, and random states of all ranks."""
        validates = self.validation_due and not self._should_accumulate()
        own = self.states  # what came after the step will be done again
        if not self.validation_due and not self._should_accumulate():
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
        """Restore the same; random states only if there are as many ranks."""
        super().on_load_checkpoint(state_dict)
        self.validation_due = state_dict.get("validates", False)
        states = state_dict.get("random", ())
        if len(states) == self.trainer.world_size:
            self.states = states[self.trainer.global_rank]
            # Invalid states raise here, where the error is about the checkpoint.
            set_random_states(self.states, self.trainer.strategy.root_device)

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: `Interruption` asks all ranks whether one got a signal, once a step.

        Lightning asks before each batch, and waits for the GPU:
        https://github.com/Lightning-AI/pytorch-lightning/issues/21487
        """


class FitLoop(_FitLoop):
    """Whenever it is saved, its progress counts complete optimizer steps and epochs only."""

    epoch_loop: EpochLoop

    def __init__(self, trainer: Trainer) -> None:
        old = trainer.fit_loop
        super().__init__(trainer, old.min_epochs, old.max_epochs)
        self.epoch_loop = EpochLoop(trainer, old.epoch_loop.min_steps, old.epoch_loop.max_steps)
        self.epoch_unfinished = False  # the loaded one; its end runs also at max_steps
        callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
        stopping = [callback for callback in callbacks if isinstance(callback, EarlyStopping)]
        # Loading a checkpoint overwrites the patience; the one given for this run must win.
        self.patience = {callback: callback.patience for callback in stopping}

    @property
    def completed(self) -> int:
        """Number of epochs that have ended."""
        epochs: Any = self.epoch_progress.current
        if not epochs.ready:
            return 0
        epoch, batch = training_position(self.trainer)
        full = batch >= self.trainer.num_training_batches
        return epoch + (full and epochs.processed == epochs.ready)

    @property
    def done(self) -> bool:
        """Not before the loaded epoch has ended, also at `max_steps`."""
        return super().done and not self.epoch_unfinished

    def on_run_start(self) -> None:
        super().on_run_start()
        if self.epoch_loop.states is not None:
            set_random_states(self.epoch_loop.states, self.trainer.strategy.root_device)

    def on_advance_start(self) -> None:
        super().on_advance_start()
        self.epoch_unfinished = False

    def on_advance_end(self) -> None:
        """End an epoch; call `after_epoch` of the callbacks while it still is `current_epoch`."""
        super().on_advance_end()
        self.epoch_progress.current.completed -= 1  # this counter is `current_epoch`
        call_hook(self.trainer, "after_epoch")
        self.epoch_progress.current.completed += 1

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Restore the progress; refuse a checkpoint with more epochs than `max_epochs`.

        A run that stopped early stays so, as asked for in
        https://github.com/Lightning-AI/pytorch-lightning/issues/8278
        """
        super().load_state_dict(state_dict, prefix)
        epochs: Any = self.epoch_progress.current
        done = epochs.processed
        if self.max_epochs is not None and -1 != self.max_epochs < done:
            raise UsageError(
                f"--trainer.max_epochs {self.max_epochs}: the run has completed {done} epochs; "
                "give a larger number"
            )
        self.epoch_unfinished = epochs.completed < epochs.ready
        for stopping, patience in self.patience.items():
            stopping.patience = patience
            if has_stopped(stopping):
                self.trainer.should_stop = True

    def state_dict(
        self, destination: dict[str, Any] | None = None, prefix: str = ""
    ) -> dict[str, Any]:
        state = super().state_dict(destination, prefix)
        epochs: Any = self.epoch_progress.current
        batches: Any = self.epoch_loop.batch_progress
        if not epochs.ready:
            return state
        epoch, batch = training_position(self.trainer)
        completed = self.completed
        ended = completed > epoch
        total = batches.total.processed - batches.current.processed + batch
        counts = {"ready": epoch + 1, "started": epoch + 1}
        counts |= {"processed": completed, "completed": completed}
        state["epoch_progress"] = {"total": counts, "current": counts}
        state["epoch_loop.batch_progress"] = {
            "total": counters(total),
            "current": counters(0 if ended else batch),
            "is_last_batch": batch >= self.trainer.num_training_batches and not ended,
        }
        return state


def has_stopped(stopping: EarlyStopping) -> bool:
    """Whether early stopping ends or ended the run, judged by the patience given now."""
    if stopping.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
        return stopping.wait_count >= stopping.patience
    return stopping.stopping_reason != EarlyStoppingReason.NOT_STOPPED


def stopped_early(trainer: Trainer) -> EarlyStopping | None:
    """The callback that has ended training; None if none has."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    stopping = (callback for callback in callbacks if isinstance(callback, EarlyStopping))
    return next((callback for callback in stopping if has_stopped(callback)), None)


def counters(count: int) -> dict[str, int]:
    """Lightning's counters of what was begun and completed equally often."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose `last` is exact to resume from, and whose run folder may be moved.

    Lightning saves before a step's metrics are logged and before an epoch has ended, writes `last`
    only beside another checkpoint, and keeps absolute paths.
    """

    saved_epochs = 0  # completed epochs at the latest save
    best: "RunCheckpoint | None" = None  # that of the task's own metric, beside this one

    @property
    def state_key(self) -> str:
        """Lightning's key of this callback's state; two callbacks must not have the same."""
        key = super().state_key
        is_taken = self.best is not None and self.best.state_key == key
        return f"{key} of --checkpoint" if is_taken else key

    def check_monitor_top_k(self, trainer: Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether to save; with save_top_k=1, the latest of equal scores wins.

        Equal scores are common on small validation sets; the later weights have seen more samples.
        Lightning keeps the first: https://github.com/Lightning-AI/pytorch-lightning/issues/17240
        """
        best = self.best_model_score
        tied = current is not None and best is not None and bool(current == best)
        return tied or super().check_monitor_top_k(trainer, current)

    def on_train_batch_end(self, trainer: Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Nothing: see `after_step`."""

    def after_step(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save if it is time, now that the optimizer step is complete and logged."""
        was_deferred, self._defer_save_until_validation = self._defer_save_until_validation, False
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        is_due = trainer.fit_loop.epoch_loop.validation_due  # type: ignore[attr-defined]
        if self._defer_save_until_validation and self.save_last and not is_due:
            self.save_now(trainer)  # `last` needs no metric
        self._defer_save_until_validation |= was_deferred
        if is_due:
            self._last_global_step_saved = -1  # what comes after the validation is not saved yet

    def on_train_epoch_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: see `after_epoch`."""

    def after_epoch(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save if it is time, now that the epoch has ended and is logged."""
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        trainer.fit_loop.epoch_loop.validation_due = False  # type: ignore[attr-defined]
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end, also if `every_n_train_steps` does not divide it."""
        if self.save_last:
            self.save_now(trainer)

    def last_saved(self, trainer: Trainer) -> bool:
        """Whether `last` is of the present step; a signal may have saved it without `save_last`."""
        is_last = Path(self._last_checkpoint_saved).stem == self.CHECKPOINT_NAME_LAST
        now = (trainer.global_step, trainer.fit_loop.completed)  # type: ignore[attr-defined]
        saved = (self._last_global_step_saved, self.saved_epochs)
        return (bool(self.save_last) or is_last) and saved == now

    def save_now(self, trainer: Trainer) -> None:
        """Save `last`, unless it was just saved."""
        if not self.last_saved(trainer):
            # A best checkpoint may be of this step; Lightning would then leave out `last`.
            self._last_global_step_saved = -1
        if not self._should_skip_saving_checkpoint(trainer):
            path = Path(self.dirpath or "", f"{self.CHECKPOINT_NAME_LAST}.ckpt")
            self._save_checkpoint(trainer, str(path))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.saved_epochs = trainer.fit_loop.completed  # type: ignore[attr-defined]

    def _save_topk_checkpoint(
        self, trainer: Trainer, monitor_candidates: dict[str, torch.Tensor]
    ) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if self.save_last and self.save_top_k == 0:
            # Lightning writes `last` only after another checkpoint of this step.
            self._last_global_step_saved = trainer.global_step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scores; paths in the old folder become paths in this one.

        Lightning forgets the scores if the folder is moved:
        https://github.com/Lightning-AI/pytorch-lightning/issues/14443
        """
        old = str(state_dict["dirpath"])

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {moved(key): moved(item) for key, item in value.items()}
            if isinstance(value, str) and f"{value}/".startswith(f"{old}/"):
                return value.replace(old, str(self.dirpath), 1)
            return value

        super().load_state_dict(moved(state_dict))
