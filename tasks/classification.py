"""What classification tasks share: metrics, confusion matrix, `predictions.csv`."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from datamodules.utils.files import replacing, write_text
from tasks.base import Task
from tasks.options import merged
from tasks.tracking.media import Picture, Table, rendered
from tasks.tracking.report import draw_confusion
from tasks.tracking.run_folder import make_folder


class ConfusionMatrix(MulticlassConfusionMatrix):
    """A confusion matrix, which is drawn and not logged."""

    names: tuple[str, ...] = ()  # of the values that are logged: none


class ClassifierTask(Task):
    """A task whose data have class names.

    Args:
        label_smoothing: Probability mass spread evenly over all classes (Szegedy 2016), from 0 to
            below 1.
        kwargs: Those of `Task`.
    """

    monitor = "val/acc"
    monitor_mode = "max"
    # Metadata that are options of `data.dataset`, too.
    dataset_metadata: tuple[str, ...] = ("class_names",)

    def __init__(self, label_smoothing: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing {label_smoothing} must be from 0 to below 1")
        self.label_smoothing = label_smoothing

    @property
    def class_names(self) -> list[str]:
        """Names of the K classes, in the order of the logits."""
        return list(self.metadata["class_names"])

    def make_metrics(self) -> dict[str, Metric]:
        classes = len(self.class_names)
        return {
            "acc": MulticlassAccuracy(classes, average="micro"),
            "confusion": ConfusionMatrix(classes),
        }

    def resolved_config(self) -> dict[str, Any]:
        dataset = {name: self.metadata[name] for name in self.dataset_metadata}
        return merged(super().resolved_config(), {"data": {"dataset": dataset}})

    def media(self, split: str) -> dict[str, Table | Picture]:
        counts = self.metrics[split]["confusion"].compute().cpu()
        return {"confusion": rendered(lambda file: draw_confusion(counts, self.class_names, file))}

    def save_results(self, folder: Path) -> None:
        counts = self.metrics["test"]["confusion"].compute().cpu()
        with replacing(folder / "confusion.png") as partial:
            draw_confusion(counts, self.class_names, partial)

    def save_predictions(
        self, folder: Path, column: str, samples: Sequence[str], probabilities: Sequence[Tensor]
    ) -> None:
        """Writes `predictions.csv`: each sample, its most probable class, all probabilities (K,).

        Args:
            folder: Created if it does not exist.
            column: Name of the first column, such as "text".
            samples: Texts or paths.
            probabilities: One tensor (K,) per sample.
        """
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([column, "label", *self.class_names])
        for sample, row in zip(samples, probabilities, strict=True):
            label = self.class_names[int(row.argmax())]
            table.writerow([sample, label, *(f"{p:.6f}" for p in row.tolist())])
        make_folder(folder)
        write_text(folder / "predictions.csv", text.getvalue())
