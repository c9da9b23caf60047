"""Output layers of language models: vectors to scores of tokens."""

from collections.abc import Callable

from torch import Tensor, nn

from modules.embedding import TokenEmbedding
from modules.kernels.linear import Linear, linear


class TokenHead(nn.Module):
    """Scores of all tokens by the embedding's own table (weight tying, Press 2017).

    (..., E) -> (..., V).

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
