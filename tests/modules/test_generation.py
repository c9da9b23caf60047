"""Generation: what a cache, a batch or beams must not change, and the same choices as other code."""

import itertools
from collections.abc import Sequence
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
from modules.models.gpt import Decoder
from tests.modules.test_cache import PLACES, VARIANTS, T, V, decoder, name_of

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
NEW = 9


def text(
    net: Decoder, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any
) -> list[list[int]]:
    """Rows of new tokens."""
    extra = {key: options.pop(key) for key in ("stop", "seeds") if key in options}
    steps = list(
        generate(net, prompts, GenerationConfig(**{"max_new_tokens": NEW, **options}), **extra)
    )
    return torch.stack(steps, 1).tolist()


@torch.no_grad()
def next_logits(net: Decoder, tokens: list[int]) -> Tensor:
    """Scores of what follows, without a cache."""
    return net.logits(net(torch.tensor([tokens])))[0, -1]


def greedy(net: Decoder, prompt: Sequence[int], new: int = NEW) -> list[int]:
    """One row without cache, batch or padding; the window as `PromptDecoder` has it."""
    window, made = [*prompt], []
    for _ in range(new):
        made.append(int(next_logits(net, window).argmax()))
        window = [*window, made[-1]]
        if len(window) > net.max_length:
            window = window[-(net.max_length // 2) :]
    return made


@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_the_likeliest_tokens_are_those_without_cache_or_batch(options: dict[str, Any]) -> None:
    net = decoder(**options)
    assert text(net, temperature=0) == [greedy(net, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("position", PLACES)
def test_rows_that_outgrow_the_context_go_on_with_its_last_half(position: str) -> None:
    net = decoder(position=position)
    prompts = [[*range(T)], [*range(5)], [*range(7)]]
    assert text(net, prompts, temperature=0, max_new_tokens=24) == [
        greedy(net, prompt, 24) for prompt in prompts
    ]


def test_a_context_of_one_token() -> None:
    net = decoder(max_length=1)
    assert text(net, [[3]], temperature=0) == [greedy_of_one(net, 3)]


def greedy_of_one(net: Decoder, token: int) -> list[int]:
    made = [token]
    for _ in range(NEW):
        made.append(int(next_logits(net, made[-1:]).argmax()))
    return made[1:]


DRAWS = {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3, "temperature": 1.5}


def test_a_rows_draws_do_not_depend_on_the_others() -> None:
    net = decoder(position="rotary")
    together = text(net, seed=5, max_new_tokens=2 * T, **DRAWS)
    for row, prompt in enumerate(PROMPTS):
        assert text(net, [prompt], seed=5 + row, max_new_tokens=2 * T, **DRAWS) == [together[row]]
    assert text(net, PROMPTS[1:], seeds=[6, 7], max_new_tokens=2 * T, **DRAWS) == together[1:]


def test_same_seed_same_text() -> None:
    net = decoder(position="rotary")
    one = text(net, seed=1)
    assert text(net, seed=1) == one != text(net, seed=2)
    assert [row[:4] for row in one] == text(net, seed=1, max_new_tokens=4)
    state = torch.get_rng_state()
    same = text(net, [PROMPTS[0]] * 3, seeds=[1, 1, 2], temperature=2.0)
    assert same[0] == same[1] != same[2]
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's draws change


def test_rows_end_one_by_one() -> None:
    net = decoder()
    free = text(net, seed=3)
    stop = {free[0][2], free[1][0]}
    ends = [next((i for i, token in enumerate(row) if token in stop), NEW) for row in free]
    expected = [
        row[: end + 1] + [-1] * (NEW - end - 1) for row, end in zip(free, ends, strict=True)
    ]
    steps = min(NEW, max(ends) + 1)
    assert text(net, seed=3, stop=stop) == [row[:steps] for row in expected]
    first = greedy(net, PROMPTS[0])[0]
    assert text(net, PROMPTS[:1], temperature=0, stop=[first]) == [[first]]


def test_tokens_come_as_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    net, steps = decoder(), []
    step = IncrementalDecoder.decode_step
    monkeypatch.setattr(
        IncrementalDecoder,
        "decode_step",
        lambda self, tokens: steps.append(1) or step(self, tokens),
    )
    made = generate(net, PROMPTS, GenerationConfig())
    for expected in range(3):
        next(made)
        assert len(steps) == expected


def test_banned_tokens_never_follow() -> None:
    net = decoder()
    likely = {token for row in text(net, temperature=0) for token in row}
    drawn = {
        int(token)
        for step in generate(net, PROMPTS, GenerationConfig(200), (), None, likely)
        for token in step
    }
    assert drawn and not drawn & likely
    for renormalize in (True, False):
        found = beam_search(net, PROMPTS, GenerationConfig(5, beams=3), (), likely, renormalize)
        assert not likely & {token for texts in found for tokens, _ in texts for token in tokens}
    with pytest.raises(ValueError, match="Banned token 31"):
        generate(net, PROMPTS, GenerationConfig(), (), None, [V])


def test_rows_that_have_ended_are_read_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    net, rows = decoder(position="rotary"), []
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [9, 2]]
    options = {"seed": 3, "max_new_tokens": 2 * T, "repetition_penalty": 1.2}
    stop = {next(text[2] for text in text(net, prompts, **options)), 4, 5}
    step = IncrementalDecoder.decode_step
    monkeypatch.setattr(
        IncrementalDecoder,
        "decode_step",
        lambda self, tokens: rows.append(len(tokens)) or step(self, tokens),
    )
    fewer = text(net, prompts, stop=stop, **options)
    assert rows == sorted(rows, reverse=True) and rows[-1] < rows[0] == 4
    monkeypatch.setattr("modules.generation.generate.rows_to_keep", lambda open_: None)
    assert text(net, prompts, stop=stop, **options) == fewer


def test_a_cache_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = decoder(position="rotary"), set()
    made = Decoder.make_cache

    def counted(self: Decoder, batch: int, length: int) -> Any:
        seen.add((batch, length))
        return made(self, batch, length)

    monkeypatch.setattr(Decoder, "make_cache", counted)
    text(net, max_new_tokens=4)
    assert seen == {(3, 9)}
    seen.clear()
    text(net, max_new_tokens=3 * T)
    assert seen == {(3, T)}


# Draws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.8},
        {"top_p": 1.0},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.0},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.15, "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [3, 30, 1000])
def test_tokens_to_draw_from_are_those_of_transformers(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "NUCLEUS", most)
    theirs = pytest.importorskip("transformers.generation.logits_process")
    scores = 3 * torch.randn(6, 50)
    wanted, none = scores, torch.empty(6, 0, dtype=torch.int64)
    for name, kind in (
        ("temperature", theirs.TemperatureLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
    ):
        if name in options and options[name] != 1000:
            wanted = kind(options[name])(none, wanted)
    kept, tokens = filter_scores(scores, GenerationConfig(**options))
    ours = (
        kept if tokens is None else torch.full_like(scores, float("-inf")).scatter(1, tokens, kept)
    )
    torch.testing.assert_close(ours.softmax(1), wanted.softmax(1), atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.isinf(), wanted.isinf())


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_penalty_is_that_of_transformers(penalty: float) -> None:
    theirs = pytest.importorskip("transformers.generation.logits_process")
    scores, seen = torch.randn(3, 20), torch.randint(20, (3, 7))
    torch.testing.assert_close(
        penalize_repetition(scores, seen, penalty),
        theirs.RepetitionPenaltyLogitsProcessor(penalty)(seen, scores),
    )


def test_padding_is_not_punished() -> None:
    net = decoder()
    config = {"repetition_penalty": 3.0, "temperature": 0.0}
    assert text(net, [[*range(9)], [7]], **config)[1] == text(net, [[7]], **config)[0]


@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"top_p": 0.9}], ids=str)
def test_draws_follow_the_probabilities(options: dict[str, Any]) -> None:
    count, config = 20000, GenerationConfig(**options)
    scores = torch.randn(1, 12)
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    drawn = sample_tokens(scores.expand(count, -1), config, even).bincount(minlength=12) / count
    kept, tokens = filter_scores(scores, config)
    wanted = (
        kept.softmax(1)[0]
        if tokens is None
        else torch.zeros(12).scatter(0, tokens[0], kept.softmax(1)[0])
    )
    torch.testing.assert_close(drawn, wanted, atol=2 / count, rtol=0)


