"""Sums with earlier tokens equal convolutions, with first and second derivatives."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.kernels.add_earlier import add_earlier
from tests.helpers.tiny_models import close


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("new", [1, 2, 9])
def test_sums_with_earlier_tokens_are_convolutions(new: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float64, "generator": generator}
    x = torch.randn(2, 3 + new, 5, requires_grad=True, **options)
    weight = torch.randn(3, 5, requires_grad=True, **options)
    visible = torch.rand(3, 2, new, 1, generator=generator) < 0.5 if masked else None
    if not masked:
        taps = torch.cat((weight.flip(0), torch.ones(1, 5, dtype=x.dtype))).mT[:, None]  # (E, 1, K)
        close(add_earlier(x, weight), F.conv1d(x.mT, taps, groups=5).mT)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return add_earlier(x, weight, visible)

    assert torch.autograd.gradcheck(run, (x, weight), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight))
    if visible is not None:
        alone = torch.where(
            visible, x[:, [[2 - k + n for n in range(new)] for k in range(3)]].movedim(1, 0), 0
        )
        close(run(x, weight), x[:, 3:] + (alone * weight[:, None, None]).sum(0))


def test_sums_of_16_bits_with_wider_weights_are_wide() -> None:
    x, weight = torch.randn(1, 6, 4, dtype=torch.bfloat16), torch.randn(2, 4)
    close(add_earlier(x, weight), add_earlier(x.float(), weight))


def test_each_sample_of_a_vmap_has_its_gradients() -> None:
    x, weight = torch.randn(3, 1, 6, 4), torch.randn(2, 4)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return add_earlier(x, weight).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)  # (3, 2, 4)
    close(each, torch.stack([torch.func.grad(loss)(weight, one) for one in x]))
    leaf = weight.clone().requires_grad_()
    close(each.sum(0), torch.autograd.grad(sum(loss(leaf, one) for one in x), leaf)[0])
