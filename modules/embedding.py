"""From token ids to vectors."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from modules.config import StackConfig, default
from modules.init import initialise
from modules.kernels.dropout import Dropout, dropout
from modules.kernels.linear import Linear


class TokenEmbedding(nn.Embedding):
    """Token ids to vectors, multiplied by sqrt(E) if `scale` (Vaswani 2017).

    The vector of the token `pad_id` starts at zero, and gets no gradient as an input.
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


def is_scaled(scale_embedding: bool | None, position: str) -> bool:
    """Whether a model multiplies its embeddings by sqrt(E); null: only with sinusoidal positions.

    Their values reach 1, far above those of embeddings that start with std 0.02.
    """
    return default(scale_embedding, position == "sinusoidal")


@torch.no_grad()
def initialise_table(table: TokenEmbedding, scaled: bool, stack: StackConfig) -> None:
    """Sets the initial values of a table of tokens, of the embedding or of the output layer.

    They are those of `stack.init`; in a model with `scaled` embeddings they have std 1 / sqrt(E),
    so that the vectors times sqrt(E) have std 1.
    """
    if scaled:
        table.reset_parameters()  # std 1
        table.weight.mul_(table.embedding_dim**-0.5)
    else:
        initialise(table, stack.init, stack.depth)


def embedding_stack(stack: StackConfig, embedding_width: int | None) -> StackConfig:
    """The blocks as position encodings see them: as wide as the embedding, heads unchanged."""
    if embedding_width is None:
        return stack
    return replace(stack, width=embedding_width, head_dim=stack.resolved.head_dim)


def width_change(before: int, after: int, stack: StackConfig) -> nn.Module:
    """Between an embedding and the blocks, of another width: (B, N, before) -> (B, N, after).

    A linear map, the second factor of the table (Lan 2020, section 3.1); none for equal widths.
    """
    return nn.Identity() if before == after else Linear(before, after, bias=stack.bias)


class TokenDropout(Dropout):
    """Dropout of whole tokens: each vector becomes zero or is scaled up (Iyyer 2015)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if not self.training:
            return x
        return x * dropout(torch.ones_like(x[..., :1]), self.p)
