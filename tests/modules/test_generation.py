"""Generation by all decoders: the choices of simpler code, whatever the cache, batch and beams."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.generation import sampling
from modules.generation.beam_search import beam_search, run_beam_search, stable_topk
from modules.generation.decoding import IncrementalDecoder
from modules.generation.generate import generate
from modules.generation.sampling import (
    GenerationConfig,
    filter_scores,
    penalize_repetition,
    sample_tokens,
    uniform,
)
from modules.generation.translation import DecodingRules, translate
from modules.models.gpt import Decoder
from modules.models.seq2seq import Seq2Seq
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

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [8, 2]]
START = 1  # the token that targets begin with
NEW = 9  # tokens
STOP = {*range(0, VOCAB, 2)}
FILTERS = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}
ways = pytest.mark.parametrize("options", [{"temperature": 0.0}, {"beams": 3}, {}], ids=label)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def scored(
    net: Any, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> list[list[tuple[list[int], float]]]:
    """New tokens and score of the sequences of each prompt; sampled ones of GPT have score 0."""
    given = {key: options.pop(key) for key in ("stop", "banned", "seeds") if key in options}
    config = GenerationConfig(**{"max_new_tokens": NEW, **options})
    if isinstance(net, Seq2Seq):
        found = translate(net, prompts, config, START, **{"stop": (), **given})
        return [[row[:2] for row in rows] for rows in found]
    if config.beams > 1:
        return beam_search(net, prompts, config, **given)
    steps = torch.stack([*generate(net, prompts, config, **given)], 1)
    return [[([token for token in row if token >= 0], 0.0)] for row in steps.tolist()]


def sequences(net: Any, *args: Any, **options: Any) -> list[list[list[int]]]:
    return [[tokens for tokens, _ in rows] for rows in scored(net, *args, **options)]


def log_probs(net: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Log probabilities of what follows prompt and tokens, (N + 1, V), without a cache."""
    if isinstance(net, Seq2Seq):
        vectors = net(torch.tensor([prompt]), torch.tensor([[START, *tokens]]))[0]
    else:
        vectors = net(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 :]
    return net.logits(vectors).log_softmax(-1)


def score(net: Any, prompt: Sequence[int], tokens: Sequence[int], penalty: float = 1.0) -> float:
    """What the score of a sequence is said to be."""
    chosen = log_probs(net, prompt, tokens)[torch.arange(len(tokens)), [*tokens]]
    return float(chosen.sum()) / len(tokens) ** penalty


def greedy(net: Any, prompt: Sequence[int], count: int = NEW, stop: Any = ()) -> list[int]:
    """The likeliest token each time; GPT looks back as far as `PromptDecoder` says."""
    made: list[int] = []
    window = [*prompt]
    while len(made) < count and not (made and made[-1] in stop):
        if isinstance(net, Seq2Seq):
            made.append(int(log_probs(net, prompt, made)[-1].argmax()))
            continue
        made.append(int(log_probs(net, window, [])[-1].argmax()))
        window.append(made[-1])
        if len(window) > net.max_length:
            window = window[-max(1, net.max_length // 2) :]
    return made


# Likeliest tokens --------------------------------------------------------------------------------


@every_decoder
@every_variant
def test_the_likeliest_tokens_are_those_without_cache_or_batch(
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


# Samples -----------------------------------------------------------------------------------------


@every_decoder
def test_the_samples_of_a_row_do_not_depend_on_the_others(kind: str) -> None:
    net = tiny(kind, position="rotary")
    options = {**FILTERS, "repetition_penalty": 1.3, "max_new_tokens": 2 * LENGTH}
    together = sequences(net, seed=5, **options)
    for row, prompt in enumerate(PROMPTS):
        assert sequences(net, [prompt], seed=5 + row, **options) == [together[row]]
    assert sequences(net, PROMPTS[1:], seeds=[6, 7, 8], **options) == together[1:]


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


# Beams -------------------------------------------------------------------------------------------


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
            top, places = stable_topk(rows, count)
            assert torch.equal(places, expected[1][:, :count])
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
