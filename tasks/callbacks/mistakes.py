"""Misclassified images, shown by the loggers that can show images."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

Mistake = tuple[Tensor, int, int, float]  # uint8 image (C, Y, X), label, prediction, its probability


class Mistakes(Callback):
    """Log the first misclassified images of each validation and of the test: a W&B table, TensorBoard images.

    Args:
        most: number of images.
    """

    def __init__(self, most: int = 32) -> None:
        self.most, self.found = most, list[Mistake]()

    def collect(self, outputs: Tensor, batch: dict[str, Any]) -> None:
        """Keep the mistakes of a batch, given its logits (B, K)."""
        if len(self.found) >= self.most:
            return
        confidence, predicted = outputs.softmax(-1).max(-1)
        for i in torch.nonzero(predicted != batch["label"]).flatten()[: self.most - len(self.found)].tolist():
            labels = int(batch["label"][i]), int(predicted[i])
            self.found.append((batch["image"][i].cpu(), *labels, float(confidence[i])))

    def show(self, trainer: pl.Trainer, task: Any, split: str) -> None:
        """Send what was kept to the loggers, and forget it."""
        names, found = task.facts["class_names"], self.found
        self.found = []
        for logger in trainer.loggers if found and trainer.is_global_zero else ():
            if isinstance(logger, pl.loggers.WandbLogger):
                import wandb

                rows = [
                    [wandb.Image(image.float() / 255), names[true], names[guess], p] for image, true, guess, p in found
                ]
                columns = ["image", "label", "prediction", "probability"]
                logger.log_table(f"{split}/misclassified", columns, rows, step=trainer.global_step)
            elif isinstance(logger, pl.loggers.TensorBoardLogger):
                images = torch.stack([image for image, *_ in found])  # (S, C, Y, X)
                logger.experiment.add_images(f"{split}/misclassified", images, trainer.global_step)
                text = "\n".join(
                    f"{i}. {names[m[1]]} taken for {names[m[2]]} ({m[3]:.2f})" for i, m in enumerate(found, 1)
                )
                logger.experiment.add_text(f"{split}/misclassified", text, trainer.global_step)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Collect from a validation batch."""
        self.collect(outputs, batch)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Collect from a test batch."""
        self.collect(outputs, batch)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the mistakes of this validation."""
        self.show(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the mistakes of the test."""
        self.show(trainer, pl_module, "test")
