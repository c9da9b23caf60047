"""Linear layers by oneDNN equal those by PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.kernels.cpu import HAS_ONEDNN
from modules.kernels.linear import (
    MANY_OUTPUTS,
    Linear,
    linear,
    linear_in_parts,
    linear_to_many,
    onednn_product,
    takes_onednn,
    weight_gradient,
)
from tests.helpers.tiny_models import close


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products go to oneDNN, also on processors that are given another kernel."""
    if not HAS_ONEDNN:
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr("modules.kernels.linear.PREFERS_ONEDNN", True)
    monkeypatch.setattr("modules.kernels.linear.MIN_PRODUCTS", 2**22)
    monkeypatch.setattr("modules.kernels.linear.MIN_PRODUCTS_NO_GRAD", 2**18)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "shape, outputs", [((4, 65, 192), 768), ((4, 65, 768), 192), ((300, 256), 64)]
)
def test_products_equal_plain_ones(shape: tuple[int, ...], outputs: int, biased: bool) -> None:
    x = torch.randn(*shape, requires_grad=True)
    weight = (torch.randn(outputs, shape[-1]) * shape[-1] ** -0.5).requires_grad_()
    leaves = [x, weight] + [torch.randn(outputs, requires_grad=True)] * biased
    assert takes_onednn(x, weight)
    ours = linear(*leaves)
    plain = F.linear(*leaves)
    close(ours, plain)
    close(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(plain.square().sum(), leaves),
        atol=1e-3,
    )


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch has no oneDNN here")
@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize("width, outputs", [(24, 96), (96, 24), (24, 24)])
def test_gradients_of_weights_equal_plain_ones(width: int, outputs: int, by_onednn: bool) -> None:
    x = torch.randn(300, width, requires_grad=True)
    grad = torch.randn(300, outputs, requires_grad=True)
    ours = weight_gradient(x, grad, by_onednn)
    plain = grad.T @ x
    close(ours, plain, atol=1e-4)
    close(
        torch.autograd.grad(ours.square().sum(), (x, grad)),
        torch.autograd.grad(plain.square().sum(), (x, grad)),
        rtol=1e-4,
        atol=1e-2,
    )


