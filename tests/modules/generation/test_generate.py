"""Generation by all decoders: the choices of simpler code, whatever the cache, batch and beams."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modules.generation.beam_search import beam_search
from modules.generation.decoding import IncrementalDecoder
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import DecodingRules, translate
from modules.models.gpt import Decoder
from tests.helpers.generation import (
    NEW,
    PROMPTS,
    START,
    STOP,
    greedy,
    log_probs,
    score,
    scored,
    sequences,
)
from tests.helpers.tiny_models import (
    LENGTH,
    VOCAB,
    close,
    every_decoder,
    every_position,
    every_variant,
    label,
    tiny,
)

ways = pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beams": 3}, {}], ids=label)


# Most likely tokens -----------------------------------------------------------------------------


@pytest.mark.plain_every(3)
@every_decoder
@every_variant
def test_the_most_likely_tokens_are_those_without_cache_or_batch(
    kind: str, options: dict[str, Any]
) -> None:
    net = tiny(kind, **options)
    expected = [[greedy(net, prompt)] for prompt in PROMPTS]
    assert sequences(net, temperature=0.0) == expected
    again = sequences(net, temperature=0.0, repetition_penalty=1 + 1e-9)  # by sampling
    assert again == expected


@every_position
def test_rows_that_outgrow_the_context_continue_from_its_last_half(position: str) -> None:
    net = tiny("gpt", position=position)
    prompts = [[*range(LENGTH)], [*range(5)], [*range(7)]]
    found = sequences(net, prompts, temperature=0.0, max_new_tokens=24)
    assert found == [[greedy(net, prompt, 24)] for prompt in prompts]
    short = tiny("gpt", position=position, max_length=1)
    assert sequences(short, [[3]], temperature=0.0) == [[greedy(short, [3])]]


@every_decoder
@ways
def test_rows_that_have_ended_leave_the_batch(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny(kind, **({"tied": False} if kind == "gpt" else {"tying": "none"}))
    options = {"stop": STOP, "early_stopping": "first", **options}
    rows: list[int] = []
    step = IncrementalDecoder.decode_step

    def counted(self: IncrementalDecoder, tokens: Tensor) -> Tensor:
        rows.append(len(tokens))
        return step(self, tokens)

    monkeypatch.setattr(IncrementalDecoder, "decode_step", counted)
    found = sequences(net, PROMPTS * 2, **options)
    assert rows == sorted(rows, reverse=True)
    if kind == "gpt":  # the other nets end all rows at once, or none
        assert rows[-1] < rows[0]
    if "temperature" in options or "beams" in options:
        assert found == [sequences(net, [prompt], **options)[0] for prompt in PROMPTS] * 2


@every_decoder
@ways
def test_sequences_end_with_a_stop_token_or_at_the_limit(
    kind: str, options: dict[str, Any]
) -> None:
    net = tiny(kind)
    found = scored(net, stop=STOP, **options)
    for prompt, rows in zip(PROMPTS, found, strict=True):
        assert [rated for _, rated in rows] == sorted((r for _, r in rows), reverse=True)
        for tokens, rated in rows:
            assert tokens[-1] in STOP or len(tokens) == NEW
            assert not STOP & {*tokens[:-1]}
            if kind != "gpt" or options.get("beams"):
                assert rated == pytest.approx(score(net, prompt, tokens), abs=1e-4)
    if options.get("temperature") == 0.0:
        assert [rows[0][0] for rows in found] == [greedy(net, p, stop=STOP) for p in PROMPTS]
    if kind != "gpt":
        config = GenerationConfig(500, **options)
        for rows in translate(net, PROMPTS, config, START, ()):
            assert {len(row.tokens) for row in rows} == {net.max_length}
            assert not any(row.finished for row in rows)
        for rows in translate(net, PROMPTS, config, START, STOP):
            assert all(row.finished == (row.tokens[-1] in STOP) for row in rows)


def test_tokens_come_as_they_are_made() -> None:
    net = tiny("gpt")
    steps: list[int] = []
    net.stack.register_forward_hook(lambda *_: steps.append(1))
    made = generate(net, PROMPTS, GenerationConfig())
    for count in range(1, 4):
        next(made)
        assert len(steps) == count


@every_decoder
@ways
def test_banned_tokens_never_follow(kind: str, options: dict[str, Any]) -> None:
    net = tiny(kind, **({} if kind == "gpt" else {"output_bias": True}))
    banned = {row[0] for rows in sequences(net, stop=STOP, **options) for row in rows} - STOP
    found = scored(net, stop=STOP, banned=banned, **options)
    assert not banned & {token for rows in found for row, _ in rows for token in row}
    if kind != "gpt":
        net.head.bias[[*banned]] = float("-inf")  # so that the others have all probability
        for ours, expected in zip(found, scored(net, stop=STOP, **options), strict=True):
            assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
            close(torch.tensor([s for _, s in ours]), torch.tensor([s for _, s in expected]), 1e-4)
    elif options.get("beams"):
        lost = beam_search(net, PROMPTS, GenerationConfig(5, beams=3), (), banned, False)
        for prompt, rows in zip(PROMPTS, lost, strict=True):
            for tokens, rated in rows:
                assert not banned & {*tokens}
                assert rated == pytest.approx(score(net, prompt, tokens), abs=1e-4)


def test_forced_tokens_are_certain() -> None:
    net = tiny("encoder_decoder")
    config = GenerationConfig(4, beams=2)
    rules = DecodingRules(forced_bos=(5,), forced_eos=(6,))
    for (row, _), source in zip(
        translate(net, PROMPTS, config, START, {6}, {8}, rules=rules), PROMPTS, strict=True
    ):
        assert row.tokens[0] == 5
        assert row.tokens[-1] == 6
        assert row.finished == (len(row.tokens) < 4)
        steps = log_probs(net, source, row.tokens)[torch.arange(len(row.tokens)), row.tokens]
        assert 8 not in row.tokens
        inner = steps[1:] if row.finished else steps[1:-1]
        assert row.score * len(row.tokens) >= float(inner.sum()) - 1e-4  # none is lost to 8


# Refusals ----------------------------------------------------------------------------------------


@every_decoder
@pytest.mark.parametrize(
    "prompts, number",
    [([], ""), ([[1], []], "1"), ([[0] * (LENGTH + 1)], "0"), ([[1], [VOCAB]], "1"), ([[-1]], "0")],
)
def test_prompts_that_do_not_fit_are_named(
    kind: str, prompts: list[list[int]], number: str
) -> None:
    for beams in (1, 2):
        with pytest.raises(ValueError, match=f"(Prompt|Source) {number}" if number else ""):
            sequences(tiny(kind), prompts, beams=beams)


@every_decoder
def test_other_arguments_that_do_not_fit_are_refused(kind: str) -> None:
    net = tiny(kind)
    with pytest.raises(ValueError, match=str(VOCAB)):
        sequences(net, banned=[VOCAB])
    with pytest.raises(ValueError, match="1 seeds"):
        sequences(net, seeds=[1])
    with pytest.raises(ValueError, match="training mode"):
        sequences(net.train())
    if isinstance(net, Decoder):
        with pytest.raises(ValueError, match="beam_search"):
            generate(net, PROMPTS, GenerationConfig(beams=2))
        with pytest.raises(ValueError, match="1 seeds"):  # before the first token is asked for
            generate(net.eval(), PROMPTS, GenerationConfig(), seeds=[1])


@pytest.mark.parametrize("options", [{"temperature": 0.0, "repetition_penalty": 1.2}, {"seed": 3}])
def test_scores_without_beams_are_divided_by_the_length(options: dict[str, Any]) -> None:
    net = tiny("encoder_decoder")
    found = scored(net, length_penalty=2.0, stop=STOP, **options)
    for prompt, ((tokens, rated),) in zip(PROMPTS, found, strict=True):
        assert rated == pytest.approx(score(net, prompt, tokens, 2.0), abs=1e-4)


def test_a_forced_token_costs_nothing() -> None:
    config = GenerationConfig(1, temperature=0.0)
    rules = DecodingRules(forced_bos=(5,))
    for (row,) in translate(tiny("encoder_decoder"), PROMPTS, config, START, STOP, rules=rules):
        assert row.tokens == [5] and row.score == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_probabilities_are_always_renormalised_when_sampling(temperature: float) -> None:
    net = tiny("encoder_decoder", output_bias=True)
    config = GenerationConfig(9, temperature=temperature, repetition_penalty=3.0)
    first, second = (
        translate(net, PROMPTS, config, START, STOP, rules=DecodingRules(renormalize))
        for renormalize in (True, False)
    )
    assert first == second
