"""Tables and pictures of a task, in the loggers that can show them."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from tasks.lightning_patches import logged_step

Picture = Tensor  # uint8 (C, H, W), grey or RGB


@dataclass(frozen=True)
class Table:
    """Rows to show: numbers, texts, or pictures of one size, one for each column."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class MediaLogger(Callback):
    """Collects what a task shows of an evaluation, and logs it after each validation and test."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.reset_media()  # type: ignore[operator]

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if collects_media(trainer):
            pl_module.collect_media(batch, outputs)  # type: ignore[operator]

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.on_validation_batch_end(trainer, pl_module, outputs, batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if media_loggers(trainer):
            split = "test" if trainer.testing else "val"
            media = pl_module.media(split)  # type: ignore[operator]
            log_media(trainer, {f"{split}/{name}": shown for name, shown in media.items()})

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)


def collects_media(trainer: pl.Trainer) -> bool:
    """Whether this process logs what an evaluation shows, or saves it among the results."""
    saves = trainer.state.fn != TrainerFn.FITTING and not trainer.fast_dev_run  # type: ignore[attr-defined]
    return bool(media_loggers(trainer)) or (trainer.is_global_zero and saves)


def media_loggers(trainer: pl.Trainer) -> list[Logger]:
    """This process's loggers that can show tables and pictures; none in a sanity check."""
    if trainer.sanity_checking or not trainer.is_global_zero:
        return []
    kinds = (WandbLogger, TensorBoardLogger)
    return [logger for logger in trainer.loggers if isinstance(logger, kinds)]


def log_media(trainer: pl.Trainer, media: Mapping[str, Table | Picture]) -> None:
    """Log tables and pictures by name, at the step of the metrics that are logged now."""
    for logger in media_loggers(trainer):
        log = to_wandb if isinstance(logger, WandbLogger) else to_tensorboard
        for name, shown in media.items():
            log(logger, name, shown, logged_step(trainer))


def render_picture(draw: Callable[[BinaryIO], None]) -> Picture:
    """The picture that `draw` writes as PNG."""
    import numpy
    from PIL import Image

    file = io.BytesIO()
    draw(file)
    pixels = numpy.array(Image.open(file).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)  # (H, W, 3) -> (3, H, W)


def to_wandb(logger: Any, name: str, shown: Table | Picture, step: int) -> None:
    import wandb
    from torchvision.transforms.functional import to_pil_image

    def value(cell: Any) -> Any:
        return wandb.Image(to_pil_image(cell)) if isinstance(cell, Tensor) else cell

    if not isinstance(shown, Table):
        logger.log_metrics({name: value(shown)}, step)
        return
    rows = [[value(cell) for cell in row] for row in shown.rows]
    logger.log_table(name, list(shown.columns), rows, step=step)


def to_tensorboard(logger: Any, name: str, shown: Table | Picture, step: int) -> None:
    """Log pictures as images and other cells as text, each below the name of its column."""
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
