"""Attention: the one place where queries meet keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig, require
from modules.kernels.dropout import dropout
from modules.kernels.linear import Linear
from modules.kernels.upcast import exact
from modules.masks import Mask
from modules.memory import Memory
from modules.norm import norm_factory
from modules.position import Rotation

FREE = Mask()
NO_MEMORY = Memory()


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
        width, inner, shared = (
            config.width,
            self.heads * self.head_width,
            2 * self.kv_heads * self.head_width,
        )
        if source_width is None:
            self.qkv = Linear(width, inner + shared, bias=config.qkv_bias)
        else:
            self.query = Linear(width, inner, bias=config.qkv_bias)
            self.key_value = Linear(source_width, shared, bias=config.qkv_bias)
        norm = (
            norm_factory(config.norm, config.norm_eps, config.bias)
            if config.qk_norm
            else nn.Identity
        )
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
        memory: Memory = NO_MEMORY,
    ) -> Tensor:
        """Mixes the values that each token attends to.

        Args:
            x: (B, N, E), where the queries come from.
            source: (B, M, source width), where keys and values come from in cross-attention; None in self-attention.
            mask: Who may attend to whom; a query that may attend to nothing gives zeros before the output projection.
            rotation: Rotary positions for queries and keys; None: none.
            memory: What keys, values and weights are handed to; it may add keys and values of earlier tokens, attend
                to them itself, and have several texts share a source.

        Returns:
            (B, N, E).
        """
        require(
            (source is not None) == self.is_cross,
            "Cross-attention needs a source sequence and self-attention takes none; see source_width.",
        )
        if source is None:
            q, k, v = self.split(self.qkv(x)).split(
                (self.heads, self.kv_heads, self.kv_heads), dim=1
            )
            q, k = self.q_norm(q), self.k_norm(k)
            if rotation is not None:
                q, k = rotation(q), rotation(k)
            k, v = memory.extend(k, v)
        else:
            k, v = memory.recall() or memory.extend(*self.read(source))
            q = self.query(x)
            if memory.texts > 1:  # those that share a source become one
                q = q.unflatten(0, (-1, memory.texts)).flatten(
                    1, 2
                )  # (B K, N, H D) -> (B, K N, H D)
            q = self.q_norm(self.split(q))
        mixed = mask.silence(self.attend(q, k, v, mask, memory)).transpose(
            1, 2
        )  # (B, H, N, D) -> (B, N, H, D)
        return self.output(mixed.reshape(*x.shape[:2], self.heads * self.head_width))

    def split(self, x: Tensor) -> Tensor:
        """Heads side by side, as a view: (B, N, heads x D) -> (B, heads, N, D)."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(
            1, 2
        )  # (B, N, heads, D) -> (B, heads, N, D)

    def read(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a source: (B, M, source width) -> (B, G, M, D) twice."""
        k, v = self.split(self.key_value(source)).chunk(2, dim=1)
        return self.k_norm(k), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, memory: Memory) -> Tensor:
        """Weighted means of the values, (B, H, N, D); `memory` as in `forward`."""
        mixed = memory.mix(q, mask)
        if mixed is not None:
            return mixed
        rate = self.dropout if self.training else 0.0
        slow = rate > 0 and q.device.type == "cpu"  # SDPA's fast kernel knows no dropout there
        if self.fused and not memory.wants_weights and not slow:
            allowed, shared = mask.tensor(q.dtype), self.kv_heads != self.heads
            return F.scaled_dot_product_attention(
                q, k, v, allowed, rate, mask.is_causal, enable_gqa=shared
            )
        if (groups := self.heads // self.kv_heads) > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, H, M, D)
        weights = mask.silence(mask.add_to(exact(self.scores(q, k))).softmax(-1))
        memory.watch(weights)
        return dropout(weights.to(v.dtype), rate) @ v

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
        memory: Memory = NO_MEMORY,
    ) -> Tensor:
        """As `MultiHeadAttention.forward`: (B, N, E) -> (B, N, E)."""
        require(
            rotation is None,
            "Rotary positions work on dot products; additive attention cannot use them.",
        )
        return super().forward(x, source, mask, None, memory)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """w . tanh(q + k): (B, H, N, D), (B, H, M, D) -> (B, H, N, M)."""
        return torch.einsum(
            "bhnmd,hd->bhnm", torch.tanh(q[:, :, :, None] + k[:, :, None]), self.score
        )


ATTENTIONS: dict[str, type[MultiHeadAttention]] = {
    "dot": MultiHeadAttention,
    "additive": AdditiveAttention,
}
