"""All decoders under one interface, and the same results from simpler code."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modules.generation.beam_search import beam_search
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from modules.generation.translation import translate
from modules.models.seq2seq import Seq2Seq
from tests.helpers.tiny_models import VOCAB

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [8, 2]]
START = 1  # the token that targets begin with
NEW = 9  # tokens
STOP = {*range(0, VOCAB, 2)}


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
    """The most likely token each time; GPT looks back as far as `PromptDecoder` says."""
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
