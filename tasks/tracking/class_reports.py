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


def class_report(counts: Tensor, names: Sequence[str]) -> list[list[Any]]:
    """The columns of report.csv from a confusion matrix (K, K), true class by predicted class.

    Precision: correct among those predicted; recall: correct among those of the class; F1: their
    harmonic mean; support: samples of the class. Without any, they are 0.
    """
    correct = counts.diagonal().double()  # (K,)
    support = counts.sum(1)  # (K,)
    precision = correct / counts.sum(0).clamp(min=1)
    recall = correct / support.clamp(min=1)
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    return [list(names), *(column.tolist() for column in (precision, recall, f1, support))]


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
    classes = samples.probabilities.shape[1]
    pairs = samples.labels * classes + samples.probabilities.argmax(-1)  # (S,)
    return pairs.bincount(minlength=classes**2).reshape(classes, classes).cpu()


def label_report(samples: Evaluated, names: Sequence[str]) -> list[list[Any]]:
    """The columns of report.csv for several labels per sample, predicted from 0.5 on.

    Precision, recall, F1, average precision and support of each label, 0 without any.
    """
    truth = samples.labels.bool()  # (S, K)
    predicted = samples.probabilities >= 0.5  # (S, K)
    correct = (truth & predicted).sum(0).double()  # (K,)
    support = truth.sum(0)  # (K,)
    precision = correct / predicted.sum(0).clamp(min=1)
    recall = correct / support.clamp(min=1)
    f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
    ranked = torch.zeros(len(names))
    for label in support.nonzero().flatten().tolist():  # torchmetrics warns of the others
        scores = samples.probabilities[:, label]
        ranked[label] = binary_average_precision(scores, truth[:, label].long())
    columns = (precision, recall, f1, ranked, support)
    return [list(names), *(column.tolist() for column in columns)]
