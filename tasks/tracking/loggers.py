"""Lightning's loggers of W&B and TensorBoard, for runs that resume or lose the network."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import loggers
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from tasks.errors import UsageError
from tasks.lightning_patches import without_anonymous

STEP = "trainer/global_step"  # Lightning's name of W&B's x axis


class WandbLogger(loggers.WandbLogger):
    """Lightning's, with the optimizer step as W&B's step: W&B drops what a resumed run repeats.

    If W&B cannot be reached, the run is kept in its folder, for `wandb sync`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        without_anonymous(self)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """W&B's run, offline if there is no way to W&B or no account here.

        Raises `UsageError` if W&B refuses its settings.
        """
        import pydantic
        import wandb

        Path(self.save_dir or ".").mkdir(parents=True, exist_ok=True)  # or W&B writes elsewhere
        try:
            return super().experiment
        except pydantic.ValidationError as error:
            found = error.errors()[0]
            setting = ".".join(map(str, found["loc"])) or "the settings"
            raise UsageError(
                f"W&B refuses {setting} of its options or variables WANDB_*: {found['msg']}"
            ) from error
        except wandb.errors.Error as error:
            reason = str(error).partition("\n")[0]
            wandb.teardown()  # which still holds the run that could not begin
            os.environ["WANDB_MODE"] = "offline"
        try:
            run = super().experiment
        except wandb.errors.Error as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"W&B cannot be used, nor offline: {reason}; see its options and variables WANDB_*"
            ) from error
        warnings.warn(
            f"W&B cannot be used ({reason}): training continues, and the run is kept in "
            f"{self.save_dir}/wandb, from where `wandb sync` sends it",
            stacklevel=2,
        )
        return run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        run = self.experiment
        if step is None:
            run.log(dict(metrics))
        elif step >= run.starting_step:
            run.log({**metrics, STEP: step}, step=step)


class TensorBoardLogger(loggers.TensorBoardLogger):
    """Lightning's, without its `hparams.yaml`: the options are in `config.yaml`."""

    @rank_zero_only
    def save(self) -> None:
        """Does nothing: events are written as they come."""
