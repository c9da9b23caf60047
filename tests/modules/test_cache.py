"""Caches: the same vectors as without, in whatever pieces; beams share what they have in common."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.config import StackConfig
from modules.generation import beam_cache
from modules.generation.beam_cache import BeamCache, EmbeddingBagContextCache, make_key_bags
from modules.kv_cache import KVCache
from modules.masks import Mask
from tests.helpers.tiny_models import (
    LENGTH,
    SOURCE,
    close,
    every_decoder,
    every_position,
    every_variant,
    hidden,
    new_cache,
    random_tokens,
    tiny,
)

both_ways = pytest.mark.parametrize("by_embedding_bag", [True, False])


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def in_pieces(net: Any, tokens: Tensor, cache: KVCache, *pieces: int) -> Tensor:
    return torch.cat([hidden(net, part, cache=cache) for part in tokens.split(pieces, 1)], 1)


@pytest.mark.plain_every(4)
@every_decoder
@every_variant
@pytest.mark.parametrize("pieces", [(LENGTH,), (1,) * LENGTH, (5, 1, 1, 6, 1, 2)], ids=str)
def test_any_pieces_give_the_same_vectors(
    kind: str, options: dict[str, Any], pieces: tuple[int, ...]
) -> None:
    net = tiny(kind, **options)
    tokens = random_tokens()
    cache = new_cache(net, range(3), LENGTH)
    close(in_pieces(net, tokens, cache, *pieces), hidden(net, tokens))
    assert cache.length == cache.max_length


@every_variant
def test_rows_padded_on_the_left_continue_as_alone(options: dict[str, Any]) -> None:
    net = tiny("gpt", **options)
    tokens = random_tokens()
    pads = (0, 3, 6)
    cache = net.make_cache(3, LENGTH)
    first = net(tokens[:, :9], torch.arange(9) >= torch.tensor(pads)[:, None], cache=cache)
    together = torch.cat((first, in_pieces(net, tokens[:, 9:], cache, 1, 2, 4)), 1)
    for row, pad in enumerate(pads):
        close(together[row, pad:], net(tokens[row : row + 1, pad:])[0])


@every_position
def test_padding_and_positions_may_come_later(position: str) -> None:
    net = tiny("gpt", position=position)
    tokens = random_tokens(2, 8)
    cache = net.make_cache(2, 8)
    mask = torch.tensor([[True] * 3, [False, False, True]])
    first = net(tokens[:, :2], cache=cache)
    middle = net(tokens[:, 2:5], mask, cache=cache)
    together = torch.cat((first, middle, net(tokens[:, 5:], cache=cache)), 1)
    close(together[0], net(tokens[:1])[0])
    close(together[1, 4:], net(tokens[1:, [0, 1, 4, 5, 6, 7]])[0, 2:])
    positions = torch.tensor([[4], [7]]) + torch.arange(8)
    cache.clear()
    first = net(tokens[:, :3], positions=positions[:, :3], cache=cache)
    rest = in_pieces(net, tokens[:, 3:], cache, 2, 2, 1)
    close(torch.cat((first, rest), 1), net(tokens, positions=positions))


@pytest.mark.parametrize("padded", [False, True])
@every_variant
def test_rows_can_be_selected(options: dict[str, Any], padded: bool) -> None:
    net = tiny("gpt", **options)
    tokens = random_tokens(3, 9)
    rows = torch.tensor([2, 2, 0])
    mask = None
    whole_mask = None
    if padded:
        mask = torch.arange(6) >= torch.tensor([0, 2, 4])[:, None]
        whole_mask = F.pad(mask[rows], (0, 3), value=True)
    cache = net.make_cache(3, 9)
    net(tokens[:, :6], mask, cache=cache)
    selected = cache.select(rows)
    continued = torch.cat((tokens[rows, :6], tokens[:, 6:]), 1)
    close(in_pieces(net, tokens[:, 6:], selected, 1, 2), net(continued, whole_mask)[:, 6:])
    assert (selected.length, cache.length) == (9, 6)


@every_variant
def test_a_cleared_cache_is_as_new(options: dict[str, Any]) -> None:
    net = tiny("gpt", **options)
    cache = net.make_cache(3, LENGTH)
    net(random_tokens(), (torch.arange(LENGTH) >= 2).expand(3, -1), cache=cache)
    cache.clear()
    tokens = random_tokens()
    close(in_pieces(net, tokens, cache, 4, 1, LENGTH - 5), net(tokens))


def test_a_cache_is_freed_at_once_with_its_beams() -> None:
    net = tiny("gpt")
    cache = net.make_cache(2, LENGTH)
    net(random_tokens(2), cache=cache)
    gc.disable()  # there must be no circle of references
    try:
        beams = BeamCache(cache, 2, 3)
        tables = (weakref.ref(cache.values), weakref.ref(beams.values[0]))
        del cache, beams
        assert [table() for table in tables] == [None, None]
    finally:
        gc.enable()


def test_what_does_not_fit_is_refused() -> None:
    net = tiny("gpt")
    cache = net.make_cache(2, 4)
    net(random_tokens(2, 3), cache=cache)
    for rows, count in ((2, 2), (3, 1)):
        with pytest.raises(ValueError, match=f"{count} tokens in {rows} rows"):
            net(random_tokens(rows, count), cache=cache)
    beams = BeamCache(cache, 3, 1)
    for rows, count in ((6, 2), (2, 1)):
        with pytest.raises(ValueError, match=f"{count} tokens in {rows} rows"):
            net(random_tokens(rows, count), cache=beams)
    net(random_tokens(6, 1), cache=beams)
    with pytest.raises(ValueError, match="at most 4"):
        net(random_tokens(6, 1), cache=beams)


# Beams -------------------------------------------------------------------------------------------


def choose_way(by_embedding_bag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of rows where they suit, or what other devices have."""
    monkeypatch.setattr(beam_cache, "SLOT_STEP", 4)  # so that tables grow more than once
    if not by_embedding_bag:
        monkeypatch.setattr(beam_cache, "prefers_embedding_bag", lambda *_: False)


