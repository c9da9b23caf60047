"""Products by oneDNN equal PyTorch's, with their gradients, and step aside where they do not fit."""

import pytest
import torch
import torch.nn.functional as F

from modules.kernels.linear import MIN_PRODUCTS, Linear, OneDnnLinear, linear, takes_onednn

SHAPES = [((4, 65, 192), 768), ((4, 65, 768), 192), ((300, 256), 64), ((2, 3, 50, 128), 256)]


@pytest.mark.parametrize("biased", (True, False))
@pytest.mark.parametrize(("shape", "outputs"), SHAPES)
def test_equals_plain_linear_with_gradients(
    shape: tuple[int, ...], outputs: int, biased: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, requires_grad=True)
    weight = (torch.randn(outputs, shape[-1]) * shape[-1] ** -0.5).requires_grad_()
    bias = torch.randn(outputs, requires_grad=True) if biased else None
    assert takes_onednn(x, weight), "this test is about the large products"
    upstream = torch.randn(*shape[:-1], outputs)
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    ours, plain = linear(x, weight, bias), F.linear(x, weight, bias)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    for mine, theirs in zip(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(plain, leaves, upstream),
        strict=True,
    ):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


def test_second_derivatives_equal_plain_ones() -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(300, 128, requires_grad=True),
        (torch.randn(128, 128) / 12).requires_grad_(),
    )

    def penalty(function) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        slope = torch.autograd.grad(function(x, weight).square().sum(), x, create_graph=True)[0]
        return list(torch.autograd.grad(slope.square().mean(), (x, weight)))

    for mine, theirs in zip(penalty(linear), penalty(F.linear), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_only_the_gradients_asked_for_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = OneDnnLinear.forward
    monkeypatch.setattr(
        OneDnnLinear, "forward", staticmethod(lambda *inputs: calls.append(1) or forward(*inputs))
    )
    frozen = Linear(256, 256).requires_grad_(False)
    frozen(torch.randn(100, 256, requires_grad=True)).sum().backward()
    assert len(calls) == 2  # forward and the input's gradient; none for the weight


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.randn(8, 8), torch.randn(8, 8)),
        (torch.randn(MIN_PRODUCTS), torch.randn(4, MIN_PRODUCTS)),
        (torch.randn(512, 128, dtype=torch.float64), torch.randn(128, 128, dtype=torch.float64)),
        (torch.randn(512, 128, device="meta"), torch.randn(128, 128, device="meta")),
    ],
    ids=("small", "vector", "float64", "meta"),
)
def test_leaves_the_rest_to_pytorch(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert not takes_onednn(x, weight)
    assert linear(x, weight).shape == F.linear(x, weight).shape


def test_leaves_autocast_to_pytorch() -> None:
    x, layer = torch.randn(512, 128), Linear(128, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_compiled_equals_eager() -> None:
    x, layer = torch.randn(512, 128), Linear(128, 128)
    torch.testing.assert_close(
        torch.compile(layer, backend="eager")(x), layer(x), atol=1e-5, rtol=0
    )


def test_same_bits_every_time() -> None:
    x, layer = torch.randn(512, 256), Linear(256, 512)
    results = [layer(x.clone()) for _ in range(5)]
    assert all(torch.equal(results[0], other) for other in results)
