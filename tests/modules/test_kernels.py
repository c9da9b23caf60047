"""Faster ways to compute the same: dropout, products, cross entropy, packed and int8 weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.embedding import TokenDropout
from modules.generation import quantized
from modules.generation.quantized import (
    X_MAX,
    PackedLinear,
    QuantizedLinear,
    prepare,
    quantize_rows,
)
from modules.kernels import cross_entropy
from modules.kernels.add_earlier import add_earlier
from modules.kernels.cpu import HAS_FBGEMM, HAS_ONEDNN
from modules.kernels.cross_entropy import chunked_cross_entropy
from modules.kernels.dropout import LEVELS, Dropout, dropout, random_int16
from modules.kernels.linear import MIN_PRODUCTS, Linear, OneDnnLinear, linear, takes_onednn
from tests.helpers.tiny_models import VARIANTS, VOCAB, close, label, random_tokens, tiny

COUNT = 2**20
S, E, V = 23, 8, 17

# Dropout -----------------------------------------------------------------------------------------


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


# Products ----------------------------------------------------------------------------------------


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products go to oneDNN, also on processors that are given another kernel."""
    if not HAS_ONEDNN:
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr("modules.kernels.linear.PREFERS_ONEDNN", True)


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


@pytest.mark.usefixtures("onednn")
def test_second_derivatives_of_products_equal_plain_ones() -> None:
    x = torch.randn(300, 128, requires_grad=True)
    weight = (torch.randn(128, 128) / 12).requires_grad_()

    def penalty(product: Any) -> tuple[Tensor, ...]:
        slope = torch.autograd.grad(product(x, weight).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(slope.square().mean(), (x, weight))

    close(penalty(linear), penalty(F.linear), rtol=1e-4)


@pytest.mark.usefixtures("onednn")
def test_a_frozen_weight_costs_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    forward = OneDnnLinear.forward
    counted = staticmethod(lambda *inputs: calls.append(1) or forward(*inputs))
    monkeypatch.setattr(OneDnnLinear, "forward", counted)
    frozen = Linear(256, 256).requires_grad_(False)
    frozen(torch.randn(100, 256, requires_grad=True)).sum().backward()
    assert len(calls) == 2  # forward, and the gradient of the input


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize(
    "x, outputs",
    [
        (torch.randn(8, 8), 8),
        (torch.randn(MIN_PRODUCTS), 4),
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


# Cross entropy -----------------------------------------------------------------------------------


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
def test_cross_entropy_in_chunks_equals_the_plain_one(
    logits_per_chunk: int,
    smoothing: float,
    z_loss: float,
    biased: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", logits_per_chunk)
    x, weight, bias, targets = loss_inputs()
    leaves = [x, weight, bias][: 2 + biased]
    logits = F.linear(*leaves)
    plain = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    plain = plain + z_loss * logits.logsumexp(1)[targets >= 0].square().mean()
    loss, correct = chunked_cross_entropy(
        x, weight, bias if biased else None, targets, smoothing, z_loss=z_loss
    )
    close(loss, plain)
    close(torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * plain, leaves))
    assert correct == (logits.argmax(1) == targets).sum()
    assert not correct.requires_grad


def test_products_of_the_loss_fit_into_a_chunk_and_none_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def counted(*inputs: Tensor) -> Tensor:
        product = linear(*inputs)
        sizes.append(product.numel())
        return product

    monkeypatch.setattr(cross_entropy, "linear", counted)
    monkeypatch.setattr(cross_entropy, "LOGITS_PER_CHUNK", 4 * V)
    x, weight, bias, targets = loss_inputs()
    chunked_cross_entropy(x, weight, bias, targets)[0].backward()
    assert max(sizes) == 4 * V  # all scores are S x V, and the gradient of the table is V x E
    assert sum(sizes) == S * V + S * E + 6 * V * E  # six chunks
    sizes.clear()
    chunked_cross_entropy(x, weight.detach(), bias.detach(), targets)
    assert sum(sizes) == S * V + S * E
    sizes.clear()
    with torch.no_grad():
        assert not chunked_cross_entropy(x, weight, bias, targets)[0].requires_grad
    assert sum(sizes) == S * V


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


# Packed and int8 weights -------------------------------------------------------------------------

needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="torch has no oneDNN here")
layer_shapes = pytest.mark.parametrize(
    "rows, width, outputs", [(1, 384, 96), (7, 24, 65), (40, 129, 2), (300, 24, 65), (1, 700, 400)]
)
biases = pytest.mark.parametrize("biased", [True, False])


@needs_onednn
@layer_shapes
@biases
def test_a_packed_layer_is_the_layer(rows: int, width: int, outputs: int, biased: bool) -> None:
    weight = torch.randn(outputs, width) * width**-0.5
    bias = torch.randn(outputs) if biased else None
    x = torch.randn(2, rows, width)
    layer = PackedLinear(weight, bias)
    close(layer(x), F.linear(x, weight, bias))
    assert torch.equal(layer.weight, weight)


@needs_onednn
@pytest.mark.parametrize("min_products", [0, 2**18])
@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[-1], {"tied": False}], ids=label)
def test_a_prepared_decoder_is_the_decoder(
    options: dict[str, Any], min_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "MIN_PRODUCTS_NO_GRAD", min_products)  # 0: always packed
    net = tiny("gpt", **options)
    tokens = random_tokens()
    with torch.no_grad():
        logits = net.logits(net(tokens))
        loss, _ = net.loss(net(tokens), tokens)
        assert prepare(net) is net
        assert isinstance(net.head, PackedLinear)
        assert not any(isinstance(module, Linear) for module in net.modules())
        close(net.logits(net(tokens)), logits, atol=1e-4)
        close(net.loss(net(tokens), tokens)[0], loss)


