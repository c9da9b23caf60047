"""The cache: the same vectors with and without it, in whatever pieces a text is read; never moved in memory."""

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.attention import ATTENTIONS
from modules.config import StackConfig
from modules.generation.beam_cache import BeamCache
from modules.kv_cache import KVCache
from modules.masks import padding
from modules.models.gpt import Decoder, DecoderConfig
from modules.position import POSITIONS
from modules.record import AttentionRecord
from modules.transformer import ORDERS, Context, Stack
from tests.modules.test_properties import shaken

V, T, E = 31, 16, 24
STACK = StackConfig(E, 2, 4, mlp_width=20, causal=True)
PLACES = [name for name in POSITIONS if not name.endswith("2d")]
VARIANTS: list[dict[str, Any]] = [
    *({"position": name} for name in PLACES),
    *({"position": name, "kv_heads": 2, "head_dim": 4} for name in PLACES),
    *({"attention": name, "kv_heads": 1} for name in ATTENTIONS),
    *({"order": name} for name in ORDERS),
    {"qk_norm": True, "position": "rotary", "position_options": {"fraction": 0.34}},
    {"norm": "rmsnorm", "feedforward": "swiglu", "bias": False, "qkv_bias": False, "tied": False},
]


def name_of(options: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in options.items())


def decoder(**options: Any) -> Decoder:
    own = {key: options.pop(key) for key in [*options] if key in DecoderConfig.__dataclass_fields__}
    config = DecoderConfig(
        **{"vocabulary": V, "max_length": T, "stack": replace(STACK, **options), **own}
    )
    return shaken(Decoder(config)).eval()


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
@pytest.mark.parametrize("pieces", [(T,), (1,) * T, (5, 1, 1, 6, 1, 2)], ids=str)
def test_any_pieces_give_the_same_logits(options: dict[str, Any], pieces: tuple[int, ...]) -> None:
    net, tokens = decoder(**options), torch.randint(V, (3, T))
    cache = net.make_cache(3, T)
    hidden = torch.cat([net(part, cache=cache) for part in tokens.split(pieces, 1)], 1)
    whole = net(tokens)
    close(hidden, whole)
    close(net.logits(hidden), net.logits(whole))
    assert cache.length == T


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_rows_padded_on_the_left_equal_each_alone(options: dict[str, Any]) -> None:
    net, tokens, pads = decoder(**options), torch.randint(V, (3, T)), (0, 3, 6)
    padding_mask = torch.arange(9) >= torch.tensor(pads)[:, None]
    cache = net.make_cache(3, T)
    parts = [
        net(tokens[:, :9], padding_mask, cache=cache),
        *(net(part, cache=cache) for part in tokens[:, 9:].split((1, 2, 4), 1)),
    ]
    plain = net(tokens, torch.arange(T) >= torch.tensor(pads)[:, None])
    for row, pad in enumerate(pads):
        alone = net(tokens[row : row + 1, pad:])[0]
        close(torch.cat(parts, 1)[row, pad:], alone)
        close(plain[row, pad:], alone)


@pytest.mark.parametrize("position", PLACES)
def test_padding_may_come_later_too(position: str) -> None:
    net, tokens = decoder(position=position), torch.randint(V, (2, 8))
    cache, padding_mask = net.make_cache(2, 8), torch.tensor([[True] * 3, [False, False, True]])
    net(tokens[:, :2], cache=cache)
    parts = [net(tokens[:, 2:5], padding_mask, cache=cache), net(tokens[:, 5:], cache=cache)]
    close(torch.cat(parts, 1)[0], net(tokens[:1])[0, 2:])
    close(torch.cat(parts, 1)[1, 2:], net(tokens[1:, [0, 1, 4, 5, 6, 7]])[0, 2:])


@pytest.mark.parametrize("position", PLACES)
def test_given_coordinates_go_on(position: str) -> None:
    net, tokens, positions = (
        decoder(position=position),
        torch.randint(V, (2, 8)),
        torch.tensor([[4], [7]]) + torch.arange(8),
    )
    cache = net.make_cache(2, 8)
    parts = [
        net(tokens[:, :3], positions=positions[:, :3], cache=cache),
        *(net(t, cache=cache) for t in tokens[:, 3:].split(2, 1)),
    ]
    close(torch.cat(parts, 1), net(tokens, positions=positions))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("position", PLACES)
