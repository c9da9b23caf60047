"""Translation by several models: against the mean of their probabilities without a cache."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.generation.sampling import GenerationConfig
from modules.generation.translation import DecodingRules, Translation, translate
from modules.models.seq2seq import Seq2Seq
from tests.helpers.generation import PROMPTS, START, STOP, log_probs
from tests.helpers.tiny_models import VOCAB, tiny

LIMIT = 6  # tokens of the shorter model

ways = pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"beams": 3}, {"temperature": 1.0, "top_k": 9}]
)


def two_nets() -> list[Seq2Seq]:
    """An encoder-decoder, and a decoder-only model of other weights and fewer tokens."""
    return [tiny("encoder_decoder"), tiny("prefix", max_length=LIMIT)]


def mean_log_probs(
    nets: Sequence[Seq2Seq],
    source: Sequence[int],
    made: Sequence[int],
    banned: Sequence[int] = (),
    renormalize: bool = True,
) -> Tensor:
    """Of what follows the tokens made so far, (N + 1, V)."""
    each = [log_probs(net, source, made) for net in nets]
    for scores in each:
        scores[:, banned] = -torch.inf
    if renormalize:
        each = [scores.log_softmax(-1) for scores in each]
    return torch.stack(each).exp().mean(0).log()


def found_by(nets: Any, options: dict[str, Any], **given: Any) -> list[list[Translation]]:
    config = GenerationConfig(**{"max_new_tokens": 9, **options})
    return translate(nets, PROMPTS, config, START, STOP, **given)


@ways
def test_scores_are_of_the_mean_probabilities(options: dict[str, Any]) -> None:
    nets = two_nets()
    alone = [found_by(net, options) for net in nets]
    found = found_by(nets, options)
    assert found != alone[0] and found != alone[1]
    for source, rows in zip(PROMPTS, found, strict=True):
        for tokens, score, finished in rows:
            assert finished or len(tokens) == LIMIT
            steps = mean_log_probs(nets, source, tokens)[torch.arange(len(tokens)), tokens]
            assert score == pytest.approx(float(steps.mean()), abs=1e-4)


@pytest.mark.parametrize("renormalize", [True, False])
def test_each_model_leaves_out_banned_tokens(renormalize: bool) -> None:
    nets = two_nets()
    banned = [row.tokens[0] for rows in found_by(nets, {"beams": 3}) for row in rows]
    rules = DecodingRules(renormalize)
    found = found_by(nets, {"beams": 3}, banned=banned, rules=rules)
    for source, rows in zip(PROMPTS, found, strict=True):
        for tokens, score, _ in rows:
            assert not {*tokens} & {*banned}
            steps = mean_log_probs(nets, source, tokens, banned, renormalize)
            chosen = steps[torch.arange(len(tokens)), tokens]
            assert score == pytest.approx(float(chosen.mean()), abs=1e-4)


def test_greedy_takes_the_token_of_the_largest_mean() -> None:
    nets = two_nets()
    for source, (best,) in zip(PROMPTS, found_by(nets, {"temperature": 0.0}), strict=True):
        for number, token in enumerate(best.tokens):
            assert token == mean_log_probs(nets, source, best.tokens[:number])[-1].argmax()


@ways
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_model_twice_is_the_model(options: dict[str, Any], renormalize: bool) -> None:
    net = tiny("encoder_decoder")
    rules = DecodingRules(renormalize, forced_bos=(5, 7))
    given = {"banned": {8}, "rules": rules}
    for alone, twice in zip(
        found_by(net, options, **given), found_by([net, net], options, **given), strict=True
    ):
        assert [row.tokens for row in alone] == [row.tokens for row in twice]
        assert [row.score for row in alone] == pytest.approx([row.score for row in twice])


def test_what_an_ensemble_cannot_do_is_refused() -> None:
    net = tiny("encoder_decoder")
    larger = tiny("encoder_decoder", target_vocabulary=VOCAB + 1, tying="target")
    with pytest.raises(ValueError, match=f"{VOCAB + 1}"):
        found_by([net, larger], {})
    with pytest.raises(ValueError, match="no model"):
        found_by([], {})
    with pytest.raises(ValueError, match="repetition_penalty"):
        found_by([net, net], {"repetition_penalty": 2.0})


def test_a_compiled_model_translates() -> None:
    net = tiny("encoder_decoder")
    assert found_by(torch.compile(net, backend="eager"), {"beams": 3}) == found_by(
        net, {"beams": 3}
    )


@pytest.mark.parametrize("beams", [1, 2])
def test_there_are_as_many_seeds_as_sources(beams: int) -> None:
    config = GenerationConfig(max_new_tokens=3, beams=beams)
    with pytest.raises(ValueError, match="1 seeds"):
        translate(two_nets(), PROMPTS, config, START, STOP, seeds=[1])