def test_weights_that_onednn_does_not_take_stay() -> None:
    for net in (tiny("gpt").double(), tiny("gpt").to("meta")):
        assert all(isinstance(b.attention.qkv, Linear) for b in prepare(net).stack.blocks)


@layer_shapes
@biases
def test_int8_multiplies_whole_numbers_exactly(
    rows: int, width: int, outputs: int, biased: bool
) -> None:
    x = torch.randint(-X_MAX, X_MAX + 1, (rows, width)).float()
    weight = torch.randint(-127, 128, (outputs, width)).float()
    bias = torch.randn(outputs) if biased else None
    x[:, 0] = X_MAX  # so that the scales are 1
    weight[:, 0] = -127
    plain = nn.Linear(width, outputs, bias=biased).double()
    plain.weight.data = weight.double()
    if bias is not None:
        plain.bias.data = bias.double()
    close(QuantizedLinear(weight, bias)(x), plain(x.double()).float())


def test_int8_rounds_to_half_a_scale_and_each_row_alone() -> None:
    rows = torch.randn(50, 40) * torch.logspace(-4, 4, 50)[:, None]
    found, scales = quantize_rows(rows)
    assert found.dtype == torch.int8
    assert torch.equal(found.abs().amax(1), torch.full((50,), 127))
    assert ((found * scales - rows).abs() <= 0.5001 * scales).all()
    weight = torch.randn(9, 40)
    bias = torch.randn(9)
    layer = QuantizedLinear(weight, bias)
    scales *= 127 / X_MAX
    rounded = (rows / scales).round() * scales if HAS_FBGEMM else rows
    close(layer(rows), F.linear(rounded, layer.weight, bias), rtol=1e-4)
    assert (layer.weight - weight).abs().max() <= weight.abs().max() / 253
    close(layer(rows), torch.cat([layer(row[None]) for row in rows]))
    assert torch.equal(layer(torch.zeros(2, 3, 40)), bias.expand(2, 3, 9))
    low = layer(rows[:25].bfloat16())
    assert low.dtype == torch.bfloat16
    close(low.float(), layer(rows[:25]), atol=0.1, rtol=0.05)
    with pytest.raises(ValueError, match="meta"):
        QuantizedLinear(torch.zeros(5, 8, device="meta"))


@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[-1]], ids=label)
def test_an_int8_decoder_keeps_its_embedding_and_nearly_its_scores(options: dict[str, Any]) -> None:
    net = tiny("gpt", **options)
    tokens = random_tokens()
    with torch.no_grad():
        embedding = net.embed.weight.clone()
        logits = net.logits(net(tokens))
        loss, _ = net.loss(net(tokens), tokens)
        prepare(net, "int8")
        found = net.logits(net(tokens))
        assert isinstance(net.head, QuantizedLinear)
        assert not any(isinstance(module, Linear) for module in net.modules())
        assert torch.equal(net.embed.weight, embedding)
        assert found.shape == (3, 16, VOCAB)
        assert found.dtype == torch.float32
        assert (found - logits).norm() < 0.05 * logits.norm()
        close(net.loss(net(tokens), tokens)[0], loss, rtol=0.02)


# sums with earlier tokens -------------------------------------------------------------------------


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

    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradgradcheck(run, (x, weight))
    if visible is not None:
        alone = torch.where(
            visible, x[:, [[2 - k + n for n in range(new)] for k in range(3)]].movedim(1, 0), 0
        )
        close(run(x, weight), x[:, 3:] + (alone * weight[:, None, None]).sum(0))


def test_sums_of_16_bits_with_wider_weights_are_wide() -> None:
    x, weight = torch.randn(1, 6, 4, dtype=torch.bfloat16), torch.randn(2, 4)
    close(add_earlier(x, weight), add_earlier(x.float(), weight))