def test_the_edges_of_chance() -> None:
    scores = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    for value, token in ((0.0, 1), (1 - 2**-53, 3)):
        assert (
            sample_tokens(scores, GenerationConfig(), torch.tensor([value], dtype=torch.float64))
            == token
        )
    drawn = uniform([4, 5], 1000)
    assert drawn.dtype == torch.float64 and drawn.min() >= 0 and drawn.max() < 1
    assert torch.equal(drawn[1:, :10], uniform([5], 10))


# Beams ---------------------------------------------------------------------------------------------------------------


def every_text(
    net: Decoder, prompt: list[int], length: int, stop: set[int], penalty: float
) -> list[tuple[Any, float]]:
    """All texts of up to `length` tokens that end with an end token or there, best first."""
    made = torch.tensor([*itertools.product(range(net.vocabulary), repeat=length)])
    whole = torch.cat((torch.tensor(prompt).expand(len(made), -1), made), 1)
    logs = (
        net.logits(net(whole))[:, len(prompt) - 1 : -1]
        .log_softmax(-1)
        .gather(2, made[..., None])[..., 0]
    )
    found: dict[tuple[int, ...], float] = {}
    for tokens, steps in zip(made.tolist(), logs.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(tokens) if token in stop), length)
        found[tuple(tokens[:end])] = sum(steps[:end]) / end**penalty
    return sorted(found.items(), key=lambda item: -item[1])


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
def test_enough_beams_find_the_best_of_all_texts(penalty: float) -> None:
    net, prompts, stop = decoder(vocabulary=4, position="rotary"), [[1, 2, 0], [3]], {2}
    config = GenerationConfig(beams=27, max_new_tokens=3, length_penalty=penalty)
    for prompt, found in zip(prompts, beam_search(net, prompts, config, stop), strict=True):
        wanted = every_text(net, prompt, 3, stop, penalty)[:27]
        assert [tuple(tokens) for tokens, _ in found] == [tokens for tokens, _ in wanted]
        torch.testing.assert_close(
            torch.tensor([score for _, score in found]),
            torch.tensor([score for _, score in wanted]),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("position", PLACES)
def test_one_beam_is_the_likeliest_token_each_time(position: str) -> None:
    net = decoder(position=position)
    found = beam_search(net, PROMPTS, GenerationConfig(max_new_tokens=NEW))
    assert [texts[0][0] for texts in found] == [greedy(net, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("position", PLACES)
def test_beams_of_a_batch_are_those_of_each_prompt(position: str) -> None:
    net, config = decoder(position=position), GenerationConfig(beams=3, max_new_tokens=8)
    for prompt, found in zip(PROMPTS, beam_search(net, PROMPTS, config, [4, 8]), strict=True):
        ((*alone,),) = beam_search(net, [prompt], config, [4, 8])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone]
        for tokens, score in found:
            logs = net.logits(net(torch.tensor([prompt + tokens])))[
                0, len(prompt) - 1 : -1
            ].log_softmax(-1)  # (L, V)
            total = logs[torch.arange(len(tokens)), torch.tensor(tokens)].sum()
            assert score == pytest.approx(float(total) / len(tokens), abs=1e-4)


class Foreign(IncrementalDecoder):
    """Somebody else's decoder, read anew at every step."""

    def __init__(self, net: Any, prompts: list[list[int]], beams: int, new: int) -> None:
        self.net, self.beams, self.max_new_tokens = net, beams, new
        self.sequences = torch.tensor(prompts)

    def prefill(self) -> Tensor:
        scores = self.following()
        self.sequences = self.sequences.repeat_interleave(self.beams, 0)
        return scores

    def following(self) -> Tensor:
        return self.net(self.sequences).logits[:, -1]

    def decode_step(self, tokens: Tensor) -> Tensor:
        self.sequences = torch.cat((self.sequences, tokens[:, None]), 1)
        return self.following()

    def reorder(self, beams: Tensor) -> None:
        texts = torch.arange(len(self.sequences)).unflatten(0, (-1, self.beams)).gather(1, beams)
        self.sequences = self.sequences[texts.flatten()]

    def select(self, prompts: Tensor) -> None:
        self.sequences = self.sequences.unflatten(0, (-1, self.beams))[prompts].flatten(0, 1)


@pytest.mark.parametrize(
    "stopping, theirs_is", [("never", "never"), ("likely", False), ("first", True)]
)
@pytest.mark.parametrize(
    "beams, penalty, stop", [(2, 0.0, [5, 11, 17]), (4, 1.0, [5]), (4, 2.0, [5, 11, 17])]
)
def test_beams_are_those_of_transformers(
    beams: int, penalty: float, stop: list[int], stopping: Any, theirs_is: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 23,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 32,
        "initializer_range": 0.6,
    }
    net = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ).eval()
    prompts = torch.randint(23, (6, 4))
    theirs = net.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        num_beams=beams,
        num_return_sequences=beams,
        max_new_tokens=8,
        length_penalty=penalty,
        early_stopping=theirs_is,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    config = GenerationConfig(beams=beams, length_penalty=penalty, early_stopping=stopping)
    found = run_beam_search(Foreign(net, prompts.tolist(), beams, 8), config, stop)
    for row, (tokens, score) in enumerate(text for texts in found for text in texts):
        assert theirs.sequences[row, 4:].tolist()[: len(tokens)] == tokens
        assert theirs.sequences_scores[row].item() == pytest.approx(score, abs=1e-4)


class Scripted(Foreign):
    """The same chances whatever was read before, one row of them for each step."""

    def __init__(self, chances: list[list[float]], beams: int = 1) -> None:
        self.beams, self.max_new_tokens, self.steps, self.scores_of = (
            beams,
            len(chances),
            0,
            torch.tensor(chances).log(),
        )

    def prefill(self) -> Tensor:
        return self.scores_of[:1].clone()

    def decode_step(self, tokens: Tensor) -> Tensor:
        self.steps += 1
        return self.scores_of[self.steps].repeat(len(tokens), 1)

    def reorder(self, beams: Tensor) -> None:
        pass


def test_the_search_ends_when_nothing_better_can_come() -> None:
    chances = [[0.4, 0.0, 0.6], [0.3, 0.05, 0.65], [0.9, 0.05, 0.05]]
    logs = torch.tensor([0.6, 0.4 * 0.65, 0.4 * 0.3 * 0.9]).log().tolist()
    for penalty, stopping, steps, wanted in (
        (0.0, "never", 1, [([2], logs[0]), ([0, 2], logs[1])]),  # longer texts are less likely
        (
            2.0,
            "never",
            2,
            [([0, 0, 0], logs[2] / 9), ([0, 2], logs[1] / 4)],
        ),  # three tokens divide their sum by nine
        (2.0, "likely", 1, [([0, 2], logs[1] / 4), ([2], logs[0])]),
        (2.0, "first", 1, [([0, 2], logs[1] / 4), ([2], logs[0])]),
    ):
        reader = Scripted(chances, beams=2)
        (found,) = run_beam_search(
            reader, GenerationConfig(length_penalty=penalty, early_stopping=stopping), {2}
        )
        assert [tokens for tokens, _ in found] == [
            tokens for tokens, _ in wanted
        ] and reader.steps == steps
        assert [score for _, score in found] == pytest.approx(
            [score for _, score in wanted], abs=1e-5
        )
    reader = Scripted(chances)
    ((best, score),) = run_beam_search(reader, GenerationConfig(length_penalty=2.0), {2})[0]
    assert (
        best == [2] and reader.steps == 0 and score == pytest.approx(logs[0])
    )  # one beam is greedy


def test_the_first_texts_need_not_be_the_best() -> None:
    chances = [[0.5, 0.1, 0.3, 0.1], [0.05, 0.5, 0.4, 0.05], [0.05, 0.05, 0.9, 0.0]]
    best = {}
    for stopping in ("never", "likely", "first"):
        reader = Scripted(chances, beams=2)
        config = GenerationConfig(beams=2, length_penalty=1.0, early_stopping=stopping)
        best[stopping] = run_beam_search(reader, config, {2})[0], reader.steps
    assert best["first"] == (best["first"][0], 1)
    assert [tokens for tokens, _ in best["first"][0]] == [[0, 2], [2]]
    assert [tokens for tokens, _ in best["never"][0]] == [[0, 1, 2], [0, 2]]


def test_equals_keep_their_order() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0, 5.0, 5.0]])
    assert stable_topk(scores, 3)[1].tolist() == [[1, 2, 4], [0, 1, 2]]
    assert stable_topk(scores, 5)[1].tolist() == [[1, 2, 4, 5, 3], [0, 1, 2, 3, 4]]
    assert stable_topk(scores[:, :4], 9)[1].tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]
    net = decoder()
    with torch.no_grad():
        net.embed.weight.zero_()  # all tokens are as likely
    assert text(net, temperature=0) == [[0] * NEW] * 3
    found = beam_search(net, PROMPTS, GenerationConfig(beams=3, max_new_tokens=2))
    assert [tokens for tokens, _ in found[0]] == [[0, 0], [0, 1], [0, 2]]


