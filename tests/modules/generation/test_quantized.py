"""Packed weights equal plain ones, int8 weights nearly do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from modules.generation import quantized
from modules.generation.quantized import (
    X_MAX,
    PackedLinear,
    QuantizedLinear,
    prepare,
    quantize_rows,
)
from modules.kernels.cpu import HAS_FBGEMM, HAS_ONEDNN
from modules.kernels.linear import Linear
from tests.helpers.tiny_models import VARIANTS, VOCAB, close, label, random_tokens, tiny

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
    monkeypatch.setattr(quantized, "MIN_PACKED_PRODUCTS", min_products)  # 0: always packed
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


@needs_onednn
@torch.no_grad()
def test_a_prepared_decoder_keeps_biases_of_queries_and_values_only() -> None:
    net = tiny("gpt", attention="cosine")
    for name, parameter in net.named_parameters():
        if name.endswith(("q_bias", "v_bias")):
            parameter.normal_()
    tokens = random_tokens()
    logits = net.logits(net(tokens))
    close(prepare(net).logits(net(tokens)), logits, atol=1e-4)


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


@torch.no_grad()
@pytest.mark.parametrize("shape", [(7,), (0, 7), (1, 7), (2, 3, 7)])
def test_int8_keeps_all_axes_but_the_last(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    layer = QuantizedLinear(torch.randn(5, 7))
    assert layer(x).shape == (*shape[:-1], 5)
    close(layer(x), x @ layer.weight.T, atol=0.3)


def test_other_names_of_quantization_are_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        prepare(tiny("gpt"), "int4")  # type: ignore[arg-type]


def test_rows_of_zeros_give_the_bias_and_the_engine_stays() -> None:
    engine = torch.backends.quantized.engine
    bias = torch.arange(9.0)
    layer = QuantizedLinear(torch.randn(9, 16), bias)
    assert torch.backends.quantized.engine == engine
    for rows in (1, 2):
        assert torch.equal(layer(torch.zeros(rows, 16)), bias.expand(rows, -1))
