"""One interface to every tokenizer: text to ids, ids to a model's inputs, and back."""

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.tokenizers.config import TokenizerConfig, TokenizerName, TruncateName
from datamodules.tokenizers.pretrained import SPECIAL_TOKENS_KEY, parse_tokenizer, read_tokenizer
from datamodules.tokenizers.special_tokens import (
    ALTERNATIVE_NAMES,
    SPECIAL_TOKENS,
    TITLES,
    BoundaryTokens,
    SpecialTokenIds,
    find_special_tokens,
)
from datamodules.tokenizers.training import (
    CHARACTER_SPLIT,
    cached_tokenizer,
    kind_of,
    train_tokenizer,
)
from datamodules.utils.cache import Texts, chunks, content_key
from datamodules.utils.errors import UsageError
from datamodules.utils.progress import progress_bar


class ModelInputs(NamedTuple):
    """Token ids, their segments (0, and 1 in the second text), and whether text was truncated."""

    ids: list[int]
    segments: list[int]
    truncated: bool


class Tokenizer:
    """Splits texts into tokens; special tokens that are typed in a text, such as [MASK], stay text.

    Args:
        text: Content of a `tokenizer.json`; `DataError` if it is not that of a tokenizer.
        truncation: What is kept of a text that is too long: its head, its tail, or half of each.
        origin: Where the content is from, for errors.
    """

    def __init__(
        self, text: str, truncation: TruncateName = "head", origin: str = "the tokenizer"
    ) -> None:
        self._backend, content, named = parse_tokenizer(text, origin)
        self._origin = origin
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # as text
        self.truncation = truncation
        self.kind: TokenizerName | None = kind_of(content)
        self._decoder = decoder_type(content)
        self._maps_characters = (  # each by itself, without normalisation
            content.get("normalizer") is None and content.get("pre_tokenizer") == CHARACTER_SPLIT
        )
        self.vocab: dict[str, int] = self._backend.get_vocab()
        self.vocab_size = max(self.vocab.values()) + 1
        self.special_ids: SpecialTokenIds = find_special_tokens(self.vocab, named)
        # Written only if needed: other programs refuse a file with a key that they do not know.
        guessed = find_special_tokens(self.vocab, {})
        self._named = named if self.special_ids != guessed else {}
        # RoBERTa puts two tokens between two texts: its template adds four tokens to a pair.
        self._separators = 2 if self._backend.num_special_tokens_to_add(True) == 4 else 1

    # Reading, training and saving.

    @classmethod
    def train(cls, texts: Texts, config: TokenizerConfig) -> "Tokenizer":
        """Trains a new one, without the cache; raises as `train_tokenizer`."""
        return cls(train_tokenizer(texts, config), config.truncate)

    @classmethod
    def load_or_train(cls, texts: Texts, config: TokenizerConfig) -> "Tokenizer":
        """From `config.file`, if given; else trained from these texts, or cached before.

        Raises as `read_tokenizer` and `cached_tokenizer`.
        """
        if config.file is not None:
            return cls.from_file(config.file, config.truncate)
        return cls(cached_tokenizer(texts, config), config.truncate)

    @classmethod
    def from_json(cls, text: str, truncation: TruncateName = "head") -> "Tokenizer":
        """From what `to_json` returned, which checkpoints keep."""
        return cls(text, truncation, "the tokenizer in the checkpoint")

    @classmethod
    def from_file(cls, path: str | Path, truncation: TruncateName = "head") -> "Tokenizer":
        """From a `tokenizer.json`, or a folder of a model; raises as `read_tokenizer`."""
        return cls(read_tokenizer(Path(path)), truncation, str(path))

    def to_json(self) -> str:
        """Content of a `tokenizer.json`, the same for the same tokenizer."""
        content = json.loads(self._backend.to_str())
        if self._named:
            content[SPECIAL_TOKENS_KEY] = self._named
        return json.dumps(content, ensure_ascii=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.to_json(), self.truncation)

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides how a text is split: 32 hexadecimal digits."""
        return content_key(self.to_json())

    # Special tokens.

    @cached_property
    def boundary_tokens(self) -> BoundaryTokens:
        """The special tokens that mark documents for a language model."""
        empty = self._backend.encode("")
        mask = empty.special_tokens_mask
        added = [token_id for token_id, special in zip(empty.ids, mask, strict=True) if special]
        return BoundaryTokens.from_ids(self.special_ids, added)

    def special_id(self, role: str) -> int:
        """Id of a special token, such as "mask". Raises `UsageError` if the tokenizer lacks it."""
        token_id = getattr(self.special_ids, role)
        if token_id is None:
            names = " or ".join((SPECIAL_TOKENS[role], *ALTERNATIVE_NAMES[role]))
            raise UsageError(
                f"{self._origin} has no {TITLES[role]} token ({names}): use a tokenizer that does."
            )
        return token_id

    def num_special_tokens(self, pair: bool = False) -> int:
        """Number of special tokens that `build_inputs` puts around a text, or around a pair."""
        return 2 + self._separators if pair else 2

    # Text to ids.

    def encode_chunks(self, texts: Texts, progress: bool = True) -> Iterator[list[list[int]]]:
        """Token ids of many texts, without special tokens, a chunk at a time, on all cores.

        With `progress`, many texts show a progress bar on a terminal. Raises `UsageError` if a text
        has lone surrogates (from bytes that were not UTF-8).
        """
        with progress_bar("tokenising", len(texts) if progress else 0) as advance:
            first = 0
            for chunk in chunks(texts):
                try:
                    encodings = self._backend.encode_batch_fast(chunk, add_special_tokens=False)
                except TypeError as error:
                    row = next(i for i, text in enumerate(chunk) if not _is_utf8(text))
                    raise UsageError(
                        f"texts[{first + row}] is not UTF-8: {ascii(chunk[row])[:80]}."
                    ) from error
                yield [encoding.ids for encoding in encodings]
                first += len(chunk)
                advance(len(chunk))

    def encode_batch(self, texts: Texts) -> list[list[int]]:
        """Token ids of each text, without special tokens; as `encode_chunks`."""
        return list(chain.from_iterable(self.encode_chunks(texts)))

    def encode_concatenated(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of S texts in a row, uint32 (N,), and the number of each text's, int64 (S,).

        Without special tokens. Raises `UsageError` if a text has lone surrogates.
        """
        if self._id_of_character is not None:
            try:
                points = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
            except UnicodeEncodeError as error:
                raise UsageError(
                    f"a text is not UTF-8: {ascii(error.object[error.start : error.end])}."
                ) from error
            return self._id_of_character[points], np.array([len(text) for text in texts], np.int64)
        lists = list(chain.from_iterable(self.encode_chunks(texts, progress=False)))
        sizes = np.array([len(ids) for ids in lists], np.int64)
        return np.fromiter(chain.from_iterable(lists), np.uint32, sizes.sum()), sizes

    @cached_property
    def _id_of_character(self) -> np.ndarray | None:
        """Id of each Unicode code point, if each character is a token: faster than the library."""
        unk = self.special_ids.unk
        if not (self.is_character_level and self._maps_characters) or unk is None:
            return None
        ids = np.full(sys.maxunicode + 1, unk, np.uint32)
        for token, token_id in self.vocab.items():
            if len(token) == 1:
                ids[ord(token)] = token_id
        return ids

    def first_token_bytes(self, text: str) -> int:
        """UTF-8 bytes of a text's first token; tokens of one character share its bytes evenly."""
        spans = self._backend.encode(text, add_special_tokens=False).offsets
        if not spans:
            return 0
        end = spans[0][1]
        return len(text[:end].encode()) // spans.count(spans[0])

    @property
    def is_character_level(self) -> bool:
        """Whether tokens are single characters."""
        return self.kind == "character"

    @property
    def lowercases(self) -> bool:
        """Whether texts are lowercased before they are split into tokens."""
        normalizer = self._backend.normalizer
        return normalizer is not None and "A" not in normalizer.normalize_str("A")

    def first_unknown_character(self, texts: Iterable[str]) -> str | None:
        """The first character of some texts that a character-level vocabulary lacks."""
        known: set[str] = set()
        for text in texts:
            for letter in dict.fromkeys(text):
                if letter not in known and self.special_ids.unk in self.encode_batch([letter])[0]:
                    return letter
                known.add(letter)
        return None

    def unknown_words(self, text: str) -> list[str]:
        """The parts of a text that become [UNK], each once: words, or only their unknown letters.

        An [UNK] that the text itself spells is none of them.
        """
        unk = self.special_ids.unk
        if unk is None:
            return []
        encoding = self._backend.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        found = dict.fromkeys(text[start:end] for token, (start, end) in pairs if token == unk)
        found.pop(self._backend.id_to_token(unk), None)
        return list(found)

    def bpe_merges(self, text: str) -> Iterator[tuple[tuple[str, str] | None, list[str]]]:
        """How byte-level BPE splits a text: it merges pairs of tokens (Sennrich 2016, section 3.2).

        Yields None and the single bytes; then, of the pairs that occur in a word, the one learned
        first, and the tokens after all its occurrences are merged; and so on until no learned pair
        occurs. Raises `UsageError` for a tokenizer of another kind.
        """
        model = json.loads(self._backend.to_str())["model"]
        if self.kind != "bpe" or model["type"] != "BPE" or model.get("ignore_merges"):
            kind = f"is of kind {self.kind}" if self.kind not in (None, "bpe") else "is another"
            raise UsageError(
                f"{self._origin} {kind} and has no byte-level BPE merges: use one of kind bpe."
            )
        ranks = {(first, second): rank for rank, (first, second) in enumerate(model["merges"])}
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        split = self._backend.pre_tokenizer.pre_tokenize_str(text)
        words = [list(word) for word, _ in split]
        yield None, list(chain(*words))
        while present := {pair for word in words for pair in pairwise(word)} & ranks.keys():
            first, second = min(present, key=ranks.__getitem__)
            words = [_merge(word, first, second) for word in words]
            yield (first, second), list(chain(*words))

    # Ids to a model's inputs.

    def build_inputs(
        self, ids: Sequence[int], max_length: int, pair: Sequence[int] | None = None
    ) -> ModelInputs:
        """[CLS] a [SEP], or for a pair [CLS] a [SEP] b [SEP], truncated to `max_length` tokens.

        Of a pair that is too long, the longer text is truncated first (Devlin 2019). Raises
        `UsageError` if there is no room for text, or the tokenizer lacks one of the special tokens.
        """
        cls = self.special_id("cls")
        sep = self.special_id("sep")
        room = max_length - self.num_special_tokens(pair is not None)
        if room < (1 if pair is None else 2):
            raise UsageError(
                f"--data.max_length is {max_length}, which leaves no room for text between special "
                "tokens."
            )
        if pair is None:
            first = self.truncate(ids, room)
            return ModelInputs([cls, *first, sep], [0] * (len(first) + 2), len(first) < len(ids))
        first = self.truncate(ids, max(room - len(pair), (room + 1) // 2))
        second = self.truncate(pair, room - len(first))
        end = [*[sep] * (self._separators - 1), *second, sep]
        segment = 2 - self._separators  # RoBERTa has no second segment
        segments = [0] * (len(first) + 2) + [segment] * len(end)
        truncated = len(first) < len(ids) or len(second) < len(pair)
        return ModelInputs([cls, *first, sep, *end], segments, truncated)

    def truncate(self, ids: Sequence[int], length: int) -> list[int]:
        """At most `length` of these ids: the part that `truncation` names."""
        numbers: list[int] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if len(numbers) <= length:
            return numbers
        head = {"head": length, "tail": 0, "both": (length + 1) // 2}[self.truncation]
        return numbers[:head] + numbers[len(numbers) - (length - head) :]

    # Ids to text.

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens except for [UNK]."""
        special = set(self.special_ids.known().values()) - {self.special_ids.unk}
        kept = [int(i) for i in ids if int(i) not in special]
        return self._backend.decode(kept, skip_special_tokens=False)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them, such as ##ing; empty for unknown ids."""
        return [self._backend.id_to_token(int(i)) or "" for i in ids]

    @cached_property
    def starts_word(self) -> list[bool]:
        """Whether each token of the vocabulary begins a word, for whole-word masking.

        WordPiece: all but ##pieces. Byte-level BPE: those that begin with a space or another ASCII
        character that is not a letter or digit. Characters: all but letters, digits and accents, so
        that a word includes the space before it. All whole words and special tokens.
        """
        starts_word = WORD_STARTS.get(self._decoder, lambda token: True)
        special = set(self.special_ids.known().values())
        starts = [True] * self.vocab_size
        for token, token_id in self.vocab.items():
            starts[token_id] = token_id in special or starts_word(token)
        return starts


def decoder_type(content: dict[str, Any]) -> str | None:
    """The type of a tokenizer's decoder, or of its model if it has none.

    A sequence of decoders that puts spaces for U+2581, as Llama's, is a Metaspace.
    """
    decoder = content.get("decoder") or content["model"]
    replaced = [one.get("pattern") for one in decoder.get("decoders", ())]
    return "Metaspace" if {"String": "\u2581"} in replaced else decoder.get("type")


def _merge(tokens: list[str], first: str, second: str) -> list[str]:
    """Joins each `first` to a `second` that follows it, from left to right."""
    merged: list[str] = []
    for token in tokens:
        if token == second and merged and merged[-1] == first:
            merged[-1] = first + second
        else:
            merged.append(token)
    return merged


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _byte_level_starts_word(token: str) -> bool:
    first = token[:1]  # the bytes 0 to 32 are spelled U+0100 to U+0120
    return "\u0100" <= first <= "\u0120" or (first.isascii() and not first.isalnum())


def _character_starts_word(token: str) -> bool:
    return not token.isalnum() and not unicodedata.combining(token[:1] or " ")


# By the type of a tokenizer's decoder, or of its model if it has none.
WORD_STARTS: dict[str | None, Callable[[str], bool]] = {
    "WordPiece": lambda token: not token.startswith("##"),
    "ByteLevel": _byte_level_starts_word,
    "Metaspace": lambda token: token.startswith("\u2581"),
    "Fuse": _character_starts_word,
}
