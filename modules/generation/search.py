"""New tokens after given ones: one by one, or by beam search."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modules.config import require
from modules.generation.decoding import NEVER, Reader, TextReader, check_texts
from modules.generation.sampling import GenerationConfig, draw, noise, penalise
from modules.models.gpt import Decoder

__all__ = ["GenerationConfig", "beam_search", "generate", "sample", "search"]

ENDED = -1  # what a row gives after its end
GROUP = 64  # neighbouring scores whose maximum is taken first
Found = list[tuple[list[int], float]]


def generate(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    banned: Collection[int] = (),
) -> Iterator[Tensor]:
    """Makes the tokens that follow prompts, a step at a time.

    A row's tokens depend on its prompt and its seed only, not on the other rows nor on their number.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each row.
        config: How tokens are drawn, and how many.
        stop: End tokens.
        seeds: Of each row's draws; None: `config.seed`, and one more in each next row.
        banned: Tokens that never follow.

    Yields:
        (rows,): the next token of each row, its end token too, and -1 after that. Stops once all rows have ended.

    Raises:
        ValueError: As `TextReader`, or `config` asks for beam search.
    """
    require(
        config.beams == 1,
        "Beam search ranks whole texts, which cannot be streamed; call beam_search.",
    )
    reader = TextReader(net, prompts, config.max_new_tokens, banned=banned)
    return (tokens for tokens, _ in sample(reader, config, stop, seeds))


@torch.inference_mode()
def sample(
    reader: Reader,
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    scored: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens one by one, of whatever `reader` reads; other arguments as in `generate`.

    Yields:
        Tokens as `generate`, and, if `scored`, their log probabilities, whatever the draw left out, 0 after the end.
    """
    scores = reader.start()
    seeds = range(config.seed, config.seed + len(scores)) if seeds is None else seeds
    require(
        len(seeds) == len(scores),
        f"There are {len(seeds)} seeds for {len(scores)} prompts; give each its own.",
    )
    chances, ends = noise(seeds, reader.new).to(scores.device), tokens_of(stop, scores.device)
    rows = torch.arange(len(scores), device=scores.device)  # those that are still read
    nothing, zeros = torch.full_like(rows, ENDED), torch.zeros_like(rows, dtype=torch.float32)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for step in range(reader.new):
        fair = (
            scores
            if config.repetition_penalty == 1
            else penalise(scores, reader.seen, config.repetition_penalty)
        )
        tokens, logs = draw(fair, config, chances[rows, step]), zeros
        if scored:
            own = scores.float().log_softmax(1).gather(1, tokens[:, None])[:, 0]  # (rows,)
            logs = zeros.index_copy(0, rows, own.masked_fill(ended, 0.0))
        yield nothing.index_copy(0, rows, tokens.masked_fill(ended, ENDED)), logs
        ended |= (tokens[:, None] == ends).any(1)
        if (len(ends) and ended.all()) or step + 1 == reader.new:
            return
        left = few(~ended)
        if left is not None:
            reader.select(left)
            rows, tokens, ended = rows[left], tokens[left], ended[left]
        scores = reader.step(tokens)


def few(open_: Tensor) -> Tensor | None:
    """Numbers of the rows that are open, (rows,), if so few are that leaving the others pays; None: go on with all."""
    left = open_.nonzero()[:, 0]
    return left if 4 * len(left) <= 3 * len(open_) else None


def tokens_of(stop: Collection[int], device: torch.device) -> Tensor:
    """End tokens as a tensor, (S,)."""
    return torch.tensor([*stop], dtype=torch.int64, device=device)


