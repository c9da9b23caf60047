"""Beam search (Graves 2012) with any model that decodes a token at a time."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.generation.decoding import (
    MINUS_INF,
    IncrementalDecoder,
    PromptDecoder,
    check_prompts,
    rows_to_keep,
)
from modules.generation.sampling import GenerationConfig
from modules.models.gpt import Decoder

TOPK_GROUP = 64  # neighbouring scores whose maximum is taken first
Hypotheses = list[tuple[list[int], float]]  # tokens and score, best first


class BeamHypotheses(NamedTuple):
    """K sequences for each of P prompts.

    Scores are (P, K), -inf for none; new tokens (P, K, L); lengths (P, K).
    """

    scores: Tensor
    tokens: Tensor
    lengths: Tensor

    @classmethod
    def empty(
        cls, prompts: int, beams: int, max_new_tokens: int, device: torch.device
    ) -> "BeamHypotheses":
        """Room for P x K sequences of up to L tokens, none of them there yet."""
        scores = torch.full((prompts, beams), MINUS_INF, dtype=torch.float32, device=device)
        tokens = torch.zeros(prompts, beams, max_new_tokens, dtype=torch.int64, device=device)
        lengths = torch.zeros(prompts, beams, dtype=torch.int64, device=device)
        return cls(scores, tokens, lengths)

    def gather(self, order: Tensor) -> "BeamHypotheses":
        """The sequences of each prompt at the indices `order`, (P, C)."""
        index = order[..., None].expand(-1, -1, self.tokens.shape[2])  # (P, C, L)
        return BeamHypotheses(
            self.scores.gather(1, order),
            self.tokens.gather(1, index),
            self.lengths.gather(1, order),
        )

    def keep_first(self, count: int) -> "BeamHypotheses":
        """The first sequences of each prompt."""
        return BeamHypotheses(*(part[:, :count] for part in self))

    def append(self, tokens: Tensor, scores: Tensor) -> "BeamHypotheses":
        """Each with one more token, (P, K), and its new score, (P, K)."""
        longer = self.tokens.scatter(2, self.lengths[..., None], tokens[..., None])
        return BeamHypotheses(scores, longer, self.lengths + 1)

    def mask_scores(self, chosen: Tensor, divisor: float = 1.0) -> "BeamHypotheses":
        """Scores divided by `divisor`, -inf if not `chosen`, (P, K)."""
        return self._replace(scores=(self.scores / divisor).masked_fill(~chosen, MINUS_INF))

    def merge_best(self, others: "BeamHypotheses") -> "BeamHypotheses":
        """The K best of these and the first K others; ties go to the lower index."""
        beams = self.scores.shape[1]
        pairs = zip(self, others.keep_first(beams), strict=True)
        both = BeamHypotheses(*(torch.cat(pair, 1) for pair in pairs))
        return both.gather(stable_topk(both.scores, beams)[1])

    def select(self, prompts: Tensor) -> "BeamHypotheses":
        """Those of the prompts at the indices `prompts`, (R,)."""
        return BeamHypotheses(*(part[prompts] for part in self))

    def set_rows(self, prompts: Tensor, others: "BeamHypotheses") -> None:
        """Replaces those of the prompts at the indices `prompts`, (R,), in place."""
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
    """The largest scores and their indices, (P, S) -> (P, count) twice; ties: lower index first."""
    count = min(count, scores.shape[1])
    top, index = grouped_topk(scores, min(count + 1, scores.shape[1]))
    last = top[:, count - 1 : count]  # (P, 1)
    index = index[:, :count]
    if (last == top[:, count:]).any():  # `topk` takes any of equals
        size = scores.shape[1]
        # All larger scores come first, then of those equal to the last the lower indices.
        tie_rank = torch.arange(size, 0, -1, device=scores.device, dtype=torch.int32)
        rank = tie_rank.where(scores == last, 0).masked_fill_(scores > last, size + 1)  # (P, S)
        index = rank.topk(count)[1]
    index = index.sort(1)[0]
    top, order = scores.gather(1, index).sort(dim=1, descending=True, stable=True)
    return top, index.gather(1, order)


def grouped_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `scores.topk(count)`, (R, S) -> (R, count) twice, faster for many scores.

    The largest are in the groups with the largest maxima, so that most scores are read only once.
    """
    grouped = scores.shape[1] // TOPK_GROUP * TOPK_GROUP
    if grouped < 4 * count * TOPK_GROUP:
        return scores.topk(count)
    groups = scores[:, :grouped].unflatten(1, (-1, TOPK_GROUP)).amax(2).topk(count)[1]  # (R, count)
    inside = torch.arange(TOPK_GROUP, device=groups.device)
    indices = (groups[..., None] * TOPK_GROUP + inside).flatten(1)  # (R, count * TOPK_GROUP)
    rest = torch.arange(grouped, scores.shape[1], device=groups.device).expand(len(groups), -1)
    indices = torch.cat((indices, rest), 1)
    top, order = scores.gather(1, indices).topk(count)
    return top, indices.gather(1, order)


