"""Incremental decoding: a model and its cache, as sampling and beam search use them."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from modules.config import require
from modules.generation.beam_cache import BeamCache
from modules.kv_cache import KVCache
from modules.models.gpt import Decoder

MINUS_INF = float("-inf")


class IncrementalDecoder:
    """Scores of the next token, a token at a time: the base of all incremental decoders.

    There are P prompts, and K = `beams` sequences that continue each, next to each other: "rows"
    are P x K.
    """

    net: Decoder
    cache: KVCache | BeamCache
    sequences: Tensor  # with one beam: all tokens, (P, length and room for new tokens)
    length: int  # number of tokens of each sequence so far
    max_new_tokens: int
    beams: int
    banned: Tensor  # tokens that are never generated, (number of them,)
    renormalize = True  # the probability mass of banned tokens goes to the others

    def prefill(self) -> Tensor:
        """Runs the prompts: scores of the tokens that follow, (P, V)."""
        scores = self.next_token_scores(self.run_prompts())
        if self.beams > 1:
            assert isinstance(self.cache, KVCache)
            room = self.max_new_tokens - 1  # the last new token is not run
            self.cache = BeamCache(self.cache, self.beams, room)
        return scores

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Runs one more token in each row, (rows,): scores of those that follow, (rows, V)."""
        if self.beams == 1:
            self.sequences[:, self.length] = tokens
        self.length += 1
        return self.next_token_scores(self.run(tokens[:, None])[:, 0])  # (rows, 1) -> (rows, E)

    def run_prompts(self) -> Tensor:
        """Runs the prompts: the last token's vectors, (P, E)."""
        return self.run(self.sequences[:, : self.length])[:, -1]

    def run(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Prompts (P, N) or next tokens (rows, 1) -> vectors, (P, N, E) or (rows, 1, E)."""
        raise NotImplementedError

    def next_token_scores(self, hidden: Tensor) -> Tensor:
        """Vectors (..., E) -> scores of the tokens that follow, (..., V)."""
        scores = self.net.logits(hidden)
        if not self.renormalize:
            scores = scores.float().log_softmax(-1)
        if len(self.banned):
            scores = scores.index_fill(-1, self.banned, MINUS_INF)
        return scores

    def reorder(self, beams: Tensor) -> None:
        """Each sequence continues that of its prompt with the index in `beams`, (P, K)."""
        assert isinstance(self.cache, BeamCache)
        self.cache.reorder(beams)

    def select(self, prompts: Tensor) -> None:
        """Keeps only the prompts at the indices `prompts`, (R,)."""
        self.cache = self.cache.select(prompts)
        self.sequences = self.sequences[prompts]


class PromptDecoder(IncrementalDecoder):
    """Continues prompts with a decoder.

    Rows of different lengths are padded on the left. A row that gets longer than `max_length` is
    run again from its last `max_length` / 2 tokens.

    `prompts`, `banned` and `renormalize` are as in `beam_search`, `max_new_tokens` and `beams` as
    in `GenerationConfig`. Raises `ValueError` if a prompt is empty, longer than `max_length`, or
    has unknown tokens; or a banned one is unknown.
    """

    def __init__(
        self,
        net: Decoder,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        beams: int = 1,
        banned: Collection[int] = (),
        renormalize: bool = True,
    ) -> None:
        check_evaluation_mode(net)
        check_prompts("Prompt", prompts, net.max_length, net.vocabulary)
        if banned:
            check_tokens("A banned token", banned, net.vocabulary)
        device = net.embed.weight.device
        self.net = net
        self.max_new_tokens = max_new_tokens
        self.beams = beams
        self.renormalize = renormalize
        self.banned = torch.tensor([*banned], dtype=torch.int64, device=device)
        self.length = max(len(prompt) for prompt in prompts)
        self.starts = [self.length - len(prompt) for prompt in prompts]  # each row's first token
        rows = [
            [prompt[0]] * start + [*prompt] + [0] * max_new_tokens
            for start, prompt in zip(self.starts, prompts, strict=True)
        ]
        self.sequences = torch.tensor(rows, device=device)  # (P, length + max_new_tokens)
        length = self.length if beams > 1 else min(net.max_length, self.length + max_new_tokens)
        self.cache = net.make_cache(len(prompts), length)

    def decode_step(self, tokens: Tensor) -> Tensor:
        """Runs one more token in each row, (rows,): scores of those that follow, (rows, V)."""
        if self.cache.length < self.cache.max_length:
            return super().decode_step(tokens)
        self.sequences[:, self.length] = tokens
        self.length += 1
        longest = self.net.max_length
        half = self.length - max(1, longest // 2)
        self.starts = [start if self.length - start <= longest else half for start in self.starts]
        return self.next_token_scores(self.run_prompts())

    def run_prompts(self) -> Tensor:
        """Runs each row from its start: the last token's vectors, (P, E)."""
        assert isinstance(self.cache, KVCache)
        self.cache.clear()
        first = min(self.starts)
        padding_mask = None
        if first < max(self.starts):
            starts = torch.tensor(self.starts, device=self.sequences.device)
            index = torch.arange(first, self.length, device=starts.device)
            padding_mask = index >= starts[:, None]  # (P, N)
        return self.run(self.sequences[:, first : self.length], padding_mask)[:, -1]

    def run(self, tokens: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Prompts (P, N) or next tokens (rows, 1) -> vectors, (P, N, E) or (rows, 1, E)."""
        return self.net(tokens, padding_mask, cache=self.cache)

    def select(self, prompts: Tensor) -> None:
        """Keeps only the prompts at the indices `prompts`, (R,)."""
        super().select(prompts)
        self.starts = [self.starts[row] for row in prompts.tolist()]


def check_evaluation_mode(net: torch.nn.Module) -> None:
    """Raises `ValueError` unless a model is in evaluation mode."""
    require(not net.training, "The model is in training mode; call its eval() first.")


def check_prompts(
    name: str, prompts: Sequence[Sequence[int]], max_length: int, vocabulary: int
) -> None:
    """Raises `ValueError` unless a model of this length and vocabulary takes these prompts."""
    require(len(prompts) > 0, f"There is no {name.lower()}; give at least one.")
    for number, prompt in enumerate(prompts):
        require(
            len(prompt) > 0,
            f"{name} {number} is empty; give at least one token, such as the end token.",
        )
        require(
            len(prompt) <= max_length,
            f"{name} {number} has {len(prompt)} tokens, over the model's {max_length}; shorten it.",
        )
        check_tokens(f"{name} {number} has a token that", prompt, vocabulary)


def check_tokens(name: str, tokens: Collection[int], vocabulary: int) -> None:
    """Raises `ValueError` unless all tokens are of a model's vocabulary."""
    require(
        min(tokens) >= 0 and max(tokens) < vocabulary,
        f"{name} is not among the {vocabulary} of the model; use the tokenizer that it was trained "
        "with.",
    )


def rows_to_keep(unfinished: Tensor) -> Tensor | None:
    """Numbers of the unfinished rows, if it pays to drop the others; None: keep all."""
    kept = unfinished.nonzero()[:, 0]
    return kept if 4 * len(kept) <= 3 * len(unfinished) else None
