"""Lightning's training loops, with places to go on from that are exact."""

from typing import Any

import torch.distributed as dist
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from pytorch_lightning.loops.fit_loop import _FitLoop
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.utilities import rank_zero_only

from datamodules.base import training_position
from tasks.checkpoints.contents import check_like
from tasks.errors import UsageError
from tasks.training.seeds import States, check_random_states, random_states, set_random_states


class EpochLoop(_TrainingEpochLoop):
    """Calls `after_step` of the callbacks that have it once a step is complete and logged, before any validation.

    A run that resumes does what was still to be done, such as a validation that had not ended. Lightning guesses that
    from its counters, and leaves out a validation that was due or shifts the loggers' steps; it also asks all ranks
    before each batch whether there was a SIGTERM, which callbacks do here.
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
        """Make good a validation that had not ended."""
        super().on_run_start(data_fetcher)
        if self.validates:
            super().on_advance_end(data_fetcher)
            self.validates = False

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Tell the callbacks that an optimizer step is complete; then validate, if it is time."""
        self.validates = self._should_check_val_fx(data_fetcher)
        if not self._should_accumulate():
            self.states = random_states(self.trainer.strategy.root_device)
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "after_step"):
                    callback.after_step(self.trainer, self.trainer.lightning_module)
        super().on_advance_end(data_fetcher)
        self.validates = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        """The loggers' next step, whether to validate first, and the states of all ranks' generators."""
        validates = self.validates and not self._should_accumulate()
        states: list[Any] = [self.states]  # what came after the step will be done again
        if not self.validates and not self._should_accumulate():
            states = [random_states(self.trainer.strategy.root_device)]
        if self.trainer.world_size > 1:
            (own,), states = states, [None] * self.trainer.world_size
            dist.all_gather_object(states, own)
        return {
            "_batches_that_stepped": self.global_step - validates,
            "validates": validates,
            "random": states,
        }

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take over the same; of other numbers of ranks no random states, on which no draw of ours depends."""
        super().on_load_checkpoint(state_dict)
        self.validates = state_dict.get("validates", False)
        states = state_dict.get("random", ())
        if len(states) == self.trainer.world_size:
            self.states = states[self.trainer.global_rank]
            check_random_states(self.states, self.trainer.strategy.root_device)

    def _broadcast_sigterm_tensor(self) -> None:
        """Nothing: see the class."""


class FitLoop(_FitLoop):
    """Saves as progress what is complete, whenever it is asked: whole optimizer steps, and epochs whose end is over.

    Args:
        trainer: whose own loop it replaces.
    """

    epoch_loop: EpochLoop

    def __init__(self, trainer: Trainer) -> None:
        old = trainer.fit_loop
        super().__init__(trainer, old.min_epochs, old.max_epochs)
        self.epoch_loop = EpochLoop(trainer, old.epoch_loop.min_steps, old.epoch_loop.max_steps)
        self.open = False  # whether a loaded epoch has yet to be ended
        stopping: list[Any] = [one for one in trainer.callbacks if isinstance(one, EarlyStopping)]  # type: ignore
        self.patience = {one: one.patience for one in stopping}  # a checkpoint's would win

    @property
    def completed(self) -> int:
        """Number of epochs whose end is over."""
        epochs: Any = self.epoch_progress.current
        epoch, batch = training_position(self.trainer)
        full = batch >= self.trainer.num_training_batches
        return epoch + (full and epochs.processed == epochs.ready) if epochs.ready else 0

    @property
    def done(self) -> bool:
        """Whether training is over."""
        return super().done and not self.open

    def on_run_start(self) -> None:
        """Begin training, a run that goes on with the random states that it had."""
        super().on_run_start()
        if self.epoch_loop.states is not None:
            set_random_states(self.epoch_loop.states, self.trainer.strategy.root_device)

    def advance(self) -> None:
        """Run an epoch, or the rest of one."""
        self.open = False
        super().advance()

    def on_advance_end(self) -> None:
        """End an epoch; then tell the callbacks that have `after_epoch`, as long as it still is `current_epoch`."""
        super().on_advance_end()
        self.epoch_progress.current.completed -= 1
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "after_epoch"):
                callback.after_epoch(self.trainer, self.trainer.lightning_module)
        self.epoch_progress.current.completed += 1

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Take over the progress of a checkpoint."""
        check_like(state_dict, self.state_dict(), "loops.fit_loop")
        super().load_state_dict(state_dict, prefix)
        epochs: Any = self.epoch_progress.current
        done, most = epochs.processed, self.max_epochs
        if most is not None and -1 != most < done:
            raise UsageError(
                f"the run has done {done} epochs, and --trainer.max_epochs {most} is less: give more"
            )
        self.open = epochs.completed < epochs.ready
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
        full, done = batch >= self.trainer.num_training_batches, self.completed
        over = done > epoch  # else the end of the epoch has yet to be done
        total = batches.total.processed - batches.current.processed + batch

        def progress(
            total: dict[str, int], current: dict[str, int], **more: bool
        ) -> dict[str, Any]:
            return {"total": total, "current": current, **more}

        counted = {"ready": epoch + 1, "started": epoch + 1, "processed": done, "completed": done}
        state["epoch_progress"] = progress(counted, counted)
        state["epoch_loop.batch_progress"] = progress(
            evenly(total), evenly(0 if over else batch), is_last_batch=full and not over
        )
        return state


def with_own_loops(trainer: Trainer) -> Trainer:
    """The same trainer with these loops, and without Lightning's handlers of signals."""
    trainer.fit_loop = FitLoop(trainer)
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer


def had_stopped(stopping: EarlyStopping) -> bool:
    """Whether it has ended the run that its state is of, by the patience that it has now."""
    if stopping.stopping_reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
        return stopping.wait_count >= stopping.patience
    return stopping.stopping_reason != EarlyStoppingReason.NOT_STOPPED


def evenly(count: int) -> dict[str, int]:
    """The counters of something that is begun and completed as often."""
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)
