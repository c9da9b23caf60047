"""Many vectors to one: (B, N, E) -> (B, E); `padding_mask` (B, N) is False at padding."""

import torch
from torch import Tensor, nn

from modules.attention import MultiHeadAttention
from modules.masks import padding


def masked_mean(x: Tensor, padding_mask: Tensor) -> Tensor:
    """Mean of the vectors that are not padding, (B, N, E) -> (B, E); zeros if all are."""
    total = x.masked_fill(~padding_mask[..., None], 0.0).sum(1)  # (B, E)
    return total / padding_mask.sum(1, keepdim=True).clamp(min=1)


class Pooling(nn.Module):
    """Base of poolings of vectors of size `width`; `heads` is for attention."""

    patches_only = True  # in a ViT without class and register tokens

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()


class ClassTokenPooling(Pooling):
    """The first token's vector (Devlin 2019)."""

    patches_only = False

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E)."""
        return x[:, 0]


class MeanPooling(Pooling):
    """Mean of the vectors that are not padding; zeros if all are."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E)."""
        return x.mean(1) if padding_mask is None else masked_mean(x, padding_mask)


class MaxPooling(Pooling):
    """Largest value of each channel over what is not padding; zeros if all is."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E)."""
        if padding_mask is None:
            return x.amax(1)
        largest = x.masked_fill(~padding_mask[..., None], float("-inf")).amax(1)
        return largest.masked_fill(~padding_mask.any(1, keepdim=True), 0.0)


class AttentionPooling(Pooling):
    """Attention from one learned query to all vectors (Lee 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.query = nn.Parameter(torch.randn(1, 1, width) * width**-0.5)
        self.attention = MultiHeadAttention(width, heads, context_width=width)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E)."""
        query = self.query.expand(x.shape[0], -1, -1)  # (B, 1, E); len(x) would fix B in a graph
        return self.attention(query, x, padding(padding_mask))[:, 0]  # (B, 1, E) -> (B, E)


POOLINGS: dict[str, type[Pooling]] = {
    "cls": ClassTokenPooling,
    "mean": MeanPooling,
    "max": MaxPooling,
    "attention": AttentionPooling,
}
