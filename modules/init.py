"""Start values of weights."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from modules.config import InitName, variant

RESIDUAL = ("output", "down")  # layers of blocks whose results join the residual stream


@torch.no_grad()
def truncated_normal(weight: Tensor, std: float) -> None:
    """Normal, truncated at two std, many times faster than `nn.init.trunc_normal_`."""
    edge = math.erf(2 / math.sqrt(2))
    weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))


def trunc_normal(weight: Tensor, residual_scale: float) -> None:
    """Normal with std 0.02, truncated at two std, which leaves 0.0176 (code of Devlin 2019)."""
    truncated_normal(weight, 0.02)


def xavier(weight: Tensor, residual_scale: float) -> None:
    """Uniform, keeping the variance of values and gradients (Glorot 2010)."""
    nn.init.xavier_uniform_(weight)


def kaiming(weight: Tensor, residual_scale: float) -> None:
    """Normal with variance 2 / inputs, which ReLU keeps (He 2015, equation 10)."""
    nn.init.kaiming_normal_(weight, nonlinearity="relu")


def gpt2(weight: Tensor, residual_scale: float) -> None:
    """Normal with std 0.02, smaller where the result joins the residual stream (Radford 2019)."""
    nn.init.normal_(weight, std=0.02 * residual_scale)


def zero_residual(weight: Tensor, residual_scale: float) -> None:
    """Normal with variance 1 / inputs; zero where the result joins the residual stream.

    Each block starts as the identity (Zhang 2019, Fixup; Yang 2022 for the variance).
    """
    if residual_scale < 1:
        nn.init.zeros_(weight)
    else:
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


INITS: dict[str, Callable[[Tensor, float], None]] = {
    "trunc_normal": trunc_normal,
    "xavier": xavier,
    "kaiming": kaiming,
    "gpt2": gpt2,
    "zero_residual": zero_residual,
}


@torch.no_grad()
def initialise(net: nn.Module, name: InitName, depth: int) -> None:
    """Sets the weights of linear layers and embeddings in `net` by `name`, biases to zero.

    Args:
        net: The network. Weights of convolutions are normal with std 1 / sqrt(inputs), truncated at
            two std, which leaves 0.88 of it; norms and learned vectors stay.
        name: Entry of `INITS`.
        depth: Number of blocks N; "gpt2" scales residual layers by 1 / sqrt(2 N).
    """
    init = variant("init", name, INITS)
    for path, module in net.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            *parents, last = path.split(".")
            is_residual = "blocks" in parents and last in RESIDUAL
            init(module.weight, (2 * depth) ** -0.5 if is_residual else 1.0)
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                nn.init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Conv2d):
            truncated_normal(module.weight, module.weight[0].numel() ** -0.5)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