class Texts(NamedTuple):
    """K texts for each of P prompts: scores (P, K), -inf for none, new tokens (P, K, L), and how many, (P, K)."""

    scores: Tensor
    tokens: Tensor
    lengths: Tensor

    @classmethod
    def none(cls, prompts: int, beams: int, new: int, device: torch.device) -> "Texts":
        """No text yet, P x K times, with room for L tokens."""
        lengths = torch.zeros(prompts, beams, dtype=torch.int64, device=device)
        return cls(
            torch.full(lengths.shape, NEVER, device=device),
            lengths[..., None].repeat(1, 1, new),
            lengths,
        )

    def pick(self, order: Tensor) -> "Texts":
        """Some of the texts: (P, C) of K."""
        tokens = self.tokens.gather(
            1, order[..., None].expand(-1, -1, self.tokens.shape[2])
        )  # (P, C, L)
        return Texts(self.scores.gather(1, order), tokens, self.lengths.gather(1, order))

    def first(self, count: int) -> "Texts":
        """The first texts of each prompt."""
        return Texts(*(part[:, :count] for part in self))

    def longer(self, token: Tensor, scores: Tensor) -> "Texts":
        """Each with one more token, (P, K), and its new score, (P, K)."""
        tokens = self.tokens.scatter(2, self.lengths[..., None], token[..., None])
        return Texts(scores, tokens, self.lengths + 1)

    def where(self, chosen: Tensor, divisor: float = 1.0) -> "Texts":
        """None but the chosen ones, (P, K), their scores divided."""
        return self._replace(scores=(self.scores / divisor).masked_fill(~chosen, NEVER))

    def best(self, others: "Texts") -> "Texts":
        """The K best of these and the first K others; of equals the first."""
        beams = self.scores.shape[1]
        both = Texts(*(torch.cat(pair, 1) for pair in zip(self, others.first(beams), strict=True)))
        return both.pick(leading(both.scores, beams)[1])

    def rows(self, prompts: Tensor) -> "Texts":
        """Those of some prompts: (R,) of P."""
        return Texts(*(part[prompts] for part in self))

    def keep(self, prompts: Tensor, others: "Texts") -> None:
        """Takes over, in place, the texts of others, for these prompts of its own, (R,)."""
        for mine, other in zip(self, others, strict=True):
            mine[prompts] = other

    def listed(self) -> list[Found]:
        """Tokens and score of each text that there is, by prompt."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), self.scores.tolist(), strict=True)
        return [
            [
                (one[:length], score)
                for one, length, score in zip(*row, strict=True)
                if score > NEVER
            ]
            for row in rows
        ]


def leading(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row and where they stand, of equals the first: (P, S) -> (P, count) twice."""
    count = min(count, scores.shape[1])
    top, place = largest(scores, min(count + 1, scores.shape[1]))
    if (top[:, count - 1 : count] == top[:, count:]).any():  # `topk` takes any of equals
        top, place = scores.sort(dim=1, descending=True, stable=True)
        return top[:, :count], place[:, :count]
    place = place[:, :count].sort(1)[0]
    top, order = scores.gather(1, place).sort(dim=1, descending=True, stable=True)
    return top, place.gather(1, order)


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `scores.topk(count)`, (R, S) -> (R, count) twice, but looks closely only where it can pay.

    The largest of a row are in the groups with the largest maxima, which most numbers are read once for.
    """
    whole = scores.shape[1] // GROUP * GROUP
    if whole < 4 * count * GROUP:
        return scores.topk(count)
    best = (
        scores[:, :whole].unflatten(1, (-1, GROUP)).amax(2).topk(count)[1]
    )  # (R, count), of S / GROUP
    places = (best[..., None] * GROUP + torch.arange(GROUP, device=best.device)).flatten(
        1
    )  # (R, count GROUP)
    rest = torch.arange(whole, scores.shape[1], device=best.device).expand(len(best), -1)
    places = torch.cat((places, rest), 1)
    top, order = scores.gather(1, places).topk(count)
    return top, places.gather(1, order)


def beam_search(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    banned: Collection[int] = (),
    renormalise: bool = True,
) -> list[Found]:
    """The best texts that follow each prompt, as far as the context goes, whatever prompts are beside it.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each text.
        config: `beams`, `max_new_tokens` and `length_penalty`; nothing is drawn.
        stop: End tokens.
        banned: Tokens that never follow.
        renormalise: Their share of probability goes to the others; False: it is lost, as in `generate` of Hugging Face.

    Returns:
        For each prompt up to `beams` pairs of new tokens, the end token too, and score, best first.

    Raises:
        ValueError: As `TextReader`.
    """
    check_texts("Prompt", prompts, net.max_length, net.vocabulary)
    most = net.max_length + 1  # the last token is not read
    rooms = [min(config.max_new_tokens, most - len(prompt)) for prompt in prompts]
    found: dict[int, Found] = {}
    for room in set(rooms):  # those of one room are searched side by side
        rows = [row for row, its in enumerate(rooms) if its == room]
        reader = TextReader(
            net, [prompts[row] for row in rows], room, config.beams, banned, logs=not renormalise
        )
        found |= zip(rows, search(reader, config, stop), strict=True)
    return [found[row] for row in range(len(prompts))]


@torch.inference_mode()
def search(reader: Reader, config: GenerationConfig, stop: Collection[int] = ()) -> list[Found]:
    """Beam search (Graves 2012) over whatever `reader` reads; arguments as in `beam_search`.

    A text ends with an end token or after `reader.new` tokens. Its score is the sum of its tokens' log probabilities,
    divided by their number^`length_penalty`. Of equals, the better beam goes first, then the lower token. When the
    search for a prompt is over, `early_stopping` says; the prompt is then read no more. One beam takes the likeliest
    token each time, up to the first end.
    """
    scores, beams, new = reader.start(), reader.beams, reader.new
    ends, prompts = tokens_of(stop, scores.device), torch.arange(len(scores), device=scores.device)
    found, done = (Texts.none(len(prompts), beams, new, scores.device) for _ in range(2))
    running = Texts.none(len(prompts), 1, new, scores.device)  # from which all beams go on
    running.scores.zero_()
    open_ = torch.ones_like(prompts, dtype=torch.bool)
    for step in range(1, new + 1):
        top, beam, token = continued(
            scores, running.scores, beams * (1 + len(ends)), reader.logs
        )  # (P, C)
        if (missing := beams - top.shape[1]) > 0:  # there are fewer tokens than beams
            top, beam, token = (
                F.pad(part, (0, missing), value=fill)
                for part, fill in ((top, NEVER), (beam, 0), (token, 0))
            )
        made = running.pick(beam).longer(token, top)
        ended = (token[..., None] == ends).any(-1) | (step == new)  # (P, C)
        if ended.any():
            done = done.best(made.where(ended & open_[:, None], step**config.length_penalty))
            order = ended.long().argsort(dim=1, stable=True)[:, :beams]  # (P, K)
            beam, token, made = (
                beam.gather(1, order),
                token.gather(1, order),
                made.where(~ended).pick(order),
            )
        beam, token, running = beam[:, :beams], token[:, :beams], made.first(beams)  # (P, K)
        open_ = open_ & hopeful(running, done, config, step, new)
        if step == new or not open_.any():
            break
        if beams > 1:
            reader.reorder(beam)
        left = few(open_)
        if left is not None:
            found.keep(prompts, done)
            reader.select(left)
            done, running = done.rows(left), running.rows(left)
            prompts, open_, token = prompts[left], open_[left], token[left]
        scores = reader.step(token.flatten())
    found.keep(prompts, done)
    return found.listed()


def continued(
    scores: Tensor, sums: Tensor, count: int, logs: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest ways to go on from P x K beams, C <= `count` for each prompt.

    Args:
        scores: Of the next token, (P K, V); they are overwritten.
        sums: Of the log probabilities of the tokens before, (P, K).
        count: Number of ways.
        logs: Scores are log probabilities, which need not sum to 1.

    Returns:
        The new sums, which beam goes on, and with which token, (P, C) each, best first.
    """
    scores = scores.float()
    tokens = leading(scores, count)[1]  # (P K, C')
    shares = scores if logs else torch.log_softmax(scores, 1, out=scores)
    shares = shares.gather(1, tokens).unflatten(0, sums.shape)  # (P, K, C')
    top, place = leading((sums[..., None] + shares).flatten(1), count)  # of (P, K C')
    return (
        top,
        place // shares.shape[2],
        tokens.unflatten(0, sums.shape).flatten(1).gather(1, place),
    )


def hopeful(running: Texts, done: Texts, config: GenerationConfig, step: int, new: int) -> Tensor:
    """Whether the search for each prompt goes on after `step` of `new` tokens: boolean (P,)."""
    worst, best, penalty = done.scores[:, -1], running.scores[:, 0], config.length_penalty
    if config.early_stopping == "first" or done.scores.shape[1] == 1:
        return (worst == NEVER) & (best > NEVER)
    length = step  # at which open texts would score best
    if config.early_stopping == "never":
        length = new if penalty > 0 else step + 1
    return worst < best / length**penalty
