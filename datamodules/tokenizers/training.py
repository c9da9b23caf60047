"""Training a tokenizer: the kinds, and the cache of what was trained."""

import json
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.tokenizers.config import TokenizerConfig, TokenizerName
from datamodules.tokenizers.special_tokens import SPECIAL_TOKENS
from datamodules.utils.cache import (
    Texts,
    cache_folder,
    chunks,
    content_key,
    text_digest,
    write_cached,
)
from datamodules.utils.errors import UsageError
from datamodules.utils.progress import progress_bar

MAX_ALPHABET = 1000  # characters that WordPiece learns, the most frequent; others are [UNK]
CHARACTER_SPLIT = {  # as a `tokenizer.json` spells the split into single characters
    "type": "Split",
    "pattern": {"Regex": r"[\s\S]"},
    "behavior": "Isolated",
    "invert": False,
}


class Pipeline(NamedTuple):
    """The parts of a tokenizer, all from the package `tokenizers`."""

    model: Any
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any  # None: tokens are joined by spaces
    trainer: Any


def whitespace(config: TokenizerConfig, texts: Texts) -> Pipeline:
    """Words separated by spaces, with their punctuation."""
    from tokenizers import Regex, pre_tokenizers

    # Only here a word may look like a special token: it is split after its bracket.
    names = "|".join(name.strip("[]") for name in SPECIAL_TOKENS.values())
    brackets = pre_tokenizers.Split(Regex(rf"\[(?=({names})\])"), "isolated")
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), brackets])
    return _word_level(config, split)


def word(config: TokenizerConfig, texts: Texts) -> Pipeline:
    """Words, and runs of punctuation."""
    from tokenizers import pre_tokenizers

    return _word_level(config, pre_tokenizers.Whitespace())


def character(config: TokenizerConfig, texts: Texts) -> Pipeline:
    """Single characters, spaces among them: decoding is lossless if all are known."""
    from tokenizers import Regex, decoders, pre_tokenizers

    split = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return _word_level(config, split)._replace(decoder=decoders.Fuse())


def bpe(config: TokenizerConfig, texts: Texts) -> Pipeline:
    """Byte-level BPE (Sennrich 2016, Radford 2019): decoding is lossless for any text."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(initial_alphabet=split.alphabet(), **_trainer_options(config))
    return Pipeline(models.BPE(), _lowercase(config), split, decoders.ByteLevel(), trainer)


def wordpiece(config: TokenizerConfig, texts: Texts) -> Pipeline:
    """BERT's: words and punctuation; rare words in pieces, all but the first after ##."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=bool(config.lowercase))
    alphabet = _alphabet(texts, normalizer)
    options = _trainer_options(config)
    # The trainer numbers single pieces in an order that differs from run to run, unless they are
    # given.
    options["special_tokens"] += [
        f"##{letter}"
        for letter in alphabet
        if unicodedata.category(letter)[0] in "LMNS" and letter not in string.punctuation
    ]
    trainer = trainers.WordPieceTrainer(
        initial_alphabet=alphabet, limit_alphabet=len(alphabet), **options
    )
    model = models.WordPiece(unk_token=SPECIAL_TOKENS["unk"])
    split = pre_tokenizers.BertPreTokenizer()
    return Pipeline(model, normalizer, split, decoders.WordPiece(), trainer)


PIPELINES: dict[TokenizerName, Callable[[TokenizerConfig, Texts], Pipeline]] = {
    "whitespace": whitespace,
    "word": word,
    "character": character,
    "bpe": bpe,
    "wordpiece": wordpiece,
}


def kind_of(content: dict[str, Any]) -> TokenizerName | None:
    """The kind of a `tokenizer.json`; None: none that is trained here."""
    kinds: dict[Any, TokenizerName] = {
        "WordPiece": "wordpiece",
        "ByteLevel": "bpe",
        "Fuse": "character",
    }
    part = (content.get("decoder") or content["model"]).get("type")
    if part == "WordLevel":
        part = (content.get("pre_tokenizer") or {}).get("type")
        kinds = {"Whitespace": "word", "Sequence": "whitespace"}
    return kinds.get(part)


