"""New tokens after given ones, sampled one by one."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from modules.config import require
from modules.generation.decoding import IncrementalDecoder, PromptDecoder, rows_to_keep
from modules.generation.sampling import (
    GenerationConfig,
    penalize_repetition,
    sample_tokens,
    uniform,
)
from modules.models.gpt import Decoder

ENDED = -1  # stands for tokens after the end of a row


def generate(
    net: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    banned: Collection[int] = (),
) -> Iterator[Tensor]:
    """Generates the tokens that follow prompts, a step at a time.

    A row's tokens depend on its prompt and its seed only, not on the other rows.

    Args:
        net: The model, in evaluation mode.
        prompts: Token ids of each row.
        config: How tokens are sampled, and how many.
        stop: Tokens that end a sequence.
        seeds: One seed per row; None: `config.seed` + row number.
        banned: Tokens that are never generated.

    Yields:
        (rows,): the next token of each row, its end token too, and -1 after that. Stops once all
        rows have ended.

    Raises:
        ValueError: As `PromptDecoder`, there are not as many `seeds` as prompts, or `config` asks
            for beam search.
    """
    require(
        config.beams == 1,
        "Beam search ranks whole sequences, which cannot be streamed; call beam_search.",
    )
    decoder = PromptDecoder(net, prompts, config.max_new_tokens, banned=banned)
    return (tokens for tokens, _ in sample(decoder, config, stop, seeds))


def sample(
    decoder: IncrementalDecoder,
    config: GenerationConfig,
    stop: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    with_log_probs: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens one by one, of any incremental decoder; other arguments as in `generate`.

    Yields:
        Tokens as `generate`, and, with `with_log_probs`, their log probabilities under the model
        (before repetition penalty, temperature, top_k, top_p and min_p), 0 after the end.

    Raises:
        ValueError: There are not as many `seeds` as prompts; before anything is run.
    """
    prompts = len(decoder.sequences)
    check_seeds(seeds, prompts)
    if seeds is None:
        seeds = range(config.seed, config.seed + prompts)
    return sample_steps(decoder, config, stop, seeds, with_log_probs)


def check_seeds(seeds: Sequence[int] | None, prompts: int) -> None:
    """Raises `ValueError` unless each prompt has its seed; None: there are no seeds."""
    count = prompts if seeds is None else len(seeds)
    require(count == prompts, f"There are {count} seeds for {prompts} prompts; give each its own.")


@torch.inference_mode()
def sample_steps(
    decoder: IncrementalDecoder,
    config: GenerationConfig,
    stop: Collection[int],
    seeds: Sequence[int],
    with_log_probs: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The steps of `sample`, with the same arguments."""
    logits = decoder.prefill()
    device = logits.device
    random = uniform(seeds, decoder.max_new_tokens).to(device)
    stop_tokens = torch.tensor([*stop], dtype=torch.int64, device=device)
    rows = torch.arange(len(logits), device=device)  # those that are still in the batch
    filler = torch.full_like(rows, ENDED)
    zeros = torch.zeros_like(rows, dtype=torch.float32)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for step in range(decoder.max_new_tokens):
        penalized = logits
        if config.repetition_penalty != 1:
            sequences = decoder.sequences[:, : decoder.length]
            penalized = penalize_repetition(logits, sequences, config.repetition_penalty)
        tokens = sample_tokens(penalized, config, random[rows, step])
        log_probs = zeros
        if with_log_probs:
            chosen = logits.float().log_softmax(1).gather(1, tokens[:, None])[:, 0]  # (rows,)
            log_probs = zeros.index_copy(0, rows, chosen.masked_fill(ended, 0.0))
        yield filler.index_copy(0, rows, tokens.masked_fill(ended, ENDED)), log_probs
        ended |= (tokens[:, None] == stop_tokens).any(1)
        if (len(stop) and ended.all()) or step + 1 == decoder.max_new_tokens:
            return
        kept = rows_to_keep(~ended) if len(stop) else None
        if kept is not None:
            decoder.select(kept)
            rows = rows[kept]
            tokens = tokens[kept]
            ended = ended[kept]
        logits = decoder.decode_step(tokens)
