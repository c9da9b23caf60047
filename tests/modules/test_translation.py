"""Translation: the best of all texts, whatever the batch, the beams or those that leave."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modules.generation import beam_search, generate
from modules.generation.decoding import IncrementalDecoder
from modules.generation.translation import GenerationConfig, Seq2SeqDecoder, Translation, translate
from modules.models.seq2seq import ARCHITECTURES, Seq2Seq
from tests.modules.test_seq2seq import PLACES, V, both, model

SOURCES = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [8, 2]]
START, STOP = 1, {2, 7}
GREEDY = GenerationConfig(max_new_tokens=9, temperature=0.0)


def found(
    net: Seq2Seq, sources: Sequence[Sequence[int]] = SOURCES, **options: Any
) -> list[list[Translation]]:
    given = {key: options.pop(key) for key in ("banned", "seeds", "stop") if key in options}
    config = GenerationConfig(**{"max_new_tokens": 9, **options})
    return translate(net, sources, config, START, **{"stop": STOP, **given})


@torch.no_grad()
def logs(net: Seq2Seq, source: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Log probabilities of all tokens after each of a text's, (N + 1, V), by teacher forcing."""
    hidden = net(torch.tensor([[*source]]), torch.tensor([[START, *tokens]]))
    return net.logits(hidden)[0].log_softmax(-1)


def score(
    net: Seq2Seq, source: Sequence[int], tokens: Sequence[int], penalty: float = 1.0
) -> float:
    """What a translation's score is said to be."""
    return (
        float(logs(net, source, tokens)[torch.arange(len(tokens)), [*tokens]].sum())
        / len(tokens) ** penalty
    )


def greedy(net: Seq2Seq, source: Sequence[int], new: int = 9) -> list[int]:
    """The likeliest token each time, without cache or batch."""
    made: list[int] = []
    while len(made) < new and not (made and made[-1] in STOP):
        made.append(int(logs(net, source, made)[-1].argmax()))
    return made


def check(net: Seq2Seq, made: list[list[Translation]], penalty: float = 1.0) -> None:
    """Scores, order and ends are as documented."""
    for source, rows in zip(SOURCES, made, strict=True):
        assert [row.score for row in rows] == sorted((row.score for row in rows), reverse=True)
        for tokens, rated, finished in rows:
            assert rated == pytest.approx(score(net, source, tokens, penalty), abs=1e-4)
            assert finished == (tokens[-1] in STOP) and not STOP & {*tokens[:-1]}
            assert finished or len(tokens) == 9


@both
@pytest.mark.parametrize("position", PLACES)
def test_one_beam_is_greedy(architecture: str, position: str) -> None:
    net = model(architecture, position=position, tying="none", output_bias=True)
    with torch.no_grad():
        net.head.bias[[*STOP]] += 0.5
    made = found(net, temperature=0.0)
    assert [row.tokens for (row,) in made] == [greedy(net, source) for source in SOURCES]
    check(net, made)
    again = found(net, temperature=0.0, repetition_penalty=1 + 1e-9)  # goes token by token
    assert [row.tokens for (row,) in again] == [row.tokens for (row,) in made]


@both
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
def test_enough_beams_find_the_best_of_all_texts(architecture: str, penalty: float) -> None:
    net, source = model(architecture, target_vocabulary=4, tying="target"), SOURCES[0]
    made = torch.tensor([*itertools.product(range(4), repeat=3)])
    with torch.no_grad():
        hidden = net(
            torch.tensor([source]).expand(len(made), -1), F.pad(made[:, :-1], (1, 0), value=START)
        )
        steps = net.logits(hidden).log_softmax(-1).gather(2, made[..., None])[..., 0]  # (texts, 3)
    scores: dict[tuple[int, ...], float] = {}
    for text, logs_ in zip(made.tolist(), steps.tolist(), strict=True):
        end = text.index(2) + 1 if 2 in text else 3
        scores[tuple(text[:end])] = sum(logs_[:end]) / end**penalty
    wanted = sorted(((rated, text) for text, rated in scores.items()), reverse=True)[:27]
    rows = found(
        net, [SOURCES[1], source], stop={2}, beams=27, max_new_tokens=3, length_penalty=penalty
    )[1]
    assert [tuple(row.tokens) for row in rows] == [text for _, text in wanted]
    assert [row.score for row in rows] == pytest.approx([rated for rated, _ in wanted], abs=1e-4)


@both
@pytest.mark.parametrize(
    "position, stopping",
    [("sinusoidal", "never"), ("t5", "likely"), ("rotary", "first"), ("learned", "never")],
)
def test_beams_of_a_batch_are_those_of_each_source(
    architecture: str, position: str, stopping: str
) -> None:
    net = model(architecture, position=position, tying="none")
    made = found(net, beams=3, early_stopping=stopping)
    check(net, made)
    for source, rows in zip(SOURCES, made, strict=True):
        (alone,) = found(net, [source], beams=3, early_stopping=stopping)
        assert [row.tokens for row in rows] == [row.tokens for row in alone]


