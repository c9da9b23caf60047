"""Upcasts what needs more than 16 bits: softmax, losses and sums."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least: itself if it is already. Keeps the shape."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
