"""Dropout by cheap random bits: the right share, independent, repeatable, with the gradient of its mask."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modules.kernels.dropout import LEVELS, Dropout, TokenDropout, dropout, random_int16

COUNT = 400_000


def sigma(p: float, count: int) -> float:
    return (p * (1 - p) / count) ** 0.5


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.25, 0.5, 0.9, 0.9999])
def test_share_and_scale(p: float) -> None:
    out = dropout(torch.ones(COUNT), p)
    exact = round(p * LEVELS) / LEVELS
    kept = out != 0
    assert abs(kept.double().mean().item() - (1 - exact)) < 4 * sigma(exact, COUNT)
    assert abs(exact - p) <= 0.5 / LEVELS
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - exact)))


def test_the_smallest_rates_stay_rates() -> None:
    dropped = sum(
        (dropout(torch.ones(2**20), 1e-9) == 0).sum().item() for _ in range(4)
    )  # rounded up to 1 / 65536
    assert 2**22 / LEVELS - 4 * 8 < dropped < 2**22 / LEVELS + 4 * 8
    assert torch.isfinite(dropout(torch.ones(1000), 1 - 1e-9)).all()


def test_all_bits_are_random() -> None:
    numbers = random_int16(torch.Size((COUNT,))).long() + LEVELS // 2
    for bit in range(16):
        assert abs((numbers >> bit & 1).double().mean().item() - 0.5) < 4 * sigma(0.5, COUNT), bit
    for place in range(4):  # the four parts of each wide number
        assert (
            abs(numbers[place::4].double().mean().item() / LEVELS - 0.5)
            < 4 * (1 / 12 / (COUNT / 4)) ** 0.5
        )


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 64, 2496, 2500])
def test_neighbours_are_independent(offset: int) -> None:
    kept = (dropout(torch.ones(COUNT), 0.3) != 0).double()
    one, two = kept[:-offset] - kept.mean(), kept[offset:] - kept.mean()
    assert abs((one * two).mean().item() / kept.var().item()) < 4 * len(one) ** -0.5


def test_repeatable_from_the_seed() -> None:
    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.stack((dropout(torch.ones(1001), 0.5), dropout(torch.ones(1001), 0.5)))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2)) and not torch.equal(*run(1))


def test_nothing_happens_in_eval_or_at_rate_zero() -> None:
    x, module = torch.randn(5, 7), Dropout(0.5)
    assert module(x).eq(0).any()
    assert module.eval()(x) is x and dropout(x, 0.0) is x and Dropout(0.0)(x) is x


def test_whole_tokens_are_dropped() -> None:
    module, x = TokenDropout(0.3), torch.rand(40, 50, 6) + 1
    factors = module(x) / x  # (B, N, E)
    assert torch.equal(factors.amin(-1) == 0, factors.amax(-1) == 0)  # a token goes as a whole
    dropped = (factors[..., 0] == 0).double().mean().item()
    assert abs(dropped - 0.3) < 4 * sigma(0.3, 2000)
    torch.testing.assert_close(
        factors[factors > 0].mean(), torch.tensor(1 / 0.7), rtol=1e-4, atol=0
    )
    assert module.eval()(x) is x


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), (3,), (4, 5), (2, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    out = dropout(x, 0.4)
    assert out.shape == x.shape and out.dtype == dtype
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == dtype


def test_views_are_dropped_like_copies() -> None:
    x = torch.randn(4, 6, 8).transpose(0, 2)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return dropout(x, 0.5)

    assert torch.equal(seeded(x), seeded(x.contiguous()))


def seeded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return function(x)

    return run


def test_gradient_is_the_mask() -> None:
    x = torch.randn(50, 31, requires_grad=True)
    out = dropout(x, 0.3)
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    torch.testing.assert_close(grad * x, out)
    assert set(grad.unique().tolist()) == {0.0, grad.max().item()}


def test_gradient_by_finite_differences_twice() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    run = seeded(lambda x: dropout(x.square(), 0.5).square())
    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def test_compiled_and_elsewhere_it_is_plain_dropout() -> None:
    compiled = torch.compile(Dropout(0.5), backend="eager", fullgraph=True)
    out = compiled(torch.ones(1000))
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert dropout(torch.ones(3, device="meta"), 0.5).is_meta
