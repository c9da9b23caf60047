"""One interface to every tokenizer, whoever trained it: text to token numbers, numbers to a model's input, and back."""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.tokenizers.control import CONTROL, ControlIds, Frame, find_control
from datamodules.tokenizers.foreign import parsed, read_tokenizer
from datamodules.tokenizers.kinds import (
    CHARACTERS,
    KIND_OF,
    WORDS,
    TokenizerConfig,
    TokenizerName,
    TruncateName,
)
from datamodules.tokenizers.training import learn, learned
from datamodules.utils.cache import CHUNK, Texts, chunks, content_key
from datamodules.utils.errors import UsageError
from datamodules.utils.progress import progress_bar


class Built(NamedTuple):
    """A model's input: token numbers, their segments (0, and 1 in the second text), and whether text was cut off."""

    ids: list[int]
    segments: list[int]
    cut: bool


class Tokenizer:
    """Cuts texts into tokens of a vocabulary. What a text says is text: a typed [MASK] is no control token.

    Args:
        text: Content of a `tokenizer.json`.
        truncate: What remains of a text that is too long: its head, its tail, or half of each.
        origin: Where the content is from, for errors.

    Raises:
        DataError: The content is not a tokenizer.
    """

    def __init__(
        self, text: str, truncate: TruncateName = "head", origin: str = "the tokenizer"
    ) -> None:
        self._backend, content, named = parsed(text, origin)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # as text
        self.truncate = truncate
        self._style = (content.get("decoder") or content["model"]).get("type")
        self._plain = (
            content.get("normalizer") is None and content.get("pre_tokenizer") == CHARACTERS
        )
        words = (
            WORDS.get((content.get("pre_tokenizer") or {}).get("type"))
            if self._style == "WordLevel"
            else None
        )
        self.kind: TokenizerName | None = KIND_OF.get(self._style, words)
        self.vocabulary: dict[str, int] = self._backend.get_vocab()
        self.size = max(self.vocabulary.values()) + 1
        self.ids: ControlIds = find_control(self.vocabulary, named)
        # Kept where the names alone do not tell: other programs refuse a file with a key that they do not know.
        self._named = named if self.ids != find_control(self.vocabulary, {}) else {}
        # RoBERTa parts two texts by two tokens; its file says so by the number of control tokens around a pair.
        self._separators = 2 if self._backend.num_special_tokens_to_add(True) == 4 else 1

    # Where tokenizers come from, and where they go.

    @classmethod
    def train(cls, texts: Texts, config: TokenizerConfig) -> "Tokenizer":
        """Trains a new one; the control tokens have the numbers 0 to 6. See `for_texts`.

        Raises:
            UsageError: The texts are empty, or hold more characters than the vocabulary has room for.
        """
        return cls(learn(texts, config), config.truncate)

    @classmethod
    def for_texts(cls, texts: Texts, config: TokenizerConfig) -> "Tokenizer":
        """The one of `config.file`, where it is given; else one trained from these texts, once: it is cached.

        Raises:
            UsageError: As in `train` and `from_file`. DataError: as in `from_file`, or the cache cannot be written.
        """
        if config.file is not None:
            return cls.from_file(config.file, config.truncate)
        return cls(learned(texts, config), config.truncate)

    @classmethod
    def from_json(cls, text: str, truncate: TruncateName = "head") -> "Tokenizer":
        """From what `to_json` returned, which checkpoints keep.

        Raises:
            DataError: It is not a tokenizer.
        """
        return cls(text, truncate, "the tokenizer in the checkpoint")

    @classmethod
    def from_file(cls, path: str | Path, truncate: TruncateName = "head") -> "Tokenizer":
        """From a `tokenizer.json`, or a folder of a Hugging Face model.

        Raises:
            UsageError: It does not exist, or the folder holds no tokenizer. DataError: it cannot be read.
        """
        return cls(read_tokenizer(Path(path)), truncate, str(path))

    def to_json(self) -> str:
        """Content of a `tokenizer.json`, the same for the same tokenizer."""
        content = {
            **json.loads(self._backend.to_str()),
            **({"control": self._named} if self._named else {}),
        }
        return json.dumps(content, ensure_ascii=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.to_json(), self.truncate)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides how a text is cut: 32 hexadecimal digits."""
        return content_key(self.to_json())

    @cached_property
    def frame(self) -> Frame:
        """Control tokens that mark documents for a language model."""
        made = self._backend.encode("")
        return Frame.of(
            self.ids,
            [i for i, special in zip(made.ids, made.special_tokens_mask, strict=True) if special],
        )

    # Text to numbers.

    def encode_chunks(self, texts: Texts, progress: bool = True) -> Iterator[list[list[int]]]:
        """Token numbers of many texts, without control tokens, `datamodules.utils.cache.CHUNK` texts at a time.

        Args:
            texts: The texts; encoded in all cores.
            progress: Show a bar on a terminal where there are many.

        Raises:
            UsageError: A text holds what is no character (from bytes that were not UTF-8).
        """
        with progress_bar("tokenising", len(texts) if progress else 0) as advance:
            for number, part in enumerate(chunks(texts)):
                try:
                    found = self._backend.encode_batch_fast(part, add_special_tokens=False)
                except TypeError as error:
                    row = number * CHUNK + next(
                        (i for i, text in enumerate(part) if not _is_text(text)), 0
                    )
                    raise UsageError(
                        f"text {row + 1} is not UTF-8: {ascii(part[row % CHUNK])[:80]}."
                    ) from error
                yield [encoding.ids for encoding in found]
                advance(len(part))

    def encode_joined(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token numbers of a few texts, without control tokens, one after the other.

        Returns:
            (N,) uint32: the tokens. (S,) int64: how many of them are of each text.

        Raises:
            UsageError: A text holds what is no character.
        """
        if self._numbers is not None:
            try:
                points = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"a text is not UTF-8: {ascii(error.object[error.start : error.end])}."
                ) from error
            return self._numbers[points], np.array([len(text) for text in texts], np.int64)
        lists = [ids for part in self.encode_chunks(texts, progress=False) for ids in part]
        sizes = np.array([len(ids) for ids in lists], np.int64)
        return np.fromiter(chain.from_iterable(lists), np.uint32, sizes.sum()), sizes

    def first_bytes(self, text: str) -> int:
        """UTF-8 bytes of a text that its first token stands for; of a character in several tokens an even share."""
        spans = self._backend.encode(text, add_special_tokens=False).offsets
        return len(text[: spans[0][1]].encode()) // spans.count(spans[0]) if spans else 0

    @cached_property
    def _numbers(self) -> np.ndarray | None:
        """Number of each Unicode character, where tokens are single characters and nothing else: a quick way."""
        if not self.characters or not self._plain or self.ids.unk is None:
            return None
        numbers = np.full(sys.maxunicode + 1, self.ids.unk, np.uint32)
        for token, number in self.vocabulary.items():
            if len(token) == 1:
                numbers[ord(token)] = number
        return numbers

    def first_unknown(self, texts: Iterable[str]) -> str | None:
        """The first character of some texts that the vocabulary lacks, where tokens are single characters."""
        known: dict[str, bool] = {}
        for text in texts:
            for letter in dict.fromkeys(text):
                if letter not in known:
                    known[letter] = self.ids.unk not in self.encode_batch([letter])[0]
                if not known[letter]:
                    return letter
        return None

    @property
    def characters(self) -> bool:
        """Whether tokens are single characters."""
        return self._style == "Fuse"

    def encode_batch(self, texts: Texts) -> list[list[int]]:
        """Token numbers of each text, without control tokens; as `encode_chunks`."""
        return [ids for part in self.encode_chunks(texts) for ids in part]

    def build(
        self, ids: Sequence[int], max_length: int, pair: Sequence[int] | None = None
    ) -> Built:
        """A model's input: [CLS] a [SEP], or of a pair [CLS] a [SEP] b [SEP], cut down to `max_length`.

        Of a pair that is too long the longer text gives way first (Devlin 2019).

        Raises:
            UsageError: There is no room for text, or the tokenizer lacks one of the control tokens.
        """
        cls, sep = self.control("cls"), self.control("sep")
        room = max_length - self.added(pair is not None)
        if room < (1 if pair is None else 2):
            raise UsageError(
                f"max_length is {max_length}, which leaves no room for text between control tokens."
            )
        first = self.cut(ids, room if pair is None else max(room - len(pair), (room + 1) // 2))
        built, cut = [cls, *first, sep], len(first) < len(ids)
        segments = [0] * len(built)
        if pair is not None:
            second = self.cut(pair, room - len(first))
            after = [*[sep] * (self._separators - 1), *second, sep]
            built, cut = built + after, cut or len(second) < len(pair)
            segments += [2 - self._separators] * len(after)  # RoBERTa knows one kind of segment
        return Built(built, segments, cut)

    def added(self, pair: bool = False) -> int:
        """Number of control tokens that `build` puts around a text, or around two."""
        return 3 + self._separators - 1 if pair else 2

    def control(self, role: str) -> int:
        """Number of a control token, such as "mask".

        Raises:
            UsageError: The tokenizer lacks it.
        """
        number = getattr(self.ids, role)
        if number is None:
            raise UsageError(
                f"the tokenizer has no {CONTROL[role]} token, which is needed here: use another one."
            )
        return number

    def cut(self, ids: Sequence[int], room: int) -> list[int]:
        """As many of these tokens as there is room for: the part that `truncate` names."""
        numbers: list[int] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if len(numbers) <= room:
            return numbers
        head = {"head": room, "tail": 0, "both": (room + 1) // 2}[self.truncate]
        return numbers[:head] + numbers[len(numbers) - (room - head) :]

    # Numbers to text.

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token numbers, without control tokens except for [UNK]."""
        hidden = set(self.ids.known().values()) - {self.ids.unk}
        return self._backend.decode(
            [int(i) for i in ids if int(i) not in hidden], skip_special_tokens=False
        )

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them, such as ##ing; empty for a number that it lacks."""
        return [self._backend.id_to_token(int(i)) or "" for i in ids]

    @cached_property
    def starts_word(self) -> list[bool]:
        """Of each token of the vocabulary whether it begins a word: what whole-word masking goes by.

        WordPiece: all but ##pieces. Byte-level pieces: those that begin with a space or another ASCII character that
        is no letter or digit. Characters: all but letters, digits and accents, so that a word has the space
        before it, too. Whole words and control tokens always do.
        """
        rule = STARTS.get(self._style, lambda token: True)
        control = set(self.ids.known().values())
        starts = [True] * self.size
        for token, number in self.vocabulary.items():
            starts[number] = number in control or rule(token)
        return starts


def _is_text(text: Any) -> bool:
    try:
        return text.encode() is not None
    except (AttributeError, UnicodeEncodeError):
        return False


def _byte_level_start(token: str) -> bool:
    first = token[:1]  # the bytes 0 to 32 are spelled U+0100 to U+0120
    return "\u0100" <= first <= "\u0120" or (first.isascii() and not first.isalnum())


def _character_start(token: str) -> bool:
    return not token.isalnum() and not unicodedata.combining(token[:1] or " ")


# By the decoder that a tokenizer.json names, or else its model.
STARTS: dict[str | None, Callable[[str], bool]] = {
    "WordPiece": lambda token: not token.startswith("##"),
    "ByteLevel": _byte_level_start,
    "Metaspace": lambda token: token.startswith("\u2581"),
    "Fuse": _character_start,
}
