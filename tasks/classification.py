"""What classification tasks share: metrics, confusion matrix, tables of predictions."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from datamodules.utils.files import replacing
from tasks.base import Task
from tasks.cli.parsing import merged
from tasks.tracking.media import MediaTask, Picture, Table, rendered
from tasks.tracking.report import draw_confusion
from tasks.training.optim import OptimConfig


class ConfusionMatrix(MulticlassConfusionMatrix):
    """A confusion matrix, which is drawn instead of being logged."""

    names: tuple[str, ...] = ()


class ClassifierTask(MediaTask, Task):
    """A task whose data have class names; arguments as `Task`, and:

    Args:
        label_smoothing: Probability mass spread evenly over all classes (Szegedy 2016), 0 to below
            1.

    Raises:
        ValueError: `label_smoothing` out of range.
    """

    monitor = "val/acc"
    monitor_mode = "max"
    dataset_metadata: tuple[str, ...] = ("class_names",)  # options of `data.dataset`, too

    def __init__(
        self,
        optimizer: OptimConfig,
        label_smoothing: float = 0.0,
        ema: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(optimizer, ema, compile)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} must be from 0 to below 1")
        self.label_smoothing = label_smoothing

    @property
    def class_names(self) -> list[str]:
        """Names of the K classes, in the order of the logits."""
        return list(self.metadata["class_names"])

    def make_metrics(self) -> dict[str, Metric]:
        """Returns accuracy and the confusion matrix over all samples."""
        classes = len(self.class_names)
        return {
            "acc": MulticlassAccuracy(classes, average="micro"),
            "confusion": ConfusionMatrix(classes),
        }

    def resolved(self) -> dict[str, Any]:
        """Returns the run's options with those that the data decided."""
        known = {name: self.metadata[name] for name in self.dataset_metadata}
        return merged(super().resolved(), {"data": {"dataset": known}})

    def media(self, split: str) -> dict[str, Table | Picture]:
        """Returns the confusion matrix."""
        counts = self.metrics[split]["confusion"].compute().cpu()
        return {"confusion": rendered(lambda file: draw_confusion(counts, self.class_names, file))}

    def draw_results(self, folder: Path) -> None:
        """Writes `confusion.png` of the test."""
        counts = self.metrics["test"]["confusion"].compute().cpu()
        with replacing(folder / "confusion.png") as partial:
            draw_confusion(counts, self.class_names, partial)

    def table(self, what: str, rows: Iterable[tuple[str, Tensor]]) -> str:
        """Returns CSV: a sample, its most probable class, and the probability of each class.

        Args:
            what: Name of the first column.
            rows: Samples as text, with their probabilities (K,).
        """
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([what, "label", *self.class_names])
        for sample, probabilities in rows:
            label = self.class_names[int(probabilities.argmax())]
            table.writerow([sample, label, *(f"{p:.6f}" for p in probabilities.tolist())])
        return text.getvalue()
