"""What a command's Trainer is made of, beside Lightning's own parts."""

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from tasks.errors import UsageError
from tasks.loggers import OUR_LOGGERS

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
    | {"devices": (("auto", "1", 1), ALONE), "num_nodes": ((1,), ALONE), "strategy": (("auto",), ALONE)},
}


class FolderCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint whose `last` is the end of the run, and which finds its files again in a moved run folder."""

    def check_monitor_top_k(self, trainer: pl.Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether to save: of equally good checkpoints the latest, since small validation sets often see ties."""
        tied = current is not None and self.best_model_score is not None and bool(current == self.best_model_score)
        return tied or super().check_monitor_top_k(trainer, current)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end, which `every_n_train_steps` need not meet; Lightning does so only where nothing was saved."""
        if self.save_last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the scores; paths in the old folder become paths in this one."""
        old, new = str(state_dict["dirpath"]), str(self.dirpath)

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {moved(key): moved(item) for key, item in value.items()}
            return value.replace(old, new, 1) if isinstance(value, str) and value.startswith(old) else value

        super().load_state_dict(moved(state_dict))


def refuse_ours(options: Mapping[str, Any], command: str) -> None:
    """Refuse Trainer options that a command would overrule.

    Raises:
        UsageError: names the option, and what to do instead.
    """
    for name, (accepted, reason) in (OURS["all"] | OURS.get(command, {})).items():
        if options[name] not in accepted:
            raise UsageError(f"--trainer.{name} cannot be changed: {reason}")


def as_list(value: Any) -> list[Any]:
    """None as no element, one value as one, several as they are."""
    if value is None:
        return []
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str | dict) else [value]


def place_loggers(chosen: Iterable[Any], folder: Path) -> None:
    """Let the loggers that options name write into the run folder, W&B's and TensorBoard's by classes that go on there.

    W&B also needs an id, kept there, to continue the same run later; the agent of a sweep has given that of a new run.
    """
    for logger in chosen:
        if hasattr(logger, "init_args"):
            logger.class_path = OUR_LOGGERS.get(logger.class_path.rpartition(".")[2], logger.class_path)
            logger.init_args["save_dir"] = str(folder)
            if logger.class_path.endswith("WandbLogger"):
                kept, given = folder / "wandb_id", os.environ.get("WANDB_RUN_ID")
                logger.init_args["id"] = kept.read_text() if kept.exists() else given or uuid.uuid4().hex[:8]


def fill_in(options: Any, epochs: int) -> None:
    """Trainer options that nobody gave: the precision, and an end of training."""
    if options.precision is None:
        options.precision = default_precision(options.accelerator)
    if options.max_epochs is None and options.max_steps == -1 and options.max_time is None:
        options.max_epochs = epochs


def default_precision(accelerator: str) -> str:
    """bf16-mixed where the accelerator computes in bfloat16, else 32-true."""
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    return "bf16-mixed" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
