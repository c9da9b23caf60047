"""Normalisation of each token's vector."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from modules.config import StackConfig, variant


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis (Ba 2016).

    `var` is the mean of (x - mean(x))^2; `weight` and `bias` (E,) are learned, 1 and 0 at first.
    """


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis (Zhang 2019). Has no bias."""

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> the same shape, in the weight's dtype, so in float32 under autocast.

        `nn.RMSNorm` warns of an input of another dtype, and takes a slow kernel.
        """
        return super().forward(x.to(self.weight.dtype))


NORMS: dict[str, Callable[..., nn.Module]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def norm_factory(config: StackConfig) -> Callable[[int], nn.Module]:
    """A function from a width to a new norm of the kind in `config`."""
    return partial(variant("norm", config.norm, NORMS), eps=config.norm_eps, bias=config.bias)
