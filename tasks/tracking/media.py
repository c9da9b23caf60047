"""What a task has to show beside figures, in the loggers that can show it: tables, and pictures."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

Picture = Tensor  # uint8 (C, Y, X), grey or colour


@dataclass(frozen=True)
class Table:
    """Rows to show.

    Args:
        columns: their names.
        rows: cells of a row: numbers, texts, or pictures of one size.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class Exhibits:
    """A task with things to show, in the first process of runs with a logger that can show them."""

    def look(self, batch: dict[str, Any], outputs: Any) -> None:
        """Keep what `exhibits` wants of an evaluated batch."""

    def exhibits(self, split: str) -> dict[str, Table | Picture]:
        """What there is to show of a validation or test, "val" or "test", by name."""
        return {}


class Gallery(Callback):
    """After each validation and test, log what the task then has to show."""

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Let the task look at a batch of the validation."""
        if isinstance(pl_module, Exhibits) and not trainer.sanity_checking and senders(trainer):
            pl_module.look(batch, outputs)

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Let the task look at a batch of the test."""
        self.on_validation_batch_end(trainer, pl_module, outputs, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show what the task has."""
        if isinstance(pl_module, Exhibits) and not trainer.sanity_checking and senders(trainer):
            split = "test" if trainer.testing else "val"
            show(
                trainer,
                {f"{split}/{name}": shown for name, shown in pl_module.exhibits(split).items()},
            )

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show what the task has."""
        self.on_validation_end(trainer, pl_module)


def show(trainer: pl.Trainer, found: Mapping[str, Table | Picture]) -> None:
    """Log things by name, at the step of the metrics that are logged now."""
    step = trainer.fit_loop.epoch_loop._batches_that_stepped
    for logger, send in senders(trainer):
        for name, shown in found.items():
            send(logger, name, shown, step)


def drawn(draw: Callable[[BinaryIO], None]) -> Picture:
    """What `draw` writes as PNG."""
    import numpy
    from PIL import Image

    file = io.BytesIO()
    draw(file)
    return torch.from_numpy(numpy.array(Image.open(file).convert("RGB"))).permute(
        2, 0, 1
    )  # (3, Y, X)


def to_wandb(logger: Any, name: str, shown: Table | Picture, step: int) -> None:
    """Log a table, or an image."""
    import wandb

    def cell(value: Any) -> Any:
        return wandb.Image(value.float() / 255) if isinstance(value, Tensor) else value

    if isinstance(shown, Table):
        logger.log_table(
            name,
            list(shown.columns),
            [[cell(value) for value in row] for row in shown.rows],
            step=step,
        )
    else:
        logger.log_metrics({name: cell(shown)}, step)


def to_tensorboard(logger: Any, name: str, shown: Table | Picture, step: int) -> None:
    """Log images as such and texts as they are, each below the name of its column."""
    if not isinstance(shown, Table):
        logger.experiment.add_image(name, shown, step)
        return
    pictures = [value for row in shown.rows for value in row if isinstance(value, Tensor)]
    if pictures:
        logger.experiment.add_images(name, torch.stack(pictures), step)  # (S, C, Y, X)
    texts = []
    for number, row in enumerate(shown.rows, 1):
        cells = {
            c: str(value)
            for c, value in zip(shown.columns, row, strict=True)
            if not isinstance(value, Tensor)
        }
        for column, text in cells.items():
            lines = "\n".join(
                "    " + line for line in text.splitlines()
            )  # Markdown shows such lines as they are
            texts.append(f"{number}. {column}\n\n{lines}")
    logger.experiment.add_text(name, "\n\n".join(texts), step)


Send = Callable[[Any, str, Table | Picture, int], None]
SHOWN_BY: dict[type[Logger], Send] = {WandbLogger: to_wandb, TensorBoardLogger: to_tensorboard}


def senders(trainer: pl.Trainer) -> list[tuple[Logger, Send]]:
    """This process's loggers that can show something, each with how."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [
        (logger, send)
        for logger in loggers
        for kind, send in SHOWN_BY.items()
        if isinstance(logger, kind)
    ]
