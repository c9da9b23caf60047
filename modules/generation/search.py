"""New tokens after given ones: sampled one by one, or by beam search."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.config import require
from modules.generation.decoding import (
    MINUS_INF,
    IncrementalDecoder,
    PromptDecoder,
    check_prompts,
)
from modules.generation.sampling import (
    GenerationConfig,
    penalize_repetition,
    sample_tokens,
    uniform,
)
from modules.models.gpt import Decoder

__all__ = ["GenerationConfig", "beam_search", "generate", "sample", "search"]

ENDED = -1  # what a row gives after its end
GROUP = 64  # neighbouring scores whose maximum is taken first
Hypotheses = list[tuple[list[int], float]]  # tokens and score, best first


def generate(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    banned: Collection[int] = (),
) -> Iterator[Tensor]:
    """Generates the tokens that follow prompts, a step at a time.

    A row's tokens depend on its prompt and its seed only, not on the other rows nor on their
    number.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each row.
        config: How tokens are sampled, and how many.
        stop: End tokens.
        seeds: Of each row; None: `config.seed`, and one more in each next row.
        banned: Tokens that never follow.

    Yields:
        (rows,): the next token of each row, its end token too, and -1 after that. Stops once all
        rows have ended.

    Raises:
        ValueError: As `PromptDecoder`, or `config` asks for beam search.
    """
    require(
        config.beams == 1,
        "Beam search ranks whole sequences, which cannot be streamed; call beam_search.",
    )
    decoder = PromptDecoder(net, prompts, config.max_new_tokens, banned=banned)
    return (tokens for tokens, _ in sample(decoder, config, stop, seeds))


@torch.inference_mode()
def sample(
    decoder: IncrementalDecoder,
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    with_log_probs: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens one by one, of any incremental decoder; other arguments as in `generate`.

    Yields:
        Tokens as `generate`, and, with `with_log_probs`, their log probabilities, before any
        filter, 0 after the end.
    """
    scores = decoder.prefill()
    device = scores.device
    if seeds is None:
        seeds = range(config.seed, config.seed + len(scores))
    require(
        len(seeds) == len(scores),
        f"There are {len(seeds)} seeds for {len(scores)} prompts; give each its own.",
    )
    random = uniform(seeds, decoder.max_new_tokens).to(device)
    stop_tokens = torch.tensor([*stop], dtype=torch.int64, device=device)
    rows = torch.arange(len(scores), device=device)  # those that are still in the batch
    all_ended = torch.full_like(rows, ENDED)
    zeros = torch.zeros_like(rows, dtype=torch.float32)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for step in range(decoder.max_new_tokens):
        penalized = scores
        if config.repetition_penalty != 1:
            sequences = decoder.sequences[:, : decoder.length]
            penalized = penalize_repetition(scores, sequences, config.repetition_penalty)
        tokens = sample_tokens(penalized, config, random[rows, step])
        log_probs = zeros
        if with_log_probs:
            chosen = scores.float().log_softmax(1).gather(1, tokens[:, None])[:, 0]  # (rows,)
            log_probs = zeros.index_copy(0, rows, chosen.masked_fill(ended, 0.0))
        yield all_ended.index_copy(0, rows, tokens.masked_fill(ended, ENDED)), log_probs
        ended |= (tokens[:, None] == stop_tokens).any(1)
        if (len(stop) and ended.all()) or step + 1 == decoder.max_new_tokens:
            return
        left = rows_to_keep(~ended)
        if left is not None:
            decoder.select(left)
            rows = rows[left]
            tokens = tokens[left]
            ended = ended[left]
        scores = decoder.decode_step(tokens)


def rows_to_keep(unfinished: Tensor) -> Tensor | None:
    """Numbers of the unfinished rows, if leaving the others out pays; None: go on with all."""
    left = unfinished.nonzero()[:, 0]
    return left if 4 * len(left) <= 3 * len(unfinished) else None


