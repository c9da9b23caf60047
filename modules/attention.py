"""Attention by dot products and other scores, and its multi-head layers."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import require
from modules.kernels.derivatives import in_forward_mode
from modules.kernels.dropout import dropout as fast_dropout
from modules.kernels.linear import Linear, linear
from modules.kernels.upcast import upcast
from modules.masks import NO_MASK, Mask
from modules.rotation import Rotation

ScoreFunction = Callable[[Tensor, Tensor], Tensor]  # (B, H, N, D), (B, H, M, D) -> (B, H, N, M)
OnWeights = Callable[[Tensor], Tensor | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = NO_MASK,
    dropout: float = 0.0,
    score_fn: ScoreFunction | None = None,
    on_weights: OnWeights | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v (Vaswani 2017, equation 1).

    Args:
        q: Queries (B, H, N, D).
        k: Keys (B, G, M, D); G divides H.
        v: Values (B, G, M, V).
        mask: Who may attend to whom, such as `padding(padding_mask) & causal(N)` of
            `modules.masks`; a query that may attend to nothing gives zeros.
        dropout: Probability of dropping a weight.
        score_fn: Computes the scores before softmax, (B, H, N, M); None: q k^T / sqrt(D).
        on_weights: Called with the weights, (B, H, N, M), before dropout; what it returns, unless
            it is None, takes their place.

    Returns:
        Weighted means of the values, (B, H, N or `mask.num_outputs`, V).

    Raises:
        ValueError: `mask` is not a `Mask`.
    """
    require(
        isinstance(mask, Mask),
        "mask must be a Mask, such as padding(padding_mask) or causal(N) of modules.masks.",
    )
    if mask.num_outputs is not None:
        q = q[:, :, : mask.num_outputs]  # keys and values stay those of all tokens
        mask = mask.first_queries(k.shape[2], k.device)
    # SDPA's fast kernels have no forward-mode derivatives, that for CPUs neither dropout nor a
    # gradient of the bias.
    on_cpu = q.device.type == "cpu"
    lacks_kernel = in_forward_mode() or (on_cpu and (dropout > 0 or mask.has_learned_bias))
    if score_fn is None and on_weights is None and not lacks_kernel:
        grouped = k.shape[1] != q.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, mask.attn_mask(q.dtype), dropout, mask.is_causal, enable_gqa=grouped
        )
        return mask.zero_masked_rows(out)
    queries_per_key = q.shape[1] // k.shape[1]
    if queries_per_key > 1:
        k = k.repeat_interleave(queries_per_key, 1)  # (B, H, M, D)
        v = v.repeat_interleave(queries_per_key, 1)  # (B, H, M, V)
    # A copy, as `add_to` works in place, and autograd may need the result of `score_fn`.
    scores = (q * q.shape[-1] ** -0.5) @ k.mT if score_fn is None else score_fn(q, k).clone()
    weights = mask.add_to(upcast(scores)).softmax(-1)
    if on_weights is not None:
        weights = mask.zero_masked_rows(weights)
        changed = on_weights(weights)
        weights = weights if changed is None else changed
    # Zeros go into the result (B, H, N, V), often smaller than the weights (B, H, N, M).
    return mask.zero_masked_rows(fast_dropout(weights.to(v.dtype), dropout) @ v)


