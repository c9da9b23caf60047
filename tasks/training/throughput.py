"""Throughput of training: tokens/s, and model FLOP/s utilisation (MFU, Chowdhery 2022).

Lightning's ThroughputMonitor counts padding, knows no peak of CPUs, and waits for a GPU at each
step.
"""

import time
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from modules.kernels.linear import linear

# By the first letters of Lightning's precision.
DTYPES = {"bf16": torch.bfloat16, "16": torch.float16, "64": torch.float64}
# Of the matrices that are multiplied.
CPU_ROWS = 2048
GPU_ROWS = 8192


class TokenCount(nn.Module):
    """Counts the tokens of training samples without padding, without waiting for the device."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        sums = torch.zeros(2, dtype=torch.int64)  # tokens, samples
        self.register_buffer("sums", sums, persistent=False)

    def add(self, tokens: Tensor, samples: int) -> None:
        self.sums += torch.stack((tokens, torch.full_like(tokens, samples)))

    def per_sample(self) -> float:
        tokens, samples = self.sums.tolist()
        return tokens / max(samples, 1)


def flops_per_token(net: Any, length: int) -> int:
    """FLOP per token, forward and backward: 6 N + 6 L H (D + V) T (Chowdhery 2022, appendix B).

    N are the weights that a token is multiplied with: of linear layers and of the output layer, not
    of embeddings. L blocks of H heads, with keys of size D and values of size V (usually equal),
    compare the token with all T of a row, as if attention saw later ones, too. What activation
    checkpointing computes again does not count.

    Args:
        net: A `Decoder`.
        length: Tokens T of a row.
    """
    linears = [part for part in net.modules() if isinstance(part, nn.Linear)]
    weights = sum(part.weight.numel() for part in linears) + net.head.weight.numel()
    stack = net.config.stack
    sizes = stack.resolved
    compared = stack.depth * stack.heads * (sizes.head_dim + sizes.value_dim)
    return 6 * weights + 6 * compared * length


@cache
def matmul_peak(device: torch.device, precision: str, seconds: float = 0.3) -> float:
    """FLOP/s of a large matrix product in a precision such as "bf16-mixed", measured once.

    It is repeated for `seconds`; the fastest counts.
    """
    dtype = torch.float32
    for name, other in DTYPES.items():
        if precision.startswith(name):
            dtype = other
    size = CPU_ROWS if device.type == "cpu" else GPU_ROWS
    generator = torch.Generator(device).manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator, device=device, dtype=dtype)
    times: list[float] = []
    with torch.no_grad():
        linear(a, b)
        while not times or sum(times) < seconds:
            _wait(device)
            start = time.perf_counter()
            linear(a, b)
            _wait(device)
            times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
