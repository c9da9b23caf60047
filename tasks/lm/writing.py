"""Prompts to tokens and tokens to text, as far as it is text already: what everything that generates shares."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from datamodules.tokenizers import Tokenizer
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.errors import UsageError
from tasks.lm.architectures import Model

LOOK_BACK = 8  # tokens before new ones that may decide how these are spelled, such as with a space before them
BROKEN = "\ufffd"  # what decoding makes of a part of a character


def prompt_tokens(model: Model, prompt: str) -> list[int]:
    """Tokens of a prompt as the model saw texts in training: with the token that begins a document, if it knows one.

    An empty prompt is the beginning of a document; for a model that was trained on one text, it is that of a line.

    Raises:
        UsageError: a character is not in the model's vocabulary, or the prompt gives no token.
    """
    tokenizer, boundary = model.tokenizer, model.boundary_tokens
    if (
        tokenizer.is_character_level
        and (letter := tokenizer.first_unknown_character([prompt])) is not None
    ):
        raise UsageError(
            f"the prompt has the character {letter!r} (U+{ord(letter):04X}), which is not among the "
            f"{tokenizer.vocab_size} tokens that the model knows: leave it out"
        )
    begin = [
        number
        for number in (boundary.bos, None if prompt else boundary.prefix)
        if number is not None
    ]
    (ids,) = tokenizer.encode_batch([prompt if prompt or begin else "\n"])
    if not begin + ids:
        raise UsageError(
            "the model knows no way to begin a text: give a --prompt that is not empty"
        )
    return begin + ids


class Writer:
    """The text that follows one prompt, as its tokens come.

    Given out are whole characters only, though a token may be a part of one, and nothing that may yet turn out to be a
    stop string.

    Args:
        tokenizer: The model's.
        prompt: Tokens that it goes on from.
        stop: Strings that end the text and are no part of it.
        ends: Tokens that end it.

    Attributes:
        text: What was given out.
        tokens: How many tokens came.
        ended: Why nothing more will come: "stop", "end", or what `finish` was told; None: it may go on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        ends: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.stop, self.ends = tokenizer, stop, ends
        self.text, self.tokens = "", 0
        self.ended: str | None = None
        self._ids = [*prompt[-LOOK_BACK:]]  # of them the text up to `_read` was decoded
        self._first, self._read = 0, len(self._ids)
        self._held = ""

    def add(self, token: int) -> None:
        """Takes the next token; nothing where the text has ended."""
        if self.ended:
            return
        self.tokens += 1
        if token in self.ends:
            self._take(self._new(), "end")
            return
        self._ids.append(token)
        new = self._new()
        if new and not new.endswith(BROKEN):
            self._first, self._read = max(self._first, self._read - LOOK_BACK), len(self._ids)
            self._take(new, None)

    def finish(self, ended: str = "length") -> None:
        """No more tokens, for this reason: the rest is text as it is."""
        if not self.ended:
            self._take(self._new(), ended)

    def _new(self) -> str:
        """What the tokens after `_read` add to the text."""
        before = self.tokenizer.decode(self._ids[self._first : self._read])
        return self.tokenizer.decode(self._ids[self._first :])[len(before) :]

    def _take(self, new: str, ended: str | None) -> None:
        """Gives out new text up to a stop string, or up to what may become one."""
        text = self._held + new
        found = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.ended, size = "stop", min(found)
        else:
            begun = (
                n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])
            )
            self.ended, size = ended, len(text) - (0 if ended else max(begun, default=0))
        self.text, self._held = self.text + text[:size], text[size:]


@dataclass
class Writers:
    """Texts that are written side by side, a token each at a time.

    Args:
        rows: One for each text.
        steps: Gives the tokens, (rows,), until all have ended.
    """

    rows: list[Writer]
    steps: Iterator[torch.Tensor]

    def advance(self) -> None:
        """One more token for each text; where there is none, all have ended."""
        tokens = next(self.steps, None)
        for row, token in zip(
            self.rows, [None] * len(self.rows) if tokens is None else tokens.tolist(), strict=True
        ):
            row.finish() if token is None else row.add(token)

    def finish(self) -> list[str]:
        """All texts to their ends."""
        while not all(row.ended for row in self.rows):
            self.advance()
        return [row.text for row in self.rows]


def writers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    found: FolderGeneration | None = None,
) -> Writers:
    """Texts that follow prompts, to be written step by step.

    Args:
        model, prompts, config, stop, seeds: As in `modules.generation.generate.generate`; `stop` are strings.
        found: What the model's folder asks.
    """
    ends = end_tokens(model, found)
    rows = [Writer(model.tokenizer, prompt, stop, ends) for prompt in prompts]
    return Writers(
        rows, generate(model.net, prompts, config, ends, seeds, found.banned if found else ())
    )


def end_tokens(model: Model, found: FolderGeneration | None = None) -> list[int]:
    """Those that its folder asks for; else the token that ends a document, if the model was trained with one."""
    if found and found.stop:
        return [*found.stop]
    return [] if model.boundary_tokens.eos is None else [model.boundary_tokens.eos]
