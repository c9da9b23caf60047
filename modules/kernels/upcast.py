"""Where 16 bits are too few: softmax, losses and sums, whatever the type of weights and vectors."""

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in float32 at least: itself where it is. Keeps the shape."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
