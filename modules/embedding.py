"""From token numbers to vectors."""

import math

from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """Token numbers to vectors, with `scale` times sqrt(E) (Vaswani 2017).

    The vector of the `padding` token stays zero.
    """

    def __init__(
        self, vocabulary: int, width: int, scale: bool = False, padding: int | None = None
    ) -> None:
        super().__init__(vocabulary, width, padding_idx=padding)
        self.scale = math.sqrt(width) if scale else 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) integers -> (B, N, E)."""
        vectors = super().forward(tokens)
        return vectors if self.scale == 1.0 else vectors * self.scale
