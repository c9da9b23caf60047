"""Problem types of classifiers: losses, weights and metrics, against torch and scikit-learn."""

import time

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    root_mean_squared_error,
)
from sklearn.utils.class_weight import compute_class_weight
from torch.distributions import Bernoulli, Categorical, kl_divergence
from torch.nn import functional as F

from tasks.errors import UsageError
from tasks.problems import PROBLEMS, MultiLabel, Problem, Regression, SingleLabel
from tasks.tracking.class_reports import label_report
from tasks.tracking.csv_files import unique_names
from tasks.tracking.evaluated import Evaluated

LABELS = torch.tensor([0, 0, 0, 0, 1, 2, 2, 0])


def problem(kind: str, names: tuple[str, ...] = ("a", "b", "c")) -> Problem:
    return PROBLEMS[kind]({"class_names": names, "target_mean": 40.0, "target_std": 5.0})


SINGLE, MULTI, NUMBER = map(problem, PROBLEMS)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS.numpy())
    weights = SINGLE.weights("balanced", LABELS)
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor(expected).float())
    assert float(weights[LABELS].mean()) == pytest.approx(1.0)
    several = F.one_hot(LABELS, 3).float()
    found = MULTI.weights("balanced", several)
    torch.testing.assert_close(found, torch.tensor([3 / 5, 7 / 1, 6 / 2]))
    assert SINGLE.weights(None, LABELS) is None


def test_weighted_loss_is_the_mean_over_samples() -> None:
    logits = torch.randn(8, 3)
    weights = torch.tensor([0.5, 2.0, 4.0])
    each = F.cross_entropy(logits, LABELS, reduction="none")
    expected = (each * weights[LABELS]).mean()
    torch.testing.assert_close(SINGLE.loss(logits, LABELS, weights=weights), expected)
    # Two micro-batches have the same mean as the whole batch.
    parts = [SINGLE.loss(logits[i : i + 4], LABELS[i : i + 4], weights=weights) for i in (0, 4)]
    torch.testing.assert_close(sum(parts) / 2, expected)
    # Dense targets, as mixup makes them, have the same loss.
    torch.testing.assert_close(SINGLE.loss(logits, SINGLE.dense(LABELS), weights=weights), expected)


def test_label_smoothing_of_several_labels() -> None:
    logits = torch.randn(8, 3)
    targets = F.one_hot(LABELS, 3).float()
    smooth = torch.where(targets == 1, 0.95, 0.05)
    expected = F.binary_cross_entropy(logits.sigmoid(), smooth)
    torch.testing.assert_close(MULTI.loss(logits, targets, smoothing=0.1), expected)


def test_numbers_are_standardised() -> None:
    targets = torch.tensor([[40.0], [45.0], [30.0]])
    logits = torch.tensor([[0.0], [1.0], [-2.0]])
    assert float(NUMBER.loss(logits, targets)) == 0
    torch.testing.assert_close(NUMBER.predictions(logits), targets)
    assert float(NUMBER.loss(logits + 1, targets)) == pytest.approx(1.0)


def test_divergences_are_means_of_both_directions() -> None:
    one, two = torch.randn(2, 4, 3)
    categorical = Categorical(logits=one), Categorical(logits=two)
    bernoulli = Bernoulli(logits=one), Bernoulli(logits=two)
    both = [kl_divergence(p, q).mean() for p, q in (categorical, categorical[::-1])]
    torch.testing.assert_close(SINGLE.divergence(one, two), sum(both) / 2)
    both = [kl_divergence(p, q).sum(-1).mean() for p, q in (bernoulli, bernoulli[::-1])]
    torch.testing.assert_close(MULTI.divergence(one, two), sum(both) / 2)
    assert float(NUMBER.divergence(one, one + 2)) == pytest.approx(4.0)