class AttentionCache:
    """What one attention layer keeps between forward passes; the base class keeps nothing."""

    on_weights: OnWeights | None = None  # as in `attention`

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys (B, G, N, D), values (B, G, N, V) -> all that are attended to, of M tokens."""
        return k, v

    def cached_context(self) -> tuple[Tensor, Tensor] | None:
        """Keys (B, G, M, D), values (B, G, M, V) of a context projected before; None: none."""
        return None

    def attend(self, q: Tensor, mask: Mask, score_fn: ScoreFunction | None) -> Tensor | None:
        """Attention of queries (B, H, N, D) to what is kept, in generation, so without dropout.

        None: there is no faster way than `attention`.
        """
        return None


NO_ATTENTION_CACHE = AttentionCache()


class MultiHeadAttention(nn.Module):
    """Multi-head attention, self or cross (Vaswani 2017), with G key/value heads (Ainslie 2023).

    Args:
        width: Size E of the tokens' vectors.
        heads: Number H of heads.
        kv_heads: Number G of key/value heads, which divides H; None: H.
        head_dim: Size D of a head, or a pair: D of its queries and keys, V of its values (d_k and
            d_v of Vaswani 2017, section 3.2.2); None: E / H.
        context_width: Size of the context's vectors in cross-attention; None: self-attention.
        qkv_bias: Biases of queries, keys and values.
        bias: A bias of the output.
        qk_norm: Makes the norms of queries and keys (Dehghani 2023).
        dropout: Probability of dropping a weight.

    Raises:
        ValueError: H is not a multiple of G; or E is not a multiple of H, and `head_dim` is None.
    """

    score_fn: ScoreFunction | None = None  # dot products
    takes_rotary = True  # whether the scores are dot products, which rotary positions need

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | tuple[int, int] | None = None,
        context_width: int | None = None,
        qkv_bias: bool = True,
        bias: bool = True,
        qk_norm: Callable[[int], nn.Module] = nn.Identity,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        require(
            head_dim is not None or width % heads == 0,
            f"width {width} is not a multiple of heads {heads}, so head_dim must be given.",
        )
        self.heads = heads
        self.kv_heads = heads if kv_heads is None else kv_heads
        require(
            self.kv_heads > 0 and heads % self.kv_heads == 0,
            f"heads {heads} is not a multiple of kv_heads {kv_heads}; change one of them.",
        )
        head_dim = width // heads if head_dim is None else head_dim
        sizes = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        self.head_dim, self.value_dim = sizes
        self.dropout = dropout
        self.is_cross = context_width is not None
        inner = self.heads * self.head_dim
        self.kv_widths = (self.kv_heads * self.head_dim, self.kv_heads * self.value_dim)
        kv_inner = sum(self.kv_widths)
        if context_width is None:
            self.qkv = Linear(width, inner + kv_inner, bias=qkv_bias)
        else:
            self.query = Linear(width, inner, bias=qkv_bias)
            self.key_value = Linear(context_width, kv_inner, bias=qkv_bias)
        self.q_norm = qk_norm(self.head_dim)
        self.k_norm = qk_norm(self.head_dim)
        self.output = Linear(self.heads * self.value_dim, width, bias=bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Mask = NO_MASK,
        rotary: Rotation | None = None,
        cache: AttentionCache = NO_ATTENTION_CACHE,
    ) -> Tensor:
        """Each token's new vector is a weighted mean of values: (B, N, E) -> (B, N, E).

        With a mask that has `num_outputs`, only these: (B, num_outputs, E).

        Args:
            x: (B, N, E), becomes the queries; in self-attention also the keys and values.
            context: (B, M, context width), becomes the keys and values of cross-attention; None in
                self-attention.
            mask: Who may attend to whom.
            rotary: Rotates queries and keys; None: no rotary positions.
            cache: Keeps keys and values of earlier tokens, or of the context.

        Raises:
            ValueError: As in `attention`, or if self-attention is given a context or
                cross-attention is not.
        """
        q, k, v = self.project(x, context, cache)  # (B, H, N, D), (B, G, M, D), (B, G, M, V)
        if rotary is not None:
            require(
                isinstance(rotary, Rotation),
                "rotary must be a Rotation, as Position.rotate(positions) returns it.",
            )
            q = rotary(q)
            k = rotary(k)
        k, v = cache.update(k, v)
        out = cache.attend(q, mask, self.score_fn)
        if out is None:
            dropout = self.dropout if self.training else 0.0
            out = attention(q, k, v, mask, dropout, self.score_fn, cache.on_weights)
        out = out.transpose(1, 2).flatten(2)  # (B, H, N, V) -> (B, N, H V)
        return self.output(out)

    def project(
        self, x: Tensor, context: Tensor | None, cache: AttentionCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, N, D), keys (B, G, M, D), values (B, G, M, V); arguments as `forward`."""
        if (context is not None) != self.is_cross:
            raise ValueError(
                "Cross-attention needs a context and self-attention takes none; see context_width."
            )
        if context is None:
            sizes = (self.heads * self.head_dim, *self.kv_widths)
            q, k, v = self.qkv(x).split(sizes, dim=-1)  # (B, N, H D), (B, N, G D), (B, N, G V)
            q = self.q_norm(split_heads(q, self.heads))
        else:
            q = self.q_norm(split_heads(self.query(x), self.heads))
            cached = cache.cached_context()
            if cached is not None:
                return q, *cached
            k, v = self.key_value(context).split(self.kv_widths, -1)  # (B, M, G D), (B, M, G V)
        k = self.k_norm(split_heads(k, self.kv_heads))
        return q, k, split_heads(v, self.kv_heads)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, heads x size) -> (B, heads, N, size), a view."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class UnscaledAttention(MultiHeadAttention):
    """softmax(q k^T) v, without the factor 1 / sqrt(D) (Luong 2015, section 3.1, "dot").

    Arguments as `MultiHeadAttention`. The larger D, the larger the scores, and the smaller the
    gradients of the softmax (Vaswani 2017, section 3.2.1).
    """

    def project(
        self, x: Tensor, context: Tensor | None, cache: AttentionCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base class, with queries times sqrt(D), which `attention` divides by."""
        q, k, v = super().project(x, context, cache)
        return q * self.head_dim**0.5, k, v


class BilinearAttention(UnscaledAttention):
    """softmax(q W k^T) v with a matrix W of each head (Luong 2015, section 3.1, "general").

    Arguments as `MultiHeadAttention`. W starts with std 1 / D, so that scores first have the
    variance of q k^T / sqrt(D). Rotary positions turn q W.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        shape = (self.heads, self.head_dim, self.head_dim)
        self.bilinear = nn.Parameter(torch.randn(shape) / self.head_dim)

    def project(
        self, x: Tensor, context: Tensor | None, cache: AttentionCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base class, with queries times W."""
        q, k, v = super().project(x, context, cache)
        return q @ self.bilinear, k, v  # (B, H, N, D) x (H, D, D) -> (B, H, N, D)


class NoKeyBias(Linear):
    """The joint projection of queries, keys and values, of which keys have no bias."""

    def __init__(self, width: int, query_width: int, key_width: int, value_width: int) -> None:
        super().__init__(width, query_width + key_width + value_width, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(query_width))
        self.v_bias = nn.Parameter(torch.zeros(value_width))
        self.key_width = key_width

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        key_bias = self.q_bias.new_zeros(self.key_width)
        return linear(x, self.weight, torch.cat((self.q_bias, key_bias, self.v_bias)))


class CosineAttention(MultiHeadAttention):
    """softmax(s cos(q, k)) v with a learned scale s of each head (Liu 2022, equation 2).

    Arguments as `MultiHeadAttention`. The scale starts at 10 and is at most 100. Keys have no bias
    in self-attention.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log_scale = nn.Parameter(torch.full((self.heads, 1, 1), math.log(10)))
        if not self.is_cross and self.qkv.bias is not None:
            inner = self.heads * self.head_dim
            self.qkv = NoKeyBias(self.qkv.in_features, inner, *self.kv_widths)

    def project(
        self, x: Tensor, context: Tensor | None, cache: AttentionCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base class, with queries of length s sqrt(D) and keys of length 1."""
        q, k, v = super().project(x, context, cache)
        scale = self.log_scale.clamp(max=math.log(100)).exp() * self.head_dim**0.5  # (H, 1, 1)
        return with_length(q, scale), with_length(k, 1), v


def with_length(x: Tensor, length: Tensor | float) -> Tensor:
    """Vectors of the same directions and another length: (..., D) -> the same shape.

    Zero vectors, such as padding in windows, stay zero. Their gradients are finite in float16, too;
    those of x / max(|x|, 1e-12) would not be.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)  # (..., 1)
    return (x * (length / norms.masked_fill(norms == 0, 1))).to(x.dtype)


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
    "unscaled": UnscaledAttention,
    "bilinear": BilinearAttention,
    "additive": AdditiveAttention,
    "cosine": CosineAttention,
}
