"""Output layers of classifiers: vectors to scores of classes."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from modules.kernels.dropout import Dropout
from modules.kernels.linear import Linear
from modules.kernels.upcast import upcast


class ClassifierHead(nn.Module):
    """linear(dropout(norm(x))): (B, E) -> (B, classes), without the norm if it is None."""

    def __init__(
        self,
        width: int,
        classes: int,
        norm: Callable[[int], nn.Module] | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = norm(width) if norm else nn.Identity()
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.linear = Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, E) -> (B, classes), logits, in float32 at least."""
        return upcast(self.linear(self.dropout(self.norm(x))))


class Pooler(nn.Module):
    """activation(dense(dropout(x))), between pooled vector and classifier: (B, E) -> (B, E).

    With tanh in BERT (Devlin 2019) and RoBERTa (Liu 2019), with ReLU in DistilBERT (Sanh 2019).
    """

    def __init__(
        self, width: int, dropout: float = 0.0, activation: Callable[[], nn.Module] = nn.Tanh
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.dense = Linear(width, width)
        self.activation = activation()

    def forward(self, x: Tensor) -> Tensor:
        """(B, E) -> (B, E)."""
        return self.activation(self.dense(self.dropout(x)))


POOLERS: dict[str, Callable[[int, float], nn.Module]] = {
    "none": nn.Identity,
    "tanh": Pooler,
    "relu": partial(Pooler, activation=nn.ReLU),
}


class PixelHead(Linear):
    """The last layer of a masked autoencoder, to the pixels of a patch: (..., E) -> (..., C P P).

    A class of its own, so that the optimizer knows an output layer.
    """
