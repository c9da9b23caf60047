"""Dot-product and additive attention, and the multi-head layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.kernels.dropout import dropout as fast_dropout
from modules.kernels.linear import Linear
from modules.kernels.upcast import upcast
from modules.masks import NO_MASK, Mask
from modules.rotation import Rotation

ScoreFunction = Callable[[Tensor, Tensor], Tensor]  # (B, H, N, D), (B, H, M, D) -> (B, H, N, M)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = NO_MASK,
    dropout: float = 0.0,
    score_fn: ScoreFunction | None = None,
    on_weights: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v (Vaswani 2017, equation 1).

    Args:
        q: Queries (B, H, N, D).
        k: Keys (B, G, M, D); G divides H.
        v: Values (B, G, M, D).
        mask: Who may attend to whom; a query that may attend to nothing gives zeros.
        dropout: Probability of dropping a weight.
        score_fn: Computes the scores before softmax; None: q k^T / sqrt(D).
        on_weights: Called with the weights, (B, H, N, M), before dropout.

    Returns:
        Weighted means of the values, (B, H, N, D).
    """
    sdpa_is_slow = dropout > 0 and q.device.type == "cpu"  # its fast kernel has no dropout there
    if score_fn is None and on_weights is None and not sdpa_is_slow:
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, mask.attn_mask(q.dtype), dropout, mask.is_causal, enable_gqa=grouped
        )
        return mask.zero_masked_rows(out)
    queries_per_key = q.shape[1] // k.shape[1]
    if queries_per_key > 1:
        k = k.repeat_interleave(queries_per_key, 1)  # (B, H, M, D)
        v = v.repeat_interleave(queries_per_key, 1)  # (B, H, M, D)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT if score_fn is None else score_fn(q, k)
    weights = mask.zero_masked_rows(mask.add_to(upcast(scores)).softmax(-1))
    if on_weights is not None:
        on_weights(weights)
    return fast_dropout(weights.to(v.dtype), dropout) @ v


class AttentionCache:
    """What one attention layer keeps between forward passes; the base class keeps nothing."""

    on_weights: Callable[[Tensor], None] | None = None  # called with weights, (B, H, N, M)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values, (B, G, N, D) each -> all that are attended to, (B, G, M, D) each."""
        return k, v

    def cached_context(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of a context that was projected before, (B, G, M, D); None: none."""
        return None

    def attend(self, q: Tensor, mask: Mask, score_fn: ScoreFunction | None) -> Tensor | None:
        """Attention of queries (B, H, N, D) to what is kept; None: use `attention`."""
        return None


NO_ATTENTION_CACHE = AttentionCache()


class MultiHeadAttention(nn.Module):
    """Multi-head attention, self or cross (Vaswani 2017), with G key/value heads (Ainslie 2023).

    Args:
        width: Size E of the tokens' vectors.
        heads: Number H of heads.
        kv_heads: Number G of key/value heads; None: H.
        head_dim: Size D of a head; None: E / H.
        context_width: Size of the context's vectors in cross-attention; None: self-attention.
        qkv_bias: Biases of queries, keys and values.
        bias: A bias of the output.
        qk_norm: Makes the norms of queries and keys (Dehghani 2023).
        dropout: Probability of dropping a weight.
    """

    score_fn: ScoreFunction | None = None  # dot products
    takes_rotary = True  # whether the scores are dot products, which rotary positions need

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_width: int | None = None,
        qkv_bias: bool = True,
        bias: bool = True,
        qk_norm: Callable[[int], nn.Module] = nn.Identity,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = width // heads if head_dim is None else head_dim
        self.dropout = dropout
        self.is_cross = context_width is not None
        inner = self.heads * self.head_dim
        kv_inner = 2 * self.kv_heads * self.head_dim
        if context_width is None:
            self.qkv = Linear(width, inner + kv_inner, bias=qkv_bias)
        else:
            self.query = Linear(width, inner, bias=qkv_bias)
            self.key_value = Linear(context_width, kv_inner, bias=qkv_bias)
        self.q_norm = qk_norm(self.head_dim)
        self.k_norm = qk_norm(self.head_dim)
        self.output = Linear(inner, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask = NO_MASK,
        rotary: Rotation | None = None,
        cache: AttentionCache = NO_ATTENTION_CACHE,
    ) -> Tensor:
        """Each token's new vector is a weighted mean of values: (B, N, E) -> (B, N, E).

        Args:
            x: Becomes the queries.
            context: (B, M, context width), becomes the keys and values of cross-attention; None in
                self-attention.
            mask: Who may attend to whom.
            rotary: Rotates queries and keys; None: no rotary positions.
            cache: Keeps keys and values of earlier tokens, or of the context.
        """
        q, k, v = self.project(x, context, cache)  # (B, H, N, D), (B, G, M, D), (B, G, M, D)
        if rotary is not None:
            q = rotary(q)
            k = rotary(k)
        k, v = cache.update(k, v)
        out = cache.attend(q, mask, self.score_fn)
        if out is None:
            dropout = self.dropout if self.training else 0.0
            out = attention(q, k, v, mask, dropout, self.score_fn, cache.on_weights)
        out = out.transpose(1, 2).flatten(2)  # (B, H, N, D) -> (B, N, H D)
        return self.output(out)

    def project(
        self, x: Tensor, context: Tensor | None, cache: AttentionCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, N, D), keys and values (B, G, M, D) each; arguments as `forward`."""
        if (context is not None) != self.is_cross:
            raise ValueError(
                "Cross-attention needs a context and self-attention takes none; see context_width."
            )
        if context is None:
            kv_width = self.kv_heads * self.head_dim
            sizes = (self.heads * self.head_dim, kv_width, kv_width)
            q, k, v = self.qkv(x).split(sizes, dim=-1)  # (B, N, H D), (B, N, G D), (B, N, G D)
            q = self.q_norm(self.split_heads(q))
        else:
            q = self.q_norm(self.split_heads(self.query(x)))
            cached = cache.cached_context()
            if cached is not None:
                return q, *cached
            k, v = self.key_value(context).chunk(2, dim=-1)  # (B, M, G D) each
        return q, self.k_norm(self.split_heads(k)), self.split_heads(v)

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, heads x D) -> (B, heads, N, D), a view."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class AdditiveAttention(MultiHeadAttention):
    """Attention with scores w . tanh(q + k), one vector w per head (Bahdanau 2015).

    Arguments as `MultiHeadAttention`. Takes N x M x D memory. Rotary positions have no meaning
    here; `build_position` refuses them.
    """

    takes_rotary = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.score = nn.Parameter(torch.randn(self.heads, self.head_dim) * self.head_dim**-0.5)

    def score_fn(self, q: Tensor, k: Tensor) -> Tensor:
        """w . tanh(q + k): (B, H, N, D), (B, H, M, D) -> (B, H, N, M)."""
        sums = torch.tanh(q[:, :, :, None] + k[:, :, None])  # (B, H, N, M, D)
        return torch.einsum("bhnmd,hd->bhnm", sums, self.score)


ATTENTIONS: dict[str, type[MultiHeadAttention]] = {
    "dot": MultiHeadAttention,
    "additive": AdditiveAttention,
}
