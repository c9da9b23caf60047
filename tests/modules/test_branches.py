"""Texts that branch off from those in a cache: each gives what it gives alone, however keys and values are read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.config import StackConfig
from modules.generation import beam_cache
from modules.generation.beam_cache import (
    BagContextCache,
    BagIndex,
    BagLayerCache,
    BeamCache,
    EmbeddingBag,
    SlotLayerCache,
)
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.masks import Mask
from modules.models.gpt import Decoder
from tests.modules.test_cache import VARIANTS, T, V, close, decoder, name_of
from tests.modules.test_translation import SOURCES, START, model

both = pytest.mark.parametrize("use_embedding_bag", [True, False])


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture
def either(use_embedding_bag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of rows where they suit, or what other devices have."""
    if not use_embedding_bag:
        monkeypatch.setattr(beam_cache, "prefers_embedding_bag", lambda *_: False)


def alone(net: Decoder, texts: list[list[list[int]]]) -> Tensor:
    """What each text of each row gives when it is read alone: (B K, E)."""
    return torch.stack([net(torch.tensor([text]))[0, -1] for row in texts for text in row])


@both
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_texts_branch_off(
    options: dict[str, Any], padded: bool, either: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beam_cache, "SLOT_STEP", 4)  # so that tables grow more than once
    net, tokens, beams = decoder(**options), torch.randint(V, (2, 5)), 3
    pads = (0, 2) if padded else (0, 0)
    cache = net.make_cache(2, 5)
    net(tokens, torch.arange(5) >= torch.tensor(pads)[:, None], cache=cache)
    memory = BeamCache(cache, beams, 5)
    texts = [[row[pad:]] * beams for row, pad in zip(tokens.tolist(), pads, strict=True)]
    for step in range(5):
        if step == 3:
            memory, texts = memory.select(torch.tensor([1])), texts[1:]
        origin, new = (
            torch.randint(beams, (len(texts), beams)),
            torch.randint(V, (len(texts), beams)),
        )
        if step:
            memory.reorder(origin)
            texts = [
                [row[k] for k in where] for row, where in zip(texts, origin.tolist(), strict=True)
            ]
        texts = [
            [[*text, t] for text, t in zip(*pair, strict=True)]
            for pair in zip(texts, new.tolist(), strict=True)
        ]
        close(net(new.flatten()[:, None], cache=memory)[:, 0], alone(net, texts))
    assert (
        memory.length == memory.length == 10
        and memory.used_slots == memory.slot_count == 5 + 5 * beams
    )


@both
def test_no_key_or_value_moves_when_texts_do(either: None) -> None:
    net = decoder()
    cache = net.make_cache(2, 3)
    net(torch.randint(V, (2, 3)), cache=cache)
    memory = BeamCache(cache, 2, 4)
    net(torch.randint(V, (4, 1)), cache=memory)
    before = [table.clone() for table in (*memory.keys, *memory.values)]
    memory.reorder(torch.tensor([[1, 1], [1, 0]]))
    net(torch.randint(V, (4, 1)), cache=memory)
    assert memory.values[0].shape[:2] == (2, 3 + 2 * 4)  # what texts have in common is there once
    for table, was in zip((*memory.keys, *memory.values), before, strict=True):
        axis = 1 if table.shape[1] == memory.slot_count else 3
        assert torch.equal(table.narrow(axis, 0, 5), was.narrow(axis, 0, 5))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_types_of_numbers_do(kind: torch.dtype) -> None:
    net, tokens = decoder(position="rotary", qk_norm=True), torch.randint(V, (2, 4))
    expected = net(torch.cat((tokens, tokens[:, :1]), 1))[:, -1:]
    net.to(kind)
    cache = net.make_cache(2, 4)
    net(tokens, cache=cache)
    memory = BeamCache(cache, 3, 1)
    found = net(tokens[:, :1].repeat_interleave(3, 0), cache=memory)
    assert found.dtype == memory.values[0].dtype == kind and isinstance(
        memory.block(0).self_attn, BagLayerCache
    )
    torch.testing.assert_close(
        found.float(), expected.repeat_interleave(3, 0), atol=0.06, rtol=0.06
    )


