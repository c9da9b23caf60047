"""Token ids of many texts, computed once and cached in a file that their hash names."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain

import numpy as np

from datamodules.sources.documents import Documents, Piece
from datamodules.tokenizers import BoundaryTokens, Tokenizer
from datamodules.tokens.token_file import TokenChunk, TokenFile, write_tokens
from datamodules.utils.cache import Texts, cache_folder, content_key, text_digest, unwritable
from datamodules.utils.cores import usable_cores
from datamodules.utils.errors import DataError
from datamodules.utils.progress import progress_bar

VERSION = "4"  # of the content of the files; another number makes old ones unused
CHARACTERS_PER_CORE = 2**18  # of a stream, tokenised at once


def tokenised(texts: Texts, tokenizer: Tokenizer) -> TokenFile:
    """The tokens of all texts, in a file of the cache; bytes of text are not counted.

    Raises `UsageError` if a text is not UTF-8, `DataError` if the cache cannot be written.
    """

    def token_chunks() -> Iterator[TokenChunk]:
        for lists in tokenizer.encode_chunks(texts):
            sizes = np.array([len(ids) for ids in lists], np.int64)
            tokens = np.fromiter(chain.from_iterable(lists), np.uint32, sizes.sum())
            zeros = np.zeros_like(sizes)
            yield TokenChunk(tokens, sizes, zeros, np.ones(len(sizes), bool), zeros)

    return _cached(text_digest(texts), token_chunks(), tokenizer)


def tokenised_documents(
    documents: Documents, tokenizer: Tokenizer, boundary: BoundaryTokens, title: str = "text"
) -> TokenFile:
    """The tokens of a stream of documents, in a file of the cache.

    Args:
        documents: The text. The end of a document that is cut off is not marked.
        tokenizer: Splits the text.
        boundary: Special tokens around each document.
        title: Name of the text on a progress bar.

    Raises:
        DataError: The cache cannot be written, or the text cannot be read or has changed.
    """

    def token_chunks() -> Iterator[TokenChunk]:
        with progress_bar(
            f"tokenising {title}, characters", documents.characters, least=20_000_000
        ) as advance:
            yield from _with_boundaries(documents, tokenizer, boundary, advance)

    key = content_key(documents.digest, repr(boundary))
    return _cached(key, token_chunks(), tokenizer)


def _cached(content: str, token_chunks: Iterable[TokenChunk], tokenizer: Tokenizer) -> TokenFile:
    """The file of these tokens in the cache; written if it is missing or damaged."""
    from tokenizers import __version__

    key = content_key(VERSION, __version__, tokenizer.digest, content)
    path = cache_folder("tokens") / f"{key}.tokens"
    if path.is_file():
        with suppress(DataError):  # damaged: written again
            return TokenFile(path)
    ids = tokenizer.special_ids
    unknown = None if ids.unk in (ids.bos, ids.eos) else ids.unk  # GPT-2 has one token for all
    try:
        write_tokens(path, token_chunks, tokenizer.vocab_size, unknown)
    except OSError as error:
        raise unwritable(path, error) from error
    return TokenFile(path)


def _with_boundaries(
    documents: Documents,
    tokenizer: Tokenizer,
    boundary: BoundaryTokens,
    advance: Callable[[int], None],
) -> Iterator[TokenChunk]:
    """The tokens of a few pieces at a time, with special tokens around each document."""
    if boundary.prefix is not None:
        zero = np.zeros(1, np.int64)
        yield TokenChunk(np.array([boundary.prefix]), zero + 1, zero, zero > 0, zero)
    characters = 0
    for pieces in _batches(documents):
        texts = [piece.text for piece in pieces]
        opens = np.array([piece.opens for piece in pieces])
        closes = np.array([piece.closes for piece in pieces])
        tokens, sizes = tokenizer.encode_concatenated(texts)
        # Nothing predicts the first token of a document without a special token before it.
        bare = opens & (boundary.first is None)
        first = [
            tokenizer.first_token_bytes(text) if is_bare else 0
            for text, is_bare in zip(texts, bare, strict=True)
        ]
        ends = sizes.cumsum()
        starts = ends - sizes
        positions = []
        inserted = []
        # [EOS] comes before [BOS] at the same position: np.insert keeps the order of equal ones.
        for token, wanted, at in ((boundary.eos, closes, ends), (boundary.bos, opens, starts)):
            if token is not None:
                positions.append(at[wanted])
                inserted.append(np.full(int(wanted.sum()), token))
                sizes = sizes + wanted
        if positions:
            tokens = np.insert(tokens, np.concatenate(positions), np.concatenate(inserted))
        text_bytes = np.array([len(text.encode()) for text in texts], np.int64)
        yield TokenChunk(tokens, sizes, text_bytes, opens, np.array(first))
        size = sum(map(len, texts))
        characters += size
        advance(size)
    if characters != documents.characters:
        raise DataError("the text was changed while it was read: start again when it is complete.")


def _batches(documents: Documents) -> Iterator[list[Piece]]:
    """As many pieces as are tokenised at once."""
    batch: list[Piece] = []
    characters = 0
    enough = CHARACTERS_PER_CORE * usable_cores()
    for piece in documents:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= enough:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch
