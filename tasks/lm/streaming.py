"""From prompts to tokens, and from generated tokens to text as early as possible."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from datamodules.tokenizers import Tokenizer
from modules.generation.generate import generate
from modules.generation.sampling import GenerationConfig
from tasks.checkpoints.generation_config import FolderGeneration
from tasks.errors import UsageError
from tasks.lm.architectures import LanguageModel

CONTEXT = 8  # earlier tokens to decode with new ones: SentencePiece drops the first space
INCOMPLETE = "\ufffd"  # text of an incomplete character


def prompt_tokens(model: LanguageModel, prompt: str, what: str = "the prompt") -> list[int]:
    """Encodes a prompt as in training: after the token that begins a document, if there is one.

    An empty prompt begins a document, or a line if the model has no such token; messages call it
    `what`.
    """
    tokenizer = model.tokenizer
    boundary = model.boundary_tokens
    # `prefix` is what begins a document if one token separates documents, as in GPT-2.
    special = [boundary.bos] if prompt else [boundary.bos, boundary.prefix]
    begin = [token for token in special if token is not None]
    text = prompt if prompt or begin else "\n"
    refuse_unknown_characters(tokenizer, [text], what)
    (ids,) = tokenizer.encode_batch([text])
    if not begin + ids:
        raise UsageError("the model needs a text with at least one token: give a longer one")
    return begin + ids


def refuse_unknown_characters(tokenizer: Tokenizer, texts: Sequence[str], what: str) -> None:
    """Raises `UsageError` for a character that a character-level vocabulary lacks."""
    letter = tokenizer.first_unknown_character(texts) if tokenizer.is_character_level else None
    if letter is not None:
        raise UsageError(
            f"{what} has the character {letter!r} (U+{ord(letter):04X}), which is not in the "
            "vocabulary: leave it out"
        )


class TextStream:
    """The text after one prompt, token by token.

    It grows by whole characters, and holds back what may become a stop string.

    Args:
        tokenizer: The model's.
        prompt: Token ids of the prompt.
        stop: Strings that end the text and are not part of it.
        end_tokens: Token ids that end it.

    Attributes:
        text: The text so far.
        tokens: Number of tokens so far, with the end token.
        ended: Why it ended: "stop", "end" (token), or as given to `finish`; None: not ended.
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
        start = max(0, len(prompt) - CONTEXT)
        for _ in range(3):  # a character has at most four bytes
            if start and tokenizer.decode(prompt[start:]).startswith(INCOMPLETE):
                start -= 1
        self._ids = [*prompt[start:]]
        # Tokens at which the latest parts of the text begin: decoding may start there.
        self._starts = [0]
        self._decoded = len(self._ids)  # number of tokens that are decoded already
        self._pending = ""  # may become a stop string

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
            self._starts.append(self._decoded)
            while self._starts[1:] and self._starts[1] <= self._decoded - CONTEXT:
                del self._starts[0]
            self._decoded = len(self._ids)
            self._append(new, None)

    def finish(self, ended: str = "length") -> None:
        if not self.ended:
            self._append(self._new_text(), ended)

    def _new_text(self) -> str:
        first = self._starts[0]
        before = self.tokenizer.decode(self._ids[first : self._decoded])
        return self.tokenizer.decode(self._ids[first:])[len(before) :]

    def _append(self, new: str, ended: str | None) -> None:
        """Appends new text up to a stop string, or up to what may become one."""
        text = self._pending + new
        stops = [text.find(stop) for stop in self.stop if stop in text]
        if stops:
            self.ended = "stop"
            size = min(stops)
        elif ended:
            self.ended = ended
            size = len(text)
        else:
            partial = [
                n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])
            ]
            size = len(text) - max(partial, default=0)
        self.text += text[:size]
        self._pending = text[size:]


@dataclass
class StreamBatch:
    """Texts that are generated together; `steps` yields the next token of each, (B,)."""

    streams: list[TextStream]
    steps: Iterator[torch.Tensor]

    def advance(self) -> None:
        """Adds a token to each text, or ends all if there are no more."""
        tokens = next(self.steps, None)
        if tokens is None:
            for stream in self.streams:
                stream.finish()
            return
        for stream, token in zip(self.streams, tokens.tolist(), strict=True):
            stream.add(token)

    def finish(self) -> list[str]:
        """Generates all texts to their ends and returns them."""
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
    """Starts to generate after each prompt; arguments are those of `generate`.

    Args:
        stop: Strings that end a text.
        generation: generation_config.json of a Hugging Face folder; its `stop` are token ids.
    """
    ends = end_tokens(model, generation)
    streams = [TextStream(model.tokenizer, prompt, stop, ends) for prompt in prompts]
    banned = generation.banned if generation else ()
    return StreamBatch(streams, generate(model.net, prompts, config, ends, seeds, banned))


def end_tokens(model: LanguageModel, generation: FolderGeneration | None = None) -> list[int]:
    """Returns the end tokens of a folder's settings, else the token that ends documents, if any."""
    if generation and generation.stop:
        return [*generation.stop]
    return [] if model.boundary_tokens.eos is None else [model.boundary_tokens.eos]