class BeamHypotheses(NamedTuple):
    """K sequences for each of P prompts.

    Scores are (P, K), -inf for none; new tokens (P, K, L); lengths (P, K).
    """

    scores: Tensor
    tokens: Tensor
    lengths: Tensor

    @classmethod
    def none(cls, prompts: int, beams: int, room: int, device: torch.device) -> "BeamHypotheses":
        """No sequence yet, P x K times, with room for L tokens."""
        scores = torch.full((prompts, beams), MINUS_INF, device=device)
        tokens = torch.zeros(prompts, beams, room, dtype=torch.int64, device=device)
        lengths = torch.zeros(prompts, beams, dtype=torch.int64, device=device)
        return cls(scores, tokens, lengths)

    def pick(self, order: Tensor) -> "BeamHypotheses":
        """Some of the sequences: (P, C) of K."""
        index = order[..., None].expand(-1, -1, self.tokens.shape[2])  # (P, C, L)
        return BeamHypotheses(
            self.scores.gather(1, order),
            self.tokens.gather(1, index),
            self.lengths.gather(1, order),
        )

    def first(self, count: int) -> "BeamHypotheses":
        """The first sequences of each prompt."""
        return BeamHypotheses(*(part[:, :count] for part in self))

    def append(self, tokens: Tensor, scores: Tensor) -> "BeamHypotheses":
        """Each with one more token, (P, K), and its new score, (P, K)."""
        longer = self.tokens.scatter(2, self.lengths[..., None], tokens[..., None])
        return BeamHypotheses(scores, longer, self.lengths + 1)

    def where(self, chosen: Tensor, divisor: float = 1.0) -> "BeamHypotheses":
        """None but the chosen ones, (P, K), their scores divided."""
        return self._replace(scores=(self.scores / divisor).masked_fill(~chosen, MINUS_INF))

    def best(self, others: "BeamHypotheses") -> "BeamHypotheses":
        """The K best of these and the first K others; of equals the first."""
        beams = self.scores.shape[1]
        pairs = zip(self, others.first(beams), strict=True)
        both = BeamHypotheses(*(torch.cat(pair, 1) for pair in pairs))
        return both.pick(stable_topk(both.scores, beams)[1])

    def rows(self, prompts: Tensor) -> "BeamHypotheses":
        """Those of some prompts: (R,) of P."""
        return BeamHypotheses(*(part[prompts] for part in self))

    def set_rows(self, prompts: Tensor, others: "BeamHypotheses") -> None:
        """Replaces, in place, the sequences of these prompts, (R,), by others."""
        for mine, other in zip(self, others, strict=True):
            mine[prompts] = other

    def to_lists(self) -> list[Hypotheses]:
        """Tokens and score of each sequence that there is, by prompt."""
        prompts: list[Hypotheses] = []
        for scores, tokens, lengths in zip(*(part.tolist() for part in self), strict=True):
            beams = zip(scores, tokens, lengths, strict=True)
            prompts.append([(row[:n], score) for score, row, n in beams if score > MINUS_INF])
        return prompts


def stable_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row and their places, of equals the first.

    (P, S) -> (P, count) twice.
    """
    count = min(count, scores.shape[1])
    top, place = grouped_topk(scores, min(count + 1, scores.shape[1]))
    if (top[:, count - 1 : count] == top[:, count:]).any():  # `topk` takes any of equals
        top, place = scores.sort(dim=1, descending=True, stable=True)
        return top[:, :count], place[:, :count]
    place = place[:, :count].sort(1)[0]
    top, order = scores.gather(1, place).sort(dim=1, descending=True, stable=True)
    return top, place.gather(1, order)


def grouped_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `scores.topk(count)`, (R, S) -> (R, count) twice, faster for many scores.

    The largest are in the groups with the largest maxima, so that most scores are read only once.
    """
    grouped = scores.shape[1] // GROUP * GROUP
    if grouped < 4 * count * GROUP:
        return scores.topk(count)
    groups = scores[:, :grouped].unflatten(1, (-1, GROUP)).amax(2).topk(count)[1]  # (R, count)
    inside = torch.arange(GROUP, device=groups.device)
    places = (groups[..., None] * GROUP + inside).flatten(
        1
    )  # (R, count, GROUP) -> (R, count GROUP)
    rest = torch.arange(grouped, scores.shape[1], device=groups.device).expand(len(groups), -1)
    places = torch.cat((places, rest), 1)
    top, order = scores.gather(1, places).topk(count)
    return top, places.gather(1, order)


def beam_search(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    banned: Collection[int] = (),
    renormalize: bool = True,
) -> list[Hypotheses]:
    """The best sequences that follow each prompt, whatever prompts are beside it.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each prompt.
        config: `beams`, `max_new_tokens`, `length_penalty`, `early_stopping`; nothing is sampled.
        stop: End tokens.
        banned: Tokens that never follow.
        renormalize: Their probability mass goes to the others; False: it is lost, as in `generate`
            of Hugging Face.

    Returns:
        For each prompt up to `beams` pairs of new tokens, the end token too, and score, best first.

    Raises:
        ValueError: As `PromptDecoder`.
    """
    check_prompts("Prompt", prompts, net.max_length, net.vocabulary)
    longest = net.max_length + 1  # the last token is not run
    rooms = [min(config.max_new_tokens, longest - len(prompt)) for prompt in prompts]
    found: dict[int, Hypotheses] = {}
    for room in set(rooms):  # those with the same room are searched side by side
        rows = [row for row, its_room in enumerate(rooms) if its_room == room]
        batch = [prompts[row] for row in rows]
        decoder = PromptDecoder(net, batch, room, config.beams, banned, renormalize)
        found |= zip(rows, search(decoder, config, stop), strict=True)
    return [found[row] for row in range(len(prompts))]


