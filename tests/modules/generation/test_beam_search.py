"""Beam search finds the best sequences, whatever the batch, and ends when none can be better."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.generation.beam_search import run_beam_search, stable_topk
from modules.generation.decoding import IncrementalDecoder
from modules.generation.sampling import GenerationConfig
from tests.helpers.generation import NEW, PROMPTS, STOP, score, scored, sequences
from tests.helpers.tiny_models import LENGTH, every_decoder, tiny


@pytest.mark.plain_every(3)
@every_decoder
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
def test_enough_beams_find_the_best_of_all_sequences(kind: str, penalty: float) -> None:
    if kind == "gpt":
        net = tiny(kind, vocabulary=4, position="rotary")
        prompts = [[1, 2, 0], [3]]
    else:
        net = tiny(kind, target_vocabulary=4, tying="target")
        prompts = PROMPTS[:2]
    options = {"beams": 27, "max_new_tokens": 3, "length_penalty": penalty}
    for prompt, found in zip(prompts, scored(net, prompts, stop={2}, **options), strict=True):
        ends = {}
        for tokens in itertools.product(range(4), repeat=3):
            length = tokens.index(2) + 1 if 2 in tokens else 3
            ends[tokens[:length]] = score(net, prompt, tokens[:length], penalty)
        best = sorted(ends.items(), key=lambda item: -item[1])[:27]
        assert [tuple(tokens) for tokens, _ in found] == [tokens for tokens, _ in best]
        assert [rated for _, rated in found] == pytest.approx([r for _, r in best], abs=1e-4)


@pytest.mark.parametrize("penalty", [-2, 10])
def test_a_penalty_may_be_a_whole_number(penalty: int) -> None:
    net = tiny("encoder_decoder")
    for options in ({"beams": 2}, {"temperature": 0.0, "repetition_penalty": 1.2}):
        options |= {"max_new_tokens": 100}
        found = scored(net, PROMPTS[:1], length_penalty=penalty, **options)
        assert found == scored(net, PROMPTS[:1], length_penalty=float(penalty), **options)


@every_decoder
@pytest.mark.parametrize("beams", [1, 2])
def test_beams_of_a_model_in_bfloat16(kind: str, beams: int) -> None:
    """Also while PyTorch makes new tensors in bfloat16, as in Lightning's bf16-true."""
    net = tiny(kind).bfloat16()
    options = {"beams": beams, "temperature": 0.0, "stop": STOP}
    expected = scored(net, **options)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert scored(net, **options) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@every_decoder
@pytest.mark.parametrize(
    "position, stopping",
    [("alibi", "never"), ("t5", "likely"), ("rotary", "first"), ("learned", "never")],
)
def test_beams_do_not_depend_on_the_batch(kind: str, position: str, stopping: str) -> None:
    net = tiny(kind, position=position)
    options = {"beams": 3, "early_stopping": stopping, "stop": STOP}
    found = sequences(net, **options)
    assert found == [sequences(net, [prompt], **options)[0] for prompt in PROMPTS]