def test_autocast_does() -> None:
    net, tokens = decoder(position="rotary", qk_norm=True), torch.randint(V, (2, 4))
    with torch.autocast("cpu", torch.bfloat16):
        cache = net.make_cache(2, 4)
        net(tokens, cache=cache)
        found = net(tokens[:, :1].repeat_interleave(3, 0), cache=BeamCache(cache, 3, 1))
    expected = net(torch.cat((tokens, tokens[:, :1]), 1))[:, -1:].repeat_interleave(3, 0)
    torch.testing.assert_close(found.float(), expected, atol=0.06, rtol=0.06)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "prefix"])
def test_translations_are_the_same_either_way(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, config, kinds = model(architecture), GenerationConfig(8, beams=4), []
    place = BeamCache.add_tokens
    monkeypatch.setattr(
        BeamCache, "add_tokens", lambda self, *a: kinds.append(self.block(0)) or place(self, *a)
    )
    fast = translate(net, SOURCES, config, START, [2])
    assert {type(block.self_attn) for block in kinds} == {BagLayerCache}
    assert {type(block.cross_attn) is BagContextCache for block in kinds} == {
        architecture == "encoder_decoder"
    }
    monkeypatch.setattr(beam_cache, "prefers_embedding_bag", lambda *_: False)
    kinds.clear()
    plain = translate(net, SOURCES, config, START, [2])
    assert {type(block.self_attn) for block in kinds} == {SlotLayerCache}
    assert [[text.tokens for text in row] for row in fast] == [
        [text.tokens for text in row] for row in plain
    ]
    for one, two in zip(fast, plain, strict=True):
        assert [text.score for text in one] == pytest.approx([text.score for text in two], abs=1e-5)


def test_scores_in_16_bits_are_added_and_weighed_in_32() -> None:
    q, keys, values = (torch.randn(2, 4, n, 6, dtype=torch.bfloat16) for n in (3, 50, 50))
    bias = torch.randn(1, 1, 1, 50) - 100
    config = StackConfig(24, 1, 4)
    columns = BagIndex(torch.zeros(2, 3, 1, dtype=torch.int64), 1, config).key_bags
    found = BagContextCache((keys, values), 3, config, columns).attend(
        q.transpose(1, 2).flatten(0, 1)[:, :, None], Mask().with_bias(bias), None
    )  # (B, H, K, D) -> (B K, H, 1, D) and back
    found = found[:, :, 0].unflatten(0, (2, 3)).transpose(1, 2)
    expected = F.scaled_dot_product_attention(
        q.double(), keys.double(), values.double(), bias.double()
    )
    assert (found - expected).abs().max() < 0.05


def test_sums_of_rows() -> None:
    rows, table, weights = torch.randint(7, (5, 2, 4)), torch.randn(7, 3), torch.randn(5, 2, 4)
    expected = (table[rows] * weights[..., None]).sum(-2)  # (5, 2, 3)
    close(EmbeddingBag(rows)(table, weights), expected.flatten(0, 1))


def test_what_does_not_fit_is_named() -> None:
    net = decoder()
    cache = net.make_cache(2, 4)
    net(torch.zeros(2, 4, dtype=torch.int64), cache=cache)
    memory = BeamCache(cache, 3, 1)
    for shape in ((6, 2), (2, 1)):
        with pytest.raises(
            ValueError,
            match=f"{shape[1]} tokens in {shape[0]} rows do not fit: 2 x 3 sequences take one",
        ):
            net(torch.zeros(shape, dtype=torch.int64), cache=memory)
    net(torch.zeros(6, 1, dtype=torch.int64), cache=memory)
    with pytest.raises(ValueError, match="and have 5 of at most 5; make more room"):
        net(torch.zeros(6, 1, dtype=torch.int64), cache=memory)
    assert memory.length == 5 and T > 5
