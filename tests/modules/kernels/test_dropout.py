"""Dropout: its rate, its random bits, its gradient; dropout of whole tokens."""

import pytest
import torch
from torch import Tensor

from modules.embedding import TokenDropout
from modules.kernels.dropout import LEVELS, Dropout, dropout, random_int16
from tests.helpers.tiny_models import close

COUNT = 2**20


def seeded_dropout(x: Tensor, p: float = 0.5, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return dropout(x, p)


@pytest.mark.parametrize("p", [1e-9, 1e-4, 0.1, 0.5, 0.9, 1 - 1e-9])
def test_dropout_drops_its_rate_and_scales_the_rest(p: float) -> None:
    rate = min(max(round(p * LEVELS), 1), LEVELS - 1) / LEVELS
    out = dropout(torch.ones(COUNT), p)
    kept = out != 0
    assert abs(kept.double().mean().item() - (1 - rate)) < 4 * (rate * (1 - rate) / COUNT) ** 0.5
    close(out[kept], torch.full_like(out[kept], 1 / (1 - rate)))


def test_all_random_bits_are_even_and_neighbours_independent() -> None:
    numbers = random_int16(torch.Size((COUNT,))).long() + LEVELS // 2
    for bit in range(16):
        assert abs((numbers >> bit & 1).double().mean().item() - 0.5) < 2 * COUNT**-0.5, bit
    kept = (dropout(torch.ones(COUNT), 0.3) != 0).double()
    for offset in (1, 2, 3, 4, 5, 64, 2500):
        first = kept[:-offset] - kept.mean()
        second = kept[offset:] - kept.mean()
        assert abs((first * second).mean().item() / kept.var().item()) < 4 * COUNT**-0.5


def test_dropout_repeats_from_its_seed_also_for_views() -> None:
    x = torch.randn(4, 6, 8).transpose(0, 2)
    assert torch.equal(seeded_dropout(x), seeded_dropout(x.contiguous()))
    assert not torch.equal(seeded_dropout(x, seed=1), seeded_dropout(x, seed=2))
    assert not torch.equal(dropout(x, 0.5), dropout(x, 0.5))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (1,), (3,), (2, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_of_dropout_is_its_mask(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.rand(shape, dtype=dtype) + 1).requires_grad_()
    out = dropout(x, 0.5)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.dtype == out.dtype == dtype
    close(grad * x, out)


def test_each_sample_of_a_vmap_has_its_own_mask() -> None:
    x = torch.ones(3, 1000)
    gradients = torch.func.grad(lambda row: dropout(row, 0.5).sum())
    masks = torch.func.vmap(gradients, randomness="different")(x)  # (3, 1000)
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(masks[0], masks[1])


def test_dropout_has_forward_mode_derivatives() -> None:
    x = torch.ones(100)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.full((100,), 3.0))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(dropout(dual, 0.5))
    close(tangent, 3 * primal)


def test_dropout_has_second_derivatives() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: seeded_dropout(x.square()).square(), x)
    assert torch.autograd.gradgradcheck(lambda x: seeded_dropout(x.square()).square(), x)


def test_dropout_does_nothing_in_evaluation_and_is_plain_elsewhere() -> None:
    x = torch.randn(5, 7)
    assert Dropout(0.5)(x).eq(0).any()
    assert Dropout(0.5).eval()(x) is x
    assert dropout(x, 0.0) is x
    compiled = torch.compile(Dropout(0.5), backend="eager", fullgraph=True)
    assert set(compiled(torch.ones(1000)).unique().tolist()) == {0.0, 2.0}
    assert dropout(torch.ones(3, device="meta"), 0.5).is_meta


def test_token_dropout_drops_whole_vectors() -> None:
    x = torch.rand(40, 50, 6) + 1
    factors = TokenDropout(0.3)(x) / x  # (B, N, E)
    close(factors, factors[..., :1].expand_as(factors), rtol=1e-4)
    assert abs(factors[..., 0].eq(0).double().mean().item() - 0.3) < 0.05
    close(factors.max(), torch.tensor(1 / 0.7), rtol=1e-4)
    assert TokenDropout(0.3).eval()(x) is x