def beam_search(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    banned: Collection[int] = (),
    renormalize: bool = True,
) -> list[Hypotheses]:
    """The best sequences that follow each prompt, which do not depend on the other prompts.

    The search ends where the model's context does: prompt and new tokens but the last fit into it.

    Args:
        net: The model, in evaluation mode.
        prompts: Token ids of each prompt.
        config: `beams`, `max_new_tokens`, `length_penalty`, `early_stopping`; nothing is sampled.
        stop: Tokens that end a sequence.
        banned: Tokens that are never generated.
        renormalize: Their probability mass goes to the others; False: it is lost, as in `generate`
            of Hugging Face.

    Returns:
        For each prompt up to `beams` pairs of new tokens, the end token too, and score, best first.

    Raises:
        ValueError: As `PromptDecoder`.
    """
    check_prompts("Prompt", prompts, net.max_length, net.vocabulary)
    # The last new token is never fed to the model, so it needs no position.
    longest = net.max_length + 1
    limits = [min(config.max_new_tokens, longest - len(prompt)) for prompt in prompts]
    found: dict[int, Hypotheses] = {}
    for limit in set(limits):  # prompts with the same limit share a batch
        rows = [row for row, their_limit in enumerate(limits) if their_limit == limit]
        batch = [prompts[row] for row in rows]
        decoder = PromptDecoder(net, batch, limit, config.beams, banned, renormalize)
        found |= zip(rows, run_beam_search(decoder, config, stop), strict=True)
    return [found[row] for row in range(len(prompts))]