def test_rows_move_between_texts(position: str, padded: bool) -> None:
    net, tokens = decoder(position=position), torch.randint(V, (3, 9))
    padding_mask = torch.arange(6) >= torch.tensor([0, 2, 4])[:, None] if padded else None
    cache, rows = net.make_cache(3, 9), torch.tensor([2, 2, 0])
    net(tokens[:, :6], padding_mask, cache=cache)
    other, cache = cache.select(torch.tensor([2, 2, 0, 1])), cache.select(rows)
    straight = torch.cat((tokens[rows, :6], tokens[:, 6:]), 1)
    full = (
        None
        if padding_mask is None
        else torch.cat((padding_mask[rows], torch.ones(3, 3, dtype=torch.bool)), 1)
    )
    expected = net(straight, full)[:, 6:]
    close(
        torch.cat([net(part, cache=cache) for part in tokens[:, 6:].split((1, 2), 1)], 1), expected
    )
    assert cache.length == 9 and other.length == 6
    close(net(tokens[[0, 1, 2, 0], 6:7], cache=other)[:3], expected[:, :1])


def test_it_is_allocated_once_and_handed_out_as_views() -> None:
    net, tokens = decoder(kv_heads=2, position="rotary"), torch.randint(V, (2, T))
    cache = net.make_cache(2, T)
    assert cache.data.shape == (2, 2, 2, 2, T, 6)
    start = cache.data.data_ptr()
    for part in tokens.split((5, *(1,) * 11), 1):
        net(part, cache=cache)
    cache.past = T  # nothing new
    keys, values = cache.block(1).self_attn.update(*cache.data[1, :, :, :, T:])
    assert (
        keys.data_ptr() == cache.data[1, 0].data_ptr()
        and values.data_ptr() == cache.data[1, 1].data_ptr()
    )
    cache.clear()
    net(tokens, cache=cache)
    assert cache.data.data_ptr() == start and cache.length == T


def test_memory_is_free_once_it_is_not_needed() -> None:
    net = decoder()
    gc.disable()
    try:
        cache = net.make_cache(1, T)
        net(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
        data, tables = (
            weakref.ref(cache.data),
            weakref.ref((texts := BeamCache(cache, 2, 3)).values[0]),
        )
        net(torch.zeros(2, 1, dtype=torch.int64), cache=texts)
        del cache, texts
        assert (
            data() is None and tables() is None
        )  # no circle of references that the collector has to find
    finally:
        gc.enable()


def test_a_source_is_projected_once() -> None:
    config = replace(STACK, cross_attention=True, context_width=10, kv_heads=2)
    stack, x = shaken(Stack(config)).eval(), torch.randn(2, 7, E)
    padding_mask = torch.tensor([[True] * 5, [True, True, False, False, True]])
    source = Context(torch.randn(2, 5, 10), padding(padding_mask))
    whole, cache, calls = stack(x, context=source), KVCache(config, 2, 7, torch.device("cpu")), []
    for block in stack.blocks:
        block.cross_attention.key_value.register_forward_hook(lambda *_: calls.append(1))
    tokens, parts = torch.zeros(2, 7), []
    for part in x.split((3, 1, 1, 2), 1):
        cache.add_tokens(tokens[:, : part.shape[1]], None, None)
        parts.append(stack(part, context=source, cache=cache))
    close(torch.cat(parts, 1), whole)
    assert len(calls) == 2  # one in each block
    other = cache.select(torch.tensor([1, 1, 0]))
    one, two = cache.block(0).cross_attn.context(), other.block(0).cross_attn.context()
    assert one is not None and two is not None and torch.equal(one[0][[1, 1, 0]], two[0])


def test_what_does_not_fit_is_named() -> None:
    net = decoder()
    cache = net.make_cache(2, 4)
    net(torch.zeros(2, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(
        ValueError,
        match="2 tokens in 2 rows do not fit into a cache of 2 rows by 4 tokens of which 3",
    ):
        net(torch.zeros(2, 2, dtype=torch.int64), cache=cache)
    assert cache.length == 3
    with pytest.raises(ValueError, match="1 tokens in 3 rows"):
        net(torch.zeros(3, 1, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="17 tokens are more than the 16 learned positions"):
        net.make_cache(1, 17)
    with pytest.raises(ValueError, match="cannot go on from a cache"):
        net(torch.zeros(2, 1, dtype=torch.int64), documents=torch.zeros(2, 1), cache=cache)


def test_autocast_and_half_precision_choose_its_type() -> None:
    net = decoder(position="rotary")
    with torch.autocast("cpu", torch.bfloat16):
        cache = net.make_cache(1, T)
        net(torch.randint(V, (1, 3)), cache=cache)
    assert (
        cache.data.dtype == torch.bfloat16
        and net.bfloat16().make_cache(1, T).data.dtype == torch.bfloat16
    )


def test_weights_can_be_watched() -> None:
    net, record = decoder(kv_heads=2), AttentionRecord()
    tokens = torch.randint(V, (2, 5))
    close(net(tokens, cache=record), net(tokens))
    assert [tuple(weights.shape) for weights in record.self_attn] == [(2, 4, 5, 5)] * 2
    assert record.self_attn[0].triu(1).abs().max() == 0
