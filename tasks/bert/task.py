"""Text classification with a BERT-style encoder: loss, metrics and predictions."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import (
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
)
from torchmetrics.utilities import dim_zero_cat

from datamodules.reviews import ReviewData
from modules.models.bert import BertClassifier, BertConfig
from tasks.base import Batch, StepOutput
from tasks.bert.architectures import fit_to_data, load_pretrained
from tasks.classification import ClassifierTask
from tasks.errors import UsageError
from tasks.text import TextTask


class CalibrationError(MulticlassCalibrationError):
    """Expected calibration error, summed in the metric's own type (float64)."""

    def compute(self) -> Tensor:
        self.confidences = [dim_zero_cat(self.confidences).to(self.dtype)]
        return super().compute()


class BertTask(TextTask, ClassifierTask):
    """Classification of texts with an encoder (Devlin 2019).

    Args:
        net: The network. Null numbers of classes and tokens come from the data.
        r_drop: Weight of the KL divergence between two passes with different dropout (Liang 2021,
            there 1 to 5), which doubles the time of a step; 0: one pass.
        reset_head: Initialise the classifier anew even if the pretrained weights have one that
            fits.
        kwargs: As of `TextTask` and `ClassifierTask`.
    """

    name = "bert"

    def __init__(
        self,
        net: BertConfig = BertConfig(),
        r_drop: float = 0.0,
        reset_head: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if r_drop < 0:
            raise ValueError(f"r_drop {r_drop} must not be negative")
        self.net_config = net
        self.r_drop = r_drop
        self.reset_head = reset_head

    def build(self, metadata: Mapping[str, Any]) -> BertClassifier:
        classes = len(metadata["class_names"])
        config = fit_to_data(self.net_config, metadata, self.pretrained, num_classes=classes)
        build = partial(BertClassifier, config)
        if self.pretrained is None:
            return build()
        reset = ("head", "pooler", "pool") if self.reset_head else ()
        return load_pretrained(build, self.pretrained, metadata, reset)

    def make_metrics(self) -> dict[str, Metric]:
        """Adds macro F1, AUROC, and expected calibration error in 15 bins (Guo 2017)."""
        classes = len(self.class_names)
        return {
            **super().make_metrics(),
            "f1": MulticlassF1Score(classes, average="macro"),
            "auroc": MulticlassAUROC(classes),
            "ece": CalibrationError(classes),
        }

    def step(self, batch: Batch, training: bool) -> StepOutput:
        """Returns loss (), probabilities (B, K) and labels (B,) of a batch of tokens (B, N)."""
        labels = batch["label"]
        smoothing = self.label_smoothing if training else 0.0
        logits = self.net(batch["tokens"], batch["padding_mask"])
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        if training and self.r_drop:
            second = self.net(batch["tokens"], batch["padding_mask"])
            loss = (loss + F.cross_entropy(second, labels, label_smoothing=smoothing)) / 2
            loss = loss + self.r_drop * divergence(logits, second) / 2
        return StepOutput(loss, len(labels), logits.softmax(-1), labels)

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        """Returns indices of the texts (B,) and their class probabilities (B, K)."""
        return batch["index"], self.net(batch["tokens"], batch["padding_mask"]).softmax(-1)

    def write_predictions(self, trainer: pl.Trainer, datamodule: ReviewData, folder: Path) -> None:
        if datamodule.predict_text is not None and datamodule.predict_path is not None:
            raise UsageError("--text and --data.predict_path exclude each other: leave one out")
        batches: Any = trainer.predict(self, datamodule=datamodule)
        indices, found = (torch.cat(parts) for parts in zip(*batches, strict=True))  # (S,), (S, K)
        probabilities = found[indices.argsort()]  # batches are sorted by length
        if datamodule.predict_text is not None:
            values = probabilities[0].tolist()
            listed = [f"{name} {p:.4f}" for name, p in zip(self.class_names, values, strict=True)]
            print(f"{self.class_names[values.index(max(values))]} ({', '.join(listed)})")
            return
        texts = datamodule.predict_texts
        self.save_predictions(folder, "text", texts, list(probabilities))
        skipped = f", {len(datamodule.skipped)} bad lines skipped" if datamodule.skipped else ""
        print(f"{len(texts)} texts labelled in {folder / 'predictions.csv'}{skipped}")


def divergence(logits1: Tensor, logits2: Tensor) -> Tensor:
    """Mean of both KL divergences between the softmax of two logits (B, K)."""
    log_p = logits1.log_softmax(-1)
    log_q = logits2.log_softmax(-1)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean() / 2
