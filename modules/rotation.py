"""Rotary positions as attention takes them: angles of queries and keys (Su 2021)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotates pairs of channels (i, i + R / 2) of queries and keys by angles.

    `cos` is (B or 1, 1, N, R), both halves equal; `sin` likewise, its first half negative.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Queries or keys (B, H, N, D) -> the same, the first R channels rotated."""
        width = self.cos.shape[-1]
        cos = self.cos.to(x.dtype)
        sin = self.sin.to(x.dtype)
        part = x[..., :width]  # (B, H, N, R)
        rotated = torch.addcmul(part * cos, part.roll(width // 2, -1), sin)  # one pass less
        if width == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., width:]), dim=-1)  # (B, H, N, D)

    def after_prefix(self, count: int) -> "Rotation":
        """The same behind `count` tokens that are not rotated (class and register tokens)."""
        cos = F.pad(self.cos, (0, 0, count, 0), value=1.0)
        return Rotation(cos, F.pad(self.sin, (0, 0, count, 0)))