def train_tokenizer(texts: Texts, config: TokenizerConfig) -> str:
    """Trains a tokenizer; returns the content of its `tokenizer.json`.

    Raises:
        UsageError: The texts are empty, or hold more characters than the vocabulary has room for.
    """
    from tokenizers import Tokenizer, processors

    assert config.kind is not None  # only with a file
    pipeline = PIPELINES[config.kind](config, texts)
    backend = Tokenizer(pipeline.model)
    backend.normalizer = pipeline.normalizer
    backend.pre_tokenizer = pipeline.pre_tokenizer
    backend.decoder = pipeline.decoder
    with progress_bar("training the tokenizer", len(texts)) as advance:
        backend.train_from_iterator(_batches(texts, advance), pipeline.trainer)
    size = backend.get_vocab_size()
    if size > config.vocabulary:  # BPE and WordPiece begin with all single characters
        raise UsageError(
            f"--data.tokenizer.vocabulary is {config.vocabulary}, but its special tokens and "
            f"single characters alone are {size}: make it larger."
        )
    if size == len(SPECIAL_TOKENS):
        raise UsageError(
            f"nothing in the texts occurs {config.min_frequency} times: give more text, or lower "
            "--data.tokenizer.min_frequency."
        )
    # For other programs that read the file; here `Tokenizer.build_inputs` does it.
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]",
        "[CLS] $A [SEP] $B:1 [SEP]:1",
        [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in SPECIAL_TOKENS.values()
    ]
    return json.dumps(content, ensure_ascii=False)


def cached_tokenizer(texts: Texts, config: TokenizerConfig) -> str:
    """As `train_tokenizer`, from the cache if there is one of the same texts, options and library.

    Raises `UsageError` as in `train_tokenizer`; `DataError` if the cache cannot be written.
    """
    from tokenizers import __version__

    options = replace(config, file=None, truncate="head")  # neither changes what is learned
    key = content_key(repr(options), __version__, text_digest(texts))
    path = cache_folder("tokenizers") / f"{key}.json"
    text = _read_cached(path)
    if text is None:
        text = train_tokenizer(texts, config)
        write_cached(path, f"{content_key(text)}\n{text}")
    return text


def _read_cached(path: Path) -> str | None:
    """The tokenizer in a file of the cache; None if it is missing or damaged."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == content_key(text) else None


def _batches(texts: Texts, advance: Callable[[int], None]) -> Iterator[list[str]]:
    """The texts for a trainer. Raises `UsageError` if all of them are empty."""
    empty = True
    for batch in chunks(texts):
        empty = empty and not any(text.strip() for text in batch)
        yield batch
        advance(len(batch))
    if empty:
        raise UsageError("there is no text to train a tokenizer from: all texts are empty.")


def _alphabet(texts: Texts, normalizer: Any) -> list[str]:
    """The `MAX_ALPHABET` characters that occur in most texts, after normalisation; sorted."""
    raw: Counter[str] = Counter()
    for batch in chunks(texts):
        for text in batch:
            raw.update(set(text))
    counts: Counter[str] = Counter()
    for letter, count in raw.items():
        normalised = normalizer.normalize_str(letter).replace(" ", "")
        counts.update(dict.fromkeys(normalised, count))
    most_frequent = sorted(counts, key=lambda letter: (-counts[letter], letter))[:MAX_ALPHABET]
    return sorted(most_frequent)


def _word_level(config: TokenizerConfig, pre_tokenizer: Any) -> Pipeline:
    from tokenizers import models, trainers

    model = models.WordLevel(unk_token=SPECIAL_TOKENS["unk"])
    trainer = trainers.WordLevelTrainer(**_trainer_options(config))
    return Pipeline(model, _lowercase(config), pre_tokenizer, None, trainer)


def _lowercase(config: TokenizerConfig) -> Any:
    from tokenizers import normalizers

    return normalizers.Lowercase() if config.lowercase else None


def _trainer_options(config: TokenizerConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocabulary,
        "min_frequency": config.min_frequency,
        "special_tokens": list(SPECIAL_TOKENS.values()),
        "show_progress": False,
    }
