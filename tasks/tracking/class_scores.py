"""Scores of probabilities of K classes (S, K) against labels (S,): ROC curves and calibration."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tasks.tracking.report import MANY_CLASSES

BINS = 15  # of confidence (Guo 2017)
WORST_CLASSES = 5  # whose curves are kept if there are many classes
MACRO_POINTS = 1001  # false positive rates at which curves are averaged


class RocCurve(NamedTuple):
    """Rates from 0 to 1 (N,) at falling thresholds, and the area under the curve."""

    name: str
    false_positive_rate: Tensor
    true_positive_rate: Tensor
    auc: float


class CalibrationBins(NamedTuple):
    """Samples by the probability of their predicted class, in equally wide bins.

    Of several labels per sample, each label of each sample counts, by its probability.

    Args:
        counts: Samples, (BINS,).
        confidence: Their mean probability of the predicted class, (BINS,); 0 in an empty bin.
        accuracy: The fraction of correct ones, or of labels that are 1, (BINS,); 0 in an empty bin.
    """

    counts: Tensor
    confidence: Tensor
    accuracy: Tensor


def roc_curve(name: str, scores: Tensor, positive: Tensor) -> RocCurve | None:
    """The curve of scores (S,) for a class, `positive` (S,); None without both kinds of samples."""
    from torchmetrics.functional.classification import binary_roc

    if positive.all() or not positive.any():
        return None
    rates = binary_roc(scores, positive.long(), validate_args=False)[:2]
    false_rate, true_rate = (rate.double() for rate in rates)
    return RocCurve(name, false_rate, true_rate, float(torch.trapezoid(true_rate, false_rate)))


def roc_curves(probabilities: Tensor, labels: Tensor, names: Sequence[str]) -> list[RocCurve]:
    """Curves of classes, each against the rest, without those that have no samples.

    Two classes have one curve, that of the second. More have the macro average, too, which comes
    first; of many, only the worst classes are kept.

    Args:
        probabilities: (S, K).
        labels: (S,), or for several labels per sample 0 or 1, (S, K), each with a curve.
        names: Of the K classes.
    """
    import numpy

    if labels.ndim == 2:
        numbers = range(len(names))
        positive = labels.bool()  # (S, K)
    else:
        numbers = range(1, 2) if len(names) == 2 else range(len(names))
        positive = labels[:, None] == torch.arange(len(names))  # (S, 1), (K,) -> (S, K)
    limit = WORST_CLASSES if len(names) > MANY_CLASSES else len(names)
    grid = torch.linspace(0, 1, MACRO_POINTS, dtype=torch.float64)
    total = torch.zeros_like(grid)
    areas = []
    curves: list[RocCurve] = []
    for number in numbers:
        curve = roc_curve(names[number], probabilities[:, number], positive[:, number])
        if curve is None:
            continue
        areas.append(curve.auc)
        heights = numpy.interp(grid, curve.false_positive_rate, curve.true_positive_rate)
        total += torch.from_numpy(heights)
        curves.append(curve)
        if len(curves) > limit:
            curves = sorted(curves, key=lambda curve: curve.auc)[:limit]
    if len(areas) < 2:
        return curves
    mean = sum(areas) / len(areas)
    return [RocCurve("macro average", grid, total / len(areas), mean), *curves]


def calibration_bins(probabilities: Tensor, labels: Tensor) -> CalibrationBins:
    """Bins of the reliability diagram (Guo 2017).

    Args:
        probabilities: (S, K).
        labels: (S,), or for several labels per sample 0 or 1, (S, K).
    """
    if labels.ndim == 2:
        confidence = probabilities.flatten()  # (S, K) -> (S K,), S in what follows
        correct = labels.flatten()  # likewise
    else:
        confidence, predicted = probabilities.max(-1)  # (S,), (S,)
        correct = predicted == labels
    confidence, correct = confidence.cpu().double(), correct.cpu().double()
    edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
    bins = torch.bucketize(confidence, edges)  # (S,)
    counts = bins.bincount(minlength=BINS).double()  # (BINS,)
    filled = counts.clamp(min=1)
    sums = [bins.bincount(values, BINS) for values in (confidence, correct)]  # (BINS,) each
    return CalibrationBins(counts, sums[0] / filled, sums[1] / filled)


def calibration_error(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Expected calibration error (Guo 2017), (); the arguments are those of `calibration_bins`."""
    bins = calibration_bins(probabilities, labels)
    gaps = (bins.accuracy - bins.confidence).abs()  # (BINS,)
    return (bins.counts * gaps).sum() / bins.counts.sum().clamp(min=1)
