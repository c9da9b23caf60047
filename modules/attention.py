"""Attention: the one place where queries meet keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig, require
from modules.dropout import dropout
from modules.linear import Linear
from modules.masks import Mask
from modules.norm import norm_factory
from modules.position import Rotation

FREE = Mask()


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention, self or cross (Vaswani 2017), with grouped key/value heads (Ainslie 2023).

    Args:
        config: Of a stack of blocks: width E of the queries' vectors and of the result, number H and size D of the
            heads, number G of key/value heads, biases, norm of queries and keys (Dehghani 2023), dropout of weights.
        source_width: Size of the vectors of keys and values; makes it cross-attention. None: self-attention.
    """

    fused = True

    def __init__(self, config: StackConfig, source_width: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.groups, config.head_width
        self.dropout = config.attention_dropout
        self.is_cross = source_width is not None
        width, inner, shared = config.width, self.heads * self.head_width, 2 * self.kv_heads * self.head_width
        if source_width is None:
            self.qkv = Linear(width, inner + shared, bias=config.qkv_bias)
        else:
            self.query = Linear(width, inner, bias=config.qkv_bias)
            self.key_value = Linear(source_width, shared, bias=config.qkv_bias)
        norm = norm_factory(config.norm, config.norm_eps, config.bias) if config.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(self.head_width), norm(self.head_width)
        self.output = Linear(inner, width, bias=config.bias)
        self.add_parameters()

    def add_parameters(self) -> None:
        """Makes what `scores` needs beyond queries and keys: nothing here."""

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Mask = FREE,
        rotation: Rotation | None = None,
        record: list[Tensor] | None = None,
    ) -> Tensor:
        """Mixes the values that each token attends to.

        Args:
            x: (B, N, E), where the queries come from.
            source: (B, M, source width), where keys and values come from in cross-attention; None in self-attention.
            mask: Who may attend to whom; a query that may attend to nothing gives zeros before the output projection.
            rotation: Rotary positions for queries and keys; None: none.
            record: Where to append the attention weights, (B, H, N, M), before dropout; None: they are not built.

        Returns:
            (B, N, E).
        """
        q, k, v = self.project(x, source)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotation(q), rotation(k)
        mixed = mask.silence(self.attend(q, k, v, mask, record))
        return self.output(mixed.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)

    def project(self, x: Tensor, source: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, N, D), keys and values (B, G, M, D), as views of one product where they can be."""
        require(
            (source is not None) == self.is_cross,
            "Cross-attention needs a source sequence and self-attention takes none; see source_width.",
        )
        if source is None:
            heads = self.qkv(x).unflatten(-1, (-1, self.head_width))  # (B, N, H + 2G, D)
            q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        else:
            q = self.query(x).unflatten(-1, (-1, self.head_width))  # (B, N, H, D)
            k, v = self.key_value(source).unflatten(-1, (-1, self.head_width)).chunk(2, dim=2)  # (B, M, G, D) each
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, N, D), (B, G, M, D) twice

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, record: list[Tensor] | None) -> Tensor:
        """Weighted means of the values, (B, H, N, D); `record` as in `forward`."""
        rate = self.dropout if self.training else 0.0
        slow = rate > 0 and q.device.type == "cpu"  # there SDPA's fast kernel knows no dropout
        if self.fused and record is None and not slow:
            allowed, shared = mask.tensor(q.dtype), self.kv_heads != self.heads
            return F.scaled_dot_product_attention(q, k, v, allowed, rate, mask.is_causal, enable_gqa=shared)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, H, M, D)
        weights = mask.silence(mask.add_to(self.scores(q, k)).softmax(-1))
        if record is not None:
            record.append(weights)
        return dropout(weights, rate) @ v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q k^T / sqrt(D): (B, H, N, D), (B, H, M, D) -> (B, H, N, M)."""
        return (q * self.head_width**-0.5) @ k.mT


class AdditiveAttention(MultiHeadAttention):
    """Attention with scores w . tanh(q + k), one vector w per head (Bahdanau 2015). Interface of `MultiHeadAttention`.

    Memory grows with N x M x D. Rotary positions have no meaning here and are refused.
    """

    fused = False

    def add_parameters(self) -> None:
        """One vector per head, (H, D)."""
        self.score = nn.Parameter(torch.randn(self.heads, self.head_width) * self.head_width**-0.5)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Mask = FREE,
        rotation: Rotation | None = None,
        record: list[Tensor] | None = None,
    ) -> Tensor:
        """As `MultiHeadAttention.forward`: (B, N, E) -> (B, N, E)."""
        require(rotation is None, "Rotary positions work on dot products; additive attention cannot use them.")
        return super().forward(x, source, mask, None, record)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """w . tanh(q + k): (B, H, N, D), (B, H, M, D) -> (B, H, N, M)."""
        return torch.einsum("bhnmd,hd->bhnm", torch.tanh(q[:, :, :, None] + k[:, :, None]), self.score)


ATTENTIONS: dict[str, type[MultiHeadAttention]] = {"dot": MultiHeadAttention, "additive": AdditiveAttention}
