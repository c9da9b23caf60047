"""What an evaluation of a classifier keeps of its samples: predictions, and pooled vectors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

MAX_VECTORS = 2000  # in embeddings.png
SampleScore = Callable[[Tensor, Tensor], Tensor]  # of predictions (S, K) and labels


class Evaluated(NamedTuple):
    """Predictions, targets and positions of S samples.

    Args:
        predictions: Probabilities, or numbers, (S, K).
        labels: Classes (S,), or labels or numbers (S, K).
        indices: Positions in the data, (S,).
    """

    predictions: Tensor
    labels: Tensor
    indices: Tensor


class EvaluatedSamples(Metric):
    """Predictions and labels of all samples, and scores that need all of them at once.

    Args:
        scores: By the name that is logged, such as {"ece": calibration_error}.

    Attributes:
        found: Samples of the last `compute`, of all processes, in the order of the data.
    """

    full_state_update = False
    predictions: list[Tensor]
    labels: list[Tensor]
    indices: list[Tensor]

    def __init__(self, scores: Mapping[str, SampleScore] = {}) -> None:
        super().__init__()
        self.scores = dict(scores)
        self.names = tuple(scores)
        self.found: Evaluated | None = None
        self.add_state("predictions", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")
        self.add_state("indices", [], dist_reduce_fx="cat")

    def reset(self) -> None:
        super().reset()
        self.found = None

    def update(self, predictions: Tensor, labels: Tensor, index: Tensor | None = None) -> None:
        """Adds a batch; `index` (B,) are the positions in the data, by default the next ones."""
        if index is None:
            start = sum(map(len, self.indices))
            index = torch.arange(start, start + len(labels), device=labels.device)
        self.predictions.append(predictions)
        self.labels.append(labels)
        self.indices.append(index)

    def compute(self) -> dict[str, Tensor]:
        indices = dim_zero_cat(self.indices)
        order = indices.argsort()
        predictions = dim_zero_cat(self.predictions)[order]
        labels = dim_zero_cat(self.labels)[order]
        self.found = Evaluated(predictions, labels, indices[order])
        # This frees the batches.
        self.predictions, self.labels, self.indices = ([values] for values in self.found)
        return {name: score(predictions, labels) for name, score in self.scores.items()}


class PooledVectors:
    """Vectors that a network pools, of at most about 2,000 samples from all over a split.

    They are the outputs of a module, seen by a forward hook, so that they cost no second pass.
    """

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.latest = torch.empty(0)
        self.reset()

    def reset(self) -> None:
        self.vectors: list[Tensor] = []
        self.labels: list[Tensor] = []

    def watch(self, module: nn.Module) -> None:
        """Sees the outputs (B, E) of a module, if it is evaluated."""
        if self.module is None:  # torch.compile does not see hooks that are added later
            self.module = module
            module.register_forward_hook(self._keep_latest)

    def _keep_latest(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if not module.training:
            self.latest = output

    def add(self, index: Tensor, labels: Tensor, size: int, limit: int = MAX_VECTORS) -> None:
        """Keeps vectors of the batch that was evaluated last.

        Args:
            index: (B,), the samples' positions in the split.
            labels: (B,) or (B, K).
            size: Of the split.
            limit: Samples to keep of the whole split.
        """
        kept = index * limit % size < limit  # (B,), `limit` of all samples, evenly spread
        self.vectors.append(self.latest[kept].float().cpu())
        self.labels.append(labels[kept].cpu())
