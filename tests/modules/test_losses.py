"""Cross entropy in chunks equals PyTorch's on all logits, with its gradients, in less memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.kernels import cross_entropy
from modules.kernels.cross_entropy import chunked_cross_entropy

S, E, V = 23, 8, 17


def inputs(
    dtype: torch.dtype = torch.float32, rows: int = S
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, weight, bias = (
        torch.randn(*shape, dtype=dtype).requires_grad_() for shape in ((rows, E), (V, E), (V,))
    )
    targets = torch.randint(V, (rows,))
    targets[1::5] = -100
    return x, weight, bias, targets


@pytest.mark.parametrize("rows", [1, 7, 23, 100, None])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_plain_cross_entropy(rows: int | None, smoothing: float, biased: bool) -> None:
    x, weight, bias, targets = inputs()
    leaves = (x, weight, bias) if biased else (x, weight)
    logits = F.linear(x, weight, bias if biased else None)
    plain = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    ours, right = chunked_cross_entropy(
        x, weight, bias if biased else None, targets, smoothing, rows
    )
    torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    assert right == (logits.argmax(1) == targets).sum() and not right.requires_grad
    pairs = zip(
        torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * plain, leaves), strict=True
    )
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradients_by_finite_differences(smoothing: float) -> None:
    x, weight, bias, targets = inputs(torch.float64, 6)

    def run(*leaves: Tensor) -> Tensor:
        return chunked_cross_entropy(*leaves, targets, smoothing, 4)[0]

    assert torch.autograd.gradcheck(run, (x, weight, bias))


@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_to_guess_costs_nothing(rows: int) -> None:
    x, weight, bias, targets = inputs(rows=rows)
    loss, right = chunked_cross_entropy(x, weight, bias, targets.fill_(-100))
    assert loss == 0 and right == 0
    loss.backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() == 0 for leaf in (x, weight, bias))


def test_only_the_gradients_asked_for_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    linear = cross_entropy.linear
    monkeypatch.setattr(cross_entropy, "linear", lambda *args: calls.append(1) or linear(*args))
    x, weight, bias, targets = inputs()
    with torch.no_grad():
        assert not chunked_cross_entropy(x, weight, bias, targets)[0].requires_grad
    assert len(calls) == 1
    loss = chunked_cross_entropy(x, weight.detach(), bias.detach(), targets)[0]
    assert len(calls) == 1 + 2  # scores, and the vectors' gradient
    loss.backward()
    assert x.grad is not None and weight.grad is None


def test_large_products_equal_plain_ones() -> None:
    x, weight = torch.randn(700, 64).requires_grad_(), (torch.randn(5000, 64) / 8).requires_grad_()
    targets = torch.randint(5000, (700,))
    ours = chunked_cross_entropy(x, weight, None, targets, chunk_rows=300)[0]
    plain = F.cross_entropy(x @ weight.T, targets)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)
    for mine, theirs in zip(
        *(torch.autograd.grad(loss, (x, weight)) for loss in (ours, plain)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=1e-4)


def test_low_precision_sums_in_float32() -> None:
    x, weight, bias, targets = inputs(torch.bfloat16)
    loss, _ = chunked_cross_entropy(x, weight, bias, targets, chunk_rows=5)
    assert loss.dtype == torch.float32
    loss.backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    plain = F.cross_entropy(F.linear(x, weight, bias).float(), targets)
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)


def test_autocast_learns_from_the_table_twice() -> None:
    x, weight, bias, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_cross_entropy(x, weight, bias, targets, chunk_rows=5)
        again = F.linear(x.detach(), weight).float().sum()
    assert loss.dtype == torch.float32
    plain = F.cross_entropy(F.linear(x, weight, bias), targets)
    torch.testing.assert_close(loss, plain, atol=0.02, rtol=0.02)  # bfloat16 has three digits
    (one,), (two,) = (torch.autograd.grad(value, weight) for value in (loss, plain))
    torch.testing.assert_close(one, two, atol=0.01, rtol=0.05)
    (copied,) = torch.autograd.grad(again, weight)
    torch.testing.assert_close(copied[0], x.detach().sum(0), atol=0.1, rtol=0.02)


def test_no_product_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    linear: Any = cross_entropy.linear
    monkeypatch.setattr(
        cross_entropy, "linear", lambda *args: seen.append((made := linear(*args)).numel()) or made
    )
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", 4 * V)
    chunked_cross_entropy(*inputs())[0].backward()
    assert max(seen) == 4 * V  # all scores are S x V, and the table's gradient is V x E
    assert sum(seen) == S * V + S * E + 6 * V * E  # six chunks
