"""Normalisation of the tokens' vectors."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from modules.config import StackConfig, variant
from modules.kernels.rms_norm import rms_norm


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis (Ba 2016).

    `var` is the mean of (x - mean(x))^2; `weight` and `bias` (E,) are learned, 1 and 0 at first.
    """


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis (Zhang & Sennrich 2019); no bias."""

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> the same shape, in the weight's dtype, so in float32 under autocast.

        `nn.RMSNorm` warns of an input of another dtype, and takes a slow kernel.
        """
        assert self.eps is not None
        return rms_norm(x.to(self.weight.dtype), self.weight, self.eps)


class BatchNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over all vectors (Ioffe 2015, alg. 1).

    In training, mean and variance of each channel are those of all vectors of the batch and the
    process (`--trainer.sync_batchnorm true`: of all processes), in evaluation their running means.
    Padding counts, and so do later tokens: a decoder sees a little of them in training. If weights
    have 16 bits (bf16-true), a CPU rounds the means to 16 bits, too.
    """

    def __init__(self, width: int, eps: float = 1e-6, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, eps)
        if not bias:
            self.norm.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) -> the same shape."""
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)  # (vectors, E) -> (..., E)


NORMS: dict[str, Callable[..., nn.Module]] = {
    "layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "batchnorm": BatchNorm,
    "none": nn.Identity,
}


def norm_factory(config: StackConfig) -> Callable[[int], nn.Module]:
    """A function from a width to a new norm of the kind in `config`."""
    return partial(variant("norm", config.norm, NORMS), eps=config.norm_eps, bias=config.bias)
