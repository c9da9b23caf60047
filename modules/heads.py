"""Output layers: vectors to scores of classes or tokens."""

from collections.abc import Callable

from torch import Tensor, nn

from modules.embedding import TokenEmbedding
from modules.linear import Linear, linear


class ClassifierHead(nn.Module):
    """linear(dropout(norm(x))): (B, E) -> (B, classes).

    Args:
        width: Size E of the vectors.
        classes: Number of classes.
        norm: Makes a norm for the vectors; None: no norm.
        dropout: Probability of dropping values.
    """

    def __init__(
        self, width: int, classes: int, norm: Callable[[int], nn.Module] | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm = norm(width) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.linear = Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, E) -> (B, classes), logits."""
        return self.linear(self.dropout(self.norm(x)))


class TokenHead(nn.Module):
    """Scores of all tokens by the embedding's own table (weight tying, Press 2017): (..., E) -> (..., V).

    Args:
        embedding: The table that is shared.
        bias: A learned bias per token.
    """

    def __init__(self, embedding: TokenEmbedding, bias: bool = False) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.bias = nn.Parameter(self.weight.new_zeros(len(self.weight))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., V), logits."""
        return linear(x, self.weight, self.bias)
