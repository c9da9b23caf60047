"""Options of the Trainer: those that cannot be changed, limits of numbers, and defaults."""

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, Timer

from datamodules.base import ResumableDataModule
from datamodules.utils.extras import requires_extra
from datamodules.utils.files import read_bytes
from tasks.errors import UsageError
from tasks.lightning_patches import RunCheckpoint, stopped_early
from tasks.options import as_list
from tasks.tracking.metrics_csv import LoggedRows

NO_LOGS = {"logger": ((None,), "only `fit` writes logs")}
CLIP = "give --model.optimizer.gradient_clip"
# For each command, options that cannot be changed: the accepted values, and the reason.
FIXED: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "all": {
        "enable_checkpointing": ((None,), "the run folder holds the checkpoints; see --checkpoint"),
        "use_distributed_sampler": ((True,), "the samplers distribute the data themselves"),
        "default_root_dir": ((None,), "give --run_dir"),
        "barebones": ((False,), "it switches off what a run folder records"),
        "gradient_clip_val": ((None,), CLIP),
        "gradient_clip_algorithm": ((None,), CLIP),
    },
    "validate": NO_LOGS,
    "test": NO_LOGS,
    "predict": NO_LOGS,
}
MINIMUM = {  # of the Trainer's numbers; -1 often means all, or no end
    **dict.fromkeys(("max_epochs", "max_steps", "num_sanity_val_steps"), -1),
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches"), 0),
    **dict.fromkeys(("limit_predict_batches", "overfit_batches", "log_every_n_steps"), 0),
    **dict.fromkeys(("min_epochs", "min_steps", "val_check_interval"), 0),
    **dict.fromkeys(("accumulate_grad_batches", "check_val_every_n_epoch"), 1),
}
MAXIMUM = 2**63 - 1  # PyTorch's largest integer
NOT_ZERO = ("accumulate_grad_batches", "limit_train_batches", "max_epochs", "max_steps")
REFUSED_CALLBACKS = {  # of Lightning, with what to use instead
    "Timer": "give --trainer.max_time",
    **dict.fromkeys(
        ("WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging"), "give --model.ema"
    ),
    "GradientAccumulationScheduler": "give --trainer.accumulate_grad_batches",
    "BatchSizeFinder": "give --data.batch_size",
    "BackboneFinetuning": "give --model.optimizer.freeze",
    "LearningRateFinder": "compare learning rates in an experiment of tasks.lab",
}
# These replace Lightning's.
LOGGERS = {name: f"tasks.tracking.loggers.{name}" for name in ("WandbLogger", "TensorBoardLogger")}
BEST_FILENAME = "best"  # name of the checkpoint with the best value of the task's monitor
OWN_FILENAMES = (BEST_FILENAME, "last", "previous")  # of the checkpoints of every run


def check_trainer_options(options: Mapping[str, Any], command: str) -> None:
    """Refuse options and callbacks that a command cannot use, and numbers that make no sense."""
    for name, minimum in MINIMUM.items():
        value = options[name]
        if not isinstance(value, int | float):
            continue  # null, or a time
        if command == "fit" and name in NOT_ZERO and (value == 0 or value < minimum):
            raise UsageError(f"--trainer.{name} is {value}, which trains nothing: give at least 1")
        if name == "val_check_interval" and value == 0:
            raise UsageError(f"--trainer.{name} is 0: give --trainer.limit_val_batches 0 instead")
        if not minimum <= value <= MAXIMUM:
            raise UsageError(f"--trainer.{name} {value}: give a number from {minimum} to {MAXIMUM}")
    for name, (accepted, reason) in (FIXED["all"] | FIXED.get(command, {})).items():
        if options[name] not in accepted:
            raise UsageError(f"--trainer.{name} cannot be changed: {reason}")
    for callback in as_list(options["callbacks"]):
        package, _, name = str(getattr(callback, "class_path", "")).rpartition(".")
        if package.startswith(("pytorch_lightning.", "lightning.")) and name in REFUSED_CALLBACKS:
            raise UsageError(f"--trainer.callbacks {name}: {REFUSED_CALLBACKS[name]}")
    if command == "fit":
        for unit in ("epochs", "steps"):
            least, most = options[f"min_{unit}"] or 0, options[f"max_{unit}"] or -1
            if 0 < most < least:
                raise UsageError(
                    f"--trainer.min_{unit} {least} exceeds --trainer.max_{unit} {most}: lower it"
                )
        limit = options["max_time"]
        try:
            remaining = Timer(limit).time_remaining()
        except Exception:  # of many kinds
            remaining = 0
        if remaining is not None and remaining <= 0:
            raise UsageError(f"--trainer.max_time {limit}: give DAYS:HOURS:MINUTES:SECONDS")


