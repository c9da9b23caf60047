"""Misclassified images, shown by the loggers that can show images."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

S = TypeVar("S")
Mistake = tuple[Tensor, int, int, float]  # uint8 image (C, Y, X), label, prediction, its probability


class Mistakes(Callback):
    """Log the first misclassified images of each validation and of the test: a W&B table, TensorBoard images.

    Nothing is kept where no logger can show images, nor on other ranks than the first, which alone logs.

    Args:
        most: number of images.
    """

    def __init__(self, most: int = 32) -> None:
        self.most, self.found = most, list[Mistake]()

    def collect(self, trainer: pl.Trainer, outputs: Tensor, batch: dict[str, Any]) -> None:
        """Keep the mistakes of a batch, given its logits (B, K)."""
        if len(self.found) >= self.most or not senders(trainer, GALLERIES):
            return
        confidence, predicted = outputs.softmax(-1).max(-1)
        for i in torch.nonzero(predicted != batch["label"]).flatten()[: self.most - len(self.found)].tolist():
            labels = int(batch["label"][i]), int(predicted[i])
            self.found.append((batch["image"][i].cpu(), *labels, float(confidence[i])))

    def show(self, trainer: pl.Trainer, task: Any, split: str) -> None:
        """Send what was kept to the loggers, and forget it."""
        found, self.found = self.found, []
        for logger, send in senders(trainer, GALLERIES) if found else ():
            send(logger, f"{split}/misclassified", found, task.facts["class_names"], trainer.global_step)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Collect from a validation batch."""
        self.collect(trainer, outputs, batch)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Collect from a test batch."""
        self.collect(trainer, outputs, batch)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the mistakes of this validation."""
        self.show(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the mistakes of the test."""
        self.show(trainer, pl_module, "test")


def to_wandb(logger: Any, name: str, found: list[Mistake], names: list[str], step: int) -> None:
    """Log a W&B table: image, label, prediction and its probability."""
    import wandb

    rows = [[wandb.Image(image.float() / 255), names[true], names[guess], p] for image, true, guess, p in found]
    logger.log_table(name, ["image", "label", "prediction", "probability"], rows, step=step)


def to_tensorboard(logger: Any, name: str, found: list[Mistake], names: list[str], step: int) -> None:
    """Log the images, and as text what each was taken for."""
    logger.experiment.add_images(name, torch.stack([image for image, *_ in found]), step)  # (S, C, Y, X)
    lines = (f"{i}. {names[true]} taken for {names[guess]} ({p:.2f})" for i, (_, true, guess, p) in enumerate(found, 1))
    logger.experiment.add_text(name, "\n".join(lines), step)


Send = Callable[[Any, str, list[Mistake], list[str], int], None]
GALLERIES: dict[type[Logger], Send] = {WandbLogger: to_wandb, TensorBoardLogger: to_tensorboard}


def senders(trainer: pl.Trainer, known: Mapping[type[Logger], S]) -> list[tuple[Logger, S]]:
    """This process's loggers of the kinds that `known` has, each with what it has for them."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [(logger, send) for logger in loggers for kind, send in known.items() if isinstance(logger, kind)]
