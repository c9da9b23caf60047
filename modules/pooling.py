"""Many vectors to one: (B, N, E) -> (B, E); `padding_mask` (B, N) is False at padding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.attention import MultiHeadAttention
from modules.config import StackConfig, check_choice, require
from modules.kernels.linear import Linear
from modules.kernels.upcast import upcast
from modules.masks import padding


def masked_mean(x: Tensor, padding_mask: Tensor) -> Tensor:
    """Mean of the vectors that are not padding, (B, N, E) -> (B, E); zeros if all are."""
    dtype = torch.promote_types(x.dtype, torch.float32)  # a sum in float16 may overflow
    total = x.masked_fill(~padding_mask[..., None], 0.0).sum(1, dtype=dtype)  # (B, E)
    return (total / padding_mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


class Pooling(nn.Module):
    """Base of poolings of vectors of size `width`.

    `heads` is for attention, `length`, the largest number of vectors, for flattening.
    """

    patches_only = True  # a ViT passes its patches without class and register tokens
    any_length = True  # False: no more than `length` vectors
    num_read: int | None = None  # number of leading tokens that it uses; None: all

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()


class ClassTokenPooling(Pooling):
    """The first token's vector (Devlin 2019)."""

    patches_only = False
    num_read = 1

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

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        self.query = nn.Parameter(torch.randn(1, 1, width) * width**-0.5)
        self.attention = MultiHeadAttention(width, heads, context_width=width)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E)."""
        query = self.query.expand(x.shape[0], -1, -1)  # (B, 1, E); len(x) would fix B in a graph
        return self.attention(query, x, padding(padding_mask))[:, 0]  # (B, 1, E) -> (B, E)


class SequencePooling(Pooling):
    """Mean of the vectors by learned weights, softmax(w . x) (Hassani 2021)."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        self.score = Linear(width, 1, bias=False)  # softmax would take a bias out again

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E)."""
        scores = upcast(self.score(x))  # (B, N, 1)
        if padding_mask is not None:
            scores = scores.masked_fill(~padding_mask[..., None], torch.finfo(scores.dtype).min)
            x = x.masked_fill(~padding_mask[..., None], 0.0)
        return (scores.softmax(1).to(x.dtype).mT @ x)[:, 0]  # (B, 1, N) @ (B, N, E) -> (B, E)


class FlattenPooling(Pooling):
    """W [x_1; ...; x_L] + b: a linear map of all vectors, one after the other, for L = `length`.

    Padding, also from N to L, counts as zeros. Unlike the other poolings it knows the position of
    each vector, as an MLP on images does.
    """

    any_length = False

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__(width, heads, length)
        self.length = length
        self.linear = Linear(length * width, width)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """(B, N, E) -> (B, E); `ValueError` if N is more than L."""
        require(
            x.shape[1] <= self.length,
            f'pool "flatten" takes {self.length} tokens at most, not {x.shape[1]}; shorten the '
            "sequence, or raise max_length.",
        )
        if padding_mask is not None:
            x = x.masked_fill(~padding_mask[..., None], 0.0)
        x = F.pad(x, (0, 0, 0, self.length - x.shape[1]))  # (B, L, E)
        return self.linear(x.flatten(1))  # (B, L E) -> (B, E)


POOLINGS: dict[str, type[Pooling]] = {
    "cls": ClassTokenPooling,
    "mean": MeanPooling,
    "max": MaxPooling,
    "attention": AttentionPooling,
    "sequence": SequencePooling,
    "flatten": FlattenPooling,
}


def check_pool(name: str, stack: StackConfig) -> None:
    """Raises `ValueError` unless a pooling has this name and fits the stack."""
    check_choice("pool", name, POOLINGS)
    pooling: Any = POOLINGS[name]  # an entry of one's own may be anything
    require(
        isinstance(pooling, type) and issubclass(pooling, Pooling),
        f'pool "{name}" must be a subclass of modules.pooling.Pooling, which says what it reads.',
    )
    require(
        POOLINGS[name] is not AttentionPooling or stack.width % stack.heads == 0,
        f'pool "{name}" splits the width {stack.width} among the heads {stack.heads}, which must '
        "divide it; change one of them, or choose another pool.",
    )