def ending_option(trainer: Trainer) -> str:
    """The option that has ended training, else `max_steps` if it is given.

    "": EarlyStopping alone has ended it.
    """
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
    if any((timer.time_remaining() or 0) <= 0 for timer in timers):
        return "max_time"
    if 0 < trainer.max_steps <= trainer.global_step:
        return "max_steps"
    by_epochs = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch
    if by_epochs:
        return "max_epochs"
    if stopped_early(trainer):
        return ""
    return "max_epochs" if trainer.max_steps <= 0 else "max_steps"


def check_monitors(trainer: Trainer, names: Iterable[str]) -> None:
    """Refuse callbacks that monitor a metric that is not logged."""
    validates = trainer.limit_val_batches != 0
    logged = [name for name in names if validates or not name.startswith("val/")]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        known = [*logged, "epoch", "step"] if isinstance(callback, ModelCheckpoint) else logged
        what = f"the callback {type(callback).__name__} monitors"
        if isinstance(callback, RunCheckpoint):
            what = "--checkpoint.monitor"
            if callback.filename == BEST_FILENAME:
                continue  # ours: it saves nothing if there is no validation
        if monitor is not None and monitor not in known:
            raise UsageError(f"{what} {monitor}, which is not logged: there is {', '.join(known)}")


def epoch_batches(trainer: Trainer, batches: int) -> int:
    """Batches of an epoch that are trained with, of those that there are.

    Raises `UsageError` as `limited_batches`.
    """
    return limited_batches(trainer, "train", batches, "an epoch")


def limited_batches(trainer: Trainer, split: str, batches: int, whole: str) -> int:
    """Batches of a split that are used, of those that there are.

    `whole` is what has them, for the message. Raises `UsageError` if a fraction of them is less
    than one.
    """
    name = f"limit_{split}_batches"
    limit = getattr(trainer, name)
    if isinstance(limit, int):
        return min(batches, limit)
    if 0 < limit * batches < 1:
        if split != "test" and getattr(trainer, "overfit_batches", 0) > 0:
            name = "overfit_batches"
        raise UsageError(
            f"--trainer.{name} {limit} is less than one of the {batches} batches of {whole}: "
            "raise it, or give a whole number"
        )
    return int(batches * limit)


def check_evaluation_limits(trainer: Trainer, data: ResumableDataModule) -> None:
    """Refuse fractions of validation and test that are less than a batch, before the training."""
    for split in ("val", "test"):
        limit = getattr(trainer, f"limit_{split}_batches")
        # `test_size` may read the split
        if 0 < limit < 1 and (split == "val" or data.test_size() is not None):
            batches = len(data.eval_loader(data.dataset(split)))
            limited_batches(trainer, split, batches, f"the {split} split")


def check_validation_interval(trainer: Trainer, batches: int) -> None:
    """Refuse an interval of validations longer than an epoch of so many batches."""
    every = getattr(trainer, "val_check_interval", None)  # Lightning does not set it for a time
    counts_in_epochs = trainer.check_val_every_n_epoch is not None
    validates = trainer.limit_val_batches != 0
    if isinstance(every, int) and every > batches > 0 and counts_in_epochs and validates:
        raise UsageError(
            f"--trainer.val_check_interval {every} is more than an epoch has batches ({batches}): "
            "lower it, or add --trainer.check_val_every_n_epoch null to count over all epochs"
        )


