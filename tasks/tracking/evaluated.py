"""What an evaluation of a classifier keeps of its samples: probabilities, and pooled vectors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

MAX_VECTORS = 2000  # in embeddings.png
Score = Callable[[Tensor, Tensor], Tensor]  # of probabilities (S, K) and labels (S,)


class Evaluated(NamedTuple):
    """Position (S,) in the data, predictions and targets of each sample.

    Args:
        indices: (S,).
        probabilities: (S, K), or the numbers that were predicted.
        labels: (S,) classes, or (S, K).
    """

    indices: Tensor
    probabilities: Tensor
    labels: Tensor


class EvaluatedSamples(Metric):
    """Probabilities and labels of all samples, and scores that need all of them at once.

    Args:
        scores: By the name that is logged, such as {"ece": calibration_error}.

    Attributes:
        found: Samples of the last `compute`, of all processes, in the order of the data.
    """

    full_state_update = False

    def __init__(self, scores: Mapping[str, Score] = {}) -> None:
        super().__init__()
        self.scores = dict(scores)
        self.names = tuple(scores)
        self.found: Evaluated | None = None
        for name in Evaluated._fields:
            self.add_state(name, [], dist_reduce_fx="cat")

    def reset(self) -> None:
        super().reset()
        self.found = None

    def update(self, probabilities: Tensor, labels: Tensor, index: Tensor) -> None:
        for name, values in zip(Evaluated._fields, (index, probabilities, labels), strict=True):
            getattr(self, name).append(values)

    def compute(self) -> dict[str, Tensor]:
        parts: list[Tensor] = [dim_zero_cat(getattr(self, name)) for name in Evaluated._fields]
        order = parts[0].argsort()
        self.found = Evaluated(*(part[order] for part in parts))
        for name, values in self.found._asdict().items():
            setattr(self, name, [values])  # frees the batches
        return {
            name: score(self.found.probabilities, self.found.labels)
            for name, score in self.scores.items()
        }


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
            labels: (B,).
            size: Of the split.
            limit: Samples to keep of the whole split.
        """
        kept = index * limit % size < limit  # (B,), `limit` of all samples, evenly spread
        self.vectors.append(self.latest[kept].float().cpu())
        self.labels.append(labels[kept].cpu())
