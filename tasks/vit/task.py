"""Image classification with a Vision Transformer: loss, metrics, pictures and predictions."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from datamodules.images import ImageData
from datamodules.vision.augment import Augment, AugmentConfig, normalise
from modules.models.vit import VIT_PRESETS, ViT, ViTConfig
from tasks.base import Batch, StepOutput
from tasks.checkpoints.weights import fill_config
from tasks.classification import ClassifierTask
from tasks.distributed.predicting import predicts_all
from tasks.predictions import PredictionFile
from tasks.tracking.media import Picture, Table, rendered
from tasks.vit.attend import draw, rollout

MAX_ROLLOUTS = 6  # images with attention that an evaluation logs
MAX_MISTAKES = 32  # misclassified images that an evaluation logs


class ViTTask(ClassifierTask):
    """Image classification with a Vision Transformer (Dosovitskiy 2021).

    Args:
        net: The network. Null numbers of classes and channels come from the data.
        augment: Random augmentation of training images.
        pretrained: Weights to start from: a checkpoint or run folder; `timm/<model name>`,
            downloaded by timm; `hf/<model>` of the Hugging Face hub; a folder of Hugging Face's or
            timm's layout; a .safetensors or .pth file of timm's weights that is named after the
            model or has a config.json beside it; or a .safetensors file that `export` wrote; null:
            random weights.
        kwargs: As of `ClassifierTask`.
    """

    name = "vit"
    dataset_metadata = ("class_names", "mean", "std")

    def __init__(
        self,
        net: ViTConfig = replace(VIT_PRESETS["tiny"], channels=None, num_classes=None),
        augment: AugmentConfig = AugmentConfig(),
        pretrained: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.net_config = net
        self.pretrained = pretrained
        self.augment = Augment(augment)
        self.collected: dict[str, Picture] = {}
        self.mistakes: list[tuple[Any, ...]] = []

    @staticmethod
    def check_options(
        options: Any, on_command_line: Collection[str], given: Collection[str]
    ) -> None:
        """Refuses a file of weights whose architecture is not known, unless options describe it."""
        if options.model.pretrained is not None:
            from tasks.vit.architectures import check_described

            check_described(options.model.pretrained, given)

    def build(self, metadata: Mapping[str, Any]) -> ViT:
        sizes = {"num_classes": len(metadata["class_names"]), "channels": metadata["channels"]}
        net = ViT(fill_config(self.net_config, sizes))
        if self.pretrained is not None:
            from tasks.vit.architectures import load_pretrained

            load_pretrained(net, self.pretrained, metadata)
        return net

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns loss (), predictions (B, K) and targets of uint8 images (B, C, H, W)."""
        labels = batch["label"]
        if training:
            pixels = self.augment.erase(self.normalised(self.augment(batch["image"])))
            pixels, targets = self.augment.mix(pixels, self.problem.dense(labels))
            logits = self.net(pixels)
            loss = self.training_loss(logits, targets)
        else:
            logits = self.net(self.normalised(batch["image"]))
            loss = self.problem.loss(logits, labels)
        predictions = self.problem.predictions(logits)
        return StepOutput(loss, len(labels), predictions, self.problem.metric_targets(labels))

    def reset_media(self) -> None:
        super().reset_media()
        self.collected = {}
        self.mistakes = []

    def collect_media(self, batch: Batch, outputs: Tensor) -> None:
        """Keeps misclassified images, and draws the attention rollout of the first images."""
        super().collect_media(batch, outputs)
        if self.collected and len(self.mistakes) >= MAX_MISTAKES:
            return
        if self.problem_type != "single_label_classification":
            return
        images = batch["image"]
        confidence, predicted = outputs.cpu().max(-1)  # (B,), (B,)
        labels = batch["label"].cpu()
        names = [
            (self.class_names[label], self.class_names[guess])
            for label, guess in zip(labels.tolist(), predicted.tolist(), strict=True)
        ]
        if not self.collected:
            first = images[:MAX_ROLLOUTS]
            with self.trainer.precision_plugin.val_step_context():
                attention = rollout(self.net, self.normalised(first))
            titles = [
                f"label: {label}" + f"\nprediction: {guess}" * (label != guess)
                for label, guess in names[:MAX_ROLLOUTS]
            ]
            self.collected["attention"] = rendered(
                lambda file: draw(first, attention, titles, file)
            )
        wrong = torch.nonzero(predicted != labels).flatten()  # (S,)
        for i in wrong[: MAX_MISTAKES - len(self.mistakes)].tolist():
            self.mistakes.append((images[i].clone().cpu(), *names[i], float(confidence[i])))

    def media(self, split: str) -> dict[str, Table | Picture]:
        media = super().media(split) | self.collected
        if self.problem_type == "single_label_classification":
            columns = ("image", "label", "prediction", "probability")
            media["misclassified"] = Table(columns, self.mistakes)
        return media

    def normalised(self, images: Tensor) -> Tensor:
        """Normalises uint8 images (B, C, H, W) with the mean and std of the training data."""
        return normalise(images, self.metadata["mean"], self.metadata["std"])

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[list[str], Tensor]:
        """Returns paths and predictions (B, K)."""
        logits = self.net(self.normalised(batch["image"]))
        return batch["path"], self.problem.predictions(logits)

    def write_predictions(
        self, trainer: pl.Trainer, datamodule: ImageData, file: PredictionFile
    ) -> None:
        found = self.predict_inputs(trainer, datamodule, file)
        if found is None:
            return
        paths, predictions = found
        bad = set(datamodule.skipped)
        if predicts_all(trainer):
            bad |= set(datamodule.predict_samples) - set(paths)  # also what other processes skipped
        if len(paths) == 1:
            print(predictions[0].line(file.top_k))
        self.save_predictions(file, paths, predictions, sorted(bad))