@pytest.mark.plain_every(5)
@both_ways
@pytest.mark.parametrize("padded", [False, True])
@every_decoder
@every_variant
def test_each_beam_gives_what_it_gives_alone(
    options: dict[str, Any],
    kind: str,
    padded: bool,
    by_embedding_bag: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choose_way(by_embedding_bag, monkeypatch)
    net = tiny(kind, **options)
    beams = 3
    tokens = random_tokens(2, 5)
    starts = (0, 2) if padded else (0, 0)
    mask = torch.arange(5) >= torch.tensor(starts)[:, None]
    prompts = new_cache(net, range(2), 5)
    hidden(net, tokens, mask, prompts, range(2))
    cache = BeamCache(prompts, beams, 5)
    rows = [0] * beams + [1] * beams
    sequences = [tokens[row, starts[row] :].tolist() for row in rows]
    for step in range(5):
        if step == 3:
            cache = cache.select(torch.tensor([1]))
            rows = rows[beams:]
            sequences = sequences[beams:]
        if step:
            origin = torch.randint(beams, (len(rows) // beams, beams))
            cache.reorder(origin)
            flat = origin + torch.arange(0, len(rows), beams)[:, None]
            sequences = [sequences[index] for index in flat.flatten()]
        new = random_tokens(len(rows), 1)
        sequences = [[*old, int(token)] for old, token in zip(sequences, new, strict=True)]
        alone = [
            hidden(net, torch.tensor([sequence]), rows=[row])[0, -1]
            for sequence, row in zip(sequences, rows, strict=True)
        ]
        found = hidden(net, new, cache=cache, rows=rows[::beams])
        close(found[:, 0], torch.stack(alone))
    assert cache.used_slots == cache.slot_count


@pytest.mark.parametrize("kind", ["gpt", "encoder_decoder"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "autocast"])
def test_beams_in_other_types_of_numbers(kind: str, dtype: Any) -> None:
    net = tiny(kind, position="rotary", qk_norm=True)
    tokens = random_tokens(2, 4)
    rows = [0, 0, 0, 1, 1, 1]
    longer = torch.cat((tokens, tokens[:, :1]), 1)
    expected = hidden(net, longer, rows=[0, 1])[rows, -1:]
    if dtype != "autocast":
        net.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        cache = new_cache(net, range(2), 4)
        hidden(net, tokens, cache=cache, rows=range(2))
        beams = BeamCache(cache, 3, 1)
        found = hidden(net, tokens[rows, :1], cache=beams, rows=[0, 1])
    assert beams.use_embedding_bag
    assert beams.values[0].dtype == (torch.bfloat16 if dtype == "autocast" else dtype)
    close(found.float(), expected, atol=0.06, rtol=0.06)


def test_the_source_is_kept_once_for_all_beams() -> None:
    net = tiny("encoder_decoder")
    cache = new_cache(net, range(3), 1)
    hidden(net, SOURCE[:, :1], cache=cache)
    keys, _ = BeamCache(cache, 5, 2).block(1).cross_attn.cached_context()
    assert keys.shape == (3, 4, 7, 6)  # of sources, not of beams


def test_scores_in_16_bits_are_added_and_weighed_in_32() -> None:
    q = torch.randn(2, 4, 3, 6, dtype=torch.bfloat16)  # (B, H, K, D)
    keys = torch.randn(2, 4, 50, 6, dtype=torch.bfloat16)
    values = torch.randn(2, 4, 50, 6, dtype=torch.bfloat16)
    bias = torch.randn(1, 1, 1, 50) - 100
    config = StackConfig(24, 1, 4)
    key_bags = make_key_bags(2, 3, config, q.device)
    context = EmbeddingBagContextCache((keys, values), 3, config, key_bags)
    one_query_a_beam = q.transpose(1, 2).flatten(0, 1)[:, :, None]  # (B K, H, 1, D)
    found = context.attend(one_query_a_beam, Mask().with_bias(bias), None)
    expected = F.scaled_dot_product_attention(
        q.double(), keys.double(), values.double(), bias.double()
    )
    expected = expected.transpose(1, 2).flatten(0, 1)[:, :, None]
    close(found.double(), expected, atol=0.05)


def test_a_source_of_padding_has_no_influence_on_a_prefix_lm() -> None:
    net = tiny("prefix")
    targets = random_tokens(2, 7)
    padding_mask = torch.tensor([[True] * 5, [False] * 5])
    first, second = (net(random_tokens(2, 5), targets, padding_mask)[1] for _ in range(2))
    close(first, second)
