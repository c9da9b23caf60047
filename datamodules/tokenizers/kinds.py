"""The kinds of tokenizers that can be trained here: how each cuts a text, and which model it learns."""

import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from datamodules.tokenizers.control import CONTROL
from datamodules.utils.cache import Texts, chunks
from datamodules.utils.errors import UsageError

TokenizerName = Literal["whitespace", "word", "character", "bpe", "wordpiece"]
TruncateName = Literal["head", "tail", "both"]
ALPHABET = 1000  # characters that WordPiece knows at most, the most frequent ones; others are [UNK]

# How `tokenizer.json` spells the cut into single characters.
CHARACTERS = {
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}
# The kinds by the decoder in `tokenizer.json`, and those of whole words, which have none, by their cut.
KIND_OF: dict[str | None, TokenizerName] = {
    "WordPiece": "wordpiece",
    "ByteLevel": "bpe",
    "Fuse": "character",
}
WORDS: dict[str | None, TokenizerName] = {"Whitespace": "word", "Sequence": "whitespace"}


@dataclass(frozen=True)
class TokenizerConfig:
    """A tokenizer to train, or a file of one.

    Args:
        kind: whitespace: words as spaces part them; word: words and runs of punctuation; character: single
            characters; bpe: byte-level pieces, for which nothing is unknown (Radford 2019); wordpiece: pieces of
            words (Schuster 2012, Devlin 2019). Beside a file this and the next three are what that file says, null
            where it does not.
        vocabulary: Number of tokens at most, the 7 control tokens among them.
        min_frequency: Words, pieces or characters that occur less often are not learned.
        lowercase: Whether A and a are the same; wordpiece then drops accents, too.
        file: A `tokenizer.json`, or a folder in Hugging Face's layout, to use instead of training one.
        truncate: What remains of a text that is too long: its head, its tail, or half of each.

    Raises:
        UsageError: An option is out of range.
    """

    kind: TokenizerName | None = "wordpiece"
    vocabulary: int = 16_000
    min_frequency: int | None = 2
    lowercase: bool | None = True
    file: str | None = None
    truncate: TruncateName = "head"

    def __post_init__(self) -> None:
        if self.file is None and None in (self.kind, self.min_frequency, self.lowercase):
            raise UsageError(
                "the tokenizer's kind, min_frequency or lowercase is null: say which, or give a file of one."
            )
        if self.kind is not None and self.kind not in KINDS:
            raise UsageError(
                f"the tokenizer's kind is {self.kind}, but must be one of {', '.join(KINDS)}."
            )
        if self.vocabulary <= len(CONTROL):
            raise UsageError(
                f"the tokenizer's vocabulary is {self.vocabulary}, but must be more than its {len(CONTROL)} "
                "control tokens."
            )
        if self.min_frequency is not None and self.min_frequency < 1:
            raise UsageError(
                f"the tokenizer's min_frequency is {self.min_frequency}, but must be at least 1."
            )


class Parts(NamedTuple):
    """What a tokenizer is made of, all from the package `tokenizers`."""

    model: Any
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any  # None: tokens are joined by spaces
    trainer: Any


def whitespace(config: TokenizerConfig, texts: Texts) -> Parts:
    """Words as spaces part them, with their punctuation."""
    from tokenizers import Regex, models, pre_tokenizers, trainers

    # Only here a word may look like a control token: its bracket becomes a word of its own.
    names = "|".join(name.strip("[]") for name in CONTROL.values())
    brackets = pre_tokenizers.Split(Regex(rf"\[(?=({names})\])"), "isolated")
    cut = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), brackets])
    model = models.WordLevel(unk_token=CONTROL["unk"])
    return Parts(model, _lowercase(config), cut, None, trainers.WordLevelTrainer(**_limits(config)))


def word(config: TokenizerConfig, texts: Texts) -> Parts:
    """Words, and runs of punctuation."""
    from tokenizers import models, pre_tokenizers, trainers

    model = models.WordLevel(unk_token=CONTROL["unk"])
    trainer = trainers.WordLevelTrainer(**_limits(config))
    return Parts(model, _lowercase(config), pre_tokenizers.Whitespace(), None, trainer)


def character(config: TokenizerConfig, texts: Texts) -> Parts:
    """Single characters, spaces among them: decoding gives back the text where it knows all of them."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

    model = models.WordLevel(unk_token=CONTROL["unk"])
    cut = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return Parts(
        model,
        _lowercase(config),
        cut,
        decoders.Fuse(),
        trainers.WordLevelTrainer(**_limits(config)),
    )


def bpe(config: TokenizerConfig, texts: Texts) -> Parts:
    """Byte-level byte-pair encoding (Sennrich 2016, Radford 2019): decoding gives back any text."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(initial_alphabet=cut.alphabet(), **_limits(config))
    return Parts(models.BPE(), _lowercase(config), cut, decoders.ByteLevel(), trainer)


def wordpiece(config: TokenizerConfig, texts: Texts) -> Parts:
    """BERT's: words and punctuation, rare words in pieces, of which all but the first begin with ##."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    cleaned = normalizers.BertNormalizer(lowercase=bool(config.lowercase))
    letters = _letters(texts, cleaned)
    limits = _limits(config)
    # The trainer numbers single pieces in an order that differs from run to run, unless they are given.
    limits["special_tokens"] += [
        f"##{letter}" for letter in letters if unicodedata.category(letter)[0] in "LMN"
    ]
    trainer = trainers.WordPieceTrainer(
        initial_alphabet=letters, limit_alphabet=len(letters), **limits
    )
    model = models.WordPiece(unk_token=CONTROL["unk"])
    return Parts(model, cleaned, pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(), trainer)


KINDS: dict[str, Callable[[TokenizerConfig, Texts], Parts]] = {
    "whitespace": whitespace,
    "word": word,
    "character": character,
    "bpe": bpe,
    "wordpiece": wordpiece,
}


def _letters(texts: Texts, normalizer: Any) -> list[str]:
    """The `ALPHABET` characters that occur in most texts, once these are normalised; in order."""
    found: Counter[str] = Counter()
    for part in chunks(texts):
        for text in part:
            found.update(set(text))
    normal: Counter[str] = Counter()
    for letter, count in found.items():
        normal.update(dict.fromkeys(normalizer.normalize_str(letter).replace(" ", ""), count))
    return sorted(sorted(normal, key=lambda letter: (-normal[letter], letter))[:ALPHABET])


def _lowercase(config: TokenizerConfig) -> Any:
    from tokenizers import normalizers

    return normalizers.Lowercase() if config.lowercase else None


def _limits(config: TokenizerConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary,
        "min_frequency": config.min_frequency,
        "special_tokens": list(CONTROL.values()),
        "show_progress": False,
    }
