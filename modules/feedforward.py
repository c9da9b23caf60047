"""Feed-forward parts: each token's vector through a hidden layer of width F."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from modules.config import GATED
from modules.kernels.dropout import Dropout
from modules.kernels.linear import Linear


class FeedForward(nn.Module):
    """down(dropout(activation(up(x)))): (B, N, E) -> (B, N, F) -> (B, N, E) (Vaswani 2017).

    If gated: down(dropout(activation(gate(x)) * up(x))) (Shazeer 2020).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        bias: bool = True,
        dropout: float = 0.0,
        activation: Callable[[], nn.Module] = nn.GELU,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.up = Linear(width, hidden, bias=bias)
        self.activation = activation()
        self.dropout = Dropout(dropout) if dropout else nn.Identity()
        self.down = Linear(hidden, width, bias=bias)
        self.gate = Linear(width, hidden, bias=bias) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, N, E)."""
        if self.gate is None:
            hidden = self.activation(self.up(x))  # (B, N, F)
        else:
            hidden = self.activation(self.gate(x)) * self.up(x)  # (B, N, F)
        return self.down(self.dropout(hidden))


class ReLUSquared(nn.Module):
    """max(x, 0)^2, the activation of Primer (So 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, F) -> (B, N, F)."""
        return F.relu(x).square()


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), an approximation of GELU (Hendrycks 2016, section 2)."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, F) -> (B, N, F)."""
        return x * (1.702 * x).sigmoid()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu2": ReLUSquared,
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "silu": nn.SiLU,
    "swiglu": nn.SiLU,
    "geglu": nn.GELU,
    "geglu_tanh": partial(nn.GELU, approximate="tanh"),
}
FEEDFORWARDS: dict[str, Callable[..., nn.Module]] = {
    name: partial(FeedForward, activation=activation, gated=name in GATED)
    for name, activation in ACTIVATIONS.items()
}
