"""What tasks that sort things into classes share: targets, confusion matrix, tables of predictions."""

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
    """The same, which is rendered instead of being logged."""

    names: tuple[str, ...] = ()


class ClassifierTask(MediaTask, Task):
    """A task whose data have class names; arguments as `Task`, and:

    Args:
        label_smoothing: share of the target spread evenly over all classes (Szegedy 2016), 0 to below 1.

    Raises:
        ValueError: `label_smoothing` out of range.
    """

    monitor, monitor_mode = "val/acc", "max"
    known: tuple[str, ...] = ("class_names",)  # facts that `config.yaml` names under `data.dataset`

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
        return list(self.facts["class_names"])

    def make_metrics(self) -> dict[str, Metric]:
        """Accuracy and the confusion matrix over all samples."""
        classes = len(self.class_names)
        return {
            "acc": MulticlassAccuracy(classes, average="micro"),
            "confusion": ConfusionMatrix(classes),
        }

    def resolved(self) -> dict[str, Any]:
        """The run's options with the network and what the data decided filled in."""
        known = {name: self.facts[name] for name in self.known}
        return merged(super().resolved(), {"data": {"dataset": known}})

    def media(self, split: str) -> dict[str, Table | Picture]:
        """The confusion matrix."""
        counts = self.metrics[split]["confusion"].compute().cpu()
        return {"confusion": rendered(lambda file: draw_confusion(counts, self.class_names, file))}

    def draw_results(self, folder: Path) -> None:
        """Draw `confusion.png` from the test just done."""
        with replacing(folder / "confusion.png") as partial:
            draw_confusion(
                self.metrics["test"]["confusion"].compute().cpu(), self.class_names, partial
            )

    def table(self, what: str, rows: Iterable[tuple[str, Tensor]]) -> str:
        """CSV: a sample, its most probable class, and the probability of each class.

        Args:
            what: head of the first column.
            rows: samples as text, with their probabilities (K,).
        """
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow([what, "label", *self.class_names])
        for sample, probabilities in rows:
            shares = probabilities.tolist()
            table.writerow(
                [sample, self.class_names[shares.index(max(shares))], *(f"{p:.6f}" for p in shares)]
            )
        return text.getvalue()
