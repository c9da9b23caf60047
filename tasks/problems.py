"""What classifiers learn to predict: one class, any number of labels, or a number."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelExactMatch,
    MultilabelF1Score,
)

from datamodules.sources import class_counts
from datamodules.sources.base import shortened
from datamodules.utils.files import replacing
from tasks.errors import UsageError
from tasks.predictions import AnyPrediction, LabelSet, Number, Prediction, most_likely
from tasks.tracking.class_reports import (
    CONFUSED,
    LABEL_REPORT,
    REPORT,
    THRESHOLD,
    class_report,
    confusion_counts,
    is_predicted,
    label_report,
    most_confused,
)
from tasks.tracking.csv_files import write_csv
from tasks.tracking.evaluated import Evaluated, EvaluatedSamples
from tasks.tracking.evaluation_figures import draw_calibration, draw_numbers, draw_roc
from tasks.tracking.media import Picture, Table, render_picture
from tasks.tracking.report import MANY_CLASSES, draw_confusion
from tasks.training.metrics import R2, MeanAveragePrecision

ClassWeights = Literal["balanced"] | list[float] | dict[str, float] | None


class Problem(ABC):
    """A problem type: its loss, what the outputs of a network mean, and its metrics.

    Args:
        metadata: Of the data, as `datamodules.sources.labelled.target_metadata` describes:
            `class_names` and, for a regression, `target_mean` (default 0) and `target_std` (1).
    """

    monitor: str  # the metric that decides which checkpoint is best
    monitor_mode: str
    answers: Mapping[str, type]  # names and types of `BasePrediction.answer`

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.names: list[str] = list(metadata["class_names"])  # of the K outputs
        self.mean: float = metadata.get("target_mean", 0.0)
        self.std: float = metadata.get("target_std", 1.0)

    @property
    def description(self) -> str:
        """What the targets are, as in "2 classes"."""
        return f"{len(self.names)} classes"

    @abstractmethod
    def loss(
        self, logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Tensor:
        """Mean loss () over the samples.

        Args:
            logits: (B, K).
            targets: (B,) classes, or float (B, K) as `dense` returns.
            smoothing: Of the targets (Szegedy 2016).
            weights: (K,) of the classes.
        """

    @abstractmethod
    def predictions(self, logits: Tensor) -> Tensor:
        """Probabilities, or numbers, (B, K) of logits (B, K)."""

    @abstractmethod
    def divergence(self, logits1: Tensor, logits2: Tensor) -> Tensor:
        """How far two outputs (B, K) of the same batch are apart, (): for R-Drop (Liang 2021)."""

    @abstractmethod
    def metrics(self) -> dict[str, Metric]:
        """Metrics of `predictions` and targets, by name."""

    @abstractmethod
    def prediction(self, row: Tensor) -> AnyPrediction:
        """What is predicted for one input, from its `predictions`, (K,) on the CPU."""

    @abstractmethod
    def evaluated_columns(self, samples: Evaluated) -> tuple[list[str], list[list[Any]]]:
        """Heads and columns of predictions.csv of an evaluation, after the column of samples."""

    @abstractmethod
    def save_reports(self, folder: Path, prefix: str, samples: Evaluated) -> None:
        """Writes tables and figures of an evaluation into a folder, as `<prefix><name>`."""

    def media(self, samples: Evaluated) -> dict[str, Table | Picture]:
        """Pictures of an evaluation by name, for loggers and files."""
        return {}

    def check_top_k(self, top_k: int) -> None:
        """Raises `UsageError` if an input has no `top_k` most likely classes."""
        if top_k < 1:
            raise UsageError(f"--top_k {top_k} must be at least 1")
        if top_k > len(self.names):
            raise UsageError(
                f"--top_k {top_k} exceeds the {len(self.names)} classes of the model: lower it, or "
                "leave it out for the probabilities of all"
            )

    def dense(self, targets: Tensor) -> Tensor:
        """Targets as float32 (B, K), which can be mixed."""
        return targets

    def metric_targets(self, targets: Tensor) -> Tensor:
        """Targets in the type that the metrics need."""
        return targets

    def weights(self, given: ClassWeights, labels: Tensor | None) -> Tensor | None:
        """(K,) weights of the classes in the loss; None: all are equal.

        Args:
            given: A number per class, or by the names of some, 1 for others; or "balanced", for
                weights from the training labels.
            labels: Of the training samples, (S,) or (S, K), if given is "balanced".
        """
        if given is None:
            return None
        if given == "balanced":
            assert labels is not None
            return self.balanced_weights(class_counts(labels, len(self.names)), len(labels))
        if isinstance(given, dict):
            by_name = {str(name): weight for name, weight in given.items()}  # YAML has numbers
            if unknown := by_name.keys() - {*self.names}:
                raise UsageError(
                    f"--model.class_weights has a weight for {min(unknown)}, which is none of the "
                    f"{len(self.names)} classes: {shortened(self.names)}"
                )
            given = [by_name.get(name, 1.0) for name in self.names]
        are_weights = all(0 <= weight < math.inf for weight in given) and sum(given) > 0
        if len(given) != len(self.names) or not are_weights:
            raise UsageError(
                f"--model.class_weights {given} must be a number from 0, not all 0, for each of "
                f"the {len(self.names)} classes: {shortened(self.names)}"
            )
        return torch.tensor(given, dtype=torch.float32)

    def balanced_weights(self, counts: Tensor, samples: int) -> Tensor:
        """(K,) weights from the samples of each class (K,) and of all."""
        raise NotImplementedError


class SingleLabel(Problem):
    """One class for each sample: softmax and cross-entropy."""

    monitor = "val/acc"
    monitor_mode = "max"
    answers = {"label": str, "probability": np.float32}

    def loss(
        self, logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy, times the weight of the class before smoothing.

        The mean is over samples. torch's is over weights, and its smoothing gives each sample the
        weights of all classes, so that a rare class is predicted for all.
        """
        if weights is None:
            return F.cross_entropy(logits, targets, label_smoothing=smoothing)
        log_p = logits.log_softmax(-1)
        losses = -(1 - smoothing) * log_p - smoothing * log_p.mean(-1, keepdim=True)  # (B, K)
        dense = targets if targets.is_floating_point() else self.dense(targets)
        return (dense * weights * losses).sum(-1).mean()

    def predictions(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def divergence(self, logits1: Tensor, logits2: Tensor) -> Tensor:
        """Mean of both KL divergences, over the batch."""
        log_p = logits1.log_softmax(-1)
        log_q = logits2.log_softmax(-1)
        return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1).mean() / 2

    def metrics(self) -> dict[str, Metric]:
        """Accuracy, and the mean of F1 over the classes."""
        classes = len(self.names)
        return {
            "acc": MulticlassAccuracy(classes, average="micro"),
            "f1": MulticlassF1Score(classes, average="macro"),
            "samples": EvaluatedSamples(),
        }

    def prediction(self, row: Tensor) -> Prediction:
        found = most_likely(self.names, row)
        label = next(iter(found))
        return Prediction(label, found[label], found)

    def evaluated_columns(self, samples: Evaluated) -> tuple[list[str], list[list[Any]]]:
        probability, predicted = samples.predictions.cpu().max(-1)  # (S,), (S,)
        columns = [
            [self.names[i] for i in samples.labels.tolist()],
            [self.names[i] for i in predicted.tolist()],
            probability.tolist(),
        ]
        return ["label", "prediction", "probability"], columns

    def media(self, samples: Evaluated) -> dict[str, Table | Picture]:
        counts = confusion_counts(samples)
        return {"confusion": render_picture(lambda file: draw_confusion(counts, self.names, file))}

    def save_reports(self, folder: Path, prefix: str, samples: Evaluated) -> None:
        counts = confusion_counts(samples)
        write_csv(folder / f"{prefix}report.csv", REPORT, class_report(counts, self.names))
        if len(self.names) > MANY_CLASSES:
            pairs = most_confused(counts, self.names)
            write_csv(folder / f"{prefix}confused.csv", CONFUSED, pairs)
        probabilities = samples.predictions.cpu()
        labels = samples.labels.cpu()
        with replacing(folder / f"{prefix}roc.png") as partial:
            draw_roc(probabilities, labels, self.names, partial)
        with replacing(folder / f"{prefix}calibration.png") as partial:
            draw_calibration(probabilities, labels, partial)

    def dense(self, targets: Tensor) -> Tensor:
        return F.one_hot(targets, len(self.names)).float()

    def balanced_weights(self, counts: Tensor, samples: int) -> Tensor:
        """S / (K * samples of the class): mean 1 over the samples, as scikit-learn's "balanced"."""
        return samples / (len(counts) * counts.clamp(min=1))


