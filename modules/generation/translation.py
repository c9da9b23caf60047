"""Target texts for source texts: the likeliest, the best of beam search, or drawn by chance."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modules.generation.decoding import NEVER, Reader, check_ready, check_texts
from modules.generation.sampling import GenerationConfig
from modules.generation.search import ENDED, Found, sample, search
from modules.models.seq2seq import Seq2Seq

__all__ = ["GenerationConfig", "Rules", "SourceReader", "Translation", "translate"]


class Translation(NamedTuple):
    """A target text: its tokens, the end token too; its score; whether it has ended or only reached the limit."""

    tokens: list[int]
    score: float
    finished: bool


class Rules(NamedTuple):
    """What else decides on tokens, as in `generate` of Hugging Face.

    Args:
        renormalise: The share of probability of banned tokens goes to the others; False: it is lost.
        first: Every text begins with one of these, which counts as certain; none: with any token.
        last: A text that has not ended before ends with one of these at the length limit, the same way.
    """

    renormalise: bool = True
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


OWN_RULES = Rules()


class SourceReader(Reader):
    """Reads source texts, then the target texts that are made from them.

    What the decoder sees of a source is kept once, however many beams look at it.

    Args:
        net: The model, in evaluation mode.
        sources: Token numbers of each source.
        start: The token that target texts begin with.
        new: Number of tokens that will follow; not above `max_length` of the model.
        beams: Texts that go on from each source.
        banned: Tokens that never follow.
        rules: What else decides.

    Raises:
        ValueError: A source is empty, longer than the model's limit, or has tokens that the model does not know.
    """

    net: Seq2Seq  # type: ignore[assignment]

    def __init__(
        self,
        net: Seq2Seq,
        sources: Sequence[Sequence[int]],
        start: int,
        new: int,
        beams: int = 1,
        banned: Collection[int] = (),
        rules: Rules = OWN_RULES,
    ) -> None:
        self.rules, self.logs = rules, not rules.renormalise
        self.net, self.new, self.beams, self.size = net, min(new, net.max_length), beams, 1
        check_ready(net)
        check_texts("Source", sources, net.max_length, net.source_vocabulary)
        known = [start, *banned, *rules.first, *rules.last]
        check_texts("Start", [known], len(known), net.vocabulary)
        device, longest = net.embed.weight.device, max(len(source) for source in sources)
        self.banned = torch.tensor([*banned], dtype=torch.int64, device=device)
        padded = torch.tensor(
            [[*source] + [0] * (longest - len(source)) for source in sources], device=device
        )
        lengths = torch.tensor([len(source) for source in sources], device=device)
        self.source = net.encode(padded, torch.arange(longest, device=device) < lengths[:, None])
        self.tokens = torch.tensor([[start] + [0] * self.new], device=device).repeat(
            len(sources), 1
        )  # (P, 1 + new)
        self.cache = net.make_cache(self.source, 1 if beams > 1 else self.new)

    def read(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """As `Reader.read`."""
        return self.net.decode(tokens, self.source, keep, self.cache)

    def scores(self, vectors: Tensor) -> Tensor:
        """Vectors (..., E) -> scores of the tokens that follow, (..., V)."""
        scores = super().scores(vectors)
        forced = (self.size == self.new and self.rules.last) or (
            self.size == 1 and self.rules.first
        )
        if not forced:
            return scores
        return scores.fill_(NEVER).index_fill_(-1, torch.tensor(forced, device=scores.device), 0.0)

    def select(self, prompts: Tensor) -> None:
        """Goes on with some of the sources only: (R,) of P."""
        super().select(prompts)
        self.source = self.source.select(prompts)


@torch.inference_mode()
def translate(
    net: Seq2Seq,
    sources: Sequence[Sequence[int]],
    config: GenerationConfig,
    start: int,
    stop: Collection[int],
    banned: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    rules: Rules = OWN_RULES,
) -> list[list[Translation]]:
    """Target texts for a batch of source texts.

    With `beams` above 1, beam search; with temperature 0, the likeliest token each time; otherwise tokens are drawn,
    each source's with its own seed. Texts that are done leave the batch.

    Hugging Face's `generate` finds the same texts and scores, with `early_stopping` "likely" for its False, "first" for
    True, and "never", if the `rules` are those of its model: in it, `banned` tokens (`bad_words_ids`) keep their share
    of probability unless `renormalize_logits` is set, and the first and the last token may be forced. What differs: of
    equals it takes any; and with a `length_penalty` below 0 its "never" is a guess.

    Args:
        net: The model, in evaluation mode.
        sources: Token numbers of each source, as in training: with the end token, if it was there.
        config: How tokens are chosen, and how many at most; never more than `net.max_length`.
        start: The token that target texts begin with.
        stop: End tokens.
        banned: Tokens that are never made, as if their scores were -inf.
        seeds: Of each source's draws; None: `config.seed`, and one more for each next source.
        rules: What else decides on tokens; of draws and their scores not what becomes of shares of probability.

    Returns:
        For each source up to `beams` translations, best first. A score is the sum of the tokens' log probabilities
        divided by their number^`length_penalty`. One whose end was forced at the limit is not finished.

    Raises:
        ValueError: As `SourceReader`.
    """
    ranked = config.beams > 1 or (config.temperature == 0 and config.repetition_penalty == 1)
    rules = rules if ranked else rules._replace(renormalise=True)
    reader = SourceReader(net, sources, start, config.max_new_tokens, config.beams, banned, rules)
    least = (
        reader.new if rules.last else reader.new + 1
    )  # tokens of a text that did not end by itself
    found = search(reader, config, stop) if ranked else drawn(reader, config, stop, seeds)
    return [
        [
            Translation(tokens, score, tokens[-1] in stop and len(tokens) < least)
            for tokens, score in texts
        ]
        for texts in found
    ]


def drawn(
    reader: SourceReader,
    config: GenerationConfig,
    stop: Collection[int],
    seeds: Sequence[int] | None,
) -> list[Found]:
    """One text for each source, token by token, and its score; arguments as in `sample`."""
    steps = zip(*sample(reader, config, stop, seeds, scored=True), strict=True)
    tokens, logs = (torch.stack(step, 1) for step in steps)  # (P, L)
    lengths = (tokens != ENDED).sum(1)
    scores = logs.sum(1) / lengths**config.length_penalty
    rows = zip(tokens.tolist(), lengths.tolist(), scores.tolist(), strict=True)
    return [[(text[:length], score)] for text, length, score in rows]
