"""Cross entropy in chunks equals the plain one."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from modules.config import StackConfig
from modules.kernels import cross_entropy
from modules.kernels.cross_entropy import (
    add_product,
    chunk_loss,
    chunked_cross_entropy,
    is_largest,
    plain_cross_entropy,
)
from modules.models.gpt import Decoder, DecoderConfig
from tests.helpers.tiny_models import close

S, E, V = 23, 8, 17


def loss_inputs(dtype: torch.dtype = torch.float32, rows: int = S) -> tuple[Tensor, ...]:
    """Vectors, table, biases and targets, some of which do not count."""
    x = torch.randn(rows, E, dtype=dtype).requires_grad_()
    weight = torch.randn(V, E, dtype=dtype).requires_grad_()
    bias = torch.randn(V, dtype=dtype).requires_grad_()
    targets = torch.randint(V, (rows,))
    targets[1::5] = -100
    return x, weight, bias, targets


@pytest.mark.parametrize("logits_per_chunk", [V, 4 * V, 2**23])
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.3), (0.2, 0.01)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_cross_entropy_in_chunks_equals_the_plain_one(
    logits_per_chunk: int,
    smoothing: float,
    z_loss: float,
    biased: bool,
    is_compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.compiler.reset()
    of_chunk = torch.compile(chunk_loss, backend="eager") if is_compiled else chunk_loss
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", logits_per_chunk)
    x, weight, bias, targets = loss_inputs()
    leaves = [x, weight, bias][: 2 + biased]
    logits = F.linear(*leaves)
    plain = plain_cross_entropy(logits, targets, smoothing, z_loss)
    theirs = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    close(plain, theirs + z_loss * logits.logsumexp(1)[targets >= 0].square().mean())
    loss, correct = chunked_cross_entropy(
        x, weight, bias if biased else None, targets, smoothing, z_loss, of_chunk
    )
    close(loss, plain)
    close(torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * plain, leaves))
    assert correct == (logits.argmax(1) == targets).sum()
    assert not correct.requires_grad


class Products(TorchDispatchMode):
    """Records the sizes of results of matrix products, new ones and those that are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[int] = []
        self.added_to: list[int] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            sizes = self.added_to if "out" in (kwargs or {}) else self.new
            sizes.append(result.numel())
        return result


def test_products_of_the_loss_fit_into_a_chunk_and_none_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", 4 * V)
    x, weight, bias, targets = loss_inputs()
    with Products() as products, FlopCounterMode(display=False) as counter:
        chunked_cross_entropy(x, weight, bias, targets)[0].backward()
    assert max(products.new) == 4 * V  # all logits are S x V
    assert sum(products.new) == S * V + S * E + 6 * V  # with the bias's gradient of six chunks
    assert products.added_to == 6 * [V * E]
    assert counter.get_total_flops() == 2 * S * V * (3 * E + 1)
    with Products() as products:
        chunked_cross_entropy(x, weight.detach(), bias.detach(), targets)
    assert sum(products.new) == S * V + S * E and not products.added_to
    with torch.no_grad(), Products() as products:
        assert not chunked_cross_entropy(x, weight, bias, targets)[0].requires_grad
    assert sum(products.new) == S * V and not products.added_to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_added_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "takes_onednn", lambda *_: True)
    a = torch.randn(V, S, dtype=dtype)
    b = torch.randn(S, E, dtype=dtype)
    total = torch.ones(V, E)
    add_product(total, a, b, max_temporary=8 * E)
    tolerance = 0.04 if dtype == torch.bfloat16 else 1e-5
    close(total, 1 + a.float() @ b.float(), tolerance, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_logits_are_no_correct_predictions(dtype: torch.dtype) -> None:
    weight = torch.zeros(V, E, dtype=dtype)
    targets = torch.arange(1, V)
    assert chunked_cross_entropy(torch.randn(V - 1, E, dtype=dtype), weight, None, targets)[1] == 0


@pytest.mark.parametrize("rows", [0, 4])
def test_a_loss_of_no_targets_is_zero(rows: int) -> None:
    x, weight, bias, targets = loss_inputs(rows=rows)
    loss, correct = chunked_cross_entropy(x, weight, bias, targets.fill_(-100))
    loss.backward()
    assert loss == correct == 0
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in (x, weight, bias))


@pytest.mark.parametrize("target", [-5, V])
def test_targets_outside_the_table_are_errors(target: int) -> None:
    x, weight, bias, targets = loss_inputs()
    targets[2] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        chunked_cross_entropy(x, weight, bias, targets)


def test_losses_in_16_bits_are_summed_in_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", 5 * V)
    x, weight, bias, targets = loss_inputs(torch.bfloat16)
    loss, _ = chunked_cross_entropy(x, weight, bias, targets)
    close(loss, F.cross_entropy(F.linear(x, weight, bias).float(), targets))
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_autocast_learns_from_the_table_twice() -> None:
    x, weight, bias, targets = loss_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = chunked_cross_entropy(x, weight, bias, targets)
        again = F.linear(x.detach(), weight).float().sum()
    plain = F.cross_entropy(F.linear(x, weight, bias), targets)
    close(loss, plain, atol=0.02, rtol=0.02)  # bfloat16 has three digits
    close(torch.autograd.grad(loss, weight), torch.autograd.grad(plain, weight), 0.01, 0.05)
    close(torch.autograd.grad(again, weight)[0][0], x.detach().sum(0), 0.1, 0.02)


def test_a_compiled_model_can_be_copied() -> None:
    torch.compiler.reset()
    net = Decoder(DecoderConfig(V, S, stack=StackConfig(E, 1, 2, causal=True)))
    tokens = torch.randint(V, (2, S))
    expected = net.loss(net(tokens), tokens)[0]
    net.compile(backend="eager")
    for compiled in (net, copy.deepcopy(net)):
        close(compiled.loss(compiled(tokens), tokens)[0], expected)


def test_equal_logits() -> None:
    logits = torch.ones(2, 4)
    logits[1, 1:3] = 2
    target = torch.tensor([[1], [2]])
    assert is_largest(logits.bfloat16(), target).tolist() == [False, False]
    first = torch.tensor([[0], [1]])
    assert is_largest(logits.bfloat16(), first).tolist() == [True, True]
    assert is_largest(logits, target).tolist() == [False, True]