class MultiLabel(Problem):
    """Any number of K labels for each sample: a sigmoid and binary cross-entropy for each."""

    monitor = "val/map"
    monitor_mode = "max"
    answers = {"labels": str}

    @property
    def description(self) -> str:
        return f"{len(self.names)} labels"

    def loss(
        self, logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Tensor:
        """Mean over samples and labels; `weights` multiply the loss of labels that are 1.

        torch's `pos_weight` multiplies what smoothing adds to the others, too.
        """
        ends = (smoothing / 2, 1 - smoothing / 2)
        if weights is None:
            targets = targets * (1 - smoothing) + ends[0]
            return F.binary_cross_entropy_with_logits(logits, targets)
        zero, one = (
            F.binary_cross_entropy_with_logits(
                logits, torch.full_like(logits, end), reduction="none"
            )
            for end in ends
        )
        return (targets * weights * one + (1 - targets) * zero).mean()

    def predictions(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def divergence(self, logits1: Tensor, logits2: Tensor) -> Tensor:
        """Mean of both KL divergences, summed over the labels, over the batch."""
        difference = logits1.sigmoid() - logits2.sigmoid()
        return (difference * (logits1 - logits2)).sum(-1).mean() / 2

    def metrics(self) -> dict[str, Metric]:
        """Mean average precision and F1 over the labels; samples with all labels right."""
        labels = len(self.names)
        return {
            "map": MeanAveragePrecision(labels),
            "f1": MultilabelF1Score(labels, THRESHOLD),
            "exact_match": MultilabelExactMatch(labels, THRESHOLD),
            "samples": EvaluatedSamples(),
        }

    def metric_targets(self, targets: Tensor) -> Tensor:
        return targets.long()

    def prediction(self, row: Tensor) -> LabelSet:
        found = most_likely(self.names, row)
        count = int(is_predicted(row).sum())
        return LabelSet(list(found)[:count], found)

    def evaluated_columns(self, samples: Evaluated) -> tuple[list[str], list[list[Any]]]:
        truth = [self.listed(row) for row in samples.labels.bool()]
        predicted = [self.listed(row) for row in is_predicted(samples.predictions)]
        probabilities = samples.predictions.T.tolist()  # (S, K) -> (K, S)
        return ["labels", "predictions", *self.names], [truth, predicted, *probabilities]

    def listed(self, chosen: Tensor) -> str:
        """The names of labels, (K,) bool, with commas between them."""
        return ",".join(self.names[i] for i in chosen.nonzero().flatten().tolist())

    def save_reports(self, folder: Path, prefix: str, samples: Evaluated) -> None:
        write_csv(folder / f"{prefix}report.csv", LABEL_REPORT, label_report(samples, self.names))
        with replacing(folder / f"{prefix}roc.png") as partial:
            draw_roc(samples.predictions.cpu(), samples.labels.cpu(), self.names, partial)
        with replacing(folder / f"{prefix}calibration.png") as partial:
            draw_calibration(samples.predictions.cpu(), samples.labels.cpu(), partial)

    def balanced_weights(self, counts: Tensor, samples: int) -> Tensor:
        """Samples without the label / samples with it."""
        return (samples - counts).clamp(min=1) / counts.clamp(min=1)


class Regression(Problem):
    """A number for each sample: squared error of the standardised numbers.

    The network's output is in units of the standard deviation of the training numbers, from their
    mean; `predictions` are in the numbers' own unit.
    """

    monitor = "val/mae"
    monitor_mode = "min"
    answers = {"prediction": np.float32}

    @property
    def description(self) -> str:
        return f"target {self.names[0]} (mean {self.mean:.4g})"

    def loss(
        self, logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> Tensor:
        return F.mse_loss(logits, (targets - self.mean) / self.std)

    def predictions(self, logits: Tensor) -> Tensor:
        return logits * self.std + self.mean

    def prediction(self, row: Tensor) -> Number:
        return Number(float(row))

    def evaluated_columns(self, samples: Evaluated) -> tuple[list[str], list[list[Any]]]:
        numbers = (samples.labels[:, 0].tolist(), samples.predictions[:, 0].tolist())
        columns: list[list[Any]] = [[f"{number:.7g}" for number in column] for column in numbers]
        name = "label" if self.names[0] == "prediction" else self.names[0]
        return [name, "prediction"], columns

    def save_reports(self, folder: Path, prefix: str, samples: Evaluated) -> None:
        predicted = samples.predictions[:, 0].cpu()
        truth = samples.labels[:, 0].cpu()
        with replacing(folder / f"{prefix}predicted.png") as partial:
            draw_numbers(predicted, truth, self.names[0], partial)

    def divergence(self, logits1: Tensor, logits2: Tensor) -> Tensor:
        """Squared difference."""
        return F.mse_loss(logits1, logits2)

    def metrics(self) -> dict[str, Metric]:
        """Mean absolute error, root of the mean squared error, coefficient of determination."""
        return {
            "mae": MeanAbsoluteError(),
            "rmse": MeanSquaredError(squared=False),
            "r2": R2(self.mean, self.std),
            "samples": EvaluatedSamples(),
        }

    def weights(self, given: ClassWeights, labels: Tensor | None) -> Tensor | None:
        """None; `UsageError` if weights are given."""
        if given is not None:
            raise UsageError(
                "--model.class_weights is for classes, not for regression: leave it out"
            )
        return None

    def check_top_k(self, top_k: int) -> None:
        """Raises `UsageError`."""
        raise UsageError(
            f"--top_k {top_k} is for classes, and the model predicts a number: leave it out"
        )


def external_targets(problem_type: str) -> dict[str, Any]:
    """Metadata of the targets of an external model, whose numbers are in their own unit."""
    return {"problem_type": problem_type, "target_mean": 0.0, "target_std": 1.0}


PROBLEMS: dict[str, type[Problem]] = {
    "single_label_classification": SingleLabel,
    "multi_label_classification": MultiLabel,
    "regression": Regression,
}
