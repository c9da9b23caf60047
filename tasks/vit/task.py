"""ViT image classification: the network, its recipe and its results."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F

from datamodules.images import ImageData
from datamodules.utils.files import write_text
from datamodules.vision.augment import Augment, AugmentConfig, normalise
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from tasks.base import Batch, StepOutput
from tasks.checkpoints.weights import fill_config
from tasks.classification import ClassifierTask
from tasks.tracking.media import Picture, Table, rendered
from tasks.tracking.run_folder import make_folder
from tasks.training.optim import OptimConfig
from tasks.vit.attend import draw, rollout

ROLLOUTS = 6  # images with attention in loggers, of each evaluation
MISTAKES = 32  # misclassified images in loggers


class ViTTask(ClassifierTask):
    """Image classification with a Vision Transformer (Dosovitskiy 2021).

    Args:
        net: The network. Number of classes and channels come from the data where they are null.
        optimizer: Optimizer, schedule and clipping.
        augment: Random augmentation of training images.
        label_smoothing: Probability mass spread evenly over all classes (Szegedy 2016), 0 to 1.
        pretrained: Weights to start from: `timm/<model name>`, downloaded by timm, or a local
            .safetensors or .pth file with timm's names that is called as timm's model, has its
            config.json beside it, or is our export; null starts from random weights.
        ema: Decay of a running average of the weights, per optimizer step, such as 0.999;
            evaluation and the saved weights use the average. Null keeps none.
        compile: Compile the network with torch.compile, in place.
    """

    name = "vit"
    dataset_metadata = ("class_names", "mean", "std")

    def __init__(
        self,
        net: ViTConfig = replace(VIT_PRESETS["tiny"], channels=None, num_classes=None),
        optimizer: OptimConfig = OptimConfig(),
        augment: AugmentConfig = AugmentConfig(),
        label_smoothing: float = 0.0,
        pretrained: str | None = None,
        ema: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(optimizer, label_smoothing, ema, compile)
        self.net_config = net
        self.pretrained = pretrained
        self.augment = Augment(augment)
        self.collected: dict[str, Picture] = {}
        self.mistakes: list[tuple[Any, ...]] = []

    @staticmethod
    def check_options(options: Any, typed: Collection[str], named: Collection[str]) -> None:
        """Refuses a file of weights whose model is not known, unless options describe it."""
        if options.model.pretrained is not None:
            from tasks.vit.architectures import check_described

            check_described(options.model.pretrained, named)

    def build(self, metadata: Mapping[str, Any]) -> ViT:
        """Builds a ViT for the data's classes and channels."""
        found = {"num_classes": len(metadata["class_names"]), "channels": metadata["channels"]}
        net = ViT(fill_config(self.net_config, found))
        if self.pretrained is not None and self.restored is None:
            from tasks.vit.architectures import load_pretrained

            load_pretrained(net, self.pretrained, metadata)
        return net

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns loss (), logits (B, K) and labels (B,) of uint8 images (B, C, H, W)."""
        labels = targets = batch["label"]
        if training:
            pixels = self.augment.erase(self.normalised(self.augment(batch["image"])))
            pixels, targets = self.augment.mix(pixels, labels, len(self.class_names))
        else:
            pixels = self.normalised(batch["image"])
        logits = self.net(pixels)
        smoothing = self.label_smoothing if training else 0.0
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
        return StepOutput(loss, len(labels), logits, labels)

    def collect_media(self, batch: Batch, outputs: Tensor) -> None:
        """Keeps the first misclassified images, and attention of the first images."""
        if self.collected and len(self.mistakes) >= MISTAKES:
            return
        images = batch["image"]
        probabilities = outputs.float().softmax(-1).cpu()  # (B, K)
        confidence, predicted = probabilities.max(-1)  # (B,), (B,)
        labels = batch["label"].cpu()
        names = [
            (self.class_names[label], self.class_names[guess])
            for label, guess in zip(labels.tolist(), predicted.tolist(), strict=True)
        ]
        if not self.collected:
            first = images[:ROLLOUTS]
            with self.trainer.precision_plugin.val_step_context():
                attention = rollout(self.net, self.normalised(first))
            titles = [
                label if label == guess else f"{label}\n(seen as {guess})"
                for label, guess in names[:ROLLOUTS]
            ]
            self.collected["attention"] = rendered(
                lambda file: draw(first, attention, titles, file)
            )
        wrong = torch.nonzero(predicted != labels).flatten()  # (S,)
        for i in wrong[: MISTAKES - len(self.mistakes)].tolist():
            self.mistakes.append((images[i].cpu(), *names[i], float(confidence[i])))

    def media(self, split: str) -> dict[str, Table | Picture]:
        """Returns also what `collect_media` kept."""
        shown = super().media(split) | self.collected
        if self.mistakes:
            columns = ("image", "label", "prediction", "probability")
            shown["misclassified"] = Table(columns, self.mistakes)
        self.collected = {}
        self.mistakes = []
        return shown

    def normalised(self, images: Tensor) -> Tensor:
        """Normalises uint8 (B, C, Y, X) with the training data's mean and standard deviation."""
        return normalise(images, self.metadata["mean"], self.metadata["std"])

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[list[str], Tensor]:
        """Returns paths and class probabilities (B, K)."""
        return batch["path"], self.net(self.normalised(batch["image"])).softmax(-1)

    def write_predictions(self, trainer: pl.Trainer, datamodule: ImageData, folder: Path) -> None:
        """Writes `predictions.csv`: path, label and the probability of each class."""
        batches: Any = trainer.predict(self, datamodule=datamodule)
        rows = [row for batch in batches for row in zip(*batch, strict=True)]
        make_folder(folder)
        write_text(folder / "predictions.csv", self.table("path", rows))
        skipped = f", {len(datamodule.skipped)} bad files skipped" if datamodule.skipped else ""
        print(f"{len(rows)} images labelled in {folder / 'predictions.csv'}{skipped}")
