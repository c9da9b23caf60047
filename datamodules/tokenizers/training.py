"""Training of a tokenizer, once for the same texts and options: it is kept in the cache folder."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from datamodules.tokenizers.control import CONTROL
from datamodules.tokenizers.kinds import KINDS, TokenizerConfig
from datamodules.utils.cache import (
    Texts,
    cache_folder,
    chunks,
    content_key,
    text_digest,
    unwritable,
)
from datamodules.utils.errors import UsageError
from datamodules.utils.files import replacing
from datamodules.utils.progress import progress_bar


def learn(texts: Texts, config: TokenizerConfig) -> str:
    """Trains a tokenizer; returns the content of its `tokenizer.json`.

    Raises:
        UsageError: The texts are empty, or hold more characters than the vocabulary has room for.
    """
    from tokenizers import Tokenizer, processors

    assert config.kind is not None  # beside a file only
    model, normalizer, pre_tokenizer, decoder, trainer = KINDS[config.kind](config, texts)
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pre_tokenizer, decoder
    with progress_bar("training the tokenizer", len(texts)) as advance:
        backend.train_from_iterator(_fed(texts, advance), trainer)
    size = backend.get_vocab_size()
    if size > config.vocabulary:  # byte-level pieces and WordPiece begin with all single characters
        raise UsageError(
            f"the tokenizer's vocabulary is {config.vocabulary}, but its control tokens and single characters "
            f"alone are {size}: make it larger."
        )
    if size == len(CONTROL):
        raise UsageError(
            f"nothing in the texts occurs {config.min_frequency} times: give more text, or lower the "
            "tokenizer's min_frequency."
        )
    ends = [(name, list(CONTROL.values()).index(name)) for name in (CONTROL["cls"], CONTROL["sep"])]
    # For other programs that read the file; `Tokenizer.build` does it here.
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends
    )
    content = json.loads(backend.to_str())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if token["content"] in CONTROL.values()
    ]
    return json.dumps(content, ensure_ascii=False)


def learned(texts: Texts, config: TokenizerConfig) -> str:
    """As `learn`, from the cache where the same texts were learned from with the same options and library.

    Raises:
        UsageError: As in `learn`.
        DataError: The cache cannot be written.
    """
    from tokenizers import __version__

    options = replace(config, file=None, truncate="head")  # these change nothing that is learned
    key = content_key(repr(options), __version__, text_digest(texts))
    path = cache_folder("tokenizers") / f"{key}.json"
    text = _stored(path)
    if text is None:
        text = learn(texts, config)
        try:
            with replacing(path) as partial:
                partial.write_text(f"{content_key(text)}\n{text}", encoding="utf-8")
        except OSError as error:
            raise unwritable(path, error) from error
    return text


def _stored(path: Path) -> str | None:
    """What the cache holds under this name; None where there is nothing, or not what was written."""
    try:
        digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if digest == content_key(text) else None


def _fed(texts: Texts, advance: Callable[[int], None]) -> Iterator[list[str]]:
    """The texts for a trainer.

    Raises:
        UsageError: All of them are empty.
    """
    empty = True
    for part in chunks(texts):
        empty = empty and not any(text.strip() for text in part)
        yield part
        advance(len(part))
    if empty:
        raise UsageError("there is no text to train a tokenizer from: all texts are empty.")
