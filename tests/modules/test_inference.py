"""Packed weights: the same results. int8: exact sums, small rounding errors, and generation that stays what it was."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.generation import quantized
from modules.generation.generate import generate
from modules.generation.quantized import PackedLinear, QuantizedLinear, prepare, quantize_rows
from modules.generation.sampling import GenerationConfig
from modules.kernels.linear import HAS_ONEDNN, Linear
from modules.models.gpt import Decoder
from tests.modules.test_cache import VARIANTS, T, V, decoder, name_of

SHAPES = [
    (1, 384, 96),
    (7, 24, 65),
    (1, 3, 5),
    (40, 129, 2),
    (300, 24, 65),
    (1, 700, 400),
]  # rows, K, N


needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="torch has no oneDNN here")


@needs_onednn
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(shape: tuple[int, int, int], bias: bool) -> None:
    rows, width, out = shape
    weight, shift = torch.randn(out, width) * width**-0.5, torch.randn(out) if bias else None
    layer, x = PackedLinear(weight, shift), torch.randn(2, rows, width)
    torch.testing.assert_close(layer(x), F.linear(x, weight, shift), atol=1e-5, rtol=1e-5)
    assert torch.equal(layer.weight, weight)


@needs_onednn
@pytest.mark.parametrize("smallest", [0, 2**18])
@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_a_prepared_decoder_is_the_decoder(
    options: dict[str, Any], smallest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        quantized, "MIN_PRODUCTS_NO_GRAD", smallest
    )  # 0: packed weights however few rows there are
    net = decoder(**options)
    texts = torch.randint(V, (2, T))
    logits, loss = net.logits(net(texts)), net.loss(net(texts), texts)[0]
    assert prepare(net) is net and isinstance(net.head, PackedLinear)
    assert not any(isinstance(module, Linear) for module in net.modules())
    torch.testing.assert_close(net.logits(net(texts)), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(net.loss(net(texts), texts)[0], loss)


def test_other_weights_stay_as_they_are() -> None:
    for net in (decoder().double(), decoder().to("meta")):
        assert prepare(net) is net and all(
            isinstance(block.attention.qkv, Linear) for block in net.stack.blocks
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_whole_numbers_are_multiplied_exactly(shape: tuple[int, int, int], bias: bool) -> None:
    rows, width, out = shape
    x = torch.randint(-127, 128, (rows, width)).float()
    weight, shift = (
        torch.randint(-127, 128, (out, width)).float(),
        torch.randn(out) if bias else None,
    )
    x[:, 0], weight[:, 0] = 127, -127  # the largest, so that the steps are 1
    found = QuantizedLinear(weight, shift)(x)
    torch.testing.assert_close(
        found,
        F.linear(x.double(), weight.double(), None if shift is None else shift.double()).float(),
    )


def test_numbers_are_off_by_half_a_step_at_most() -> None:
    numbers = torch.randn(50, 40) * torch.logspace(-4, 4, 50)[:, None]
    found, steps = quantize_rows(numbers)
    assert found.dtype == torch.int8
    assert torch.equal(found.abs().amax(1), torch.full((50,), 127))
    assert ((found * steps - numbers).abs() <= 0.5001 * steps).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_is_that_of_the_rounded_factors(shape: tuple[int, int, int]) -> None:
    rows, width, out = shape
    x, weight, bias = torch.randn(2, rows, width), torch.randn(out, width), torch.randn(out)
    layer = QuantizedLinear(weight, bias)
    values, steps = quantize_rows(x.flatten(0, 1))
    expected = F.linear(values * steps, layer.weight, bias).unflatten(0, (2, rows))
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    assert (layer.weight - weight).abs().max() <= weight.abs().max() / 253


def test_vectors_of_zeros_give_the_bias() -> None:
    bias = torch.randn(5)
    assert torch.equal(
        QuantizedLinear(torch.zeros(5, 8), bias)(torch.zeros(2, 3, 8)), bias.expand(2, 3, 5)
    )


def test_a_row_does_not_depend_on_the_others() -> None:
    layer, x = (
        QuantizedLinear(torch.randn(9, 16)),
        torch.randn(6, 16) * torch.logspace(-3, 3, 6)[:, None],
    )
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


def test_other_types_of_numbers_come_back_as_they_are() -> None:
    layer, x = QuantizedLinear(torch.randn(9, 16), torch.randn(9)), torch.randn(6, 16)
    found = layer(x.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), layer(x), atol=0.1, rtol=0.05)


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match='for CPUs, but these are on "meta"; move them'):
        QuantizedLinear(torch.zeros(5, 8, device="meta"))


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_a_decoder_keeps_only_its_tables_and_norms_as_they_are(options: dict[str, Any]) -> None:
    net = decoder(**options)
    embedding, logits = (
        net.embed.weight.clone(),
        net.logits(net(tokens := torch.randint(V, (2, T)))),
    )
    assert prepare(net, "int8") is net
    assert not any(isinstance(module, Linear) for module in net.modules())
    assert isinstance(net.head, QuantizedLinear)
    assert torch.equal(net.embed.weight, embedding)
    found = net.logits(net(tokens))
    assert found.dtype == torch.float32
    assert (found - logits).norm() < 0.1 * logits.norm()


def lessons(rows: int) -> Tensor:
    """Rows (rows, T + 1) that go up by 1, 2 or 3 in each step, with one token in eight replaced."""
    start, step = torch.randint(V, (rows, 1)), torch.randint(1, 4, (rows, 1))
    texts = (start + step * torch.arange(T + 1)) % V
    return torch.where(torch.rand(texts.shape) < 1 / 8, torch.randint(V, texts.shape), texts)


@torch.enable_grad()
def trained() -> Decoder:
    """A decoder that has learned some of `lessons`."""
    net = decoder().train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(150):
        texts = lessons(32)
        net.loss(net(texts[:, :-1]), texts[:, 1:])[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.eval()


@torch.no_grad()
def perplexity(net: Decoder, texts: Tensor) -> float:
    return float(
        F.cross_entropy(net.logits(net(texts[:, :-1])).flatten(0, 1), texts[:, 1:].flatten()).exp()
    )


def test_what_was_learned_stays() -> None:
    net, texts = trained(), lessons(200)
    small = prepare(copy.deepcopy(net), "int8")
    before, after = perplexity(net, texts), perplexity(small, texts)
    assert before < 12
    assert abs(after / before - 1) < 0.01
    loss, _ = small.loss(
        small(texts[:, :-1]), texts[:, 1:]
    )  # with the rounded table, but not the rounded vectors
    assert abs(float(loss.exp()) / after - 1) < 0.01
    prompts = [[1, 2, 3, 4], [2, 4, 6], [0, 3, 6, 9, 12]]
    config = GenerationConfig(max_new_tokens=8, temperature=0)
    one, two = (torch.stack(list(generate(model, prompts, config)), 1) for model in (net, small))
    assert torch.equal(one, two)
    alone = [torch.stack(list(generate(small, [prompt], config)), 1)[0] for prompt in prompts]
    assert torch.equal(two, torch.stack(alone))
