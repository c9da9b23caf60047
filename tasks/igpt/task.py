"""Image GPT: loss, metrics, samples and completions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from datamodules.utils.files import write_text
from datamodules.vision.augment import Augment, AugmentConfig
from modules.models.gpt import IMAGEGPT_PRESETS, Decoder, DecoderConfig
from tasks.base import Batch, StepOutput, Task
from tasks.checkpoints.reading import best_checkpoint
from tasks.errors import UsageError
from tasks.igpt.architectures import PixelModel, fit_to_data, load_pretrained, palette_json
from tasks.igpt.pictures import completion_grid, sample_grid
from tasks.igpt.sampling import PixelSampling, check_count, complete_images, sample_images
from tasks.text import MeanOf
from tasks.tracking.evaluation_figures import save_media
from tasks.tracking.media import Picture, Table
from tasks.tracking.report import format_count

COMPLETED = 8  # images of an evaluation that are completed


@dataclass(frozen=True, kw_only=True)
class PictureConfig(PixelSampling):
    """Images that the model generates after an evaluation.

    Args:
        samples: Number of images to sample.
        completions: Number of completions of each of the first 8 images from its upper half.
    """

    samples: int = 16
    completions: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("samples", self.samples, self.temperature)
        check_count("completions", self.completions, self.temperature)


class IGPTTask(Task):
    """Image GPT (Chen 2020): each pixel, a colour of a palette, from those before it, row by row.

    Args:
        net: The network. Null `vocabulary` and `max_length` come from the data.
        augment: Random augmentation of training images.
        pictures: Images that the model generates after an evaluation.
        pretrained: Weights, palette and image size to start from: a checkpoint (.ckpt) or run
            folder; `hf/<model>` of the Hugging Face hub, such as hf/openai/imagegpt-small, or a
            local folder like it; null: random weights.
        kwargs: Those of `Task`.
    """

    name = "igpt"

    def __init__(
        self,
        net: DecoderConfig = IMAGEGPT_PRESETS["digits"],
        augment: AugmentConfig = AugmentConfig(),
        pictures: PictureConfig = PictureConfig(),
        pretrained: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        for option in ("erase", "mixup", "cutmix"):
            if getattr(augment, option):
                raise UsageError(
                    f"--model.augment.{option} is for classes: leave it out, the model would learn "
                    "to draw it"
                )
        if not net.stack.causal:
            raise UsageError(
                "--model.net.stack.causal false: each pixel would see the one that it must "
                "predict; leave it out"
            )
        self.net_config = net
        self.pretrained = None if pretrained is None else best_checkpoint(pretrained)
        self.augment = Augment(augment)
        self.picture_config = pictures
        self.evaluated: Tensor | None = None  # images to complete

    def build(self, metadata: Mapping[str, Any]) -> Decoder:
        if self.pretrained is None:
            return Decoder(fit_to_data(self.net_config, metadata))
        return load_pretrained(self.net_config, self.pretrained, metadata)

    @property
    def model(self) -> PixelModel:
        """The network with its palette."""
        return PixelModel(self.net, self.metadata)

    def describe_targets(self, room: int) -> str:
        """Size of the images and of the palette."""
        side = self.metadata["image_size"]
        return f", {side} x {side} pixels, {format_count(len(self.metadata['palette']), 'colour')}"

    def save_files(self, folder: Path) -> None:
        write_text(folder / "palette.json", palette_json(self.metadata))

    # Steps ----------------------------------------------------------------------------------------

    def train_metrics(self) -> list[str]:
        return [*super().train_metrics(), "bits_per_dim"]

    def make_metrics(self) -> dict[str, Metric]:
        """Accuracy of predicted pixels."""
        return {"acc": MeanOf("acc")}

    def derived(self, values: Mapping[str, Tensor], split: str) -> dict[str, Tensor]:
        """Bits per dimension; a dimension is a pixel, one colour of the palette."""
        return {f"{split}/bits_per_dim": values[f"{split}/loss"] / math.log(2)}

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns the loss () of uint8 images (B, C, H, W), a mean over their pixels."""
        images = self.augment(batch["image"]) if training else batch["image"]
        model = self.model
        targets = model.palette.encode(images)  # (B, N)
        hidden = self.net(model.inputs(targets))  # (B, N, E)
        loss, correct = self.net.loss(hidden, targets)
        count = targets.numel()
        return StepOutput(loss, count, {"acc": correct / count}, {"acc": count})

    def log_step(self, means: Mapping[str, Tensor]) -> None:
        """Logs also bits per dimension."""
        super().log_step(means)
        self.log_dict(self.derived({"train/loss": means["loss"]}, "train"))

    # Pictures -------------------------------------------------------------------------------------

    def reset_media(self) -> None:
        self.evaluated = None

    def collect_media(self, batch: Batch, outputs: Any) -> None:
        """Keeps the first images."""
        if self.evaluated is None:
            self.evaluated = batch["image"][:COMPLETED].clone()

    @torch.no_grad()
    def media(self, split: str) -> dict[str, Table | Picture]:
        """Sampled images, and completions of the first images; none if the network is sharded."""
        if hasattr(self.net, "unshard") or self.evaluated is None:
            return {}
        was_training = self.net.training
        device = next(self.net.parameters()).device
        # after a test it is on the CPU
        self.net.to(self.trainer.strategy.root_device).eval()
        model = self.model
        config = self.picture_config
        samples = sample_images(model, config.samples, config)
        completed = complete_images(model, self.evaluated, config.completions, config)
        originals = model.palette.decode(model.palette.encode(self.evaluated)).cpu()
        self.net.to(device).train(was_training)
        return {
            "samples": sample_grid(samples),
            "completed": completion_grid(originals, completed),
        }

    def save_results(self, folder: Path, split: str) -> None:
        save_media(folder, "" if split == "test" else f"{split}_", self.media(split))
