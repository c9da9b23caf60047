"""Muon, with all matrices of one shape at once, in a type that is fast on the device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from modules.kernels.cpu import matmul_dtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5 (Jordan 2024)
ITERATIONS = 5
GRAM_RATIO = 1.5  # N / M from which iterating on the M x M Gram matrix takes fewer FLOP
# A Gram matrix holds squares of singular values, of which bfloat16 loses the small ones. They grow
# in the first iterations; a second Gram matrix then keeps them.
BFLOAT16_PARTS = (3, 2)
TINY = 1e-7  # least norm: a gradient of zeros is not divided by 0
RMS = 0.2  # of the values of an update, as AdamW's (Liu 2025)
VALUES_AT_ONCE = 2**22  # limits the memory for copies of matrices


def orthogonalize(matrices: Tensor) -> Tensor:
    """Moves the singular values of each matrix near 1, by Newton-Schulz iteration (Jordan 2024).

    Each iteration maps a singular value s, from 0 to 1, to a s + b s^3 + c s^5. (K, M, N) -> the
    same shape.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # (K, M', N'), M' <= N'
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=TINY)
    x = iterate_on_gram(x) if uses_gram(x) else iterate(x)
    return x.mT if is_tall else x


def uses_gram(x: Tensor) -> bool:
    """Whether `iterate_on_gram` is the faster way for matrices (K, M, N), M <= N.

    Sharded weights are a subclass of `Tensor`, whose diagonal cannot be written to.
    """
    return type(x) is Tensor and x.shape[2] >= GRAM_RATIO * x.shape[1]


def iterate(x: Tensor) -> Tensor:
    """Newton-Schulz iterations: X becomes (a I + b G + c G G) X, G = X X^T. (K, M, N), M <= N."""
    for _ in range(ITERATIONS):
        x = torch.baddbmm(x, higher_terms(x @ x.mT), x, beta=COEFFICIENTS[0])  # (K, M, N)
    return x


def iterate_on_gram(x: Tensor) -> Tensor:
    """The same on the M x M Gram matrix G, with a product with X at the end of each part.

    A part's result is Q X, where Q is the product of its factors a I + b G + c G G. These are
    symmetric and commute, so that G of Q X is Q G Q.
    """
    a = COEFFICIENTS[0]
    for iterations in BFLOAT16_PARTS if x.dtype == torch.bfloat16 else (ITERATIONS,):
        gram = x @ x.mT  # (K, M, M)
        q = higher_terms(gram)
        q.diagonal(dim1=1, dim2=2).add_(a)
        for _ in range(iterations - 1):
            q = torch.baddbmm(q, higher_terms(q @ gram @ q), q, beta=a)  # (K, M, M)
        x = q @ x  # (K, M, N)
    return x


def higher_terms(gram: Tensor) -> Tensor:
    """b G + c G G: (K, M, M) -> the same shape."""
    _, b, c = COEFFICIENTS
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


class Muon(Optimizer):
    """Orthogonalized Nesterov momentum for matrices (Jordan 2024), with decoupled weight decay.

    Equals `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` up to rounding. That takes one matrix
    after the other, and always computes in bfloat16: on CPUs without it that takes 5 to 10 times as
    long.

    Args:
        groups: Each with `params` (weights of linear layers, or of convolutions, one row per
            output channel), `lr`, `momentum` and `weight_decay`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                count = max(1, VALUES_AT_ONCE // shape.numel())
                for start in range(0, len(parameters), count):
                    self._update(parameters[start : start + count], group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Updates parameters of one shape, (M, N) or (M, C, H, W)."""
        momenta = [self._momentum(parameter, group["momentum"]) for parameter in parameters]
        matrices = torch.stack(momenta).flatten(2)  # (K, M, N); N: values of a filter
        dtype = matmul_dtype(matrices.device, min(matrices.shape[1:]))
        updates = orthogonalize(matrices.to(dtype))
        rate = group["lr"] * RMS * max(matrices.shape[1:]) ** 0.5
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.reshape(parameter.shape), alpha=-rate)

    def _momentum(self, parameter: nn.Parameter, decay: float) -> Tensor:
        """Nesterov momentum, with the gradient of this step."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - decay)
        return parameter.grad.lerp(mean, decay)
