"""Translation: target sequences by greedy decoding, beam search or sampling."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modules.config import require
from modules.generation.beam_search import Hypotheses, run_beam_search
from modules.generation.decoding import (
    MINUS_INF,
    IncrementalDecoder,
    check_evaluation_mode,
    check_prompts,
    check_tokens,
)
from modules.generation.generate import ENDED, check_seeds, sample
from modules.generation.sampling import GenerationConfig
from modules.models.seq2seq import Seq2Seq


class Translation(NamedTuple):
    """A target sequence."""

    tokens: list[int]  # the end token included, if there is one
    score: float
    finished: bool  # whether it has an end


class DecodingRules(NamedTuple):
    """What else decides on tokens, as in `generate` of Hugging Face.

    Args:
        renormalize: The probability mass of banned tokens goes to the others; False: it is lost.
        forced_bos: Each sequence begins with one of these, all equally likely, so that a single
            one is certain; none: with any.
        forced_eos: A sequence that has not ended before ends with one of these at the length limit,
            the same way.
    """

    renormalize: bool = True
    forced_bos: tuple[int, ...] = ()
    forced_eos: tuple[int, ...] = ()


DEFAULT_RULES = DecodingRules()


class Seq2SeqDecoder(IncrementalDecoder):
    """Encodes sources, then decodes `beams` target sequences for each.

    Arguments as in `translate`. Raises `ValueError` if a source is empty, longer than the model's
    limit, or has tokens that the model does not know.
    """

    net: Seq2Seq  # type: ignore[assignment]

    def __init__(
        self,
        net: Seq2Seq,
        sources: Sequence[Sequence[int]],
        start: int,
        max_new_tokens: int,
        beams: int = 1,
        banned: Collection[int] = (),
        rules: DecodingRules = DEFAULT_RULES,
    ) -> None:
        check_evaluation_mode(net)
        check_prompts("Source", sources, net.max_length, net.source_vocabulary)
        special = [start, *banned, *rules.forced_bos, *rules.forced_eos]
        check_tokens("A start, banned or forced token", special, net.vocabulary)
        self.net = net
        self.rules = rules
        self.renormalize = rules.renormalize
        self.max_new_tokens = min(max_new_tokens, net.max_length)
        self.beams = beams
        self.length = 1
        device = net.embed.weight.device
        self.banned = torch.tensor([*banned], dtype=torch.int64, device=device)
        longest = max(len(source) for source in sources)
        padded = [[*source] + [0] * (longest - len(source)) for source in sources]
        lengths = torch.tensor([len(source) for source in sources], device=device)
        padding_mask = torch.arange(longest, device=device) < lengths[:, None]  # (P, M)
        self.context = net.encode(torch.tensor(padded, device=device), padding_mask)
        first = torch.tensor([start] + [0] * self.max_new_tokens, device=device)
        self.sequences = first.repeat(len(sources), 1)  # (P, 1 + max_new_tokens)
        self.cache = net.make_cache(self.context, 1 if beams > 1 else self.max_new_tokens)

    def run(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """As `IncrementalDecoder.run`."""
        return self.net.decode(tokens, self.context, padding_mask, self.cache)

    def next_token_scores(self, hidden: Tensor) -> Tensor:
        """Vectors (..., E) -> scores of the tokens that follow, (..., V)."""
        scores = super().next_token_scores(hidden)
        forced: tuple[int, ...] = ()
        if self.length == 1:
            forced = self.rules.forced_bos
        if self.length == self.max_new_tokens:
            forced = self.rules.forced_eos or forced
        if not forced:
            return scores
        allowed = torch.tensor(forced, device=scores.device)
        return scores.fill_(MINUS_INF).index_fill_(-1, allowed, 0.0)

    def select(self, prompts: Tensor) -> None:
        """Keeps only the sources at the indices `prompts`, (R,)."""
        super().select(prompts)
        self.context = self.context.select(prompts)


class EnsembleDecoder(IncrementalDecoder):
    """Decoders of the same sources by several models: the mean of their probabilities."""

    def __init__(self, members: Sequence[Seq2SeqDecoder]) -> None:
        first = members[0]
        self.members = members
        self.renormalize = first.renormalize
        self.max_new_tokens = first.max_new_tokens
        self.beams = first.beams
        self.sequences = first.sequences
        self.length = first.length

    def prefill(self) -> Tensor:
        """As `IncrementalDecoder.prefill`."""
        return self.average([member.prefill() for member in self.members])

    def decode_step(self, tokens: Tensor) -> Tensor:
        """As `IncrementalDecoder.decode_step`."""
        self.length += 1
        return self.average([member.decode_step(tokens) for member in self.members])

    def average(self, scores: list[Tensor]) -> Tensor:
        """Scores of each member -> logarithms of the mean probabilities, (rows, V) each."""
        if self.renormalize:
            scores = [one.float().log_softmax(-1) for one in scores]
        return torch.stack(scores).logsumexp(0) - math.log(len(scores))

    def reorder(self, beams: Tensor) -> None:
        """As `IncrementalDecoder.reorder`."""
        for member in self.members:
            member.reorder(beams)

    def select(self, prompts: Tensor) -> None:
        """Keeps only the sources at the indices `prompts`, (R,)."""
        for member in self.members:
            member.select(prompts)
        self.sequences = self.members[0].sequences


@torch.inference_mode()
def translate(
    nets: Seq2Seq | Sequence[Seq2Seq],
    sources: Sequence[Sequence[int]],
    config: GenerationConfig,
    start: int,
    stop: Collection[int],
    banned: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    rules: DecodingRules = DEFAULT_RULES,
) -> list[list[Translation]]:
    """Target sequences for a batch of sources.

    With `beams` above 1, beam search; with temperature 0, the most likely token each time;
    otherwise tokens are sampled, each source's with its own seed. Finished sequences leave the
    batch.

    Hugging Face's `generate` finds the same sequences and scores if `rules` are those of its model;
    its `early_stopping` False is "likely" here, True is "first". Only there, any of equal scores
    may win, and "never" is a guess with a `length_penalty` below 0.

    Args:
        nets: The model, in evaluation mode; or several with the same tokenizers, an ensemble, whose
            probabilities of the next token are averaged.
        sources: Token ids of each source, as in training: with the end token, if it was there.
        config: How tokens are chosen, and how many at most; never more than the `max_length` of a
            model.
        start: The token that target sequences begin with.
        stop: Tokens that end a sequence.
        banned: Tokens that are never generated, as if their scores were -inf.
        seeds: One seed per source; None: `config.seed` + number of the source.
        rules: What else decides on tokens; sampling always renormalizes.

    Returns:
        For each source up to `beams` translations, best first. A score is the sum of the tokens'
        log probabilities divided by their number^`length_penalty`. One whose end was forced at the
        limit is not finished.

    Raises:
        ValueError: As `Seq2SeqDecoder`, or there are not as many `seeds` as sources; there is no
            model, or there are several with different target vocabularies or a repetition penalty.
    """
    check_seeds(seeds, len(sources))
    is_search = config.beams > 1 or (config.temperature == 0 and config.repetition_penalty == 1)
    if not is_search:
        rules = rules._replace(renormalize=True)
    decoder = build_decoder(nets, sources, config, start, banned, rules)
    if is_search:
        found = run_beam_search(decoder, config, stop)
    else:
        found = sample_targets(decoder, config, stop, seeds)
    limit = decoder.max_new_tokens
    if not rules.forced_eos:
        limit += 1  # the last token may be an end of its own
    return [
        [
            Translation(tokens, score, tokens[-1] in stop and len(tokens) < limit)
            for tokens, score in hypotheses
        ]
        for hypotheses in found
    ]


def build_decoder(
    nets: Seq2Seq | Sequence[Seq2Seq],
    sources: Sequence[Sequence[int]],
    config: GenerationConfig,
    start: int,
    banned: Collection[int],
    rules: DecodingRules,
) -> IncrementalDecoder:
    """Decodes with one model or an ensemble; arguments and errors as in `translate`."""
    nets = nets if isinstance(nets, Sequence) else [nets]
    require(len(nets) > 0, "There is no model; give at least one.")
    sizes = {net.vocabulary for net in nets}
    require(len(sizes) == 1, f"The models have {sizes} target tokens; use those of one tokenizer.")
    require(
        len(nets) == 1 or config.repetition_penalty == 1,
        "repetition_penalty changes the scores of one model; leave it out with several.",
    )
    max_new_tokens = min(config.max_new_tokens, *(net.max_length for net in nets))
    members = [
        Seq2SeqDecoder(net, sources, start, max_new_tokens, config.beams, banned, rules)
        for net in nets
    ]
    return members[0] if len(members) == 1 else EnsembleDecoder(members)


def sample_targets(
    decoder: IncrementalDecoder,
    config: GenerationConfig,
    stop: Collection[int],
    seeds: Sequence[int] | None,
) -> list[Hypotheses]:
    """One sequence for each source, token by token, and its score; arguments as in `sample`."""
    steps = list(sample(decoder, config, stop, seeds, with_log_probs=True))
    tokens = torch.stack([step[0] for step in steps], 1)  # (P, L)
    log_probs = torch.stack([step[1] for step in steps], 1)  # (P, L)
    lengths = (tokens != ENDED).sum(1)
    scores = log_probs.sum(1) / lengths**config.length_penalty
    rows = zip(tokens.tolist(), lengths.tolist(), scores.tolist(), strict=True)
    return [[(row[:length], score)] for row, length, score in rows]
