"""RMSNorm by LayerNorm's kernel equals PyTorch's, with first and second derivatives."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.kernels.rms_norm import RMSNormFunction, rms_norm
from modules.norm import RMSNorm
from tests.helpers.tiny_models import close


def inputs(dtype: torch.dtype = torch.float32, width: int = 24) -> tuple[Tensor, Tensor]:
    """Vectors of any size whose mean is not 0, and a weight."""
    x = (torch.randn(3, 5, 2, width, dtype=dtype) + 1) * torch.logspace(-3, 3, 5)[:, None, None]
    return x.to(dtype).requires_grad_(), torch.randn(width, dtype=dtype, requires_grad=True)


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


@pytest.mark.parametrize("eps", [1e-6, 1.0])
@pytest.mark.parametrize(
    "view", [lambda x: x, lambda x: x.transpose(1, 2), lambda x: x[..., :8], lambda x: x[0, 0, 0]]
)
def test_it_equals_pytorchs(view: Callable[[Tensor], Tensor], eps: float) -> None:
    x, weight = inputs()
    width = view(x).shape[-1]
    grad = torch.randn_like(view(x))

    def run(norm: Callable[..., Tensor], create_graph: bool) -> tuple[Tensor, ...]:
        y = norm(view(x), weight[:width], eps)
        return y, *torch.autograd.grad(y, (x, weight), grad, create_graph=create_graph)

    expected = run(plain, create_graph=False)
    close(run(rms_norm, create_graph=False), expected, rtol=1e-4)
    close(run(rms_norm, create_graph=True), expected, rtol=1e-4)


@pytest.mark.parametrize("index", [(), (0, 0, 0)])
def test_first_and_second_derivatives(index: tuple[int, ...]) -> None:
    x, weight = inputs(torch.float64, width=4)
    leaves = (x[index].detach().requires_grad_(), weight)
    assert torch.autograd.gradcheck(lambda *pair: rms_norm(*pair, 1e-3), leaves)
    assert torch.autograd.gradgradcheck(lambda *pair: rms_norm(*pair, 1e-3), leaves)


def test_gradients_of_each_sample() -> None:
    x, weight = inputs()

    def gradients(norm: Callable[..., Tensor]) -> Tensor:
        loss = torch.func.grad(lambda weight, x: norm(x, weight, 1e-6).square().sum())
        return torch.func.vmap(loss, (None, 0))(weight.detach(), x.detach())

    close(gradients(rms_norm), gradients(plain), rtol=1e-4)


def test_autocast_does_not_round() -> None:
    x, weight = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = rms_norm(x, weight, 1e-6)
        close(
            torch.autograd.grad(y.sum(), x)[0],
            torch.autograd.grad(plain(x, weight, 1e-6).sum(), x)[0],
        )
    close(y, plain(x, weight, 1e-6))


def test_a_backward_pass_under_autocast_does_not_round() -> None:
    x, weight = inputs()
    expected = torch.autograd.grad(plain(x, weight, 1e-6).sum(), (x, weight))
    y = rms_norm(x, weight, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        close(torch.autograd.grad(y.sum(), (x, weight)), expected, rtol=1e-4)


def test_the_weight_or_the_input_may_be_frozen() -> None:
    x, weight = inputs()
    y = rms_norm(x, weight.detach(), 1e-6)
    close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(plain(x, weight, 1e-6).sum(), x))
    y = rms_norm(x.detach(), weight, 1e-6)
    expected = torch.autograd.grad(plain(x, weight, 1e-6).sum(), weight)
    close(torch.autograd.grad(y.sum(), weight), expected, rtol=1e-4)


def test_16_bits_and_inference_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = RMSNorm(24)
    x = inputs()[0]
    monkeypatch.setattr(RMSNormFunction, "apply", None)
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    close(half, plain(x.bfloat16(), norm.weight, 1e-6))
    with torch.no_grad():
        close(norm.float()(x), plain(x, norm.weight, 1e-6))
    with pytest.raises(TypeError):
        norm(x)


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)])
def test_vmap_over_inputs_and_weights(dims: tuple[int | None, ...]) -> None:
    x, weight = inputs()
    weights = torch.randn(3, 24, requires_grad=True)
    given = x, weight if dims[1] is None else weights
    found = torch.vmap(lambda *pair: rms_norm(*pair, 1e-6), dims)(*given)
    close(found, torch.vmap(lambda *pair: plain(*pair, 1e-6), dims)(*given), rtol=1e-4)


def test_forward_mode_derivatives() -> None:
    x, weight = inputs()
    tangents = torch.randn_like(x), torch.randn_like(weight)
    ours = torch.func.jvp(lambda *pair: rms_norm(*pair, 1e-6), (x, weight), tangents)
    close(ours, torch.func.jvp(lambda *pair: plain(*pair, 1e-6), (x, weight), tangents), rtol=1e-4)
