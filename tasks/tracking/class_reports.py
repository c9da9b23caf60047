"""Tables of how an evaluation went class by class."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_average_precision

from tasks.tracking.evaluated import Evaluated

LISTED_PAIRS = 50  # of classes, in confused.csv
REPORT = ("class", "precision", "recall", "f1", "support")
LABEL_REPORT = ("label", "precision", "recall", "f1", "average_precision", "support")
CONFUSED = ("class", "predicted", "count")
MACRO_AVERAGE = "macro avg"  # the last row, named as in scikit-learn's classification_report
THRESHOLD = 0.5  # of the probability above which a label is predicted, as in torchmetrics


def is_predicted(probabilities: Tensor) -> Tensor:
    """Which labels are predicted: bool, in the shape of the probabilities."""
    return probabilities > THRESHOLD


def class_report(counts: Tensor, names: Sequence[str]) -> list[list[Any]]:
    """The columns of report.csv from a confusion matrix (K, K), true class by predicted class.

    Precision, recall, F1 and support of each class, 0 without any samples. The last row has the
    means over the classes that occur, as a true or a predicted one, and all samples.
    """
    support = counts.sum(1)  # (K,)
    predicted = counts.sum(0)  # (K,)
    scores = precision_recall_f1(counts.diagonal(), predicted, support)
    return with_average(names, scores, support, support + predicted > 0)


def with_average(
    names: Sequence[str], scores: Sequence[Tensor], support: Tensor, counted: Tensor
) -> list[list[Any]]:
    """The columns of a report of K classes, and a last row.

    It has the means of the scores, (K,) each, over the classes that are `counted`, (K,) bool, and
    the sum of the support (K,).
    """
    averaged = [[*score.tolist(), float(score[counted].mean())] for score in scores]
    return [[*names, MACRO_AVERAGE], *averaged, [*support.tolist(), int(support.sum())]]


def precision_recall_f1(
    correct: Tensor, predicted: Tensor, support: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of K classes, float64 (K,) each, from counts (K,); 0 if the divisor is 0.

    Precision: correct among those predicted; recall: correct among those of the class; F1: their
    harmonic mean.
    """
    precision = correct.double() / predicted.clamp(min=1)
    recall = correct.double() / support.clamp(min=1)
    return precision, recall, 2 * precision * recall / (precision + recall).clamp(min=1e-12)


def most_confused(counts: Tensor, names: Sequence[str]) -> list[list[Any]]:
    """The columns of confused.csv: the classes that a confusion matrix (K, K) mixes up most."""
    wrong = counts - counts.diagonal().diag()
    order = wrong.flatten().argsort(descending=True, stable=True)[:LISTED_PAIRS]
    pairs = [divmod(index, len(names)) for index in order.tolist()]
    found = [(true, predicted) for true, predicted in pairs if wrong[true, predicted] > 0]
    return [
        [names[true] for true, _ in found],
        [names[predicted] for _, predicted in found],
        [int(wrong[pair]) for pair in found],
    ]


def confusion_counts(samples: Evaluated) -> Tensor:
    """(K, K) int64: samples of each true class by predicted class."""
    classes = samples.predictions.shape[1]
    pairs = samples.labels * classes + samples.predictions.argmax(-1)  # (S,)
    return pairs.bincount(minlength=classes**2).reshape(classes, classes).cpu()


def label_report(samples: Evaluated, names: Sequence[str]) -> list[list[Any]]:
    """The columns of report.csv for several labels per sample.

    Precision, recall, F1, average precision and support of each label, 0 without any samples. The
    last row has their means, and the sum of the support.
    """
    truth = samples.labels.bool()  # (S, K)
    predicted = is_predicted(samples.predictions)  # (S, K)
    support = truth.sum(0)  # (K,)
    scores = precision_recall_f1((truth & predicted).sum(0), predicted.sum(0), support)
    ranked = torch.zeros(len(names))
    for label in support.nonzero().flatten().tolist():  # torchmetrics warns of the others
        probabilities = samples.predictions[:, label]
        ranked[label] = binary_average_precision(probabilities, truth[:, label].long())
    return with_average(
        names, (*scores, ranked), support, torch.ones_like(support, dtype=torch.bool)
    )
