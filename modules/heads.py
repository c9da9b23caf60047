"""Output layers: vectors to scores of classes or tokens."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from modules.embedding import TokenEmbedding
from modules.kernels.cross_entropy import chunked_cross_entropy
from modules.kernels.dropout import Dropout
from modules.kernels.linear import Linear, linear
from modules.kernels.upcast import upcast


class ClassifierHead(nn.Module):
    """linear(dropout(norm(x))): (B, E) -> (B, classes).

    Args:
        width: Size E of the vectors.
        classes: Number of classes.
        norm: Makes a norm for the vectors; None: no norm.
        dropout: Probability of dropping values.
    """

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
    """activation(dense(dropout(x))), a layer of its own between pooled vector and classifier: (B, E) -> (B, E).

    With tanh as in BERT (Devlin 2019) and RoBERTa (Liu 2019), with ReLU as in DistilBERT (Sanh 2019).

    Args:
        width: Size E of the vectors.
        dropout: Probability of dropping values.
        activation: Makes the non-linearity.
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


class TokenHead(nn.Module):
    """Scores of all tokens by the embedding's own table (weight tying, Press 2017): (..., E) -> (..., V).

    Args:
        embedding: The table that is shared.
        bias: A learned bias per token.
    """

    def __init__(self, embedding: TokenEmbedding, bias: bool = False) -> None:
        super().__init__()
        self.shared = (embedding,)  # no submodule, so that a file holds the table once
        self.bias = (
            nn.Parameter(embedding.weight.new_zeros(embedding.num_embeddings)) if bias else None
        )

    @property
    def weight(self) -> Tensor:
        """The table, (V, E)."""
        return self.shared[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., V), logits."""
        return linear(x, self.weight, self.bias)

    def loss(
        self, x: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy, and number of correct predictions. Never holds all logits.

        Args:
            x: Vectors (..., E).
            targets: Tokens (...); -100 does not count.
            smoothing: Label smoothing (Szegedy 2016).
            z_loss: Weight of the mean squared logarithm of the softmax's denominator
                (Chowdhery 2022).
        """
        rows = x.flatten(0, -2)  # (..., E) -> (S, E)
        return chunked_cross_entropy(
            rows, self.weight, self.bias, targets.flatten(), smoothing, z_loss=z_loss
        )


class MaskedLMHead(nn.Module):
    """tokens(norm(activation(dense(x)))): (S, E) -> (S, V) (Devlin 2019).

    Args:
        embedding: The table that gives the scores.
        norm: Makes a norm for the vectors.
        activation: Makes the non-linearity.
        bias: A bias in the dense layer; each token has one in any case.
    """

    def __init__(
        self,
        embedding: TokenEmbedding,
        norm: Callable[[int], nn.Module],
        activation: Callable[[], nn.Module],
        bias: bool = True,
    ) -> None:
        super().__init__()
        width = embedding.embedding_dim
        self.dense = Linear(width, width, bias=bias)
        self.activation = activation()
        self.norm = norm(width)
        self.tokens = TokenHead(embedding, bias=True)

    def vectors(self, x: Tensor) -> Tensor:
        """(S, E) -> (S, E), what meets the table."""
        return self.norm(self.activation(self.dense(x)))

    def forward(self, x: Tensor) -> Tensor:
        """(S, E) -> (S, V), logits."""
        return self.tokens(self.vectors(x))
