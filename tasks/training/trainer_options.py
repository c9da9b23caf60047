"""What a command's Trainer is made of, beside Lightning's own parts."""

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint, Timer

from datamodules.utils.files import read_bytes
from tasks.errors import UsageError
from tasks.tracking.loggers import OUR_LOGGERS

HIDDEN = {  # arguments of the Trainer's methods that are ours to fill in
    "fit": {"ckpt_path", "weights_only"},
    "validate": {"ckpt_path", "weights_only", "verbose"},
    "test": {"ckpt_path", "weights_only", "verbose"},
    "predict": {"ckpt_path", "weights_only", "return_predictions"},
}
NO_LOGS = {"logger": ((None,), "only `fit` writes logs")}
ALONE = "several processes would each label a part, so predict runs in one"
# By command, and for all: Trainer options that are decided here, the values that ask for nothing else, and why.
OURS: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "all": {
        "enable_checkpointing": ((None,), "the run folder holds the checkpoints; see --checkpoint"),
        "use_distributed_sampler": ((True,), "the samplers here share out the data themselves"),
        "default_root_dir": ((None,), "give --run_dir"),
        "barebones": ((False,), "it switches off what a run folder records"),
    },
    "validate": NO_LOGS,
    "test": NO_LOGS,
    "predict": NO_LOGS
    | {
        "devices": (("auto", "1", 1), ALONE),
        "num_nodes": ((1,), ALONE),
        "strategy": (("auto",), ALONE),
    },
}


BEST = "best"  # name of the checkpoint that the task's own monitor finds best
NOTHING = (
    "accumulate_grad_batches",
    "limit_train_batches",
    "max_epochs",
    "max_steps",
)  # is trained at 0
LEAST = {  # of the Trainer's numbers, for some of which -1 is all or no end
    **dict.fromkeys(("max_epochs", "max_steps", "num_sanity_val_steps"), -1),
    **dict.fromkeys(
        ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
        0,
    ),
    **dict.fromkeys(
        ("overfit_batches", "log_every_n_steps", "gradient_clip_val", "min_epochs", "min_steps"), 0
    ),
    **dict.fromkeys(("accumulate_grad_batches", "check_val_every_n_epoch"), 1),
    "val_check_interval": 0,  # and not 0 itself
}
MOST = 2**63 - 1  # PyTorch's largest whole number


class FolderCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose `last` is always exact to go on from, and which finds its files in a moved run folder."""

    epochs = 0  # that were completed when it saved

    def check_monitor_top_k(self, trainer: pl.Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether to save: of equally good checkpoints the latest, since small validation sets often see ties."""
        tied = (
            current is not None
            and self.best_model_score is not None
            and bool(current == self.best_model_score)
        )
        return tied or super().check_monitor_top_k(trainer, current)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Nothing: see `after_step`."""

    def after_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time, now that the optimizer step is complete and logged."""
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        if trainer.fit_loop.epoch_loop.validates:  # type: ignore[attr-defined]
            self._last_global_step_saved = -1  # what comes after the validation is not saved yet

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: see `after_epoch`."""

    def after_epoch(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time, now that the end of the epoch is complete and logged."""
        super().on_train_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time."""
        trainer.fit_loop.epoch_loop.validates = False  # type: ignore[attr-defined]
        super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end, which `every_n_train_steps` need not meet; Lightning does so only where nothing was saved."""
        if self.save_last:
            self.save_now(trainer)

    def last_saved(self, trainer: pl.Trainer) -> bool:
        """Whether `last` is of where training is; a signal may have it saved also where `save_last` is off."""
        ours = (
            bool(self.save_last)
            or Path(self._last_checkpoint_saved).stem == self.CHECKPOINT_NAME_LAST
        )
        epochs = trainer.fit_loop.completed  # type: ignore[attr-defined]
        return ours and (self._last_global_step_saved, self.epochs) == (trainer.global_step, epochs)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.epochs = trainer.fit_loop.completed  # type: ignore[attr-defined]

    def save_now(self, trainer: pl.Trainer) -> None:
        """Save `last`, unless it was just saved."""
        if not self.last_saved(trainer):
            self._last_global_step_saved = -1  # if it was of this step, it was of another file
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_checkpoint(
                trainer, str(Path(self.dirpath or "", f"{self.CHECKPOINT_NAME_LAST}.ckpt"))
            )

    def _save_topk_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, torch.Tensor]
    ) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if (
            self.save_last and self.save_top_k == 0
        ):  # Lightning writes `last` only beside another one
            self._last_global_step_saved = trainer.global_step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scores; paths in the old folder become paths in this one."""
        old, new = str(state_dict["dirpath"]), str(self.dirpath)

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {moved(key): moved(item) for key, item in value.items()}
            return (
                value.replace(old, new, 1)
                if isinstance(value, str) and value.startswith(old)
                else value
            )

        super().load_state_dict(moved(state_dict))


def best_checkpoint(folder: str, task: Any) -> FolderCheckpoint:
    """Saves `best.ckpt` after the validations that the task's `monitor` finds best."""
    return FolderCheckpoint(
        folder,
        BEST,
        monitor=task.monitor,
        mode=task.monitor_mode,
        enable_version_counter=False,
        save_on_train_epoch_end=False,  # training may end without a validation
    )


