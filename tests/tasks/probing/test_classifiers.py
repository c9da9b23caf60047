"""Linear probe and k-nearest neighbours against scikit-learn's."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from tasks.probing.classifiers import (
    STRENGTHS,
    Labelled,
    accuracy,
    fit_linear,
    knn_probabilities,
    probe,
)

CLASSES = 5


def samples(count: int, seed: int, noise: float = 2.0) -> Labelled:
    """Clouds around a centre for each class, of features on unequal scales."""
    centres = torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    features = centres[labels] + noise * torch.randn(count, 12, generator=draw)
    return Labelled(features * torch.logspace(-1, 1, 12) + 3, labels)


TRAIN, VAL, TEST = samples(400, 1), samples(200, 2), samples(1500, 3)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (50, 0.5)])
def test_neighbours_vote_as_in_scikit_learn(k: int, temperature: float) -> None:
    theirs = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(TRAIN.features.double().numpy(), TRAIN.labels.numpy())
    train = Labelled(TRAIN.features.double(), TRAIN.labels)
    found = knn_probabilities(TEST.features.double(), train, CLASSES, k, temperature)
    expected = theirs.predict_proba(TEST.features.double().numpy())
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_at_a_low_temperature_the_nearest_sample_decides() -> None:
    one = knn_probabilities(TEST.features, TRAIN, CLASSES, k=1)
    found = knn_probabilities(TEST.features, TRAIN, CLASSES, k=20, temperature=1e-6)
    assert torch.equal(found.argmax(1), one.argmax(1))


@pytest.mark.parametrize("strength", [1.0, 0.01, 1e-4])
def test_the_linear_probe_is_scikit_learns_logistic_regression(strength: float) -> None:
    scaler = StandardScaler().fit(TRAIN.features.numpy())
    theirs = LogisticRegression(C=1 / (strength * len(TRAIN.labels)), max_iter=2000, tol=1e-8)
    theirs.fit(scaler.transform(TRAIN.features.numpy()), TRAIN.labels.numpy())
    ours = fit_linear(TRAIN, CLASSES, strength)
    np.testing.assert_allclose(ours.weight.numpy(), theirs.coef_, atol=5e-3)
    expected = theirs.score(scaler.transform(TEST.features.numpy()), TEST.labels.numpy())
    assert accuracy(ours(TEST.features), TEST.labels) == pytest.approx(expected, abs=0.002)


def test_the_strength_is_the_best_on_the_validation_samples() -> None:
    train = Labelled(TRAIN.features[:40], TRAIN.labels[:40])  # few, so that it matters
    linear, neighbours = probe(train, VAL, TEST, CLASSES)
    alone = {
        strength: accuracy(fit_linear(train, CLASSES, strength)(VAL.features), VAL.labels)
        for strength in STRENGTHS
    }
    assert linear.settings["l2"] == max(alone, key=lambda strength: alone[strength])
    assert linear.val == pytest.approx(max(alone.values()), abs=0.006)
    found = knn_probabilities(TEST.features, train, CLASSES)
    assert neighbours.test == accuracy(found, TEST.labels)


def test_features_that_never_vary_and_few_samples_are_fine() -> None:
    features = torch.cat([TRAIN.features[:8], torch.ones(8, 1)], 1)
    train = Labelled(features, TRAIN.labels[:8])
    linear, neighbours = probe(train, train, train, CLASSES)
    assert linear.test == 1 and neighbours.settings["k"] == 8
    assert neighbours.test > 0.5
