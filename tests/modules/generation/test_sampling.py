"""Sampling: rows are independent, seeds repeat, filters are those of transformers."""

from typing import Any

import pytest
import torch

from modules.generation import sampling
from modules.generation.sampling import (
    GenerationConfig,
    filter_scores,
    penalize_repetition,
    sample_tokens,
    uniform,
)
from tests.helpers.generation import PROMPTS, sequences
from tests.helpers.tiny_models import LENGTH, close, every_decoder, label, tiny

FILTERS = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}


@every_decoder
def test_the_samples_of_a_row_do_not_depend_on_the_others(kind: str) -> None:
    net = tiny(kind, position="rotary")
    options = {**FILTERS, "repetition_penalty": 1.3, "max_new_tokens": 2 * LENGTH}
    together = sequences(net, seed=5, **options)
    for row, prompt in enumerate(PROMPTS):
        assert sequences(net, [prompt], seed=5 + row, **options) == [together[row]]
    assert sequences(net, PROMPTS[1:], seeds=[6, 7, 8], **options) == together[1:]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_scores_that_are_nan_give_a_token(options: dict[str, Any]) -> None:
    scores = torch.full((3, 20), torch.nan)
    found = sample_tokens(scores, GenerationConfig(**options), torch.rand(3, dtype=torch.float64))
    assert ((found >= 0) & (found < 20)).all()


def test_the_same_seed_gives_the_same_text() -> None:
    net = tiny("gpt", position="rotary")
    one = sequences(net, seed=1)
    assert sequences(net, seed=1) == one
    assert sequences(net, seed=2) != one
    assert sequences(net, seed=1, max_new_tokens=4) == [[row[:4]] for (row,) in one]
    state = torch.get_rng_state()
    (first,), (same,), (other,) = sequences(net, [[9]] * 3, seeds=[1, 1, 2], temperature=2.0)
    assert first == same != other
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_p": 1.0},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.0},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.15, "temperature": 1.4},
    ],
    ids=label,
)
@pytest.mark.parametrize("nucleus", [3, 30, 1000])
def test_filters_are_those_of_transformers(
    options: dict[str, Any], nucleus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = pytest.importorskip("transformers.generation.logits_process")
    monkeypatch.setattr(sampling, "NUCLEUS", nucleus)
    expected = scores = 3 * torch.randn(6, 50)
    for name, warper in (
        ("temperature", theirs.TemperatureLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
    ):
        if name in options:
            expected = warper(options[name])(torch.empty(6, 0, dtype=torch.int64), expected)
    kept, tokens = filter_scores(scores, GenerationConfig(**options))
    if tokens is not None:
        kept = torch.full_like(scores, float("-inf")).scatter(1, tokens, kept)
    close(kept.softmax(1), expected.softmax(1))
    assert torch.equal(kept.isinf(), expected.isinf())


def test_top_k_may_be_more_than_there_are() -> None:
    assert filter_scores(torch.randn(2, 9), GenerationConfig(top_k=1000))[0].shape == (2, 9)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    theirs = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.randn(3, 20)
    tokens = torch.randint(20, (3, 7))
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(tokens, scores)
    close(penalize_repetition(scores, tokens, penalty), expected)
    net = tiny("gpt")
    options = {"repetition_penalty": 3.0, "temperature": 0.0}
    padded = sequences(net, [[*range(9)], [7]], **options)
    assert padded[1:] == sequences(net, [[7]], **options)


@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"top_p": 0.9}], ids=label)
def test_samples_follow_the_probabilities(options: dict[str, Any]) -> None:
    count = 20000
    config = GenerationConfig(**options)
    scores = torch.randn(1, 12)
    evenly = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = sample_tokens(scores.expand(count, -1), config, evenly).bincount(minlength=12) / count
    kept, tokens = filter_scores(scores, config)
    expected = kept.softmax(1)[0]
    if tokens is not None:
        expected = torch.zeros(12).scatter(0, tokens[0], expected)
    close(found, expected, atol=2 / count)


def test_tokens_without_probability_are_never_sampled() -> None:
    scores = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    for value, token in ((0.0, 1), (1 - 2**-53, 3)):
        random = torch.tensor([value], dtype=torch.float64)
        assert sample_tokens(scores, GenerationConfig(), random) == token
    numbers = uniform([4, 5], 1000)
    assert numbers.dtype == torch.float64
    assert torch.equal(numbers[1:, :10], uniform([5], 10))
