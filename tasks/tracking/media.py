"""Tables and pictures of a task, in the loggers that can show them."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

from tasks.lightning_patches import logged_step

Picture = Tensor  # uint8 (C, H, W), grey or RGB


@dataclass(frozen=True)
class Table:
    """Rows to show.

    Args:
        columns: Their names.
        rows: Numbers, texts, or pictures of one size, one for each column.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class MediaTask:
    """A task with tables and pictures, for the loggers that can show them."""

    def collect_media(self, batch: dict[str, Any], outputs: Any) -> None:
        """Keeps what `media` needs of an evaluated batch."""

    def media(self, split: str) -> dict[str, Table | Picture]:
        """Returns tables and pictures of an evaluation by name; `split` is "val" or "test"."""
        return {}


class MediaLogger(Callback):
    """Logs a task's tables and pictures after each validation and test."""

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if shows_media(trainer, pl_module):
            pl_module.collect_media(batch, outputs)  # type: ignore[operator]

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.on_validation_batch_end(trainer, pl_module, outputs, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if shows_media(trainer, pl_module):
            split = "test" if trainer.testing else "val"
            media = pl_module.media(split)  # type: ignore[operator]
            log_media(trainer, {f"{split}/{name}": shown for name, shown in media.items()})

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)


def shows_media(trainer: pl.Trainer, task: pl.LightningModule) -> bool:
    """Whether this process logs tables and pictures of this task now."""
    return (
        isinstance(task, MediaTask) and not trainer.sanity_checking and bool(media_loggers(trainer))
    )


def log_media(trainer: pl.Trainer, media: Mapping[str, Table | Picture]) -> None:
    """Log tables and pictures by name, at the step of the metrics that are logged now."""
    for logger, log in media_loggers(trainer):
        for name, shown in media.items():
            log(logger, name, shown, logged_step(trainer))


def rendered(draw: Callable[[BinaryIO], None]) -> Picture:
    """The picture that `draw` writes as PNG."""
    import numpy
    from PIL import Image

    file = io.BytesIO()
    draw(file)
    pixels = numpy.array(Image.open(file).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)  # (H, W, 3) -> (3, H, W)


def to_wandb(logger: Any, name: str, shown: Table | Picture, step: int) -> None:
    """Log a table, or an image."""
    import wandb

    def value(cell: Any) -> Any:
        return wandb.Image(cell.float() / 255) if isinstance(cell, Tensor) else cell

    if not isinstance(shown, Table):
        logger.log_metrics({name: value(shown)}, step)
        return
    rows = [[value(cell) for cell in row] for row in shown.rows]
    logger.log_table(name, list(shown.columns), rows, step=step)


def to_tensorboard(logger: Any, name: str, shown: Table | Picture, step: int) -> None:
    """Log images as such and texts as they are, each below the name of its column."""
    if not isinstance(shown, Table):
        logger.experiment.add_image(name, shown, step)
        return
    pictures = [cell for row in shown.rows for cell in row if isinstance(cell, Tensor)]
    if pictures:
        logger.experiment.add_images(name, torch.stack(pictures), step)  # (B, C, H, W)
    texts = []
    for number, row in enumerate(shown.rows, 1):
        for column, cell in zip(shown.columns, row, strict=True):
            if not isinstance(cell, Tensor):
                # Markdown shows indented lines as they are.
                lines = "\n".join("    " + line for line in str(cell).splitlines())
                texts.append(f"{number}. {column}\n\n{lines}")
    logger.experiment.add_text(name, "\n\n".join(texts), step)


LogMedia = Callable[[Any, str, Table | Picture, int], None]
LOG_FUNCTIONS: dict[type[Logger], LogMedia] = {
    WandbLogger: to_wandb,
    TensorBoardLogger: to_tensorboard,
}


def media_loggers(trainer: pl.Trainer) -> list[tuple[Logger, LogMedia]]:
    """This process's loggers that can show tables and pictures, each with how."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return [
        (logger, log)
        for logger in loggers
        for kind, log in LOG_FUNCTIONS.items()
        if isinstance(logger, kind)
    ]