def set_defaults(options: Any, epochs: int) -> None:
    """Set defaults of precision and length of training; of loggers of one class, keep the last.

    If a resumed run is given the config of its logger again, the logger is listed twice.
    """
    plugins = [str(getattr(plugin, "class_path", "")) for plugin in as_list(options.plugins)]
    if options.precision is None and not any(path.endswith("Precision") for path in plugins):
        options.precision = default_precision(options.accelerator)
    if options.max_epochs is None and options.max_steps == -1 and options.max_time is None:
        options.max_epochs = epochs
    if isinstance(options.logger, list):
        by_class = {logger_class(logger.class_path): logger for logger in options.logger}
        options.logger = list(by_class.values())


def default_precision(accelerator: str) -> str:
    """bf16-mixed if the accelerator computes in bfloat16, else 32-true."""
    has_gpu = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    if has_gpu and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true"


def place_checkpoints(options: Any) -> None:
    """Make the folder of `--checkpoint` absolute: a run may be resumed from another folder.

    Raises `UsageError` if its files would replace those of every run, or lack the optimizer.
    """
    if options.save_weights_only:
        raise UsageError(
            "--checkpoint.save_weights_only true: no run could resume from its checkpoints; leave "
            "it out, and `export` the weights after the training"
        )
    if options.filename in OWN_FILENAMES:
        raise UsageError(
            f"--checkpoint.filename {options.filename} is that of a checkpoint of every run: give "
            "another name"
        )
    if options.dirpath:
        options.dirpath = os.path.abspath(os.path.expanduser(options.dirpath))


# Loggers ------------------------------------------------------------------------------------------


def logger_class(path: str) -> str:
    """Our class in place of Lightning's if there is one, else the same."""
    return LOGGERS.get(path.rpartition(".")[2], path)


def place_loggers(loggers: Iterable[Any], folder: Path, earlier: LoggedRows) -> None:
    """Let loggers write into the run folder, and resume there.

    Args:
        loggers: Options of each, which are changed.
        folder: Run folder.
        earlier: Rows of metrics.csv that a resumed run keeps.
    """
    is_new = not (folder / "config.yaml").exists()
    for logger in loggers:
        if not hasattr(logger, "init_args"):
            continue
        logger.class_path = logger_class(logger.class_path)
        name = logger.class_path.rpartition(".")[2]
        options = logger.init_args
        asked = str(options.get("save_dir") or ".")
        if name == "WandbLogger":
            import wandb  # noqa: F401  # jsonargparse would hide that it is missing
        if name == "TensorBoardLogger":
            with requires_extra("tensorboard"):
                import tensorboard  # noqa: F401
        stays_here = name in ("CSVLogger", "WandbLogger", "TensorBoardLogger")
        if stays_here and is_new and asked not in (".", str(folder)):
            raise UsageError(
                f"{name} with save_dir {asked}: logs go into the run folder (--run_dir)"
            )
        options["save_dir"] = str(folder)
        if name == "WandbLogger":
            options["id"] = wandb_id(folder, options.get("version") or options.get("id"))
            options["version"] = None  # Lightning's other name of it
            options["resume"] = options.get("resume") or "allow"
        if name == "TensorBoardLogger" and not is_new:
            options["purge_step"] = earlier.last_step  # from 0; TensorBoard hides what follows


def wandb_id(folder: Path, chosen: str | None) -> str:
    """The id of a run in W&B: the saved one, else the chosen, that of a sweep, or a new one."""
    file = folder / "wandb_id"
    saved = read_bytes(file).decode(errors="replace") if file.exists() else None
    if saved and chosen and saved != chosen:
        raise UsageError(f"the run in {folder} is {saved} in W&B: leave the id {chosen} out")
    return saved or chosen or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