class Scripted(IncrementalDecoder):
    """The same probabilities whatever was read, one row of them for each step."""

    def __init__(self, probabilities: list[list[float]], beams: int) -> None:
        self.scores = torch.tensor(probabilities).log()
        self.beams = beams
        self.max_new_tokens = len(probabilities)
        self.steps = 0

    def prefill(self) -> Tensor:
        return self.scores[:1].clone()

    def decode_step(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        return self.scores[self.steps].repeat(len(tokens), 1)

    def reorder(self, beams: Tensor) -> None:
        pass

    def select(self, prompts: Tensor) -> None:
        pass


SHORT = [[0.4, 0.0, 0.6], [0.3, 0.05, 0.65], [0.9, 0.05, 0.05]]
MIXED = [[0.5, 0.1, 0.3, 0.1], [0.05, 0.5, 0.4, 0.05], [0.05, 0.05, 0.9, 0.0]]


@pytest.mark.parametrize(
    "probabilities, beams, penalty, stopping, steps, expected",
    [
        (SHORT, 2, 0.0, "never", 1, {(2,): 0.6, (0, 2): 0.26}),  # longer ones are less likely
        (SHORT, 2, 2.0, "never", 2, {(0, 0, 0): 0.108, (0, 2): 0.26}),  # divided by nine and four
        (SHORT, 2, 2.0, "likely", 1, {(0, 2): 0.26, (2,): 0.6}),
        (SHORT, 2, 2.0, "first", 1, {(0, 2): 0.26, (2,): 0.6}),
        (SHORT, 1, 2.0, "never", 0, {(2,): 0.6}),  # one beam is greedy
        (MIXED, 2, 1.0, "first", 1, {(0, 2): 0.2, (2,): 0.3}),  # the first need not be the best
        (MIXED, 2, 1.0, "never", 2, {(0, 1, 2): 0.225, (0, 2): 0.2}),
    ],
)
def test_the_search_ends_when_nothing_better_can_come(
    probabilities: Any, beams: int, penalty: float, stopping: Any, steps: int, expected: Any
) -> None:
    decoder = Scripted(probabilities, beams)
    config = GenerationConfig(length_penalty=penalty, early_stopping=stopping)
    (found,) = run_beam_search(decoder, config, {2})
    assert [tuple(tokens) for tokens, _ in found] == [*expected]
    assert decoder.steps == steps
    for (tokens, rated), probability in zip(found, expected.values(), strict=True):
        logarithm = float(torch.tensor(probability).log())
        assert rated == pytest.approx(logarithm / len(tokens) ** penalty, abs=1e-5)


@every_decoder
def test_equals_keep_their_order(kind: str) -> None:
    net = tiny(kind)
    net.embed.weight.zero_()  # all tokens are as likely
    assert sequences(net, temperature=0.0) == [[[0] * NEW]] * 4
    assert sequences(net, beams=3, max_new_tokens=2)[0] == [[0, 0], [0, 1], [0, 2]]
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    assert stable_topk(scores, 3)[1].tolist() == [[1, 2, 4], [0, 1, 2]]
    assert stable_topk(scores, 5)[1].tolist() == [[1, 2, 4, 5, 3], [0, 1, 2, 3, 4]]
    assert stable_topk(scores[:, :4], 9)[1].tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("levels", [7, 10**6])
@pytest.mark.parametrize("width", [60, 1000, 5000, 8001])
def test_the_largest_of_wide_rows(width: int, levels: int) -> None:
    scores = torch.randint(levels, (9, width)).float()  # with few levels nearly all are equals
    scores[0, -3:] = levels  # behind the last whole group
    scores[1, 1] = levels
    scores[2, :-1] = float("-inf")
    for count in (1, 6, 11):
        for rows in (scores, *scores.split(1)):
            expected = rows.sort(dim=1, descending=True, stable=True)
            top, indices = stable_topk(rows, count)
            assert torch.equal(indices, expected[1][:, :count])
            assert torch.equal(top, expected[0][:, :count])


def test_beams_end_with_the_context_of_their_prompt() -> None:
    net = tiny("gpt")
    prompts = [[1] * (LENGTH - 2), [3, 1, 4], [5] * (LENGTH - 2), [9] * 7]
    options = {"beams": 2, "max_new_tokens": 12}
    found = sequences(net, prompts, **options)
    assert [len(rows[0]) for rows in found] == [3, 12, 3, 10]  # the last token is not read
    assert found == [sequences(net, [prompt], **options)[0] for prompt in prompts]


@pytest.mark.parametrize("kind, size", [("gpt", "vocabulary"), ("prefix", "target_vocabulary")])
def test_there_may_be_fewer_tokens_than_beams(kind: str, size: str) -> None:
    net = tiny(kind, **{size: 3}, **({} if kind == "gpt" else {"tying": "target"}))
    for new, beams, count in ((1, 5, 3), (2, 12, 9)):  # each sequence once
        rows = sequences(net, [[1]], max_new_tokens=new, beams=beams)[0]
        assert len({tuple(row) for row in rows}) == len(rows) == count


class FivePrompts(Scripted):
    """The first has scores of its own; one of five that has ended stays in the batch."""

    other = torch.tensor([[0.5, 0.4, 0.0, 0.1]]).log()

    def prefill(self) -> Tensor:
        return torch.cat((self.scores[:1], self.other.repeat(4, 1)))

    def decode_step(self, tokens: Tensor) -> Tensor:
        scores = super().decode_step(tokens)
        scores[self.beams :] = self.other
        return scores


def test_a_prompt_that_has_ended_keeps_its_result() -> None:
    config = GenerationConfig(early_stopping="first")
    found = run_beam_search(FivePrompts(MIXED, 2), config, {2})[0]
    assert found == run_beam_search(Scripted(MIXED, 2), config, {2})[0]


def test_beams_go_on_beside_many_end_tokens() -> None:
    rows = [[0.01, 0.02, 0.07, 0.2, 0.3, 0.4], [0.1, 0.5, *[0.1] * 4], [0.5, *[0.1] * 5]]
    config = GenerationConfig(length_penalty=5.0)
    (found,) = run_beam_search(Scripted(rows, 2), config, {2, 3, 4, 5})  # the best four all end
    assert [tokens for tokens, _ in found] == [[1, 1, 0], [0, 1, 0]]


def test_a_negative_length_penalty_favours_the_next_token() -> None:
    rows = [[0.6, 0.05, 0.35], [0.55, 0.05, 0.4], [0.005, 0.005, 0.99], *[[0.3, 0.3, 0.4]] * 3]
    config = GenerationConfig(length_penalty=-0.5)
    (found,) = run_beam_search(Scripted(rows, 2), config, {2})
    assert [tokens for tokens, _ in found] == [[2], [0, 0, 2]]
