"""Times of the kernels for products, norms and Muon that this CPU has, beside each other.

    python -m tests.benchmarks.kernels

Shapes of the README's models: a ViT step of 64 images, a language model's step of 2,048 tokens, one
token and eight of its generation, its vocabulary, gradients of weights, norms, and matrices of
its optimizer. Two threads, in turns; medians in microseconds, and "*" at what is used on this CPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.generation.quantized import PackedLinear, QuantizedLinear
from modules.kernels import cpu
from modules.kernels.linear import (
    MANY_OUTPUTS,
    linear_in_parts,
    product,
    takes_onednn,
    weight_gradient,
)
from modules.kernels.rms_norm import RMSNormFunction
from tasks.training import muon
from tests.benchmarks import _compare

Choices = dict[str, Callable[[], object]]
SIZES = {  # rows, width, outputs
    "ViT, qkv": (64 * 65, 192, 576),
    "ViT, feedforward": (64 * 65, 192, 768),
    "language model, qkv": (2048, 384, 1152),
    "language model, feedforward": (2048, 384, 1536),
    "language model, vocabulary": (160, 384, 50_257),
    "generation, one text": (1, 384, 1536),
    "generation, eight texts": (8, 384, 1536),
    "generation, vocabulary": (1, 384, 50_257),
}
GRADIENTS = {  # rows, width, outputs
    "ViT, up": (64 * 65, 192, 768),
    "ViT, down": (64 * 65, 768, 192),
    "Swin, qkv": (64 * 256, 64, 192),
    "language model, up": (2048, 384, 1536),
}
VECTORS = {"ViT": (64, 65, 192), "language model": (4, 512, 384), "queries": (64, 65, 3, 64)}
MATRICES = {
    "12 of 64 x 64": (12, 64, 64),
    "24 of 128 x 128": (24, 128, 128),
    "6 of 384 x 1536": (6, 384, 1536),
}


def products(rows: int, width: int, outputs: int) -> tuple[Choices, str]:
    """Ways to multiply (M, K) by (N, K), and the one that is used."""
    x = torch.randn(rows, width)
    weight = torch.randn(outputs, width)
    choices: Choices = {"PyTorch": lambda: F.linear(x, weight)}
    if cpu.HAS_ONEDNN:
        choices["oneDNN"] = lambda: product(x, weight)
    used = "oneDNN" if takes_onednn(x, weight) else "PyTorch"
    if outputs > MANY_OUTPUTS and rows > 8:
        choices["PyTorch, in parts"] = lambda: linear_in_parts(x, weight)
        if not cpu.PREFERS_ONEDNN:
            used = "PyTorch, in parts"
    if rows <= 8:  # inference
        if cpu.HAS_ONEDNN:
            choices["oneDNN, packed"] = partial(PackedLinear(weight), x)
            used = "oneDNN, packed"
        choices["int8"] = partial(QuantizedLinear(weight), x)
    return choices, used


def weight_gradients(rows: int, width: int, outputs: int) -> tuple[Choices, str]:
    """Ways to compute the gradient of weights (N, K), and the one that is used."""
    x = torch.randn(rows, width)
    grad = torch.randn(rows, outputs)
    choices: Choices = {"PyTorch": lambda: weight_gradient(x, grad, by_onednn=False)}
    if cpu.HAS_ONEDNN:
        choices["oneDNN"] = lambda: weight_gradient(x, grad, by_onednn=True)
    is_onednn = cpu.PREFERS_ONEDNN and min(width, outputs) >= cpu.MIN_SIDE_GRADIENT
    return choices, "oneDNN" if is_onednn else "PyTorch"


def orthogonalizations(count: int, height: int, width: int) -> tuple[Choices, str]:
    """Ways in which Muon can orthogonalize matrices, and the one that is used."""
    x = torch.randn(count, height, width)
    x /= x.norm(dim=(1, 2), keepdim=True)
    x_bf16 = x.bfloat16()
    choices: Choices = {
        "bfloat16, one by one": lambda: [muon.iterate(one[None]) for one in x_bf16],
        "bfloat16": lambda: muon.iterate(x_bf16),
        "bfloat16, Gram matrices": lambda: muon.iterate_on_gram(x_bf16),
        "float32": lambda: muon.iterate(x),
        "float32, Gram matrices": lambda: muon.iterate_on_gram(x),
    }
    dtype = cpu.matmul_dtype(x.device, min(height, width))
    used = "bfloat16" if dtype == torch.bfloat16 else "float32"
    return choices, f"{used}, Gram matrices" if muon.uses_gram(x) else used


def norms(shape: tuple[int, ...]) -> tuple[Choices, str]:
    """Ways to compute RMSNorm with its gradient, and the one that is used."""
    x = torch.randn(shape).transpose(1, -2)  # (B, N, H, D) -> (B, H, N, D); (B, N, E) stays
    x.requires_grad_()
    weight = torch.ones(shape[-1], requires_grad=True)
    grad = torch.randn_like(x)
    ways = {
        "PyTorch": lambda: F.rms_norm(x, weight.shape, weight, 1e-6),
        "LayerNorm's kernel": lambda: RMSNormFunction.apply(x, weight, 1e-6),
    }

    def run(way: Callable[[], Tensor]) -> object:
        with torch.enable_grad():
            return torch.autograd.grad(way(), (x, weight), grad)

    return {name: partial(run, way) for name, way in ways.items()}, "LayerNorm's kernel"


def cases() -> Iterator[tuple[str, Choices, str]]:
    """What is computed, the ways to do it, and the one that is used."""
    for name, sizes in SIZES.items():
        yield name, *products(*sizes)
    for name, sizes in GRADIENTS.items():
        yield f"gradient, {name}", *weight_gradients(*sizes)
    for name, vectors in VECTORS.items():
        yield f"RMSNorm, {name}", *norms(vectors)
    for name, shape in MATRICES.items():
        yield f"Muon, {name}", *orthogonalizations(*shape)


def medians(choices: Choices, rounds: int) -> dict[str, float]:
    """Microseconds of each, measured in turns after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in choices}
    for _ in range(rounds + 1):
        for name, run in choices.items():
            start = time.perf_counter()
            run()
            times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(found[1:] or found) for name, found in times.items()}


def main() -> None:
    """Parses the command line and prints the table."""
    options = _compare.arguments(__doc__, 15).parse_args()
    torch.set_num_threads(2)
    print(_compare.machine())
    with torch.no_grad():
        for what, choices, used in cases():
            found = medians(choices, options.rounds)
            row = "  ".join(
                f"{name} {micro:.0f}{'*' * (name == used)}" for name, micro in found.items()
            )
            print(f"{what:<30}{row}", flush=True)


if __name__ == "__main__":
    main()
