"""Output layers of language models: vectors to scores of tokens, and their loss."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from modules.config import default
from modules.embedding import TokenEmbedding
from modules.kernels.cross_entropy import ChunkLoss, chunk_loss, chunked_cross_entropy
from modules.kernels.linear import Linear, linear


class TokenHead(nn.Module):
    """Scores of all tokens by the table of an embedding (weight tying, Press 2017)."""

    def __init__(self, embedding: TokenEmbedding, bias: bool = False) -> None:
        super().__init__()
        self.shared = (embedding,)  # no submodule, so that a file holds the table once
        zeros = embedding.weight.new_zeros(embedding.num_embeddings)
        self.bias = nn.Parameter(zeros) if bias else None

    @property
    def weight(self) -> Tensor:
        """The table, (V, E)."""
        return self.shared[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., V), logits."""
        return linear(x, self.weight, self.bias)


class TokenModel(nn.Module):
    """Base of models with a loss over a vocabulary."""

    compiled_chunk_loss: ChunkLoss | None = None

    def compile(self, *args: Any, **options: Any) -> None:
        """Compiles `forward` and the loss in place; arguments as in `torch.compile`."""
        super().compile(*args, **options)
        self.compiled_chunk_loss = torch.compile(chunk_loss, *args, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Without the compiled loss, as `nn.Module` leaves out its compiled `forward`."""
        state = super().__getstate__()
        state.pop("compiled_chunk_loss", None)
        return state

    def token_loss(
        self,
        head: TokenHead,
        x: Tensor,
        targets: Tensor,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """`chunked_cross_entropy` of vectors (..., E) and targets (...) with the weights of `head`.

        Only GPUs use the compiled loss: on CPUs compiled products of matrices are slower.
        """
        compiled = self.compiled_chunk_loss if x.is_cuda else None
        return chunked_cross_entropy(
            x, head.weight, head.bias, targets, smoothing, z_loss, default(compiled, chunk_loss)
        )


class NextTokenModel(TokenModel):
    """Base of models whose hidden states predict the next token."""

    head: TokenHead

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., E) -> logits (..., V) of the token that follows each."""
        return self.head(hidden)

    def loss(
        self, hidden: Tensor, targets: Tensor, smoothing: float = 0.0, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy, and number of correct predictions. Never holds all logits.

        Args:
            hidden: Vectors (B, N, E).
            targets: The tokens that follow, (B, N); -100 does not count.
            smoothing: Label smoothing.
            z_loss: Weight of the mean squared logarithm of the softmax's denominator.
        """
        return self.token_loss(self.head, hidden, targets, smoothing, z_loss)


class MaskedLMHead(nn.Module):
    """tokens(norm(activation(dense(x)))): (S, E) -> (S, V) (Devlin 2019).

    The dense layer maps vectors of size `width` to the embedding's, which may be narrower (Lan
    2020). `bias` is for this layer; each token has one in any case.
    """

    def __init__(
        self,
        embedding: TokenEmbedding,
        width: int,
        norm: Callable[[int], nn.Module],
        activation: Callable[[], nn.Module],
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.dense = Linear(width, embedding.embedding_dim, bias=bias)
        self.activation = activation()
        self.norm = norm(embedding.embedding_dim)
        self.tokens = TokenHead(embedding, bias=True)

    def transform(self, x: Tensor) -> Tensor:
        """(S, E) -> (S, embedding width), before the product with the table."""
        return self.norm(self.activation(self.dense(x)))

    def forward(self, x: Tensor) -> Tensor:
        """(S, E) -> (S, V), logits."""
        return self.tokens(self.transform(x))
