"""Prompts to tokens, and generated tokens to text as soon as it is certain."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from datamodules.tokenizers import Tokenizer
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.errors import UsageError
from tasks.lm.architectures import LanguageModel

CONTEXT = 8  # tokens before new ones that may decide how these are decoded, such as with a space
INCOMPLETE = "\ufffd"  # what part of a character is decoded to


def prompt_tokens(model: LanguageModel, prompt: str) -> list[int]:
    """Encodes a prompt as in training: after the token that begins a document, if there is one.

    An empty prompt is the beginning of a document, or of a line for a model without such a token.

    Raises:
        UsageError: A character is not in the model's vocabulary, or the prompt gives no token.
    """
    tokenizer = model.tokenizer
    boundary = model.boundary_tokens
    letter = tokenizer.first_unknown_character([prompt]) if tokenizer.is_character_level else None
    if letter is not None:
        raise UsageError(
            f"the prompt has the character {letter!r} (U+{ord(letter):04X}), which is not among "
            f"the {tokenizer.vocab_size} tokens that the model knows: leave it out"
        )
    special = [boundary.bos] if prompt else [boundary.bos, boundary.prefix]
    begin = [token for token in special if token is not None]
    (ids,) = tokenizer.encode_batch([prompt if prompt or begin else "\n"])
    if not begin + ids:
        raise UsageError("the model cannot begin a text: give a --prompt that is not empty")
    return begin + ids


class TextStream:
    """The text after one prompt, token by token.

    It grows by whole characters, though a token may be part of one, and never by anything that may
    turn out to be a stop string.

    Args:
        tokenizer: The model's.
        prompt: Tokens of the prompt.
        stop: Strings that end the text and are no part of it.
        end_tokens: Tokens that end it.

    Attributes:
        text: The text so far.
        tokens: Number of tokens so far.
        ended: Reason of the end: "stop", "end", or as given to `finish`; None: not ended.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        end_tokens: Collection[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.end_tokens = end_tokens
        self.text = ""
        self.tokens = 0
        self.ended: str | None = None
        self._ids = [*prompt[-CONTEXT:]]
        self._first = 0  # token that decoding starts with
        self._decoded = len(self._ids)  # tokens whose text is known
        self._pending = ""  # text that may become a stop string

    def add(self, token: int) -> None:
        """Adds the next token, unless the text has ended."""
        if self.ended:
            return
        self.tokens += 1
        if token in self.end_tokens:
            self._append(self._new_text(), "end")
            return
        self._ids.append(token)
        new = self._new_text()
        if new and not new.endswith(INCOMPLETE):
            self._first = max(self._first, self._decoded - CONTEXT)
            self._decoded = len(self._ids)
            self._append(new, None)

    def finish(self, ended: str = "length") -> None:
        """Ends the text for this reason."""
        if not self.ended:
            self._append(self._new_text(), ended)

    def _new_text(self) -> str:
        """Returns the text of tokens that are not decoded yet."""
        before = self.tokenizer.decode(self._ids[self._first : self._decoded])
        return self.tokenizer.decode(self._ids[self._first :])[len(before) :]

    def _append(self, new: str, ended: str | None) -> None:
        """Appends new text up to a stop string, or up to what may become one."""
        text = self._pending + new
        found = [text.find(stop) for stop in self.stop if stop in text]
        if found:
            self.ended = "stop"
            size = min(found)
        elif ended:
            self.ended = ended
            size = len(text)
        else:
            begun = [
                n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])
            ]
            size = len(text) - max(begun, default=0)
        self.text += text[:size]
        self._pending = text[size:]


@dataclass
class StreamBatch:
    """Texts that are generated together, one token of each at a time.

    Args:
        streams: One for each text.
        steps: Yields the next tokens, (streams,), until all have ended.
    """

    streams: list[TextStream]
    steps: Iterator[torch.Tensor]

    def advance(self) -> None:
        """Adds a token to each text; all have ended if there is none."""
        tokens = next(self.steps, None)
        if tokens is None:
            for stream in self.streams:
                stream.finish()
            return
        for stream, token in zip(self.streams, tokens.tolist(), strict=True):
            stream.add(token)

    def finish(self) -> list[str]:
        """Generates all texts to their ends."""
        while not all(stream.ended for stream in self.streams):
            self.advance()
        return [stream.text for stream in self.streams]


def stream_texts(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    stop: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    generation: FolderGeneration | None = None,
) -> StreamBatch:
    """Starts texts after prompts.

    Args:
        model, prompts, config, seeds: As in `modules.generation.generate.generate`.
        stop: Strings that end a text.
        generation: Settings of the model's folder.
    """
    ends = end_tokens(model, generation)
    streams = [TextStream(model.tokenizer, prompt, stop, ends) for prompt in prompts]
    banned = generation.banned if generation else ()
    return StreamBatch(streams, generate(model.net, prompts, config, ends, seeds, banned))


def end_tokens(model: LanguageModel, generation: FolderGeneration | None = None) -> list[int]:
    """Returns the end tokens of a folder's settings, else the one that ends documents, if any."""
    if generation and generation.stop:
        return [*generation.stop]
    return [] if model.boundary_tokens.eos is None else [model.boundary_tokens.eos]
