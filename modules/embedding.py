"""From token ids to vectors."""

import math

import torch
from torch import Tensor, nn

from modules.kernels.dropout import Dropout, dropout


class TokenEmbedding(nn.Embedding):
    """Token ids to vectors, with `scale` times sqrt(E) (Vaswani 2017).

    The vector of the token `pad_id` stays zero.
    """

    def __init__(
        self, vocabulary: int, width: int, scale: bool = False, pad_id: int | None = None
    ) -> None:
        super().__init__(vocabulary, width, padding_idx=pad_id)
        self.scale = math.sqrt(width) if scale else 1.0

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N) integers -> (B, N, E)."""
        vectors = super().forward(tokens)
        return vectors if self.scale == 1.0 else vectors * self.scale


class TokenDropout(Dropout):
    """Dropout of whole tokens: each vector becomes zero or is scaled up (Iyyer 2015)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if not self.training:
            return x
        return x * dropout(torch.ones_like(x[..., :1]), self.p)