def check_monitors(trainer: pl.Trainer, names: Iterable[str]) -> None:
    """Refuse callbacks that go by something which is not logged: they would do nothing, or keep no best checkpoint.

    Args:
        trainer: about to train.
        names: of all that is logged; without validations less.

    Raises:
        UsageError: names the callback's option, and what is logged.
    """
    validates = trainer.limit_val_batches != 0
    logged = [name for name in names if validates or not name.startswith("val/")]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        known = [*logged, "epoch", "step"] if isinstance(callback, ModelCheckpoint) else logged
        ours = isinstance(callback, FolderCheckpoint)
        if monitor is None or monitor in known or (ours and callback.filename == BEST):
            continue
        option = (
            "--checkpoint.monitor" if ours else f"the callback {type(callback).__name__} monitors"
        )
        raise UsageError(
            f"{option} {monitor}: nothing of that name is logged; there is {', '.join(known)}"
        )


def refuse_ours(options: Mapping[str, Any], command: str) -> None:
    """Refuse Trainer options that a command would overrule, or that are no sensible numbers.

    Raises:
        UsageError: names the option, and what to do instead.
    """
    for name, least in LEAST.items():
        value = options[name]
        if not isinstance(value, int | float):
            continue  # null, or a time
        if command == "fit" and name in NOTHING and (value == 0 or value < least):
            raise UsageError(f"--trainer.{name} is {value}, which trains nothing: give at least 1")
        if name == "val_check_interval" and value == 0:
            raise UsageError(
                f"--trainer.{name} is 0: to validate never give --trainer.limit_val_batches 0"
            )
        if not least <= value <= MOST:
            raise UsageError(f"--trainer.{name} is {value}: give a number from {least} to {MOST}")
    if command == "fit":
        refuse_time(options["max_time"])
    for name, (accepted, reason) in (OURS["all"] | OURS.get(command, {})).items():
        if options[name] not in accepted:
            raise UsageError(f"--trainer.{name} cannot be changed: {reason}")


def refuse_devices(asked: Any) -> None:
    """Refuse what is no number of processes that a machine without GPUs could run.

    Raises:
        UsageError: says which numbers there are.
    """
    most = max(16, os.cpu_count() or 1)
    if asked != "auto" and str(asked) not in map(str, range(1, most + 1)):
        raise UsageError(f"--trainer.devices {asked}: without GPUs it is a number from 1 to {most}")


def refuse_time(limit: Any) -> None:
    """Refuse a `max_time` that is none, or leaves none.

    Raises:
        UsageError: says how to write it.
    """
    try:
        left = Timer(limit).time_remaining()
    except Exception:  # of many kinds
        left = 0
    if left is not None and left <= 0:
        raise UsageError(
            f"--trainer.max_time {limit}: give days, hours, minutes and seconds, as in 00:01:30:00"
        )


def as_list(value: Any) -> list[Any]:
    """None as no element, one value as one, several as they are."""
    if value is None:
        return []
    return (
        list(value)
        if isinstance(value, Iterable) and not isinstance(value, str | dict)
        else [value]
    )


def our_class(path: str) -> str:
    """The class that stands for a logger's where there is one that goes on with its runs, else the same."""
    return OUR_LOGGERS.get(path.rpartition(".")[2], path)


def place_loggers(chosen: Iterable[Any], folder: Path) -> None:
    """Let the loggers that options name write into the run folder, W&B's and TensorBoard's by classes that go on there.

    Raises:
        UsageError: another folder, or for W&B's run another id than it has, was asked for.
    """
    for logger in chosen:
        if hasattr(logger, "init_args"):
            logger.class_path, given = our_class(logger.class_path), logger.init_args
            asked, new = str(given.get("save_dir") or "."), not (folder / "config.yaml").exists()
            if (
                logger.class_path in OUR_LOGGERS.values()
                and new
                and asked not in (".", str(folder))
            ):
                name = logger.class_path.rpartition(".")[2]
                raise UsageError(
                    f"{name} cannot have the save_dir {asked}: logs go into the run folder, see --run_dir"
                )
            given["save_dir"] = str(folder)
            if logger.class_path.endswith("WandbLogger"):
                given["id"] = wandb_id(folder, given.get("version") or given.get("id"))
                given["version"] = None  # Lightning's other name of it


def wandb_id(folder: Path, chosen: str | None) -> str:
    """The id of a run in W&B: that of the run so far, or as chosen, or as the agent of a sweep gave it, or a new one.

    Raises:
        UsageError: the run has another id than that chosen.
    """
    file = folder / "wandb_id"
    kept = read_bytes(file).decode(errors="replace") if file.exists() else None
    if kept and chosen and kept != chosen:
        raise UsageError(
            f"the run in {folder} is {kept} in W&B and goes on there: leave the id {chosen} out"
        )
    return kept or chosen or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]


def fill_in(options: Any, epochs: int) -> None:
    """Trainer options that nobody gave, the precision and an end of training; of loggers of one class, the last.

    A run that is continued with the configuration of its logger once more has it twice.
    """
    if options.precision is None and not any(map(of_precision, as_list(options.plugins))):
        options.precision = default_precision(options.accelerator)
    if options.max_epochs is None and options.max_steps == -1 and options.max_time is None:
        options.max_epochs = epochs
    if isinstance(options.logger, list):
        options.logger = list(
            {our_class(logger.class_path): logger for logger in options.logger}.values()
        )


def of_precision(plugin: Any) -> bool:
    """Whether options of a plugin are those of a precision, beside which the Trainer takes no other."""
    return str(getattr(plugin, "class_path", "")).endswith("Precision")


def default_precision(accelerator: str) -> str:
    """bf16-mixed where the accelerator computes in bfloat16, else 32-true."""
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return (
        "bf16-mixed"
        if cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        else "32-true"
    )