@torch.inference_mode()
def run_beam_search(
    decoder: IncrementalDecoder, config: GenerationConfig, stop: Collection[int] = ()
) -> list[Hypotheses]:
    """Beam search (Graves 2012) with any incremental decoder; arguments as in `beam_search`.

    A sequence ends with an end token or after `decoder.max_new_tokens`. Its score is the sum of its
    tokens' log probabilities, divided by their number^`length_penalty`. Ties go to the better
    beam, then to the lower token. `early_stopping` says when the search for a prompt is over; it
    then leaves the batch. One beam takes the most likely token each time, up to the first end.
    """
    next_scores = decoder.prefill()
    device = next_scores.device
    beams = decoder.beams
    max_new_tokens = decoder.max_new_tokens
    stop_tokens = torch.tensor([*stop], dtype=torch.int64, device=device)
    prompts = torch.arange(len(next_scores), device=device)  # those that are still in the batch
    results = BeamHypotheses.empty(len(prompts), beams, max_new_tokens, device)
    finished = BeamHypotheses.empty(len(prompts), beams, max_new_tokens, device)
    running = BeamHypotheses.empty(len(prompts), 1, max_new_tokens, device)  # all beams start here
    running.scores.zero_()
    unfinished = torch.ones_like(prompts, dtype=torch.bool)
    for step in range(1, max_new_tokens + 1):
        count = beams * (1 + len(stop))
        top, beam, token = next_tokens(  # (P, C)
            next_scores, running.scores, count, is_logits=decoder.renormalize
        )
        missing = beams - top.shape[1]
        if missing > 0:  # there are fewer tokens than beams
            top = F.pad(top, (0, missing), value=MINUS_INF)
            beam = F.pad(beam, (0, missing))
            token = F.pad(token, (0, missing))
        longer = running.gather(beam).append(token, top)
        ends = (token[..., None] == stop_tokens).any(-1) | (step == max_new_tokens)  # (P, C)
        if ends.any():
            ended = longer.mask_scores(ends & unfinished[:, None], step**config.length_penalty)
            # As in Hugging Face, an end token counts only if it is among the K best candidates.
            finished = finished.merge_best(ended)
            order = ends.long().argsort(dim=1, stable=True)[:, :beams]  # (P, K)
            beam = beam.gather(1, order)
            token = token.gather(1, order)
            longer = longer.mask_scores(~ends).gather(order)
        running = longer.keep_first(beams)
        unfinished = unfinished & can_improve(running, finished, config, step, max_new_tokens)
        if step == max_new_tokens or not unfinished.any():
            break
        token = token[:, :beams]  # (P, K)
        if beams > 1:
            decoder.reorder(beam[:, :beams])
        kept = rows_to_keep(unfinished)
        if kept is not None:
            results.set_rows(prompts, finished)
            decoder.select(kept)
            finished = finished.select(kept)
            running = running.select(kept)
            prompts = prompts[kept]
            unfinished = unfinished[kept]
            token = token[kept]
        next_scores = decoder.decode_step(token.flatten())  # (P, K) -> (rows,)
    results.set_rows(prompts, finished)
    return results.to_lists()


def next_tokens(
    next_scores: Tensor, sums: Tensor, count: int, is_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The most probable continuations of P x K beams, C <= `count` for each prompt.

    Args:
        next_scores: Of the next tokens, (P * K, V); overwritten.
        sums: Of the log probabilities of the tokens before, (P, K).
        count: Number of continuations.
        is_logits: `next_scores` are logits, so that softmax gives the probability of banned tokens
            to the others (`renormalize` of the decoder); False: they are log probabilities, of
            which those of banned tokens have been set to -inf.

    Returns:
        The new sums, which beam is continued, and with which token, (P, C) each, best first.
    """
    next_scores = next_scores.float()
    tokens = stable_topk(next_scores, count)[1]  # (P * K, C')
    if is_logits:
        torch.log_softmax(next_scores, 1, out=next_scores)
    log_probs = next_scores.gather(1, tokens).unflatten(0, sums.shape)  # (P, K, C')
    top, index = stable_topk((sums[..., None] + log_probs).flatten(1), count)  # of (P, K * C')
    tokens = tokens.unflatten(0, sums.shape).flatten(1)  # (P, K * C')
    return top, index // log_probs.shape[2], tokens.gather(1, index)


def can_improve(
    running: BeamHypotheses,
    finished: BeamHypotheses,
    config: GenerationConfig,
    step: int,
    max_new_tokens: int,
) -> Tensor:
    """Whether the search for each prompt continues after `step` tokens: boolean (P,).

    `early_stopping` is "first" (Hugging Face: True), "likely" (False) or "never" ("never").
    """
    worst = finished.scores[:, -1]
    best = running.scores[:, 0]
    if config.early_stopping == "first" or finished.scores.shape[1] == 1:
        return (worst == MINUS_INF) & (best > MINUS_INF)
    length = step  # "likely": the best running sequence is scored as if it ended now
    if config.early_stopping == "never":  # it is scored at the length that favours it most
        length = max_new_tokens if config.length_penalty > 0 else step + 1
    return worst < best / length**config.length_penalty