@both
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"beams": 4, "early_stopping": "likely"}, {}], ids=str
)
def test_what_is_done_leaves_the_batch(
    architecture: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, rows, step = (
        model(architecture, output_bias=True, tying="none"),
        [],
        IncrementalDecoder.decode_step,
    )
    with torch.no_grad():
        net.head.bias[[*STOP]] += 0.5
    monkeypatch.setattr(
        IncrementalDecoder,
        "decode_step",
        lambda self, tokens: rows.append(len(tokens)) or step(self, tokens),
    )
    sources = [[a, b] for a in range(4) for b in range(5)]
    made = found(net, sources, **options)
    count, wanted = len(made), []
    for length in range(1, max(len(row.tokens) for rows in made for row in rows)):
        still = sum(len(rows[0].tokens) > length for rows in made)
        count = still if still <= 0.75 * count else count
        wanted.append(count)
    assert rows == (wanted if len(made[0]) == 1 else sorted(rows, reverse=True)) and rows
    monkeypatch.setattr(beam_search, "rows_to_keep", lambda open_: None)
    monkeypatch.setattr(generate, "rows_to_keep", lambda open_: None)
    stayed = found(net, sources, **options)
    assert [[row.tokens for row in one] for one in made] == [
        [row.tokens for row in one] for one in stayed
    ]


def test_a_source_is_read_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, readers, start = model(), [], Seq2SeqDecoder.prefill
    monkeypatch.setattr(Seq2SeqDecoder, "prefill", lambda self: readers.append(self) or start(self))
    calls = []
    for block in net.decoder.stack.blocks:
        block.cross_attention.key_value.register_forward_hook(lambda *_: calls.append(1))
    found(net, beams=5, stop=())
    kept = readers[0].cache.block(1).cross_attn.context()
    assert (
        len(calls) == 2 and kept is not None and kept[0].shape == (4, 4, 5, 6)
    )  # of sources, not of beams


@both
def test_draws_do_not_depend_on_the_batch(architecture: str) -> None:
    net = model(architecture)
    made = found(net, seed=5, temperature=1.5, top_p=0.95)
    check(net, made)
    for row, source in enumerate(SOURCES):
        assert (
            found(net, [source], seed=5 + row, temperature=1.5, top_p=0.95)[0][0].tokens
            == made[row][0].tokens
        )
    assert (
        found(net, SOURCES[1:3], seeds=[6, 7], temperature=1.5, top_p=0.95)[1][0].tokens
        == made[2][0].tokens
    )
    assert (
        found(net, [SOURCES[0]] * 20, temperature=2.0)[0]
        != found(net, [SOURCES[0]] * 20, temperature=2.0)[1]
    )


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beams": 3}, {}], ids=str)
def test_banned_tokens_are_never_made(options: dict[str, Any]) -> None:
    net = model(output_bias=True)
    free = found(net, **options)
    banned = {row.tokens[0] for rows in free for row in rows} - STOP
    made = found(net, banned=banned, **options)
    assert not banned & {token for rows in made for row in rows for token in row.tokens}
    with torch.no_grad():
        net.head.bias[[*banned]] = float("-inf")  # so the others share all probability
    check(net, made)
    assert [[row.tokens for row in rows] for rows in found(net, **options)] == [
        [row.tokens for row in rows] for rows in made
    ]


@both
def test_texts_that_reach_the_limit_are_marked(architecture: str) -> None:
    net = model(architecture, position="learned")
    for options in ({"beams": 2}, {"temperature": 0.0}, {}):
        made = found(net, max_new_tokens=500, stop=(), **options)
        assert {len(row.tokens) for rows in made for row in rows} == {net.max_length}
        assert not any(row.finished for rows in made for row in rows)


def test_equals_keep_their_order() -> None:
    net = model()
    with torch.no_grad():
        net.embed.weight.zero_()  # all tokens are as likely
    assert found(net, temperature=0.0, max_new_tokens=3)[1][0].tokens == [0, 0, 0]
    made = found(net, beams=3, max_new_tokens=2, stop=())
    assert [row.tokens for row in made[0]] == [[0, 0], [0, 1], [0, 2]]


def test_a_higher_length_penalty_favours_longer_texts() -> None:
    net = model(output_bias=True)
    with torch.no_grad():
        net.head.bias[2] += 2
    lengths = [
        sum(len(rows[0].tokens) for rows in found(net, beams=6, length_penalty=penalty))
        for penalty in (-2, 0, 1, 3)
    ]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


@pytest.mark.parametrize(
    "sources, words",
    [
        ([], "There is no source"),
        ([[1], []], "Source 1 is empty"),
        ([[0] * 13], "Source 0 has 13 tokens, over the 12 of the model; shorten it"),
        ([[1], [V]], "Source 1 has a token that is not among the 19"),
    ],
)
def test_sources_that_cannot_be(sources: list[list[int]], words: str) -> None:
    for architecture in ARCHITECTURES:
        with pytest.raises(ValueError, match=words):
            found(model(architecture), sources)


def test_other_refusals() -> None:
    net = model()
    with pytest.raises(ValueError, match="training mode"):
        found(model().train())
    for start, banned in ((V, ()), (0, [V])):
        with pytest.raises(ValueError, match="Start 0 has a token that is not among the 19"):
            translate(net, SOURCES, GREEDY, start, STOP, banned)
    with pytest.raises(ValueError, match="1 seeds for 4 prompts"):
        found(net, seeds=[1])
