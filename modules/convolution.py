"""Causal convolutions of each channel: a token reads the few tokens before it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import StackConfig
from modules.kernels.add_earlier import add_earlier
from modules.masks import Mask


class ConvCache:
    """What a convolution keeps between forward passes; the base class keeps nothing."""

    def update(self, x: Tensor, count: int) -> Tensor:
        """New tokens (B, N, E) -> `count` earlier ones, then the new ones, (B, count + N, E)."""
        return F.pad(x, (0, 0, count, 0))


NO_CONV_CACHE = ConvCache()


class CausalConv(nn.Module):
    """x_t + sum_k w_k x_{t-k}, k = 1 ... K, with a weight per channel (Allen-Zhu 2025, Canon).

    A depthwise convolution with kernel K + 1, as So (2021, Primer) has after projections. Canon
    also learns a weight of x_t, which is 1 here. The weights start at zero.
    """

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kernel - 1, width))

    def forward(
        self, x: Tensor, visible: Tensor | None = None, cache: ConvCache = NO_CONV_CACHE
    ) -> Tensor:
        """(B, N, E) -> (B, N, E).

        Args:
            x: New tokens.
            visible: Made by `visible_before`; None: all tokens before.
            cache: Keeps the last K tokens.
        """
        if visible is not None:
            visible = visible[:, :, : x.shape[1]]  # of the last block, which may have fewer tokens
        joined = cache.update(x, len(self.weight))  # (B, K + N, E)
        return add_earlier(joined, self.weight, visible)  # (B, N, E)


class NoConv(nn.Module):
    """Stands where a block has no convolution."""

    def forward(
        self, x: Tensor, visible: Tensor | None = None, cache: ConvCache = NO_CONV_CACHE
    ) -> Tensor:
        """(B, N, E) -> the same."""
        return x


def causal_conv(config: StackConfig) -> nn.Module:
    """The convolution of one sub-layer of a stack."""
    if config.conv_kernel is None:
        return NoConv()
    return CausalConv(config.width, config.conv_kernel)


def visible_before(mask: Mask, new: int, count: int) -> Tensor | None:
    """Which of the `count` tokens before each of `new` tokens it may attend to.

    Returns:
        Boolean, (count, B, N, 1): entry k - 1 is about the token k places before. None: all.
    """
    if mask.allowed is None:
        return None
    allowed = mask.allowed[:, 0].expand(-1, new, -1)  # (B, N, M)
    rows = torch.arange(new, device=allowed.device)
    past = allowed.shape[-1] - new
    visible = []
    for k in range(1, count + 1):
        keys = (past + rows - k).clamp(min=0)  # (N,); before the first token there are zeros
        visible.append(allowed[:, rows, keys])  # (B, N)
    return torch.stack(visible)[..., None]  # (count, B, N, 1)
