"""Normalisation of each token's vector."""

from collections.abc import Callable
from functools import partial

from torch import nn

from modules.config import NormName


class LayerNorm(nn.LayerNorm):
    """Zero mean and unit variance over the last axis, then a learned scale and shift (Ba 2016).

    Keeps the shape.
    """

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__(width, eps=eps, bias=bias)


class RMSNorm(nn.RMSNorm):
    """Unit root mean square over the last axis, then a learned scale (Zhang 2019).

    Keeps the shape; has no bias.
    """

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__(width, eps=eps)


NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def norm_factory(name: NormName, eps: float, bias: bool) -> Callable[[int], nn.Module]:
    """A function from a width to a new norm of that kind."""
    return partial(NORMS[name], eps=eps, bias=bias)