@pytest.mark.usefixtures("onednn")
def test_second_derivatives_of_products_equal_plain_ones() -> None:
    x = torch.randn(300, 128, requires_grad=True)
    weight = (torch.randn(128, 128) / 12).requires_grad_()

    def penalty(product: Any) -> tuple[Tensor, ...]:
        slope = torch.autograd.grad(product(x, weight).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(slope.square().mean(), (x, weight))

    close(penalty(linear), penalty(F.linear), rtol=1e-4)


@pytest.mark.usefixtures("onednn")
def test_gradients_of_each_sample_equal_plain_ones() -> None:
    x = torch.randn(3, 300, 128)
    weight = torch.randn(128, 128) / 12

    def gradients(product: Any) -> Tensor:
        loss = lambda weight, x: product(x, weight).square().sum()  # noqa: E731
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, x)  # (3, 128, 128)

    assert takes_onednn(x[0], weight)
    close(gradients(linear), gradients(F.linear), rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("create_graph", [True, False])
def test_several_gradients_at_once_equal_plain_ones(create_graph: bool) -> None:
    x = torch.randn(300, 128, requires_grad=True)
    weight = (torch.randn(128, 128) / 12).requires_grad_()
    grads = torch.randn(3, 300, 128)
    options: Any = {"is_grads_batched": True, "create_graph": create_graph}
    ours = torch.autograd.grad(linear(x, weight), (x, weight), grads, **options)
    close(ours, torch.autograd.grad(F.linear(x, weight), (x, weight), grads, **options))


@pytest.mark.usefixtures("onednn")
def test_exported_layers_take_any_number_of_vectors() -> None:
    layer = Linear(192, 192)
    sizes = {"x": {0: torch.export.Dim("vectors", min=1, max=4096)}}
    exported = torch.export.export(layer, (torch.randn(300, 192),), dynamic_shapes=sizes).module()
    for count in (1, 7, 4096):
        x = torch.randn(count, 192)
        close(exported(x), layer(x))


@pytest.mark.usefixtures("onednn")
def test_a_frozen_weight_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    counted = lambda *inputs: calls.append(1) or onednn_product(*inputs)  # noqa: E731
    monkeypatch.setattr("modules.kernels.linear.onednn_product", counted)
    frozen = Linear(256, 256).requires_grad_(False)
    frozen(torch.randn(100, 256, requires_grad=True)).sum().backward()
    assert len(calls) == 2  # forward, and the gradient of the input


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize(
    "x, outputs",
    [
        (torch.randn(8, 8), 8),
        (torch.randn(2**22), 4),
        (torch.randn(512, 128, dtype=torch.float64), 128),
        (torch.randn(512, 128, device="meta"), 128),
    ],
    ids=("small", "vector", "float64", "meta"),
)
def test_other_products_are_left_to_torch(x: Tensor, outputs: int) -> None:
    weight = torch.empty(outputs, x.shape[-1], dtype=x.dtype, device=x.device)
    assert not takes_onednn(x, weight)
    assert linear(x, weight).shape == (*x.shape[:-1], outputs)


def test_autocast_and_the_compiler_keep_their_own_products() -> None:
    x = torch.randn(512, 128)
    layer = Linear(128, 128)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    close(torch.compile(layer, backend="eager")(x), layer(x))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("is_onednn", [True, False])
@pytest.mark.parametrize("outputs", [17, MANY_OUTPUTS + 17])
@torch.no_grad()
def test_products_with_many_outputs_equal_plain_ones(
    outputs: int, is_onednn: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modules.kernels.linear.PREFERS_ONEDNN", is_onednn and HAS_ONEDNN)
    calls: list[int] = []
    counted = lambda *inputs: calls.append(1) or linear_in_parts(*inputs)  # noqa: E731
    monkeypatch.setattr("modules.kernels.linear.linear_in_parts", counted)
    x = torch.randn(5, 24)
    weight = torch.randn(outputs, 24)
    bias = torch.randn(outputs) if biased else None
    close(linear_to_many(x, weight, bias), F.linear(x, weight, bias))
    assert len(calls) == (outputs > MANY_OUTPUTS and not takes_onednn(x, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear_to_many(x, weight, bias).dtype == torch.bfloat16


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize(
    "rows, width, taken",
    [(0, 512, False), (1, 512, True), (64, 256, False), (128, 256, True)],
    ids=("nothing", "large weight", "small", "many rows"),
)
def test_products_without_gradients_before_zen_5(
    rows: int, width: int, taken: bool, grad_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes that take longer by oneDNN there are left to PyTorch."""
    monkeypatch.setattr("modules.kernels.linear.MIN_PRODUCTS_NO_GRAD", 2**23)
    with torch.set_grad_enabled(grad_enabled):
        expected = rows * width**2 >= 2**22 if grad_enabled else taken
        assert takes_onednn(torch.randn(rows, width), torch.randn(width, width)) == expected


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("grad_enabled", [True, False])
def test_forward_mode_derivatives_equal_plain_ones(grad_enabled: bool) -> None:
    x, tangent = torch.randn(2, 300, 128)
    weight = torch.randn(128, 128) / 12
    with torch.set_grad_enabled(grad_enabled):
        assert takes_onednn(x, weight)
        ours = torch.func.jvp(lambda x: linear(x, weight), (x,), (tangent,))
        close(ours, (F.linear(x, weight), F.linear(tangent, weight)))


@pytest.mark.usefixtures("onednn")
def test_the_gradient_of_a_sum_is_as_fast_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN takes some seconds for one factor that is expanded: all have strides above 0."""
    x = torch.randn(300, 128)
    weight = torch.randn(256, 128, requires_grad=True)
    factors: list[Tensor] = []
    product = torch.ops.mkldnn._linear_pointwise

    def watched(a: Tensor, b: Tensor, *options: Any) -> Tensor:
        factors.append(b)
        return product(a, b, *options)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", watched)
    monkeypatch.setattr("modules.kernels.linear.MIN_SIDE_GRADIENT", 1)
    grad = torch.autograd.grad(linear(x, weight).sum(), weight)[0]
    close(grad, x.sum(0).expand(256, -1), rtol=1e-4, atol=1e-4)
    assert len(factors) == 2 and all(0 not in factor.stride() for factor in factors)