@pytest.mark.parametrize("levels", [7, 10**6])
@pytest.mark.parametrize("width", [60, 1000, 5000, 8001])
def test_the_largest_of_wide_rows(width: int, levels: int) -> None:
    scores = torch.randint(levels, (9, width)).float()  # with few levels nearly all are equals
    scores[0, -3:] = scores[1, 1] = levels  # behind the last whole group, and in the first
    scores[2, :-1] = float("-inf")
    for count in (1, 6, 11):
        for rows in (scores, *scores.split(1)):  # equals in one row have all of them sorted
            order = rows.sort(dim=1, descending=True, stable=True)[1][:, :count]
            top, place = stable_topk(rows, count)
            assert torch.equal(place, order) and torch.equal(top, rows.gather(1, order))


def test_beams_end_with_the_context() -> None:
    net = decoder()
    found = beam_search(net, [[1] * (T - 2)], GenerationConfig(beams=2, max_new_tokens=50))
    assert [len(tokens) for tokens, _ in found[0]] == [3, 3]  # the last is not read


def test_beams_have_the_same_room_whatever_is_beside_them() -> None:
    net, config = decoder(position="rotary"), GenerationConfig(beams=2, max_new_tokens=12)
    prompts = [[1] * (T - 2), [3, 1, 4], [5] * (T - 2), [9] * 7]
    found = beam_search(net, prompts, config)
    assert [len(texts[0][0]) for texts in found] == [3, 12, 3, 10]
    for prompt, texts in zip(prompts, found, strict=True):
        ((*alone,),) = beam_search(net, [prompt], config)
        assert [tokens for tokens, _ in texts] == [tokens for tokens, _ in alone]


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"beams": 0}, "beams is 0"),
        ({"beams": 2, "top_k": 3}, "Beam search ranks whole sequences"),
        ({"beams": 2, "repetition_penalty": 1.1}, "Beam search ranks whole sequences"),
        ({"beams": 2, "temperature": 0.5}, "leave temperature and seed out"),
        ({"beams": 2, "seed": 1}, "leave temperature and seed out"),
        ({"temperature": 1e-40}, "temperature is 1e-40; give 0, or a number from 0.0001"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        (
            {"seed": 2**63},
            "seed is 9223372036854775808; give a number from -9223372036854775808 to 92",
        ),
        (
            {"max_new_tokens": 99999999999},
            "max_new_tokens is 99999999999; give a number from 1 to 1000000",
        ),
    ],
)
def test_choices_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GenerationConfig(**options)


@pytest.mark.parametrize(
    "prompts, words",
    [
        ([], "There is no prompt"),
        ([[1], []], "Prompt 1 is empty"),
        ([[0] * (T + 1)], "Prompt 0 has 17 tokens, over the 16 of the model; shorten it"),
        ([[1], [V]], "Prompt 1 has a token that is not among the 31"),
        ([[-1]], "Prompt 0 has a token"),
    ],
)
def test_prompts_that_cannot_be(prompts: list[list[int]], words: str) -> None:
    for make in (
        lambda: text(decoder(), prompts),
        lambda: beam_search(decoder(), prompts, GenerationConfig(beams=2)),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match="training mode"):
        text(decoder().train())
    with pytest.raises(ValueError, match="call beam_search"):
        text(decoder(), beams=2)
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        text(decoder(), seeds=[1, 2])


def test_there_may_be_fewer_tokens_than_beams() -> None:
    net = decoder(vocabulary=3)
    for new, beams, number in ((1, 5, 3), (2, 12, 9)):  # each text once
        texts = beam_search(net, [[1]], GenerationConfig(max_new_tokens=new, beams=beams))[0]
        assert len({tuple(tokens) for tokens, _ in texts}) == len(texts) == number