def computed(kind: Problem, logits: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The metrics after two batches."""
    metrics = kind.metrics()
    del metrics["samples"]
    for metric in metrics.values():
        for some in (slice(0, 5), slice(5, None)):
            metric.update(kind.predictions(logits[some]), kind.metric_targets(targets[some]))
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def test_metrics_equal_those_of_scikit_learn() -> None:
    logits = torch.randn(40, 3)
    several = (torch.rand(40, 3) < 0.4).float()
    assert isinstance(MULTI, MultiLabel) and isinstance(NUMBER, Regression)
    found = computed(MULTI, logits, several)
    guess = logits > 0
    assert found["map"] == pytest.approx(average_precision_score(several, logits, average="macro"))
    assert found["f1"] == pytest.approx(f1_score(several, guess, average="macro"))
    assert found["exact_match"] == pytest.approx(float((guess == several).all(1).float().mean()))

    numbers = 40 + 5 * torch.randn(40, 1)
    guess = NUMBER.predictions(logits[:, :1])
    found = computed(NUMBER, logits[:, :1], numbers)
    assert found["mae"] == pytest.approx(mean_absolute_error(numbers, guess), rel=1e-5)
    assert found["rmse"] == pytest.approx(root_mean_squared_error(numbers, guess), rel=1e-5)
    assert found["r2"] == pytest.approx(r2_score(numbers, guess), rel=1e-4)


def test_labels_at_the_threshold_are_those_of_the_metrics() -> None:
    """A probability of exactly 0.5 predicts nothing, in answers, tables and torchmetrics."""
    logits = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0]])
    truth = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = computed(MULTI, logits.repeat(5, 1), truth.repeat(5, 1))
    assert found["exact_match"] == 1
    probabilities = MULTI.predictions(logits)
    answers = [MULTI.prediction(row).answer()["labels"] for row in probabilities]
    samples = Evaluated(probabilities, truth, torch.arange(2))
    _, columns = MULTI.evaluated_columns(samples)
    assert answers == columns[0] == columns[1] == ["b", "a"]
    _, precision, recall, *_ = label_report(samples, MULTI.names)
    assert precision == recall == [1, 1, 0, pytest.approx(2 / 3)]


def test_heads_of_many_classes_are_made_at_once() -> None:
    names = [f"class {number}" for number in range(20_000)]
    heads = ["class 7", *names]
    start = time.process_time()
    found = unique_names(heads)
    assert time.process_time() - start < 1
    assert len(set(found)) == 20_001 and found[8] == "probability_class 7"


@pytest.mark.parametrize("mean, std", [(20_000, 3), (737_000, 300), (0.01, 0.003), (8e-8, 4e-8)])
def test_r2_of_large_and_small_numbers(mean: float, std: float) -> None:
    numbers = mean + std * torch.randn(40, 1)
    guess = numbers + std / 3 * torch.randn(40, 1)
    metadata = {"class_names": ["n"], "target_mean": mean, "target_std": std}
    metric = Regression(metadata).metrics()["r2"]
    metric.to(torch.float64)  # as in validation
    for rows in range(0, 40, 8):
        metric.update(guess[rows : rows + 8], numbers[rows : rows + 8])
    assert float(metric.compute()) == pytest.approx(r2_score(numbers, guess), rel=1e-4)
    shown = NUMBER.prediction(torch.tensor([mean]))
    assert float(shown.line()) == pytest.approx(mean, rel=1e-5)
    assert shown.entry()["prediction"] == pytest.approx(mean, rel=1e-6)


def test_r2_of_numbers_that_are_close_for_the_training() -> None:
    """Sums of small squares are not taken for 0."""
    metric = Regression({"class_names": ["n"], "target_mean": 0, "target_std": 1e5}).metrics()["r2"]
    guess, numbers = torch.tensor([[4.0], [3.0], [2.0], [1.0]]), torch.arange(1.0, 5)[:, None]
    metric.update(guess, numbers)
    assert float(metric.compute()) == pytest.approx(r2_score(numbers, guess), rel=1e-4)
    for same in (1.0, 1234.567, 1e5):
        metric = Regression({"class_names": ["n"], "target_mean": 1111.1, "target_std": 370.4})
        constant = metric.metrics()["r2"]
        constant.update(torch.randn(100, 1), torch.full((100, 1), same))
        assert constant.compute().isnan()


def test_class_weights_leave_the_best_output_as_it_is() -> None:
    """For any weights, a sample of a certain class is best predicted by its smoothed target."""
    weights = torch.tensor([0.5, 20.0, 1.0])
    one = torch.eye(3)
    best = {SINGLE: (one * 0.9 + 0.1 / 3).log(), MULTI: (one * 0.9 + 0.05).logit()}
    for kind, logits in best.items():
        logits.requires_grad_()
        kind.loss(logits, one, 0.1, weights).backward()
        assert logits.grad is not None and logits.grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", [SINGLE, MULTI])
def test_weighted_losses_without_smoothing_are_those_of_torch(kind: Problem) -> None:
    logits = torch.randn(5, 3)
    mixed = torch.rand(5, 3)
    mixed = mixed / mixed.sum(1, keepdim=True)
    weights = torch.tensor([0.5, 20.0, 1.0])
    if kind is SINGLE:
        expected = F.cross_entropy(logits, mixed, weights, reduction="none").mean()
    else:
        expected = F.binary_cross_entropy_with_logits(logits, mixed, pos_weight=weights)
    torch.testing.assert_close(kind.loss(logits, mixed, 0.0, weights), expected)


def test_a_single_number_has_no_r2() -> None:
    metric = NUMBER.metrics()["r2"]
    metric.update(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    assert torch.isnan(metric.compute())


@pytest.mark.parametrize(
    "given", [[1.0, 2.0], [1.0, -1.0, 1.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 1.0]]
)
def test_weights_that_do_not_fit_are_refused(given: list[float]) -> None:
    assert isinstance(SINGLE, SingleLabel)
    with pytest.raises(UsageError, match=r"class_weights .* a, b, c"):
        SINGLE.weights(given, LABELS)
    with pytest.raises(UsageError, match="regression"):
        NUMBER.weights(given, LABELS)


def test_weights_by_name() -> None:
    found = SINGLE.weights({"c": 3.0, "a": 0.5}, None)
    assert found is not None and found.tolist() == [0.5, 1, 3]
    with pytest.raises(UsageError, match="weight for d, .* a, b, c"):
        SINGLE.weights({"a": 1.0, "d": 2.0}, None)
    with pytest.raises(UsageError, match="class_weights"):
        SINGLE.weights({"a": -1.0}, None)


@pytest.mark.parametrize("name, expected", [("age", "age"), ("prediction", "label")])
def test_numbers_of_any_name_are_no_predictions(name: str, expected: str) -> None:
    samples = Evaluated(torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([0]))
    names, columns = problem("regression", (name,)).evaluated_columns(samples)
    assert names == [expected, "prediction"] and columns == [["2"], ["1"]]
