"""New tokens after given ones: one by one, or by beam search."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modules.config import require
from modules.decoder import Decoder
from modules.reader import Reader
from modules.sampling import GenerationConfig, draw, noise, penalise

__all__ = ["GenerationConfig", "beam_search", "generate", "search"]

ENDED = -1  # what a row gives after its end
NEVER = float("-inf")
Found = list[tuple[list[int], float]]


@torch.inference_mode()
def generate(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """Makes the tokens that follow prompts, a step at a time.

    A row's tokens depend on its prompt and its seed only, not on the other rows nor on their number.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each row.
        config: How tokens are drawn, and how many.
        stop: End tokens.
        seeds: Of each row's draws; None: `config.seed`, and one more in each next row.

    Yields:
        (rows,): the next token of each row, its end token too, and -1 after that. Stops once all rows have ended.

    Raises:
        ValueError: As `Reader`, or `config` asks for beam search.
    """
    require(config.beams == 1, "Beam search ranks whole texts, which cannot be streamed; call beam_search.")
    seeds = range(config.seed, config.seed + len(prompts)) if seeds is None else seeds
    require(len(seeds) == len(prompts), f"There are {len(seeds)} seeds for {len(prompts)} prompts; give each its own.")
    reader = Reader(net, prompts, config.max_new_tokens)
    scores = reader.start()
    chances = noise(seeds, config.max_new_tokens).to(scores.device)  # (rows, max_new_tokens)
    ends, ended = tokens_of(stop, scores.device), torch.zeros_like(chances[:, 0], dtype=torch.bool)
    for step in range(config.max_new_tokens):
        if config.repetition_penalty != 1:
            scores = penalise(scores, reader.seen, config.repetition_penalty)
        tokens = draw(scores, config, chances[:, step])
        yield tokens.masked_fill(ended, ENDED)
        ended |= (tokens[:, None] == ends).any(1)
        if (len(ends) and ended.all()) or step + 1 == config.max_new_tokens:
            return
        scores = reader.step(tokens)


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
        return cls(torch.full(lengths.shape, NEVER, device=device), lengths[..., None].repeat(1, 1, new), lengths)

    def pick(self, order: Tensor) -> "Texts":
        """Some of the texts: (P, C) of K."""
        tokens = self.tokens.gather(1, order[..., None].expand(-1, -1, self.tokens.shape[2]))  # (P, C, L)
        return Texts(self.scores.gather(1, order), tokens, self.lengths.gather(1, order))

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
        both = Texts(*(torch.cat((mine, other[:, :beams]), 1) for mine, other in zip(self, others, strict=True)))
        return both.pick(leading(both.scores, beams)[1])

    def listed(self) -> list[Found]:
        """Tokens and score of each text that there is, by prompt."""
        rows = zip(self.tokens.tolist(), self.lengths.tolist(), self.scores.tolist(), strict=True)
        return [
            [(one[:length], score) for one, length, score in zip(*row, strict=True) if score > NEVER] for row in rows
        ]


def leading(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row and where they stand, of equals the first: (P, S) -> (P, count) twice."""
    count = min(count, scores.shape[1])
    top, place = scores.topk(min(count + 1, scores.shape[1]))
    if (top[:, count - 1 : count] == top[:, count:]).any():  # `topk` takes any of equals
        top, place = scores.sort(dim=1, descending=True, stable=True)
        return top[:, :count], place[:, :count]
    place = place[:, :count].sort(1)[0]
    top, order = scores.gather(1, place).sort(dim=1, descending=True, stable=True)
    return top, place.gather(1, order)


def beam_search(
    net: Decoder, prompts: Sequence[Sequence[int]], config: GenerationConfig, stop: Collection[int] = ()
) -> list[Found]:
    """The best texts that follow each prompt, as far as the context goes.

    Args:
        net: The decoder, in evaluation mode.
        prompts: Token numbers of each text.
        config: `beams`, `max_new_tokens` and `length_penalty`; nothing is drawn.
        stop: End tokens.

    Returns:
        For each prompt up to `beams` pairs of new tokens, the end token too, and score, best first.

    Raises:
        ValueError: As `Reader`.
    """
    room = net.max_length + 1 - max((len(prompt) for prompt in prompts), default=0)  # the last token is not read
    new = max(1, min(config.max_new_tokens, room))
    return search(Reader(net, prompts, new, config.beams), config.length_penalty, stop, new)


@torch.inference_mode()
def search(reader: Reader, penalty: float, stop: Collection[int], new: int) -> list[Found]:
    """Beam search (Graves 2012) over whatever `reader` reads; arguments as in `beam_search`.

    A text ends with an end token or after `new` tokens. Its score is the sum of its tokens' log probabilities, divided
    by their number^`penalty`. Of equals, the better beam goes first, then the lower token. The search for a prompt is
    over when no text that is still open can end with a better score than the worst of its `beams` best.
    """
    scores, beams = reader.start(), reader.beams
    prompts, device = len(scores) // beams, scores.device
    ends, rows = tokens_of(stop, device), torch.arange(len(scores), device=device).unflatten(0, (-1, beams))
    done = Texts.none(prompts, beams, new, device)
    running = Texts.none(prompts, beams, new, device)
    running.scores[:, 0] = 0.0  # the beams of a prompt are all the same as yet
    for step in range(1, new + 1):
        logs = scores.float().log_softmax(1).unflatten(0, (prompts, beams))  # (P, K, V)
        top, place = leading((running.scores[..., None] + logs).flatten(1), beams * (1 + len(ends)))
        beam, token = place // logs.shape[2], place % logs.shape[2]  # (P, C)
        made = running.pick(beam).longer(token, top)
        ended = (token[..., None] == ends).any(-1) | (step == new)  # (P, C)
        done = done.best(made.where(ended, step**penalty))
        order = ended.long().argsort(dim=1, stable=True)[:, :beams]  # (P, K)
        running = made.where(~ended).pick(order)
        length = new if penalty > 0 else step + 1  # at which open texts would score best
        if step == new or (done.scores[:, -1] >= running.scores[:, 0] / length**penalty).all():
            break
        if beams > 1:
            reader.reorder(rows.gather(1, beam.gather(1, order)).flatten())  # (P K,)
        scores = reader.step(token.gather(1, order).flatten())
    return done.listed()