@torch.inference_mode()
def search(
    decoder: IncrementalDecoder, config: GenerationConfig, stop: Collection[int] = ()
) -> list[Hypotheses]:
    """Beam search (Graves 2012) with any incremental decoder; arguments as in `beam_search`.

    A sequence ends with an end token or after `decoder.max_new_tokens`. Its score is the sum of its
    tokens' log probabilities, divided by their number^`length_penalty`. Of equals, the better beam
    goes first, then the lower token. `early_stopping` says when the search for a prompt is over; it
    then leaves the batch. One beam takes the likeliest token each time, up to the first end.
    """
    scores = decoder.prefill()
    device = scores.device
    beams = decoder.beams
    room = decoder.max_new_tokens
    stop_tokens = torch.tensor([*stop], dtype=torch.int64, device=device)
    prompts = torch.arange(len(scores), device=device)  # those that are still in the batch
    results = BeamHypotheses.none(len(prompts), beams, room, device)
    finished = BeamHypotheses.none(len(prompts), beams, room, device)
    running = BeamHypotheses.none(len(prompts), 1, room, device)  # from which all beams go on
    running.scores.zero_()
    unfinished = torch.ones_like(prompts, dtype=torch.bool)
    for step in range(1, room + 1):
        count = beams * (1 + len(stop))
        top, beam, token = next_tokens(scores, running.scores, count, decoder.renormalize)  # (P, C)
        missing = beams - top.shape[1]
        if missing > 0:  # there are fewer tokens than beams
            top = F.pad(top, (0, missing), value=MINUS_INF)
            beam = F.pad(beam, (0, missing))
            token = F.pad(token, (0, missing))
        longer = running.pick(beam).append(token, top)
        ends = (token[..., None] == stop_tokens).any(-1) | (step == room)  # (P, C)
        if ends.any():
            ended = longer.where(ends & unfinished[:, None], step**config.length_penalty)
            finished = finished.best(ended)
            order = ends.long().argsort(dim=1, stable=True)[:, :beams]  # (P, K)
            beam = beam.gather(1, order)
            token = token.gather(1, order)
            longer = longer.where(~ends).pick(order)
        running = longer.first(beams)
        unfinished = unfinished & can_improve(running, finished, config, step, room)
        if step == room or not unfinished.any():
            break
        token = token[:, :beams]  # (P, K)
        if beams > 1:
            decoder.reorder(beam[:, :beams])
        left = rows_to_keep(unfinished)
        if left is not None:
            results.set_rows(prompts, finished)
            decoder.select(left)
            finished = finished.rows(left)
            running = running.rows(left)
            prompts = prompts[left]
            unfinished = unfinished[left]
            token = token[left]
        scores = decoder.decode_step(token.flatten())  # (P, K) -> (rows,)
    results.set_rows(prompts, finished)
    return results.to_lists()


def next_tokens(
    scores: Tensor, sums: Tensor, count: int, renormalize: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest ways to go on from P x K beams, C <= `count` for each prompt.

    Args:
        scores: Of the next token, (P K, V); they are overwritten.
        sums: Of the log probabilities of the tokens before, (P, K).
        count: Number of ways.
        renormalize: Scores are logits; False: log probabilities, which need not sum to 1.

    Returns:
        The new sums, which beam goes on, and with which token, (P, C) each, best first.
    """
    scores = scores.float()
    tokens = stable_topk(scores, count)[1]  # (P K, C')
    if renormalize:
        torch.log_softmax(scores, 1, out=scores)
    log_probs = scores.gather(1, tokens).unflatten(0, sums.shape)  # (P, K, C')
    top, place = stable_topk((sums[..., None] + log_probs).flatten(1), count)  # of (P, K C')
    tokens = tokens.unflatten(0, sums.shape).flatten(1)  # (P, K C')
    return top, place // log_probs.shape[2], tokens.gather(1, place)


def can_improve(
    running: BeamHypotheses,
    finished: BeamHypotheses,
    config: GenerationConfig,
    step: int,
    room: int,
) -> Tensor:
    """Whether the search for each prompt goes on after `step` of `room` tokens: boolean (P,)."""
    worst = finished.scores[:, -1]
    best = running.scores[:, 0]
    if config.early_stopping == "first" or finished.scores.shape[1] == 1:
        return (worst == MINUS_INF) & (best > MINUS_INF)
    length = step  # at which running sequences would score best
    if config.early_stopping == "never":
        length = room if config.length_penalty > 0 else step + 1
    return worst < best / length**config.length_penalty
