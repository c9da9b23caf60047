"""Masked-autoencoder pretraining of a Vision Transformer: loss and pictures."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from datamodules.utils.random_numbers import rand_of_seeds
from modules.models.mae import MAE_PRESETS, MAEConfig, MaskedAutoencoder
from tasks.base import Batch, StepOutput
from tasks.checkpoints.reading import best_checkpoint
from tasks.checkpoints.weights import fill_config
from tasks.errors import UsageError
from tasks.mae.pictures import three_pictures
from tasks.tracking.evaluation_figures import save_media
from tasks.tracking.media import Picture, Table, render_picture
from tasks.tracking.picture_grid import draw_grid
from tasks.training.seeds import evaluation_seeds
from tasks.vit.image_task import ImageTask

MAX_PICTURES = 8  # images that an evaluation shows


class MAETask(ImageTask):
    """Reconstruction of masked patches (He 2022).

    The patches are different ones in each epoch, and the same in each evaluation.

    Args:
        net: The network. A null number of channels comes from the data.
        pretrained: Weights to start from: a checkpoint or run folder; `hf/<model>` of the Hugging
            Face hub, such as hf/facebook/vit-mae-base, or a local folder like it; null: random
            weights.
        kwargs: Those of `ImageTask`.
    """

    name = "mae"

    def __init__(
        self,
        net: MAEConfig = replace(MAE_PRESETS["base"], channels=None),
        pretrained: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for option in ("erase", "mixup", "cutmix"):
            if getattr(self.augment.config, option):
                raise UsageError(
                    f"--model.augment.{option} is for classes: leave it out, patches are masked "
                    "already"
                )
        self.net_config = net
        self.pretrained = None if pretrained is None else best_checkpoint(pretrained)
        self.collected: dict[str, Picture] = {}

    def build(self, metadata: Mapping[str, Any]) -> MaskedAutoencoder:
        net = MaskedAutoencoder(fill_config(self.net_config, {"channels": metadata["channels"]}))
        if self.pretrained is not None:
            from tasks.mae.pretrained import load_pretrained

            load_pretrained(net, self.pretrained)
        return net

    def make_metrics(self) -> dict[str, Metric]:
        """None besides the loss."""
        return {}

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns the loss () of uint8 images (B, C, H, W), a mean over masked patches.

        Its outputs are predictions (B, M, C P P) and the numbers of these patches (B, M).
        """
        images = batch["image"]
        size = (len(images), self.net.config.num_patches)
        if training:
            images = self.augment(images)
            noise = torch.rand(size, dtype=torch.float32, device=images.device)
        else:
            noise = rand_of_seeds(evaluation_seeds(batch["index"]), size[1]).to(images.device)
        kept, masked = self.net.split(noise)  # (B, K), (B, M)
        pixels = self.normalised(images)
        predicted = self.net(pixels, kept, masked)  # (B, M, C P P)
        loss = self.net.loss(predicted, pixels, masked)
        return StepOutput(loss, masked.numel(), (predicted, masked), None)

    def reset_media(self) -> None:
        self.collected = {}

    def collect_media(self, batch: Batch, outputs: tuple[Tensor, Tensor]) -> None:
        """Draws the first images: as they are, masked, and reconstructed."""
        if self.collected:
            return
        predicted, masked = (x[:MAX_PICTURES] for x in outputs)
        pixels = self.normalised(batch["image"][:MAX_PICTURES])
        rows = three_pictures(self.net, self.metadata, pixels, predicted, masked)
        if self.net.config.norm_pixels:
            name = "reconstructed, with mean and\nvariance of the original"
            rows[name] = rows.pop("reconstructed")
        titles = [f"image {number}" for number in batch["index"][:MAX_PICTURES].tolist()]
        self.collected["reconstructed"] = render_picture(lambda file: draw_grid(rows, titles, file))

    def media(self, split: str) -> dict[str, Table | Picture]:
        return dict(self.collected)

    def save_results(self, folder: Path, split: str) -> None:
        save_media(folder, "" if split == "test" else f"{split}_", self.media(split))
