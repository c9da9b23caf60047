"""Linear probe and k-nearest neighbours: what the features of a frozen network tell of classes."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

STRENGTHS = (
    1.0,
    0.1,
    0.01,
    1e-3,
    1e-4,
    1e-5,
    1e-6,
)  # of L2, that the probe tries
ITERATIONS = 200  # of L-BFGS for each strength, at most
QUERIES = 512  # that are compared with all neighbours at once


class Labelled(NamedTuple):
    """Features (S, E), float32, and their classes (S,), int64."""

    features: Tensor
    labels: Tensor


class Probed(NamedTuple):
    """A classifier on frozen features.

    Args:
        classifier: "linear" or "knn".
        settings: What it was trained with, by name.
        val: Accuracy on the validation samples.
        test: Accuracy on the test samples.
    """

    classifier: str
    settings: dict[str, float]
    val: float
    test: float


def probe(
    train: Labelled,
    val: Labelled,
    test: Labelled,
    classes: int,
    k: int = 20,
    temperature: float = 0.07,
) -> list[Probed]:
    """Returns the accuracy of a linear probe and of k-nearest neighbours on the same features.

    Args:
        train: What both learn from.
        val: The strength of the linear probe's L2 is the best of `STRENGTHS` on these, the
            strongest of equal ones.
        test: What counts.
        classes: Number of classes K.
        k, temperature: See `knn_probabilities`; k is at most the number of training samples.
    """
    k = min(k, len(train.labels))
    neighbours = [
        accuracy(knn_probabilities(part.features, train, classes, k, temperature), part.labels)
        for part in (val, test)
    ]
    best: Probed | None = None
    start = None
    for strength in STRENGTHS:  # each starts from the last, which is faster
        start = fit_linear(train, classes, strength, start)
        found = [accuracy(start(part.features), part.labels) for part in (val, test)]
        if best is None or found[0] > best.val:
            best = Probed("linear", {"l2": strength}, *found)
    assert best is not None
    return [best, Probed("knn", {"k": k, "temperature": temperature}, *neighbours)]


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Part of the samples whose class has the highest of the scores (S, K)."""
    return float((scores.argmax(-1) == labels).double().mean())


# k-nearest neighbours -----------------------------------------------------------------------------


def knn_probabilities(
    queries: Tensor, train: Labelled, classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Returns probabilities (Q, K) of queries (Q, E): weighted votes of the k nearest samples.

    The weight of a neighbour is exp(cosine similarity / temperature) (Wu 2018; Caron 2021, DINO).
    """
    keys = F.normalize(train.features, dim=-1)  # (S, E)
    votes = F.one_hot(train.labels, classes).float()  # (S, K)
    parts = []
    for part in F.normalize(queries, dim=-1).split(QUERIES):  # (Q, E)
        similarity, nearest = (part @ keys.T).topk(k)  # (Q, k), (Q, k)
        # Relative to the nearest, so that no temperature makes all of them 0.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()  # (Q, k), at most 1
        parts.append((weights[..., None] * votes[nearest]).sum(1))  # (Q, k, K) -> (Q, K)
    found = torch.cat(parts)
    return found / found.sum(-1, keepdim=True)


# Linear probe -------------------------------------------------------------------------------------


class Linear(NamedTuple):
    """A linear classifier of standardised features: mean and std (E,), weight (K, E), bias (K,)."""

    mean: Tensor
    std: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """(S, E) -> logits (S, K)."""
        return F.linear((features - self.mean) / self.std, self.weight, self.bias)


def fit_linear(
    train: Labelled, classes: int, strength: float, start: Linear | None = None
) -> Linear:
    """Returns multinomial logistic regression on standardised features, fitted by L-BFGS.

    It minimises mean cross-entropy + strength / 2 * |weight|^2, as scikit-learn's
    `LogisticRegression` with C = 1 / (strength * S).

    Args:
        train: Samples S.
        classes: Number of classes K.
        strength: Of L2; the bias has none.
        start: Where to begin; None: at 0.
    """
    features, labels = train
    std, mean = torch.std_mean(features, 0, correction=0)  # (E,), (E,)
    std = torch.where(std > 0, std, 1.0)
    features = (features - mean) / std
    weight = features.new_zeros(classes, features.shape[1]) if start is None else start.weight
    bias = features.new_zeros(classes) if start is None else start.bias
    weight = weight.clone().requires_grad_()
    bias = bias.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=ITERATIONS,
        tolerance_grad=1e-5,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = F.linear(features, weight, bias)  # (S, K)
        value = F.cross_entropy(logits, labels) + strength / 2 * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return Linear(mean, std, weight.detach(), bias.detach())
